"""Audits: every row of every scenario, cached against uncached, judged by the rules of `_compare`."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal

import torch
from torch import Tensor

from kvproof._compare import Evidence, gap_between, judge, largest
from kvproof._errors import SubjectError, UsageError
from kvproof._localise import localise
from kvproof._machine import environment
from kvproof._numerics import CONSTANTS, TOP_RUNG, declared_tolerance
from kvproof._programs import run_program
from kvproof._report import (
    SCHEMA_VERSION,
    FaultResult,
    Report,
    RowResult,
    ScenarioResult,
    Tolerance,
    Verdict,
    worst,
)
from kvproof.faults import Fault, no_fault
from kvproof.scenarios import Ability, Scenario, longest_sequences
from kvproof.subjects import Subject

#: Rows of a vocabulary up to this size are kept in the report whole.
KEPT_VOCABULARY = 256

#: How uncached rows are computed.
Reference = Literal["literal", "one-pass"]


def audit(
    subject: Subject,
    scenarios: Iterable[Scenario],
    *,
    faults: Iterable[Fault] = (),
    tolerance: Tolerance | None = None,
    reference: Reference = "literal",
    top_rung: bool = True,
    all_values: bool = True,
    on_scenario: Callable[[str], None] = lambda name: None,
) -> Report:
    """Compare the cached path with the uncached one at every row of every scenario.

    Each of ``faults`` is planted in the cached path afterwards, and the same scenarios must reject it.
    ``tolerance`` defaults to the declared one of the subject's dtype. ``reference`` says how uncached rows
    are computed: one forward for each prefix, or one for each longest sequence with literal spot checks.
    ``top_rung`` repeats everything in float64, where the subject can be cast. ``all_values`` compares every
    value on the way, because errors may cancel in the logits; without it, values are compared only in
    programs whose logits diverge. ``on_scenario`` is told what is being run.

    A scenario that needs an ability which the subject lacks is not checked; one in which the decoder raises is
    inconclusive and says what was raised. What a session refuses comes through: the scenario is wrong.
    """
    programs = list(scenarios)
    if not programs:
        raise UsageError("an audit needs at least one scenario")
    auditor = Auditor(subject, tolerance, reference=reference, top_rung=top_rung, all_values=all_values)
    results = []
    for name in dict.fromkeys(program.name for program in programs):
        on_scenario(name)
        results.append(auditor.check([program for program in programs if program.name == name]))
    clean_gap = largest(result.largest_gap for result in results)
    fault_results = []
    for fault in faults:
        on_scenario(f"fault {fault.name}")
        fault_results.append(auditor.check_fault(fault, programs, clean_gap))
    verdict = worst([result.verdict for result in results])
    return Report(
        schema_version=SCHEMA_VERSION,
        verdict=verdict,
        summary=_summary(verdict, results),
        environment=environment(),
        subject=subject.info,
        tolerance=auditor.tolerance,
        constants=CONSTANTS,
        scenarios=tuple(results),
        faults=tuple(fault_results),
        milestone=None,
    )


class Auditor:
    """One subject, at two rungs where it can be cast, with the uncached rows computed so far."""

    def __init__(
        self,
        subject: Subject,
        tolerance: Tolerance | None = None,
        *,
        reference: Reference = "literal",
        top_rung: bool = True,
        all_values: bool = True,
    ) -> None:
        self.subject = subject
        self.tolerance = tolerance or declared_tolerance(getattr(torch, subject.info.dtype))
        self.declared = Oracle(subject, reference)
        can_cast = top_rung and Ability.CAST in subject.info.abilities
        self.top = Oracle(subject.cast(TOP_RUNG), reference) if can_cast else None
        self.all_values = all_values
        self._errors: dict[tuple[int, ...], float] = {(): 0.0}

    def check(self, programs: Sequence[Scenario], fault: Fault | None = None) -> ScenarioResult:
        """Run programs of one name, compare all their rows, and the values on the way.

        The first divergence found is located; the programs after it are compared by their rows alone. Where
        the subject cannot be cast, values on the way are looked at only to locate what the rows show.
        """
        certain = Ability.CAST in self.subject.info.abilities
        missing = sorted(
            {a.value for program in programs for a in program.needs}
            - {a.value for a in self.subject.info.abilities}
        )
        if missing:
            return _not_checked(programs[0].name, f"the subject lacks the ability: {', '.join(missing)}")
        rows: list[RowResult] = []
        num_values, divergence, reason = 0, None, None
        for program in programs:
            try:
                program_rows = list(self._judged_rows(program, fault))
            except SubjectError as error:
                reason = str(error)
                break
            rows += program_rows
            suspect = not worst([row.verdict for row in program_rows]).passes
            looked = divergence is not None or Ability.TAP not in self.subject.info.abilities
            if not looked and (suspect or (self.all_values and certain)):
                located = localise(self.subject, program, fault=fault)
                num_values += located.num_values
                divergence = located.divergence
        verdicts = [row.verdict for row in rows]
        if reason is not None:  # what raised proves nothing of the rows that it did not give
            verdicts.append(Verdict.INCONCLUSIVE)
        return ScenarioResult(
            name=programs[0].name,
            verdict=Verdict.DIVERGED if divergence and certain else worst(verdicts),
            reason=reason,
            rows=tuple(rows),
            largest_gap=largest(row.gap for row in rows),
            num_values_compared=num_values,
            divergence=divergence,
        )

    def check_fault(self, fault: Fault, programs: Sequence[Scenario], clean_gap: float) -> FaultResult:
        """Plant a fault and say whether the same comparison rejects it, and names the right stage."""
        result = self.check(programs, fault)
        beyond = [row for row in result.rows if not row.gap <= row.allowed]
        divergence = result.divergence
        return FaultResult(
            name=fault.name,
            breaks=fault.breaks,
            expected_stage=fault.first_stage,
            verdict=result.verdict,
            largest_gap=result.largest_gap,
            tolerance=max((row.allowed for row in result.rows), default=0.0),
            num_rows_beyond=len(beyond),
            margin=result.largest_gap / clean_gap if clean_gap else float("inf"),
            divergence=divergence,
            caught=result.verdict is Verdict.DIVERGED,
            right_stage=divergence is not None and divergence.stage is fault.first_stage,
        )

    def _judged_rows(self, program: Scenario, fault: Fault | None) -> Iterator[RowResult]:
        """Run the cached path at both rungs in step and judge each row as it comes."""
        oracles = [oracle for oracle in (self.declared, self.top) if oracle is not None]
        for oracle in oracles:
            oracle.prepare(program)
        runs = [run_program(oracle.subject, program, fault.plant() if fault else no_fault) for oracle in oracles]
        for calls in zip(*runs, strict=True):
            for rows in zip(*(call.rows for call in calls), strict=True):
                yield self._judge(rows[0].prefix, rows[0].logits, rows[1].logits if self.top else None)

    def _judge(self, prefix: tuple[int, ...], actual: Tensor, top_actual: Tensor | None) -> RowResult:
        expected = self.declared.row(prefix)
        gap = gap_between(expected, actual)
        allowed = self.tolerance.allowed(gap.scale)
        noise = self.declared.noise(prefix)
        top_gap = top_noise = top_scale = uncached_error = cached_error = None
        if self.top is not None and top_actual is not None:
            truth = self.top.row(prefix)
            measured = gap_between(truth, top_actual)
            top_gap, top_scale, top_noise = measured.size, measured.scale, self.top.noise(prefix)
            uncached_error = self._uncached_error(self.top, prefix)
            cached_error = gap_between(truth, actual).size
        verdict, reason = judge(
            Evidence(
                gap=gap.size,
                allowed=allowed,
                noise=noise,
                top_gap=top_gap,
                top_noise=top_noise,
                top_scale=top_scale,
                uncached_error=uncached_error,
                cached_error=cached_error,
            )
        )
        keep = self.subject.info.vocab_size <= KEPT_VOCABULARY
        return RowResult(
            ids=prefix,
            tokens=self.subject.decode(prefix),
            gap=gap.size,
            worst_id=gap.index[0],
            allowed=allowed,
            noise=noise,
            scale=gap.scale,
            top_gap=top_gap,
            top_noise=top_noise,
            uncached_error=uncached_error,
            cached_error=cached_error,
            verdict=verdict,
            reason=reason,
            expected=tuple(expected.tolist()) if keep else None,
        )

    def _uncached_error(self, top: "Oracle", prefix: tuple[int, ...]) -> float:
        """Return the uncached path's largest error against float64 at this length or a shorter one.

        A single row's error may be small by luck: of 3,000 healthy float32 rows, one cached error exceeded
        four times its own row's uncached error, and none 2.8 times the largest so far.
        """
        known = max(length for length in range(len(prefix) + 1) if prefix[:length] in self._errors)
        for length in range(known + 1, len(prefix) + 1):
            part = prefix[:length]
            own = gap_between(top.row(part), self.declared.row(part)).size
            self._errors[part] = largest((own, self._errors[part[:-1]]))
        return self._errors[prefix]


class Oracle:
    """The uncached rows of one subject, recomputed from token ids alone.

    Literal: each prefix is run on its own. One-pass: a prefix's row is taken from the pass over the longest
    sequence that starts with it, which is right only for a causal subject; literal spot checks at the first
    two lengths, the middle and the last say what that costs.
    """

    def __init__(self, subject: Subject, reference: Reference = "literal") -> None:
        self.subject = subject
        self.reference = reference
        self._passes: dict[tuple[int, ...], Tensor] = {}
        self._longest: dict[tuple[int, ...], tuple[int, ...]] = {}
        self._noise: dict[tuple[int, ...], float] = {}

    def prepare(self, program: Scenario) -> None:
        """Run the passes over a program's longest sequences, so that noise is known from the first row on."""
        for sequence in longest_sequences(program):
            self._measure_noise(sequence)

    def row(self, prefix: tuple[int, ...]) -> Tensor:
        """Return the uncached row (vocab,) that follows a prefix."""
        if self.reference == "one-pass" and prefix in self._longest:
            return self._pass(self._longest[prefix])[len(prefix) - 1]
        return self._pass(prefix)[-1]

    def noise(self, prefix: tuple[int, ...]) -> float:
        """Return the largest gap, at this length or a shorter one, between two uncached ways to a row."""
        return self._noise.get(prefix, 0.0)

    def _pass(self, prefix: tuple[int, ...]) -> Tensor:
        if prefix not in self._passes:
            self._passes[prefix] = self.subject.rows(prefix)
        return self._passes[prefix]

    def _measure_noise(self, sequence: tuple[int, ...]) -> None:
        """Hold one pass against literal rows, at every length or at the spots, as a running maximum."""
        length = len(sequence)
        spots = range(1, length + 1) if self.reference == "literal" else {1, 2, (length + 1) // 2, length}
        noise = 0.0
        for end in range(1, length + 1):
            prefix = sequence[:end]
            if end in spots:
                literal = self._pass(prefix)[-1]
                noise = largest((noise, gap_between(literal, self._pass(sequence)[end - 1]).size))
            self._noise[prefix] = largest((noise, self._noise.get(prefix, 0.0)))
            self._longest.setdefault(prefix, sequence)


def random_sequences(subject: Subject, length: int, seed: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return two sequences of random ids, drawn from the seed alone; raise `UsageError` past the context."""
    if length > subject.info.context_len:
        raise UsageError(
            f"{length} tokens are more than the context of {subject.info.context_len} that "
            f"{subject.info.name} accepts"
        )
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, subject.info.vocab_size, (2, length), generator=generator).tolist()
    return tuple(ids[0]), tuple(ids[1])


def _not_checked(name: str, reason: str) -> ScenarioResult:
    return ScenarioResult(
        name=name,
        verdict=Verdict.NOT_CHECKED,
        rows=(),
        largest_gap=0.0,
        num_values_compared=0,
        divergence=None,
        reason=reason,
    )


def _summary(verdict: Verdict, results: Sequence[ScenarioResult]) -> str:
    num_rows = sum(len(result.rows) for result in results)
    gap = largest(result.largest_gap for result in results)
    text = f"{num_rows} prefixes compared over the whole vocabulary, largest gap {gap:.4e}"
    located = next((result.divergence for result in results if result.divergence), None)
    if verdict is Verdict.DIVERGED and located is not None:
        return f"The cached path diverges: {located.sentence}."
    if verdict is Verdict.DIVERGED:
        row = next(row for result in results for row in result.rows if row.verdict is Verdict.DIVERGED)
        return f"The cached path diverges after {row.tokens}: {row.reason}."
    if verdict.passes:
        return f"The cached path computes the same logits as the uncached one: {text}."
    look = f"; look first where, {located.sentence}" if located is not None else ""
    return f"Not shown: {text}, verdict {verdict.value}{look}."
