"""Shrinking: from a program with a wrong row to the simplest program found that still has one.

Everything runs in float64, where rounding cannot be mistaken for a fault. A large fault must stay large, so that
shrinking does not end at a different one that hides near rounding.
"""

import math
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import TypeVar

from torch import Tensor

from kvproof._engine.programs import run_program
from kvproof._engine.rung import Rung
from kvproof._numerics.gaps import gap_of_rows
from kvproof._numerics.tolerances import STRUCTURAL_FLOOR
from kvproof._shrinking.simpler import cost_of, simpler_programs
from kvproof.errors import KvproofError
from kvproof.scenarios import Extend, Scenario, is_legal
from kvproof.subjects import Subject, limits_of

T = TypeVar("T")

#: Identifies a row of a program: the number of its `Extend`, its batch row, and the new token that it follows.
Place = tuple[int, int, int]

#: A gap of this share of the row's scale is clear: a larger one may shrink down to it.
CLEAR = 1e-2
#: A gap that is not clear must keep at least this share of its size.
MIN_KEPT_SHARE = 0.1
#: Two forms of a subject show the same fault if their gaps at the same row differ by at most this share.
MAX_DIFFERENCE = 0.1
_TINY = 1e-300


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """The first row of a program that differs from its uncached row."""

    place: Place
    prefix: tuple[int, ...]
    gap: float  #: relative to the row's scale; infinite if only one side is finite

    @property
    def min_gap(self) -> float:
        """The smallest gap that counts as the same failure in a simpler program."""
        return max(STRUCTURAL_FLOOR.value, min(CLEAR, MIN_KEPT_SHARE * self.gap))

    def is_like(self, other: "Failure") -> bool:
        """Return whether another form of the subject has about the same gap."""
        return self.gap == other.gap or abs(self.gap - other.gap) <= MAX_DIFFERENCE * self.gap < math.inf


@dataclass(slots=True, kw_only=True)
class Tries:
    """What has been tried so far, and how many tries there may be."""

    max_tries: int
    on_try: Callable[[int], None] = lambda num: None
    num: int = 0
    known: set[Hashable] = field(default_factory=set)

    def take(self, key: Hashable) -> bool:
        """Count a try and return True, unless it is a repeated one or none is left."""
        if self.num >= self.max_tries or key in self.known:
            return False
        self.known.add(key)
        self.num += 1
        self.on_try(self.num)
        return True


class FailureFinder:
    """Finds wrong rows of one subject, which must compute in float64."""

    def __init__(self, subject: Subject, *others: Subject, cached: bool = True) -> None:
        """Read a program's rows from the cached path or, without ``cached``, from one pass over its ids.

        ``others`` are forms of the subject that must fail too, such as one with float32 steps inside.
        """
        self.subject = subject
        self.cached = cached
        self._rungs = [Rung(each) for each in (subject, *others)]

    def find(self, program: Scenario, min_gap: float = STRUCTURAL_FLOOR.value) -> Failure | None:
        """Return the first row with a gap of at least ``min_gap`` of its scale.

        Returns None if no row has one, if another form of the subject does not show the same gap, or if the
        program raises.
        """
        first, *others = self._rungs
        try:
            found = next((f for f in self._failures(first, program) if f.gap >= min_gap), None)
            if found is None:
                return None
            for rung in others:
                seen = next((f for f in self._failures(rung, program, found.place)), None)
                if seen is None or not found.is_like(seen):
                    return None
        except KvproofError:
            return None
        return found

    def _failures(self, rung: Rung, program: Scenario, only: Place | None = None) -> Iterator[Failure]:
        """Yield each row, or only the one at ``only``, with its gap. The gap is 0 where both sides are NaN."""
        for place, prefix, actual in self._rows(rung.subject, program):
            if only in (None, place):
                gap = gap_of_rows(rung.literal(prefix), actual)
                share = gap.size if math.isinf(gap.size) else gap.size / max(gap.scale, _TINY)
                yield Failure(place=place, prefix=prefix, gap=0.0 if math.isnan(share) else share)

    def _rows(self, subject: Subject, program: Scenario) -> Iterator[tuple[Place, tuple[int, ...], Tensor]]:
        if self.cached:
            for number, call in enumerate(run_program(subject, program)):
                for row in call.rows:
                    yield (number, row.batch_row, row.offset), row.prefix, row.logits
            return
        (operation,) = program.operations
        assert isinstance(operation, Extend)
        ids = operation.ids[0]
        for offset, logits in enumerate(subject.rows(ids)):
            yield (0, 0, offset), ids[: offset + 1], logits

    def shrink(self, program: Scenario, failure: Failure, tries: Tries) -> tuple[Scenario, Failure]:
        """Return the simplest program found with a large enough gap, and its first wrong row."""
        limits, min_gap = limits_of(self.subject), failure.min_gap
        program, failure = self._cut(program, failure, min_gap)
        better = True
        while better:
            better = False
            for candidate in simpler_programs(program):
                if cost_of(candidate) >= cost_of(program) or not is_legal(candidate, limits):
                    continue
                if not self.cached and len(candidate.operations) != 1:
                    continue
                found = self.find(candidate, min_gap) if tries.take(candidate) else None
                if found is not None:
                    program, failure = self._cut(candidate, found, min_gap)
                    better = True
                    break
        return program, failure

    def _cut(self, program: Scenario, failure: Failure, min_gap: float) -> tuple[Scenario, Failure]:
        """Leave out the operations after the call with the wrong row: they cannot affect it."""
        places = [place for place, operation in enumerate(program.operations) if isinstance(operation, Extend)]
        if not self.cached or len(places) <= failure.place[0]:
            return program, failure
        cut = replace(program, operations=program.operations[: places[failure.place[0]] + 1])
        again = self.find(cut, min_gap)
        return (program, failure) if again is None else (cut, again)


def simplify(
    start: T,
    simpler: Callable[[T], Iterable[T]],
    better: Callable[[T, T], bool],
    tries: Tries,
    key: Callable[[T], Hashable],
) -> T:
    """Replace ``start`` by the first simpler value that is better, until there is none; return the last one.

    ``better`` compares a candidate with the value that it would replace.
    """
    going = True
    while going:
        going = False
        for candidate in simpler(start):
            if tries.take(key(candidate)) and better(candidate, start):
                start, going = candidate, True
                break
    return start
