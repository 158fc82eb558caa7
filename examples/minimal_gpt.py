"""A minimal GPT with a concatenating cache: kvproof audit examples/minimal_gpt.py:subject

Learnt positions, pre-norm blocks; the cache is a list of (keys, values) by layer that grows by concatenation.
With the bug, each call counts its positions from 0: ``kvproof audit examples/minimal_gpt.py:broken``.
"""

import torch
from torch import Tensor, nn

from kvproof.subjects import CacheOps, ModuleSubject

VOCAB, WIDTH, HEADS, LAYERS, CONTEXT = 61, 32, 4, 2, 64

Cache = list[tuple[Tensor, Tensor]]


class Attention(nn.Module):
    """Heads that read the cache and what is new."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, past: tuple[Tensor, Tensor] | None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        batch, num_new, _ = x.shape
        parts = self.qkv(x).view(batch, num_new, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        q, k, v = parts
        if past is not None:
            k, v = torch.cat([past[0], k], dim=2), torch.cat([past[1], v], dim=2)
        visible = torch.ones(num_new, k.shape[2], dtype=torch.bool).tril(k.shape[2] - num_new)
        scores = (q @ k.transpose(-1, -2)) * q.shape[-1] ** -0.5
        weights = scores.masked_fill(~visible, float("-inf")).softmax(dim=-1)
        return self.out((weights @ v).transpose(1, 2).reshape(batch, num_new, WIDTH)), (k, v)


class Block(nn.Module):
    """Attention and a feed-forward part, each behind a norm and beside a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.norm2 = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor, past: tuple[Tensor, Tensor] | None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        read, kept = self.attention(self.norm1(x), past)
        x = x + read
        return x + self.mlp(self.norm2(x)), kept


class Gpt(nn.Module):
    """forward(ids, past) returns the logits and the grown cache."""

    def __init__(self, *, bug: bool = False) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(LAYERS)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        self.bug = bug

    def forward(self, ids: Tensor, past: Cache | None = None) -> tuple[Tensor, Cache]:
        start = past[0][0].shape[2] if past and not self.bug else 0
        x = self.tokens(ids) + self.positions(torch.arange(start, start + ids.shape[1]))
        kept: Cache = []
        for number, block in enumerate(self.blocks):
            x, entries = block(x, past[number] if past else None)
            kept.append(entries)
        return self.head(self.norm(x)), kept


def subject(*, bug: bool = False) -> ModuleSubject:
    """Return the module as kvproof takes it, with random weights."""
    torch.manual_seed(0)
    ops = CacheOps(
        crop=lambda cache, length: [(k[:, :, :length], v[:, :, :length]) for k, v in cache],
        reorder=lambda cache, rows: [(k[list(rows)], v[list(rows)]) for k, v in cache],
        show=lambda cache: [{"k": k, "v": v} for k, v in cache or []],
        put=lambda cache, layers: [(layer["k"], layer["v"]) for layer in layers],
    )
    return ModuleSubject(Gpt(bug=bug), cache="past", context_len=CONTEXT, ops=ops)


def broken() -> ModuleSubject:
    """Return the module with its bug."""
    return subject(bug=True)
