"""A window in a rotating buffer: kvproof audit examples/rotating_window.py:subject

Each layer keeps the last WINDOW entries; position p stands in slot p % WINDOW. With the bug, a call writes all
its entries before it reads, so a block loses what its first tokens should still see, and single steps never show
it: ``kvproof audit examples/rotating_window.py:broken``.
"""

import torch
from torch import Tensor, nn

from kvproof.subjects import CacheOps, ModuleSubject

VOCAB, WIDTH, HEADS, LAYERS, CONTEXT, WINDOW = 61, 32, 4, 2, 64, 6

#: Keys and values (batch, head, WINDOW, head_dim), and each slot's position, -1 where it is empty.
Ring = tuple[Tensor, Tensor, Tensor]


def written(ring: Ring, k: Tensor, v: Tensor, positions: Tensor) -> Ring:
    """Return a new ring with the last WINDOW of the new entries in their slots."""
    k, v, positions = k[:, :, -WINDOW:], v[:, :, -WINDOW:], positions[-WINDOW:]
    slots = positions % WINDOW
    return (
        ring[0].index_copy(2, slots, k),
        ring[1].index_copy(2, slots, v),
        ring[2].index_copy(0, slots, positions),
    )


class Attention(nn.Module):
    """Reads what lies in the window of each new token: the ring, and what is new."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, positions: Tensor, ring: Ring, *, bug: bool) -> tuple[Tensor, Ring]:
        batch, num_new, _ = x.shape
        q, k, v = self.qkv(x).view(batch, num_new, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        after = written(ring, k, v, positions)
        if bug and bool((ring[2] >= 0).any()):
            k, v, stood = after
        else:
            k, v = torch.cat([ring[0], k], dim=2), torch.cat([ring[1], v], dim=2)
            stood = torch.cat([ring[2], positions])
        distance = positions[:, None] - stood[None]
        visible = (stood >= 0) & (distance >= 0) & (distance < WINDOW)
        scores = (q @ k.transpose(-1, -2)) * q.shape[-1] ** -0.5
        weights = scores.masked_fill(~visible, float("-inf")).softmax(dim=-1)
        return self.out((weights @ v).transpose(1, 2).reshape(batch, num_new, WIDTH)), after


class Decoder(nn.Module):
    """forward(ids, state) returns the logits and the state: the length, and a ring for each layer."""

    def __init__(self, *, bug: bool = False) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH) for _ in range(LAYERS)])
        self.layers = nn.ModuleList([Attention() for _ in range(LAYERS)])
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.bug = bug

    def forward(
        self, ids: Tensor, state: tuple[int, list[Ring]] | None = None
    ) -> tuple[Tensor, tuple[int, list[Ring]]]:
        start, rings = state if state is not None else (0, [self.empty(len(ids)) for _ in self.layers])
        positions = torch.arange(start, start + ids.shape[1])
        x = self.tokens(ids) + self.positions(positions)
        after = []
        for norm, layer, ring in zip(self.norms, self.layers, rings, strict=True):
            read, kept = layer(norm(x), positions, ring, bug=self.bug)
            x = x + read
            after.append(kept)
        return self.head(x), (start + ids.shape[1], after)

    def empty(self, batch: int) -> Ring:
        """Return a ring without entries."""
        entries = torch.zeros(batch, HEADS, WINDOW, WIDTH // HEADS, dtype=self.head.weight.dtype)
        return entries, entries, torch.full((WINDOW,), -1)


def subject(*, bug: bool = False) -> ModuleSubject:
    """Return the module as kvproof takes it: it forgets, so it cannot be cropped; rows can be reordered."""
    torch.manual_seed(0)
    ops = CacheOps(
        reorder=lambda state, rows: (
            state[0],
            [(k[list(rows)], v[list(rows)], positions) for k, v, positions in state[1]],
        )
    )
    return ModuleSubject(Decoder(bug=bug), cache="state", context_len=CONTEXT, windows=(WINDOW,), ops=ops)


def broken() -> ModuleSubject:
    """Return the module with its bug."""
    return subject(bug=True)
