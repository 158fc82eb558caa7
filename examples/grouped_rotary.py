"""Grouped heads and rotary positions: kvproof audit examples/grouped_rotary.py:subject

Two key heads serve four query heads; keys are rotated once, by the position they were given, and cached so. The
caller gives positions and a mask, so rows of unequal length can be padded on the left. With the bug, keys from
the cache are rotated again at each call: ``kvproof audit examples/grouped_rotary.py:broken``.
"""

import torch
from torch import Tensor, nn

from kvproof.subjects import CacheOps, ModuleSubject

VOCAB, WIDTH, HEADS, KEY_HEADS, LAYERS, CONTEXT = 61, 32, 4, 2, 2, 128
HEAD_DIM = WIDTH // HEADS

Cache = list[tuple[Tensor, Tensor]]


class Rotary(nn.Module):
    """Cosines and sines (batch, 1, token, HEAD_DIM) of positions (batch, token)."""

    def forward(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        rates = 100.0 ** -(torch.arange(0, HEAD_DIM, 2, dtype=dtype) / HEAD_DIM)
        angles = (positions[..., None].to(dtype) * rates).repeat(1, 1, 2)[:, None]
        return angles.cos(), angles.sin()


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return queries or keys (batch, head, token, HEAD_DIM) turned by their positions."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


class Attention(nn.Module):
    """Four heads that read the entries of two."""

    def __init__(self, *, bug: bool) -> None:
        super().__init__()
        self.q = nn.Linear(WIDTH, HEADS * HEAD_DIM, bias=False)
        self.k = nn.Linear(WIDTH, KEY_HEADS * HEAD_DIM, bias=False)
        self.v = nn.Linear(WIDTH, KEY_HEADS * HEAD_DIM, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.bug = bug

    def forward(
        self, x: Tensor, rotation: tuple[Tensor, Tensor], visible: Tensor, past: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        batch, num_new, _ = x.shape
        q, k, v = (
            part(x).view(batch, num_new, -1, HEAD_DIM).transpose(1, 2) for part in (self.q, self.k, self.v)
        )
        q, k = rotated(q, *rotation), rotated(k, *rotation)
        if past is not None:
            old = past[0]
            if self.bug:
                old = rotated(old, *(part[:, :, -1:] for part in rotation))
            k, v = torch.cat([old, k], dim=2), torch.cat([past[1], v], dim=2)
        every_k, every_v = (part.repeat_interleave(HEADS // KEY_HEADS, dim=1) for part in (k, v))
        scores = (q @ every_k.transpose(-1, -2)) * HEAD_DIM**-0.5
        weights = scores.masked_fill(~visible, torch.finfo(x.dtype).min).softmax(dim=-1)
        return self.out((weights @ every_v).transpose(1, 2).reshape(batch, num_new, WIDTH)), (k, v)


class Decoder(nn.Module):
    """forward(ids, past, positions, padding) returns the logits and the grown cache."""

    def __init__(self, *, bug: bool = False) -> None:
        super().__init__()
        self.tokens, self.rotary = nn.Embedding(VOCAB, WIDTH), Rotary()
        self.norms = nn.ModuleList([nn.RMSNorm(WIDTH) for _ in range(LAYERS)])
        self.layers = nn.ModuleList([Attention(bug=bug) for _ in range(LAYERS)])
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(
        self,
        ids: Tensor,
        past: Cache | None = None,
        positions: Tensor | None = None,
        padding: Tensor | None = None,
    ) -> tuple[Tensor, Cache]:
        start = past[0][0].shape[2] if past else 0
        num_new, total = ids.shape[1], start + ids.shape[1]
        positions = torch.arange(start, total)[None] if positions is None else positions
        visible = torch.ones(num_new, total, dtype=torch.bool).tril(start)[None, None]
        if padding is not None:
            visible = visible & padding[:, None, None, :].bool()
        x = self.tokens(ids)
        rotation = self.rotary(positions, x.dtype)
        kept: Cache = []
        for number, (norm, layer) in enumerate(zip(self.norms, self.layers, strict=True)):
            read, entries = layer(norm(x), rotation, visible, past[number] if past else None)
            x = x + read
            kept.append(entries)
        return self.head(x), kept


def subject(*, bug: bool = False) -> ModuleSubject:
    """Return the module as kvproof takes it, told what it calls its positions and its mask."""
    torch.manual_seed(0)
    ops = CacheOps(
        reorder=lambda cache, rows: [(k[list(rows)], v[list(rows)]) for k, v in cache],
        crop=lambda cache, length: [(k[:, :, :length], v[:, :, :length]) for k, v in cache],
    )
    names = {"cache": "past", "positions": "positions", "mask": "padding"}
    return ModuleSubject(Decoder(bug=bug), **names, context_len=CONTEXT, ops=ops)


def broken() -> ModuleSubject:
    """Return the module with its bug."""
    return subject(bug=True)
