"""Rows that rounding moved far because a discrete choice fell the other way, and rows that only look so.

In a low dtype a near-tie of two experts may be decided by rounding, and the row after it moves by a large part
of its scale. The uncached path's own error then holds such a move too, and so may random rounding: either would
excuse as much of a bug. So where a model takes experts, a row that rounding is to explain must be explained with
every choice as the uncached path makes it: in float64, in its error and in the samples. Where the cached path
took others, the row is excused only if

- by the uncached path's scores what was taken and what was left differ by no more than rounding moves scores; and
- the program, run again with the uncached path's choices, gives a row that rounding explains.

Experts are choices among as many candidates in every call. Of keys there are more with each token, and what a
sparse attention takes of them is not forced. Rows of ``generate()`` stay with random rounding alone.
"""

import itertools
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from kvproof._engine.calls import Layout, Token
from kvproof._engine.programs import Call, run_program
from kvproof._engine.row_judge import RowJudge
from kvproof._engine.rung import Prefix
from kvproof._engine.uncached_rows import Uncached
from kvproof._numerics.tolerances import ROUNDING_FACTOR, structural_limit
from kvproof._numerics.top_k import Choice, Choices
from kvproof.contract.results import RowResult, Verdict
from kvproof.faults import Fault, plant
from kvproof.scenarios import Generate, Scenario


@dataclass(frozen=True, slots=True, kw_only=True)
class Flip:
    """One choice that the cached path would make otherwise, though all before it were made alike."""

    prefix: Prefix  #: of the token whose choice it is
    number: int  #: of the top-k within the forward
    taken: int
    left: int  #: what the uncached path takes instead
    margin: float  #: by which the uncached path's scores of the two differ
    error: float  #: how far rounding moves these scores

    @property
    def is_near(self) -> bool:
        """Whether rounding of both scores, by both paths, may decide it."""
        return self.margin <= 2 * ROUNDING_FACTOR.value * self.error

    def __str__(self) -> str:
        how = "an exact tie" if self.margin == 0 else f"by scores that differ by {self.margin:.2e}"
        return (
            f"top-k {self.number + 1} of position {len(self.prefix) - 1} takes {self.taken} where the uncached "
            f"path takes {self.left}, {how}, and rounding moves them by {self.error:.2e}"
        )


def decided(
    uncached: Uncached, judge: RowJudge, program: Scenario, fault: Fault | None, rows: Sequence[RowResult]
) -> list[RowResult]:
    """Return a program's rows, those judged anew that a choice of experts may have moved."""
    through_generate = any(isinstance(operation, Generate) for operation in program.operations)
    hanging = [n for n, row in enumerate(rows) if not through_generate and _is_in_doubt(uncached, row)]
    if not hanging:
        return list(rows)
    alike = _Alike(uncached, program, fault)
    if not alike.chooses:
        return list(rows)
    logits, flips = alike.run(hanging)
    result = list(rows)
    for number in hanging:
        ids = rows[number].ids
        felt = [flip for flip in flips if ids[: len(flip.prefix)] == flip.prefix]
        wide = next((flip for flip in felt if not flip.is_near), None)
        shown = wide or max(felt, key=lambda flip: flip.margin, default=None)
        why = "" if shown is None else str(shown)
        result[number] = judge.as_chosen(rows[number], logits[number], why=why, may_be_rounding=wide is None)
    return result


def _is_in_doubt(uncached: Uncached, row: RowResult) -> bool:
    """Return whether a choice may have moved a row: its error is more than the same choices explain."""
    if row.verdict not in (Verdict.ROUNDING, Verdict.DIVERGED) or not math.isfinite(row.gap):
        return False
    if row.top_gap is None or row.top_noise is None or row.cached_error is None:
        return False
    if row.top_gap > structural_limit(row.top_noise, row.scale):
        return False  # what float64 shows is no matter of choice
    if not any(choice is not None for choice in uncached.choices(uncached.home(row.ids))):
        return False
    return not row.cached_error <= ROUNDING_FACTOR.value * uncached.error_as_chosen(row.ids)


