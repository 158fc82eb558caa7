"""Shrinking: from a program whose row is wrong to the simplest one that still has a wrong row.

Only the float64 rung is asked, where no rounding can be mistaken for a fault. A fault that is large stays large:
what is left after shrinking must not be one that hides near rounding.
"""

import math
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import TypeVar

from torch import Tensor

from kvproof._engine.programs import run_program
from kvproof._engine.rung import Rung
from kvproof._numerics.gaps import gap_between
from kvproof._numerics.tolerances import STRUCTURAL_FLOOR
from kvproof._shrinking.simpler import cost_of, smaller
from kvproof.errors import KvproofError
from kvproof.scenarios import Extend, Scenario, is_legal
from kvproof.subjects import Subject, limits_of

T = TypeVar("T")

#: Which row of a program: the `Extend` that gave it, the batch row, and the call's new token that it follows.
Place = tuple[int, int, int]

#: A gap of this part of the row's scale is as clear as any …
CLEAR = 1e-2
#: … and a smaller one may shrink by no more than this.
KEPT = 0.1
#: Two forms of a subject show the same fault if the gaps of the same row differ by no more than this part.
SAME = 0.1
_TINY = 1e-300


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """The first row of a program that is not its uncached row."""

    place: Place
    prefix: tuple[int, ...]
    gap: float  #: of the part of the row's scale; infinite where one side alone is not finite

    @property
    def least(self) -> float:
        """The smallest gap that counts as the same failure in something simpler."""
        return max(STRUCTURAL_FLOOR.value, min(CLEAR, KEPT * self.gap))

    def is_like(self, other: "Failure") -> bool:
        """Return whether another form of the subject is wrong at the same row by as much."""
        return self.gap == other.gap or abs(self.gap - other.gap) <= SAME * self.gap < math.inf


@dataclass(slots=True, kw_only=True)
class Tries:
    """How much has been tried, what of it is known, and when to stop."""

    most: int
    on_try: Callable[[int], None] = lambda num: None
    num: int = 0
    known: set[Hashable] = field(default_factory=set)

    def is_new(self, key: Hashable) -> bool:
        """Count a try and return whether it is one, and there is one left."""
        if self.num >= self.most or key in self.known:
            return False
        self.known.add(key)
        self.num += 1
        self.on_try(self.num)
        return True


class Looker:
    """Looks for wrong rows of one subject, which computes in float64."""

    def __init__(self, subject: Subject, *others: Subject, cached: bool = True) -> None:
        """Take a program's rows from the cached path, or, without ``cached``, from one pass over its ids.

        ``others`` are forms of the subject that must fail too, such as one that asks for float32 inside.
        """
        self.subject = subject
        self.cached = cached
        self._rungs = [Rung(each) for each in (subject, *others)]

    def failure(self, program: Scenario, least: float = STRUCTURAL_FLOOR.value) -> Failure | None:
        """Return the first row with a gap of at least ``least`` of its scale.

        None where there is none, or one of the others does not see the same there; what raises shows none.
        """
        first, *others = self._rungs
        try:
            found = next((f for f in self._failures(first, program) if f.gap >= least), None)
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
        """Yield each row, or ``only`` one, with its gap, however small; what is NaN both ways has none."""
        for place, prefix, actual in self._rows(rung.subject, program):
            if only in (None, place):
                gap = gap_between(rung.literal(prefix), actual)
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

    def shrunk(self, program: Scenario, failure: Failure, tries: Tries) -> tuple[Scenario, Failure]:
        """Return the simplest program found that fails as much, and its first wrong row."""
        limits, least = limits_of(self.subject), failure.least
        program, failure = self._cut(program, failure, least)
        better = True
        while better:
            better = False
            for candidate in smaller(program):
                if cost_of(candidate) >= cost_of(program) or not is_legal(candidate, limits):
                    continue
                if not self.cached and len(candidate.operations) != 1:
                    continue
                found = self.failure(candidate, least) if tries.is_new(candidate) else None
                if found is not None:
                    program, failure = self._cut(candidate, found, least)
                    better = True
                    break
        return program, failure

    def _cut(self, program: Scenario, failure: Failure, least: float) -> tuple[Scenario, Failure]:
        """Leave out what comes after the call with the wrong row; nothing before it can hang on that."""
        places = [place for place, operation in enumerate(program.operations) if isinstance(operation, Extend)]
        if not self.cached or len(places) <= failure.place[0]:
            return program, failure
        cut = replace(program, operations=program.operations[: places[failure.place[0]] + 1])
        again = self.failure(cut, least)
        return (program, failure) if again is None else (cut, again)


def simplest(
    start: T,
    simpler: Callable[[T], Iterable[T]],
    better: Callable[[T, T], bool],
    tries: Tries,
    key: Callable[[T], Hashable],
) -> T:
    """Return what is left when nothing simpler is ``better``: a candidate is asked with what it is to replace."""
    going = True
    while going:
        going = False
        for candidate in simpler(start):
            if tries.is_new(key(candidate)) and better(candidate, start):
                start, going = candidate, True
                break
    return start
