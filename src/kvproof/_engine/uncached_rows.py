"""The uncached path: what every prefix's row must equal, and how well that is known.

Literal: each prefix is run on its own. One-pass: a prefix's row comes from the pass over a longer sequence
that starts with it, which is right only for a causal subject. Both are computed where they can be held
against each other: at every prefix where rows are literal; else at every prefix of the first sequence up to
`CAUSALITY_LEN`, which proves causality, and at a few lengths of every sequence, the subject's own windows
among them.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvproof._engine.ladder import Ladder
from kvproof._engine.rung import Block, Prefix, Rung
from kvproof._engine.verdict_rules import are_equal_in_float64, judge_margin
from kvproof._numerics.dtypes import dtype_of
from kvproof._numerics.gaps import error_of_row, gap_between, gap_of_rows, largest
from kvproof._numerics.random_rounding import RandomRounding, Unit, UnitRecorder
from kvproof._numerics.tolerances import FAR_FACTOR, NUM_SAMPLES
from kvproof._numerics.top_k import Choice, Choices
from kvproof._system.pool import map_in_processes
from kvproof._system.user_frames import describe_traceback
from kvproof.contract.ledger import MarginVerdict
from kvproof.errors import SubjectError
from kvproof.subjects import Subject
from kvproof.subjects._decoder_calls import wrap_errors

#: How uncached rows are computed.
Reference = Literal["literal", "one-pass"]

#: Up to this length the first sequence's rows are computed both ways at every prefix.
CAUSALITY_LEN = 8
#: Random rounding is measured over a prefix and what follows it up to this length, or twice or four times as much
#: and so on: it costs many passes.
SAMPLED_LEN = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class BothWays:
    """One prefix's row by both uncached ways, at every rung there is: differences of logits."""

    prefix: Prefix
    worst_id: int
    gap: float
    scale: float
    top_gap: float | None
    top_scale: float | None
    error: float | None  #: the larger error of the two ways in the declared dtype
    margin: float
    margin_verdict: MarginVerdict


def _with_place(error: SubjectError) -> str:
    """Return what a decoder raised and where in its own code, which nothing else of the report shows."""
    where = "" if error.__cause__ is None else describe_traceback(error.__cause__.__traceback__)
    return f"{error} ({where})" if where else str(error)