@dataclass(frozen=True, slots=True)
class _Pair:
    """One token's choice in a call and in the uncached path."""

    token: Token
    number: int  #: of the top-k within the forward
    mine: slice  #: its part of the call's choice
    other: Choice
    its: slice  #: its part of the uncached path's


class _Alike:
    """A program in the declared dtype, with every token getting the experts that it gets in the uncached path."""

    def __init__(self, uncached: Uncached, program: Scenario, fault: Fault | None) -> None:
        self.uncached = uncached
        self.program = program
        self.fault = fault
        self._forced = [self._as_uncached(call, made) for call, made in self._calls(())]
        self.chooses = any(taken is not None for forced in self._forced for taken in forced)

    def run(self, wanted: Collection[int]) -> tuple[dict[int, Tensor], list[Flip]]:
        """Return the rows of these numbers, and all that would have been chosen otherwise."""
        logits: dict[int, Tensor] = {}
        flips: list[Flip] = []
        num_rows = 0
        for call, made in self._calls(self._forced):
            rows = enumerate(call.rows, num_rows)
            logits |= {number: row.logits for number, row in rows if number in wanted}
            num_rows += len(call.rows)
            for pair in self._pairs(call, made):
                flips += _flips(pair, made[pair.number].own[pair.mine])
        return logits, flips

    def _calls(self, forced: Sequence[Sequence[Tensor | None]]) -> Iterator[tuple[Call, list[Choice]]]:
        calls = run_program(self.uncached.declared.subject, self.program, plant(self.fault))
        for number in range(len(self.program.operations)):
            choices = Choices(forced[number] if number < len(forced) else ())
            with choices:
                call = next(calls, None)
            if call is None:
                return
            yield call, choices.made

    def _as_uncached(self, call: Call, made: Sequence[Choice]) -> list[Tensor | None]:
        """Return what each top-k of a call takes where every token gets what it gets in the uncached path."""
        forced: list[Tensor | None] = [None] * len(made)
        for pair in self._pairs(call, made):
            target = forced[pair.number]
            target = made[pair.number].taken.clone() if target is None else target
            target[pair.mine] = pair.other.taken[pair.its]
            forced[pair.number] = target
        return forced

    def _pairs(self, call: Call, made: Sequence[Choice]) -> Iterator[_Pair]:
        """Yield what has a counterpart: as many top-k in the forward, as many groups and places for a token."""
        layout = Layout.of(call.rows, {})
        num_tokens = layout.num_new * (1 + max(layout.ends))
        for token in layout.tokens:
            choices = self.uncached.choices(self.uncached.home(token.prefix))
            if len(choices) != len(made):
                return
            for number, (own, other) in enumerate(zip(made, choices, strict=True)):
                groups, rest = divmod(len(own.taken), num_tokens)
                if other is None or rest or not own.is_of_the_same_kind(other):
                    continue
                start, there = (token.batch_row * layout.num_new + token.offset) * groups, len(token.prefix) - 1
                mine, its = slice(start, start + groups), slice(there * groups, (there + 1) * groups)
                if len(other.taken[its]) == groups:
                    yield _Pair(token, number, mine, other, its)


def _flips(pair: _Pair, own: Tensor) -> Iterator[Flip]:
    """Yield each of a token's groups of which the cached path would take others, with the two furthest apart."""
    other, its = pair.other, pair.its
    for scores, left, mine in zip(
        other.scores[its].tolist(), other.taken[its].tolist(), own.tolist(), strict=True
    ):
        swaps = itertools.product(set(left) - set(mine), set(mine) - set(left))
        margin, best, worst = max(
            ((abs(scores[a] - scores[b]), a, b) for a, b in swaps), default=(0.0, None, None)
        )
        if best is not None and worst is not None:
            yield Flip(
                prefix=pair.token.prefix,
                number=pair.number,
                taken=worst,
                left=best,
                margin=margin,
                error=other.error,
            )
