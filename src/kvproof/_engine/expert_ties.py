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
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from kvproof._engine.calls import Layout, Token
from kvproof._engine.programs import Call, run_program
from kvproof._engine.row_evidence import RowEvidence
from kvproof._engine.rung import Prefix
from kvproof._engine.uncached_rows import Uncached
from kvproof._engine.verdict_rules import explains_error, is_near_tie, may_come_from_choices
from kvproof._numerics.gaps import first_of_largest
from kvproof._numerics.top_k import Choice, Choices
from kvproof.contract.results import ChoiceFlip, RowResult
from kvproof.faults import Fault, plant
from kvproof.scenarios import Generate, Scenario


@dataclass(frozen=True, slots=True, kw_only=True)
class _FlipAt:
    """A choice that the cached path makes otherwise, and the tokens up to it: rows after them may have moved."""

    prefix: Prefix
    flip: ChoiceFlip


def rejudge_expert_ties(
    uncached: Uncached,
    evidence: RowEvidence,
    program: Scenario,
    fault: Fault | None,
    rows: Sequence[RowResult],
) -> list[RowResult]:
    """Return a program's rows; those that a choice of experts may have moved are judged again."""
    through_generate = any(isinstance(operation, Generate) for operation in program.operations)
    doubtful = [n for n, row in enumerate(rows) if not through_generate and _is_doubtful(uncached, row)]
    if not doubtful:
        return list(rows)
    run = _ForcedRun(uncached, program, fault)
    if not run.chooses:
        return list(rows)
    logits, flips = run.rows(doubtful)
    result = list(rows)
    for number in doubtful:
        ids = rows[number].ids
        before = [each.flip for each in flips if ids[: len(each.prefix)] == each.prefix]
        result[number] = evidence.add_choices(rows[number], logits[number], _clearest(before))
    return result


def _clearest(flips: Sequence[ChoiceFlip]) -> ChoiceFlip | None:
    """Return the first choice that no rounding decides, else the one whose scores differ most.

    Of those that differ as much, but for what rounding moves the scores by, it is the earliest.
    """
    wide = next((flip for flip in flips if not is_near_tie(flip)), None)
    if wide is not None or not flips:
        return wide
    return flips[first_of_largest([flip.margin for flip in flips], max(flip.error for flip in flips))]


def _is_doubtful(uncached: Uncached, row: RowResult) -> bool:
    """Return whether a choice may have moved a row: its error is more than the same choices explain."""
    if not may_come_from_choices(row.evidence):
        return False
    if not any(choice is not None for choice in uncached.choices(uncached.source_sequence(row.ids))):
        return False
    return not explains_error(row.evidence, uncached.error_with_choices(row.ids))


@dataclass(frozen=True, slots=True)
class _Pair:
    """One token's choice in a call and in the uncached path."""

    token: Token
    number: int  #: of the top-k within the forward
    in_call: slice  #: the token's part of the call's choice
    choice: Choice  #: the uncached path's
    in_uncached: slice  #: the token's part of that


class _ForcedRun:
    """A program in the declared dtype, with every token getting the experts that it gets in the uncached path."""

    def __init__(self, uncached: Uncached, program: Scenario, fault: Fault | None) -> None:
        self.uncached = uncached
        self.program = program
        self.fault = fault
        self._forced = [self._as_uncached(call, made) for call, made in self._calls(())]
        self.chooses = any(taken is not None for forced in self._forced for taken in forced)

    def rows(self, wanted: Collection[int]) -> tuple[dict[int, Tensor], list[_FlipAt]]:
        """Return the rows of these numbers, and all that would have been chosen otherwise."""
        logits: dict[int, Tensor] = {}
        flips: list[_FlipAt] = []
        num_rows = 0
        for call, made in self._calls(self._forced):
            numbered = enumerate(call.rows, num_rows)
            logits |= {number: row.logits for number, row in numbered if number in wanted}
            num_rows += len(call.rows)
            for pair in self._pairs(call, made):
                flips += _flips(pair, made[pair.number].own[pair.in_call])
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
            target[pair.in_call] = pair.choice.taken[pair.in_uncached]
            forced[pair.number] = target
        return forced

    def _pairs(self, call: Call, made: Sequence[Choice]) -> Iterator[_Pair]:
        """Yield what has a counterpart: as many top-k in the forward, as many groups and places for a token."""
        layout = Layout.of(call.rows, {})
        num_tokens = layout.num_new * (1 + max(layout.ends))
        for token in layout.tokens:
            choices = self.uncached.choices(self.uncached.source_sequence(token.prefix))
            if len(choices) != len(made):
                return
            for number, (own, other) in enumerate(zip(made, choices, strict=True)):
                groups, rest = divmod(len(own.taken), num_tokens)
                if other is None or rest or not own.is_of_the_same_kind(other):
                    continue
                start, there = (token.batch_row * layout.num_new + token.offset) * groups, len(token.prefix) - 1
                in_call = slice(start, start + groups)
                in_uncached = slice(there * groups, (there + 1) * groups)
                if len(other.taken[in_uncached]) == groups:
                    yield _Pair(token, number, in_call, other, in_uncached)


def _flips(pair: _Pair, own: Tensor) -> Iterator[_FlipAt]:
    """Yield each of a token's groups of which the cached path would take others, with the two furthest apart."""
    choice, part = pair.choice, pair.in_uncached
    for scores, uncached, cached in zip(
        choice.scores[part].tolist(), choice.taken[part].tolist(), own.tolist(), strict=True
    ):
        rejects, takes = sorted(set(uncached) - set(cached)), sorted(set(cached) - set(uncached))
        swaps = list(itertools.product(rejects, takes))
        if swaps:
            margins = [abs(scores[rejected] - scores[taken]) for rejected, taken in swaps]
            rejected, taken = swaps[first_of_largest(margins, choice.error)]
            flip = ChoiceFlip(
                position=len(pair.token.prefix) - 1,
                number=pair.number,
                taken=taken,
                rejected=rejected,
                margin=max(margins),
                error=choice.error,
            )
            yield _FlipAt(prefix=pair.token.prefix, flip=flip)
