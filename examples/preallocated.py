"""A cache in a preallocated buffer: kvproof audit examples/preallocated.py:subject

Keys and values are written in place at the cache's length, which advances once a call. With the bug it advances
with each layer, so every layer after the first writes one slot too far: ``examples/preallocated.py:broken``.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kvproof.subjects import CacheOps, ModuleSubject

VOCAB, WIDTH, HEADS, LAYERS, CONTEXT = 61, 32, 4, 2, 48


@dataclass
class Buffer:
    """One request's entries, (layer, batch, head, slot, head_dim); the first ``length`` slots hold tokens."""

    keys: Tensor
    values: Tensor
    length: int = 0


class Attention(nn.Module):
    """Writes what is new into its layer's slots, and reads all slots so far."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, buffer: Buffer | None, layer: int, start: int) -> Tensor:
        batch, num_new, _ = x.shape
        q, k, v = self.qkv(x).view(batch, num_new, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        if buffer is not None:
            buffer.keys[layer, :, :, start : start + num_new] = k
            buffer.values[layer, :, :, start : start + num_new] = v
            k, v = (part[layer, :, :, : start + num_new] for part in (buffer.keys, buffer.values))
        visible = torch.ones(num_new, k.shape[2], dtype=torch.bool).tril(k.shape[2] - num_new)
        scores = (q @ k.transpose(-1, -2)) * q.shape[-1] ** -0.5
        weights = scores.masked_fill(~visible, float("-inf")).softmax(dim=-1)
        return self.out((weights @ v).transpose(1, 2).reshape(batch, num_new, WIDTH))


class Decoder(nn.Module):
    """forward(ids, buffer) returns the logits; the buffer changes in place."""

    def __init__(self, *, bug: bool = False) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH) for _ in range(LAYERS)])
        self.layers = nn.ModuleList([Attention() for _ in range(LAYERS)])
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.bug = bug

    def forward(self, ids: Tensor, buffer: Buffer | None = None) -> Tensor:
        start = 0 if buffer is None else buffer.length
        x = self.tokens(ids) + self.positions(torch.arange(start, start + ids.shape[1]))
        for number, (norm, layer) in enumerate(zip(self.norms, self.layers, strict=True)):
            ahead = number if self.bug and start else 0
            x = x + layer(norm(x), buffer, number, min(start + ahead, CONTEXT - ids.shape[1]))
        if buffer is not None:
            buffer.length += ids.shape[1]
        return self.head(x)


def empty(module: nn.Module) -> Buffer:
    """Return a buffer for one request, in the module's dtype."""
    shape = (LAYERS, 1, HEADS, CONTEXT, WIDTH // HEADS)
    dtype = module.head.weight.dtype
    return Buffer(torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype))


def cropped(buffer: Buffer, length: int) -> Buffer:
    """Forget all but the first tokens; what stands behind them is written over."""
    buffer.length = length
    return buffer


def subject(*, bug: bool = False) -> ModuleSubject:
    """Return the module as kvproof takes it: a buffer is one request's, so sessions have one row."""
    torch.manual_seed(0)
    ops = CacheOps(crop=cropped)
    return ModuleSubject(Decoder(bug=bug), cache="buffer", start=empty, context_len=CONTEXT, batch=False, ops=ops)


def broken() -> ModuleSubject:
    """Return the module with its bug."""
    return subject(bug=True)
