"""Proves that a more exact rung is what it is taken for, before it judges.

Two ways in which it may not be: it is another function (a cast that returns other weights, or drops a part of a
number), or it is not as exact as its dtype says (something inside computes in a coarser one). The first ends it,
the second lowers what it can tell apart from rounding.
"""

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

import torch

from kvproof._engine.rung import Prefix, Rung, fed_to_fresh_cache
from kvproof._engine.verdict_rules import are_equal_in_float64
from kvproof._numerics.dtypes import dtype_of
from kvproof._numerics.gaps import UNSEEN, gap_of_rows, largest
from kvproof._numerics.random_rounding import InnerRounding
from kvproof._numerics.tolerances import NUM_SAMPLES, TOP_RUNG
from kvproof._numerics.watch import Watch
from kvproof.errors import KvproofError

#: So many tokens are enough to look at what a decoder computes in.
_WATCHED_LEN = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Inside:
    """The dtypes that a rung computes in."""

    coarsest: float | None  #: the unit of the coarsest; None where something could not be seen
    lowered: tuple[str, ...]  #: the operations that give a coarser result than they are given
    unseen: str | None  #: why not everything could be seen

    @property
    def is_float64(self) -> bool:
        """Whether all that was seen is float64, and nothing was not."""
        return self.unseen is None and not self.lowered


def look_inside(rung: Rung, sequence: Prefix) -> Inside:
    """Watch the uncached path and a session on a few tokens; raise `SubjectError` where the decoder does."""
    ids = sequence[:_WATCHED_LEN]
    watch = Watch()
    with watch:
        rows = [rung.subject.rows(ids)]
        with suppress(KvproofError):  # what the cached path raises is said where its scenario is checked
            rows += fed_to_fresh_cache(rung.subject, ids, _sizes(len(ids), (len(ids) + 1) // 2))
    unseen = watch.unseen
    if unseen is None and not all(map(watch.saw, rows)):
        unseen = "its logits come from outside torch"
    coarsest = watch.coarsest if unseen is None else None
    return Inside(coarsest=coarsest, lowered=tuple(watch.lowered), unseen=unseen)


def noise_of_all_ways(rung: Rung, sequence: Prefix) -> float:
    """Return the largest gap, as a part of its row's scale, between a pass and a fresh cache fed in any chunking.

    No history is involved, so what these differ by is regrouping, in the dtype that the decoder computes in.
    """
    ids = sequence[:_WATCHED_LEN]
    expected, found = rung.subject.rows(ids), [0.0]
    for size in dict.fromkeys((len(ids), (len(ids) + 1) // 2, 3, 1)):
        try:
            rows = torch.cat(list(fed_to_fresh_cache(rung.subject, ids, _sizes(len(ids), size))))
        except KvproofError:
            continue
        ends = [min(start + size, len(ids)) - 1 for start in range(0, len(ids), size)]
        own = expected[ends] if rung.subject.last_row else expected
        found += (gap_of_rows(*pair).relative for pair in zip(own, rows, strict=True))
    return largest(found)


def mean_squares(declared: Rung, top: Rung, sequence: Prefix) -> tuple[float, float]:
    """Return the mean square of the declared rows' errors, and of what a softmax sees of the exact rows."""
    ids = sequence[:_WATCHED_LEN]
    exact, rows = (rung.subject.rows(ids).double() for rung in (top, declared))
    seen = exact.isfinite() & rows.isfinite()
    seen &= exact >= exact.where(seen, -math.inf).amax(-1, keepdim=True) - UNSEEN
    count = int(seen.sum())
    if not count:
        return 0.0, 0.0
    middle = exact.where(seen, 0.0).sum(-1, keepdim=True) / seen.sum(-1, keepdim=True).clamp(min=1)
    errors, sizes = (exact - rows).where(seen, 0.0), (exact - middle).where(seen, 0.0)
    return float(errors.square().sum()) / count, float(sizes.square().sum()) / count


def longest_causal_pass(rung: Rung, sequence: Prefix) -> int:
    """Return the length of the longest pass over the start of a sequence whose every row is the literal one."""
    for length in range(2, len(sequence) + 1):
        ids = sequence[:length]
        for shorter in range(1, length):
            gap = gap_of_rows(rung.literal(ids[:shorter]), rung.one_pass(ids, shorter))
            if not are_equal_in_float64(gap):
                return length - 1
    return len(sequence)


def inner_rounding(rung: Rung, sequence: Prefix) -> float:
    """Return how far a rung's rows are moved, as a part of their scale, by rounding what it computes coarsely."""
    ids = sequence[:_WATCHED_LEN]
    expected, found = rung.subject.rows(ids), [0.0]
    for seed in range(int(NUM_SAMPLES.value)):
        with InnerRounding(dtype_of(rung.subject.info.dtype), seed):
            rows = rung.subject.rows(ids)
        found += (gap_of_rows(*pair).relative for pair in zip(expected, rows, strict=True))
    return largest(found)


def exact_dtypes(declared: torch.dtype) -> Iterator[torch.dtype]:
    """Yield the dtypes that a more exact rung may have, the most exact first."""
    yield TOP_RUNG
    if torch.finfo(declared).eps > torch.finfo(torch.float32).eps:
        yield torch.float32


def _sizes(length: int, size: int) -> Iterator[int]:
    yield from (min(size, length - start) for start in range(0, length, size))
