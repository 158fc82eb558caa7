"""A decoder with a bug that shows only under a condition: a running sum of a table's rows, as a torch module."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from kvproof.subjects import CacheOps, ModuleSubject

VOCAB = 23


@dataclass(frozen=True)
class Cache:
    """The sums after each token, (batch, slot, vocab), and what the cache has been through."""

    sums: Tensor
    num_calls: int = 0
    last_width: int = 0
    num_crops: int = 0
    num_reorders: int = 0
    is_fork: bool = False


@dataclass(frozen=True)
class Call:
    """What a bug can branch on."""

    width: int
    start: int
    batch: int
    cache: Cache
    mask: Tensor  #: (batch, slot)


#: Returns how much to add to the logits, as a number or (batch, new, 1).
Bug = Callable[[Call], "float | Tensor"]


class Summing(nn.Module):
    """``forward(ids, past, positions, mask)``; ``bug`` acts on the cached path alone."""

    def __init__(self, bug: Bug, *, stays: bool, late: Bug) -> None:
        """``stays`` keeps the error in the cache: later rows are wrong, too. ``late`` acts on logits alone."""
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.table = nn.Parameter(torch.randn(VOCAB, VOCAB, generator=generator))
        self.scale = nn.Identity()
        self.bug, self.stays, self.late = bug, stays, late

    def forward(self, ids: Tensor, past: Any = None, positions: Any = None, mask: Any = None) -> Any:
        """Return the logits (batch, new, vocab) and the cache."""
        batch, width = ids.shape
        steps = self.table[ids]
        if past is None:
            return self.scale(steps.cumsum(1)), None
        start = past.sums.shape[1]
        real = mask[:, start:, None].to(steps.dtype)
        before = past.sums[:, -1:] if start else torch.zeros_like(steps[:, :1])
        sums = before + (steps * real).cumsum(1)
        call = Call(width, start, batch, past, mask)
        error = self.bug(call)
        logits = self.scale(sums + error) + self.late(call)
        kept = torch.cat([past.sums.expand(batch, -1, -1), sums + error if self.stays else sums], 1)
        return logits, replace(past, sums=kept, num_calls=past.num_calls + 1, last_width=width)


def crop(cache: Cache, length: int) -> Cache:
    """Keep the first tokens."""
    return replace(cache, sums=cache.sums[:, :length], num_crops=cache.num_crops + 1)


def reorder(cache: Cache, rows: Sequence[int]) -> Cache:
    """Move the rows."""
    return replace(cache, sums=cache.sums[list(rows)], num_reorders=cache.num_reorders + 1)


def no_bug(call: Call) -> float:
    """Change nothing."""
    return 0.0


def subject(bug: Bug, *, stays: bool = False, windows: Sequence[int] = (), late: Bug = no_bug) -> ModuleSubject:
    """Return the decoder as a subject that can do everything to its cache."""
    return ModuleSubject(
        Summing(bug, stays=stays, late=late),
        cache="past",
        positions="positions",
        mask="mask",
        windows=windows,
        start=lambda module: Cache(torch.zeros(1, 0, VOCAB, dtype=module.table.dtype)),
        ops=CacheOps(fork=lambda cache: replace(copy.deepcopy(cache), is_fork=True), crop=crop, reorder=reorder),
    )