class Uncached:
    """Every prefix's uncached row at the declared rung and, where there is one, the top rung.

    Of a subject that is not causal the two ways differ, and by no noise: with ``is_causal=False`` they are not
    held against each other.

    Noise and errors are running maxima over length and pooled over all sequences that were measured: a single
    row's may be small by luck. Where they are not enough, `sampled_error` measures the row itself.
    """

    def __init__(
        self, subject: Subject, reference: Reference, *, top_rung: bool = True, is_causal: bool = True
    ) -> None:
        self.reference = reference
        self._is_causal = is_causal
        self.declared = Rung(subject)
        self._dtype: torch.dtype = dtype_of(subject.info.dtype)
        self.ladder = Ladder(self.declared, wanted=top_rung)
        self._units: dict[Prefix, list[Unit]] = {}
        self.both_ways: list[BothWays] = []
        #: Sequences, each with the lengths of its prefixes whose rows are compared; without any, every row is.
        self.compared: tuple[tuple[Prefix, frozenset[int]], ...] = ()
        self._sequences: list[Prefix] = []
        self._noise: list[float] = [0.0]
        self._top_noise: list[float] = [0.0]
        self._errors: list[float] = [0.0]
        self._sampled: dict[tuple[Prefix, bool], list[float]] = {}
        self._choices: dict[Prefix, list[Choice | None]] = {}
        self._no_choices = False
        self._rung_with_choices: Rung | None = None
        self._errors_with_choices: dict[Prefix, list[float]] = {}
        self._exact: tuple[Rung, tuple[str, ...]] | None = None
        self._tried_tables = False

    @property
    def rungs(self) -> list[Rung]:
        """The rungs there are, the declared one first."""
        return [self.declared] if self.top is None else [self.declared, self.top]

    @property
    def top(self) -> Rung | None:
        """The most exact rung, if there is one besides the declared dtype's."""
        return self.ladder.top

    def drop_top(self, error: SubjectError) -> None:
        """Go on without a more exact rung, and remember why."""
        self.ladder.drop_top(error)
        self._forget_top()

    def _forget_top(self) -> None:
        self.both_ways = [
            dataclasses.replace(both, top_gap=None, top_scale=None, error=None) for both in self.both_ways
        ]

    def _is_explained(self, sequence: Prefix) -> bool:
        """Return whether random rounding moves exact rows about as far as the declared dtype's are from them."""
        length = min(len(sequence), SAMPLED_LEN)
        errors = [self.own_error(sequence[:n]) for n in range(1, length + 1)]
        return largest(errors) <= FAR_FACTOR.value * self.sampled_error(sequence[:length])

    def own_error(self, prefix: Prefix) -> float:
        """Return the uncached row's own error against the more exact one."""
        return error_of_row(self.row(prefix, top=True), self.row(prefix))

    def measure(self, sequences: Iterable[Prefix]) -> None:
        """Measure what is not yet known of these sequences, the longest first, so that they share passes.

        Raises `SubjectError` where the decoder does; the sequence is then still unknown.
        """
        for sequence in sorted(sequences, key=len, reverse=True):
            if self._home(sequence) is not None:
                continue
            self._sequences.append(sequence)
            num_measured = len(self.both_ways)
            try:
                self._measure(sequence, is_first=len(self._sequences) == 1)
            except SubjectError:
                self._sequences.remove(sequence)
                del self.both_ways[num_measured:]
                raise

    def prepare(self, sequences: Iterable[Prefix], jobs: int = 1) -> str | None:
        """Measure these sequences, the longest first; return what the decoder raised first, if it did.

        ``jobs`` processes compute their rows. A sequence that cannot be run at all leaves the others as they
        are. A float64 rung that cannot run what the declared dtype can, for want of memory or of a kernel, is
        given up.
        """
        problem = None
        for sequence in self.precompute(sorted(sequences, key=lambda s: (-len(s), s)), jobs):
            try:
                self._measure_or_drop_top(sequence)
            except SubjectError as error:
                problem = problem or _with_place(error)
        return problem

    def prove(self) -> None:
        """Look once at what the rungs compute in, and give up one that is another function.

        Raises `UsageError` for a truth that is another function.
        """
        if self.ladder.inside is not None or not self._sequences:
            return
        sequence, had_top = self._sequences[0], self.top is not None
        try:
            self.ladder.prove(sequence, self._is_explained)
        except SubjectError as error:
            self.ladder.give_up_looking(error)
        if had_top and self.top is None:
            self._forget_top()

    def _measure_or_drop_top(self, sequence: Prefix) -> None:
        try:
            self.measure([sequence])
        except SubjectError as error:
            if self.top is None:
                raise
            self.declared.literal(sequence)  # raises where float64 is not the cause
            self.drop_top(error)
            self.measure([sequence])

    def precompute(self, sequences: Sequence[Prefix], jobs: int) -> Iterator[Prefix]:
        """Yield sequences, the longest first, each with the rows computed that `measure` will ask for.

        ``jobs`` processes compute them; one computes none, because `measure` does. What raises there raises
        again here.
        """
        longer = {s: sequences[:place] for place, s in enumerate(sequences)}
        alone = [s for s in sequences if not any(o[: len(s)] == s for o in (*self._sequences, *longer[s]))]
        is_first = not self._sequences

        def work(number: int) -> list[dict[Block, NDArray[np.uint8]]]:
            known = [rung.blocks for rung in self.rungs]
            with suppress(SubjectError):
                self._measure(alone[number], is_first=is_first and number == 0)
            return [rung.computed_since(blocks) for rung, blocks in zip(self.rungs, known, strict=True)]

        found = map_in_processes(work, len(alone), jobs) if jobs > 1 else None
        for sequence in sequences:
            if found is not None and sequence in alone:
                for rung, blocks in zip(self.rungs, next(found), strict=False):  # the top rung may be given up
                    rung.take(blocks)
            yield sequence

    def row(self, prefix: Prefix, *, top: bool = False) -> Tensor:
        """Return the uncached row (vocab,) that follows a prefix, in the declared dtype or in float64."""
        rung = self.top if top else self.declared
        assert rung is not None
        return self.row_of(rung, prefix)

    def noise(self, length: int) -> float:
        """Return the largest gap, at this length or a shorter one, between two uncached ways to a row."""
        return self._noise[min(length, len(self._noise) - 1)]

    def top_noise(self, length: int) -> float:
        """Return the same in float64."""
        return self._top_noise[min(length, len(self._top_noise) - 1)]

    def error(self, length: int) -> float:
        """Return the uncached path's largest error against float64 at this length or a shorter one."""
        return self._errors[min(length, len(self._errors) - 1)]

    def sampled_error(self, prefix: Prefix, *, with_choices: bool = False) -> float:
        """Return how far random rounding in the declared dtype moves this row or a shorter one from float64.

        With ``with_choices`` it moves no discrete choice: all take what the pass in the declared dtype takes.
        """
        assert self.top is not None
        num_blocks = -(-len(prefix) // SAMPLED_LEN)
        length = SAMPLED_LEN * 2 ** (num_blocks - 1).bit_length()
        home = (self._home(prefix) or prefix)[:length]
        if (home, with_choices) not in self._sampled:
            taken = self._taken(home) if with_choices else ()
            errors = [0.0] * (len(home) + 1)
            for seed in range(int(NUM_SAMPLES.value)):
                moved, exact = Rung(self.top.subject), dtype_of(self.top.subject.info.dtype)
                rounding = RandomRounding(self._dtype, seed, self.units_of(home), exact)
                for length in range(1, len(home) + 1):
                    with Choices(taken), rounding:
                        row = moved.one_pass(home, length)
                    true = (
                        self.row_with_choices(home, length) if with_choices else self.row(home[:length], top=True)
                    )
                    errors[length] = largest((error_of_row(true, row), errors[length]))
            self._sampled[home, with_choices] = _running(errors)
        return self._sampled[home, with_choices][len(prefix)]

    def units_of(self, ids: Prefix) -> list[Unit]:
        """Return the dtypes in which the pass over these tokens computes at the declared rung."""
        if ids not in self._units:
            recorder = UnitRecorder()
            with recorder:
                self.declared.subject.rows(ids)
            self._units[ids] = recorder.units
        return self._units[ids]

    def choices(self, ids: Prefix) -> list[Choice | None]:
        """Return what each top-k of the pass over these tokens takes in the declared dtype, among experts.

        Each comes with its scores' error against float64, where what came before was chosen alike. None stands
        for one whose candidates grow in number with the tokens: those are keys, or blocks of them.
        """
        if self._no_choices:
            return []
        if ids not in self._choices:
            assert self.top is not None
            made = _choices_of(self.declared, ids)
            self._no_choices = not made
            others = [_choices_of(self.declared, other) for other in _of_other_lengths(ids)] if made else []
            true = _choices_of(self.top, ids, [choice.taken for choice in made]) if made else []
            self._choices[ids] = [
                dataclasses.replace(own, error=gap_between(exact.scores, own.scores).size)
                if all(own.is_of_the_same_kind(other[number]) for other in others if number < len(other))
                else None
                for number, (own, exact) in enumerate(zip(made, true, strict=False))
            ]
        return self._choices[ids]

    def error_with_choices(self, prefix: Prefix) -> float:
        """Return the uncached path's largest error up to this row, against float64 with the same choices."""
        home = self.source_sequence(prefix)
        if home not in self._errors_with_choices:
            lengths = range(1, len(home) + 1)
            rows = ((self.row_with_choices(home, length), self.row(home[:length])) for length in lengths)
            self._errors_with_choices[home] = _running([0.0, *(error_of_row(true, own) for true, own in rows)])
        return self._errors_with_choices[home][len(prefix)]

    def row_with_choices(self, ids: Prefix, length: int) -> Tensor:
        """Return the float64 row after so many of these tokens, with the choices of the declared dtype's pass."""
        assert self.top is not None
        if self._rung_with_choices is None:
            self._rung_with_choices = Rung(self.top.subject)
        with Choices(self._taken(ids)):
            return self._rung_with_choices.one_pass(ids, length)

    def _taken(self, ids: Prefix) -> list[Tensor | None]:
        return [None if choice is None else choice.taken for choice in self.choices(ids)]

    def exact_tables(self) -> tuple[Rung, tuple[str, ...]] | None:
        """Return the top rung with tables computed anew in float64, and which; None if there is none.

        It is tried once: a model that cannot be built again excuses nothing.
        """
        if not self._tried_tables and self.top is not None:
            self._tried_tables, top = True, self.top.subject
            with suppress(SubjectError):
                exact = wrap_errors(lambda: top.with_exact_tables(self._dtype))
                self._exact = None if exact is None else (Rung(exact[0]), exact[1])
        return self._exact

    @property
    def exact(self) -> Rung | None:
        """The top rung with exact tables, once something called for it."""
        return self._exact[0] if self._exact is not None else None

    def leak(self, prefix: Prefix) -> float | None:
        """Return how far a row moves if the tokens after it alone change, in passes of one length."""
        longer = self.continuation(prefix)
        if longer is None:
            return None
        another = self.declared.subject.token_ids.another
        changed = prefix + tuple(map(another, longer[len(prefix) :]))
        if changed == longer:
            return None
        row, other = (self.declared.one_pass(ids, len(prefix)) for ids in (longer, changed))
        return gap_of_rows(row, other).size

    def row_of(self, rung: Rung, prefix: Prefix) -> Tensor:
        """Return the uncached row (vocab,) that follows a prefix, computed by a rung."""
        home = self._home(prefix) if self.reference == "one-pass" else None
        return rung.literal(prefix) if home is None else rung.one_pass(home, len(prefix))

    def source_sequence(self, prefix: Prefix) -> Prefix:
        """Return the tokens of the pass that a prefix's row is taken from."""
        return (self._home(prefix) if self.reference == "one-pass" else None) or prefix

    def continuation(self, prefix: Prefix) -> Prefix | None:
        """Return a known sequence that goes on after a prefix."""
        longer = (s for s in self._sequences if len(s) > len(prefix) and s[: len(prefix)] == prefix)
        return next(longer, None)

    def _home(self, prefix: Prefix) -> Prefix | None:
        """Return the known sequence that starts with a prefix."""
        return next((s for s in self._sequences if s[: len(prefix)] == prefix), None)

    def _measure(self, sequence: Prefix, *, is_first: bool) -> None:
        """Hold both uncached ways against each other at the spots, and both against float64 everywhere."""
        num_more = len(sequence) + 1 - len(self._noise)
        for known in (self._noise, self._top_noise, self._errors):
            known += [known[-1]] * num_more
        spots = self._spots(len(sequence), is_first=is_first)
        try:
            for length in range(1, len(sequence) + 1):
                if length in spots and self._is_causal:
                    if not self._measure_both_ways(sequence, length):
                        longer = (n for n in range(length + 1, len(sequence)) if self._compares(sequence[:n]))
                        spots.update(islice(longer, CAUSALITY_LEN))
                elif self.top is not None:
                    one, truth = (
                        rung.one_pass(sequence, length) if self._is_causal else rung.literal(sequence[:length])
                        for rung in self.rungs
                    )
                    self._errors[length] = largest((self._errors[length], error_of_row(truth, one)))
        finally:
            self._noise, self._top_noise, self._errors = map(
                _running, (self._noise, self._top_noise, self._errors)
            )

    def _spots(self, length: int, *, is_first: bool) -> set[int]:
        """Return the lengths at which both ways are computed; at the whole length they are one and the same."""
        if self.reference == "literal":
            return set(range(1, length + 1))
        proof = CAUSALITY_LEN if is_first else 2
        windows = self.declared.subject.boundaries.windows
        around = {window + more for window in windows for more in (0, 1, window, window + 1)}
        return {spot for spot in {*range(1, proof + 1), length // 2, *around} if 0 < spot < length}

    def _compares(self, prefix: Prefix) -> bool:
        """Return whether some program compares the row after a prefix."""
        length = len(prefix)
        holding = (lengths for sequence, lengths in self.compared if sequence[:length] == prefix)
        return not self.compared or any(length in lengths for lengths in holding)

    def _measure_both_ways(self, sequence: Prefix, length: int) -> bool:
        """Compare both ways to a row; return False if they give different rows, and no program compares it.

        Such a row says nothing about those that are compared: a bidirectional prefix may end after it.
        """
        prefix = sequence[:length]
        literal, one = self.declared.literal(prefix), self.declared.one_pass(sequence, length)
        gap = gap_of_rows(literal, one)
        top_gap = top_scale = error = None
        explained = gap.size
        if self.top is not None:
            truth = self.top.literal(prefix)
            top_one = self.top.one_pass(sequence, length)
            top = gap_of_rows(truth, top_one)
            if not self._compares(prefix) and not are_equal_in_float64(top):
                return False
            top_gap, top_scale = top.size, top.scale
            explained = largest((error_of_row(truth, literal), error_of_row(top_one, one)))
            error = largest(error_of_row(truth, row) for row in (literal, one))
            self._top_noise[length] = largest((self._top_noise[length], top.size))
            self._errors[length] = largest((self._errors[length], error))
        self._noise[length] = largest((self._noise[length], gap.size))
        margin, margin_verdict = judge_margin(literal, one, explained)
        self.both_ways.append(
            BothWays(
                prefix=prefix,
                worst_id=gap.index[0],
                gap=gap.size,
                scale=gap.scale,
                top_gap=top_gap,
                top_scale=top_scale,
                error=error,
                margin=margin,
                margin_verdict=margin_verdict,
            )
        )
        return True


def _of_other_lengths(ids: Prefix) -> tuple[Prefix, ...]:
    """Return one token less, and one alone: of keys in blocks there may be as many with one token less."""
    return tuple(dict.fromkeys((ids[:-1], ids[:1]))) if len(ids) > 1 else (ids * 2,)


def _choices_of(rung: Rung, ids: Prefix, forced: Sequence[Tensor | None] = ()) -> list[Choice]:
    choices = Choices(forced)
    with choices:
        rung.subject.rows(ids, keep=range(len(ids) - 1, len(ids)))
    return choices.made


def _running(values: Sequence[float]) -> list[float]:
    """Return the running maximum, in which a NaN is never lost."""
    result: list[float] = []
    for value in values:
        result.append(largest((value, *result[-1:])))
    return result
