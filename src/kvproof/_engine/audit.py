"""Audits: every row of every scenario, cached against uncached, judged by the rules of `_compare`."""

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from kvproof._engine.certificate import Certifier
from kvproof._engine.conclusion import CAUSALITY, empty_result, joined, result_of, summary_of, verdict_of
from kvproof._engine.expert_ties import decided
from kvproof._engine.four_computations import four_ways
from kvproof._engine.localise import Localisation, localise
from kvproof._engine.programs import Coverage, run_program
from kvproof._engine.prompts import DEFAULT_LENGTH, programs_for
from kvproof._engine.row_judge import RowJudge
from kvproof._engine.rung import Rung
from kvproof._engine.spread import spreads_of
from kvproof._engine.uncached_rows import Reference, Uncached
from kvproof._numerics.gaps import gap_between, largest
from kvproof._numerics.tolerances import (
    CONSTANTS,
    STRUCTURAL_FLOOR,
    TABLE_UNITS,
    declared_tolerance,
    structural_limit,
)
from kvproof._system.forked import check_jobs, default_jobs, in_processes
from kvproof._system.machine import environment
from kvproof.contract.report import SCHEMA_VERSION, Report
from kvproof.contract.results import (
    Certificate,
    Divergence,
    FaultResult,
    FourWays,
    Outcome,
    RowResult,
    ScenarioResult,
    Spread,
    Tolerance,
    Verdict,
    worst,
)
from kvproof.contract.stages import Site, Stage
from kvproof.errors import KvproofError, SubjectError, UsageError
from kvproof.faults import Fault, choose_place, choose_sequences, plant
from kvproof.scenarios import RANDOM_PROGRAMS, Ability, CacheKind, Scenario, longest_sequences, usable
from kvproof.subjects import Subject, as_subject, limits_of

NO_CERTIFICATE = "no certificate: nothing was asked to show that this audit can fail"
_SHORTEST_CERTIFIED = 4


def audit(
    decoder: object,
    scenarios: Iterable[Scenario | str] | None = None,
    *,
    length: int = DEFAULT_LENGTH,
    seed: int = 0,
    faults: Iterable[Fault] = (),
    tolerance: Tolerance | None = None,
    reference: Reference = "one-pass",
    top_rung: bool = True,
    all_values: bool = True,
    certificate: bool | None = None,
    spread: bool = False,
    fail_fast: bool = False,
    keep_partial: bool = False,
    jobs: int | None = 1,
    on_scenario: Callable[[str], None] = lambda name: None,
) -> Report:
    """Compare the cached path with the uncached one at every row of every scenario.

    ``decoder`` is a `Subject`, a pair of functions (full, step) as `CallableSubject` takes them, or a model of
    transformers. ``scenarios`` are programs, or names of the catalogue's, which are made over two sequences of
    ``length`` random tokens, or fewer where the context ends, drawn by ``seed``; by default all of them.
    Each of ``faults`` is planted in the cached path afterwards, where it is pinned or in the first place that the
    subject offers, and the same scenarios must reject it.
    ``tolerance`` defaults to the declared one of the subject's dtype. ``reference`` says how uncached rows
    are computed: one forward for each prefix, or one for each longest sequence, after a proof that the
    subject is causal and with literal spot checks. ``top_rung`` repeats everything in float64, where the
    subject can be cast. ``all_values`` compares every value on the way, because errors may cancel in the
    logits; without it, values are compared only in programs whose logits diverge. ``certificate`` plants every
    fault of the catalogue that the subject lets be planted, where the verdict would be a pass: an audit that
    cannot be shown able to fail is `vacuous`; by default it does so where the whole catalogue is run.
    ``spread`` runs one program once more, the first that diverged where one did, and reports every value's gap.
    ``fail_fast`` stops after the first scenario that diverges; ``keep_partial`` returns what is done when Ctrl-C
    arrives. Both mark the report as partial. ``jobs`` processes, of one thread each, are forked for the
    scenarios, and again for the certificate; None asks for as many as torch has threads, where decoder and
    system can be forked. ``on_scenario`` is told what is being run.

    A scenario that needs an ability which the subject lacks is not checked; one in which the decoder raises is
    inconclusive and says what was raised. What a session refuses comes through: the scenario is wrong.
    """
    subject = as_subject(decoder)
    certificate = scenarios is None if certificate is None else certificate
    programs = list(programs_for(subject, scenarios, length, seed))
    auditor = Auditor(subject, tolerance, reference, top_rung=top_rung, all_values=all_values, jobs=jobs)
    results, fault_results = list[ScenarioResult](), list[FaultResult]()
    evidence: Certificate | None = None
    partial = False
    try:
        for result in auditor.results(programs, on_scenario):
            results.append(result)
            if fail_fast and result.verdict is Verdict.DIVERGED and not result.advice:
                partial = True
                break
        clean_gap = largest(result.largest_gap for result in results)
        for fault in () if partial else faults:
            on_scenario(f"fault {fault.name}")
            fault_results.append(auditor.check_fault(fault, programs, clean_gap))
        if certificate and not partial and joined(results).passes:
            evidence = auditor.certificate(programs, on_scenario)
        if spread:
            auditor.see_spreads(programs, results)
    except KeyboardInterrupt:
        if not keep_partial:
            raise
        partial = True
    verdict = verdict_of(results, evidence)
    return Report(
        schema_version=SCHEMA_VERSION,
        verdict=verdict,
        summary=summary_of(verdict, results, evidence),
        environment=environment(),
        request=None,
        subject=subject.info,
        tolerance=auditor.tolerance,
        constants=CONSTANTS,
        scenarios=tuple(results),
        faults=tuple(fault_results),
        certificate=evidence,
        notes=(*auditor.notes(), *((NO_CERTIFICATE,) if verdict.passes and not certificate else ())),
        partial=partial,
        spreads=auditor.spreads,
        milestone=None,
    )


@dataclasses.dataclass(slots=True)
class _Learned:
    """What checking scenarios taught besides their results."""

    #: The first finding, and each fault's.
    found: dict[Fault | None, tuple[Scenario, Divergence]] = dataclasses.field(default_factory=dict)
    without_top: dict[str, str] = dataclasses.field(default_factory=dict)  #: why, by scenario
    made: Counter[str] = dataclasses.field(default_factory=Counter)  #: by all random programs together

    def __iadd__(self, later: "_Learned") -> "_Learned":
        self.found = later.found | self.found
        self.without_top |= later.without_top
        self.made += later.made
        return self


class Auditor:
    """One subject, with what is known of its uncached path so far."""

    def __init__(
        self,
        subject: Subject,
        tolerance: Tolerance | None = None,
        reference: Reference = "one-pass",
        *,
        top_rung: bool = True,
        all_values: bool = True,
        jobs: int | None = 1,
    ) -> None:
        self.jobs = default_jobs(may_fork=subject.may_fork) if jobs is None else jobs
        check_jobs(self.jobs)
        self.subject = subject
        self.tolerance = tolerance or declared_tolerance(getattr(torch, subject.info.dtype))
        self.uncached = Uncached(subject, reference, top_rung=top_rung)
        self.judge = RowJudge(subject, self.tolerance, self.uncached)
        self.all_values = all_values
        self._uncertified: str | None = None
        self._learned = _Learned()
        self.spreads: tuple[Spread, ...] = ()

    def results(
        self, programs: Sequence[Scenario], on_scenario: Callable[[str], None]
    ) -> Iterator[ScenarioResult]:
        """Check causality, where rows are taken from one pass, and then each name's programs."""
        if not programs:
            raise UsageError("an audit needs at least one scenario")
        on_scenario(CAUSALITY)
        self._prepare(programs, self.jobs)  # what raises here raises again where its own scenario is checked
        causal = True
        if self.uncached.reference == "one-pass":
            causality = self.causality()
            causal = causality.verdict is not Verdict.DIVERGED
            yield causality
        groups = [
            [program for program in programs if program.name == name]
            for name in dict.fromkeys(program.name for program in programs)
        ]
        checked = in_processes(lambda number: self._checked(groups[number]), len(groups), self.jobs)
        for group in groups:
            on_scenario(group[0].name)
            if causal:
                result, learned = next(checked)
                self._learned += learned
                yield result
            else:
                advice = any(program.advice for program in group)
                reason = "the subject is not causal: no cache can give its uncached rows"
                yield empty_result(group[0].name, Verdict.NOT_CHECKED, reason, advice=advice)

    def _checked(self, programs: Sequence[Scenario]) -> "tuple[ScenarioResult, _Learned]":
        """Check programs of one name; return the result with what it has taught."""
        before, self._learned = self._learned, _Learned()
        try:
            return self.check(programs), self._learned
        finally:
            self._learned = before

    def causality(self) -> ScenarioResult:
        """Say whether a row hangs on the tokens after it: literal rows against rows of a longer pass."""
        rows = tuple(self.judge.both_ways(both) for both in self.uncached.both_ways)
        verdict = worst([row.verdict for row in rows])
        bad = next((row for row in rows if row.verdict is Verdict.DIVERGED), None)
        reason = None
        if bad is not None:
            reason = f"not causal: the row after {len(bad.ids)} tokens changes when later tokens follow"
        return result_of(CAUSALITY, verdict, rows, reason=reason)

    def check(self, programs: Sequence[Scenario], fault: Fault | None = None) -> ScenarioResult:
        """Run programs of one name, compare all their rows, and the values on the way.

        The first divergence found is located; the programs after it are compared by their rows alone. Where
        the subject cannot be cast, values on the way are looked at only to locate what the rows show.
        """
        name, advice = programs[0].name, programs[0].advice
        skipped = next((program.skipped for program in programs if program.skipped), None)
        if skipped is not None:
            return empty_result(name, Verdict.NOT_CHECKED, skipped, advice=advice)
        missing = self._missing(programs)
        if missing is not None:
            return empty_result(name, Verdict.NOT_CHECKED, missing, advice=advice)
        rows: list[RowResult] = []
        num_values, divergence, ways, not_reached = 0, None, None, None
        reason = self._prepare(programs)
        for program in programs if reason is None else ():
            coverage = Coverage()
            try:
                judged = self._excused(self._judged(program, fault, coverage), program, fault)
                judged = self._chosen(judged, program, fault)
            except SubjectError as error:
                reason = str(error)
                break
            rows += (row for row, _ in judged)
            if name == RANDOM_PROGRAMS and fault is None:
                self._learned.made += coverage.made
            not_reached = not_reached or coverage.missing(program)
            wrong = sorted(
                (pair for pair in judged if not pair[0].verdict.passes),
                key=lambda pair: pair[0].verdict is not Verdict.DIVERGED,
            )
            bad, actual = wrong[0] if wrong else (None, None)
            if bad is not None and ways is None and fault is None and _is_a_question(program):
                ways = self._four_ways(bad, actual)
            if divergence is None:
                located = self._located(program, fault, bad)
                num_values += located.num_values
                divergence = located.divergence
                if divergence is not None and not advice:
                    self._learned.found.setdefault(fault, (program, divergence))
        verdicts = [row.verdict for row in rows]
        if divergence is not None and self._certain:
            verdicts.append(Verdict.DIVERGED)
        if reason is not None:  # what raised proves nothing of the rows that it did not give
            verdicts.append(Verdict.INCONCLUSIVE)
        elif not_reached is not None:
            verdicts.append(Verdict.VACUOUS)
        result = result_of(name, worst(verdicts), tuple(rows), reason=reason or not_reached)
        return dataclasses.replace(
            result, advice=advice, num_values_compared=num_values, divergence=divergence, four_ways=ways
        )

    def check_fault(self, fault: Fault, programs: Sequence[Scenario], clean_gap: float) -> FaultResult:
        """Plant a fault and say whether the same comparison rejects it, and names the right stage."""
        able = set(self.subject.info.abilities)
        run = [p for p in programs if p.skipped is None and not p.advice and p.needs <= able]
        if not run:
            raise UsageError(f"no scenario runs on {self.subject.info.name} in which {fault.name} could show")
        fault = choose_place(fault, self.subject, run)
        try:
            result = self.check(run, fault)
        except KvproofError as error:  # the decoder's own guard
            result = empty_result(run[0].name, Verdict.INCONCLUSIVE, str(error), advice=False)
        beyond = [row for row in result.rows if not row.gap <= row.allowed]
        first = result.divergence
        if result.verdict is Verdict.DIVERGED:
            outcome = Outcome.CAUGHT
        elif result.verdict is Verdict.INCONCLUSIVE and result.reason is not None:
            outcome = Outcome.RAISED
        else:
            outcome = Outcome.HIDDEN if first is not None or beyond else Outcome.EQUIVALENT
        return FaultResult(
            name=fault.name,
            breaks=fault.breaks,
            expected_stages=tuple(stage for stage in Stage if stage in fault.stages),
            layer=fault.place.layer,
            position=fault.place.position,
            outcome=outcome,
            where=None if first is None else _place_of(first),
            right_stage=None if first is None else fault.must_show_at(first.stage, first.layer),
            gap=largest(row.gap / row.scale if row.scale else row.gap for row in beyond[:1] or result.rows),
            reason=result.reason,
            verdict=result.verdict,
            largest_gap=result.largest_gap,
            tolerance=max((row.allowed for row in result.rows), default=0.0),
            num_rows_beyond=len(beyond),
            margin=result.largest_gap / clean_gap if clean_gap else float("inf"),
            divergence=first,
        )

    def certificate(self, programs: Sequence[Scenario], on_part: Callable[[str], None]) -> Certificate | None:
        """Plant every fault that the subject lets be planted, on the tokens of these programs.

        None, with a note, for a subject that shows no values, and for programs without four tokens in a row.
        """
        if Ability.TAP not in self.subject.info.abilities:
            self._uncertified = "the subject lacks the ability: tap"
            return None
        sequence, other = choose_sequences(programs)
        if len(sequence) < _SHORTEST_CERTIFIED:
            self._uncertified = f"it takes {_SHORTEST_CERTIFIED} tokens in a row"
            return None
        try:
            certifier = Certifier(self.uncached, self.tolerance, sequence, other)
            return certifier.certificate(on_part, self.jobs)
        except SubjectError as error:
            self._uncertified = str(error).splitlines()[0]
            return None

    def see_spreads(self, programs: Sequence[Scenario], results: Sequence[ScenarioResult]) -> None:
        """See how the first finding, or else a program without one, and each fault spread."""
        clean = programs if joined(results).passes else ()
        self.spreads = spreads_of(self.uncached, self._learned.found, clean)

    def notes(self) -> Iterator[str]:
        """Yield what a reader of the report must know besides the verdicts."""
        if self.uncached.no_top_reason is not None:
            yield f"no float64 rung, so noise alone decides: {self.uncached.no_top_reason}"
        if self._uncertified is not None:
            yield f"no certificate: {self._uncertified}"
        for name, reason in self._learned.without_top.items():
            yield f"{name} ran without the float64 rung, which raised: {reason}"
        made = self._learned.made
        if made:
            kinds = ("row", *usable(limits_of(self.subject)))
            listed = [f"{made[kind]} {kind}{'' if made[kind] == 1 else 's'}" for kind in kinds]
            text = f"the random programs compared {listed[0]}, and made {', '.join(listed[1:])}"
            none = [kind for kind in kinds if not made[kind]]
            yield text + (f"; not tried, though the subject is able: {', '.join(none)}" if none else "")

    def _prepare(self, programs: Iterable[Scenario], jobs: int = 1) -> str | None:
        """Measure the uncached path on all sequences; return what the decoder raised first, if it did.

        A sequence that cannot be run at all leaves the others as they are. A float64 rung that cannot run what
        the declared dtype can, for want of memory or of a kernel, is given up.
        """
        sequences = {sequence for program in programs for sequence in longest_sequences(program)}
        problem = None
        ordered = sorted(sequences, key=lambda sequence: (-len(sequence), sequence))
        for sequence in self.uncached.computed(ordered, jobs):
            try:
                self._know(sequence)
            except SubjectError as error:
                problem = problem or str(error)
        return problem

    def _know(self, sequence: tuple[int, ...]) -> None:
        try:
            self.uncached.know([sequence])
        except SubjectError as error:
            if self.uncached.top is None:
                raise
            self.uncached.declared.literal(sequence)  # raises where float64 is not the cause
            self.uncached.drop_top(error)
            self.uncached.know([sequence])

    def _missing(self, programs: Sequence[Scenario]) -> str | None:
        """Return which abilities the subject lacks for these programs, and why where it says so."""
        needed = {ability for program in programs for ability in program.needs}
        missing = sorted(needed - set(self.subject.info.abilities), key=lambda ability: ability.value)
        if not missing:
            return None
        reasons = {reason for ability in missing if (reason := self.subject.lacks.get(ability))}
        why = f" ({'; '.join(sorted(reasons))})" if reasons else ""
        return f"the subject lacks the ability: {', '.join(a.value for a in missing)}{why}"

    @property
    def _certain(self) -> bool:
        """Whether a value that differs on the way is a bug, and not what rounding may do."""
        return Ability.CAST in self.subject.info.abilities

    def _located(self, program: Scenario, fault: Fault | None, bad: RowResult | None) -> Localisation:
        """Find the first value on the way that is wrong: where a row is, or wherever values can be trusted.

        A row that is wrong in the declared dtype alone is looked for there.
        """
        nothing = Localisation(divergence=None, num_values=0)
        if Ability.TAP not in self.subject.info.abilities:
            return nothing
        if bad is None and not (self.all_values and self._certain):
            return nothing
        top = self.uncached.exact or self.uncached.top
        in_declared_only = (
            bad is not None
            and bad.verdict is Verdict.DIVERGED
            and bad.top_gap is not None
            and bad.top_gap <= STRUCTURAL_FLOOR.value * bad.scale
        )
        try:
            return localise(
                self.subject,
                program,
                fault=fault,
                until=None if bad is None or self.all_values else bad.ids,
                one_pass=self.uncached.reference == "one-pass",
                rung="declared" if in_declared_only and top is not None else "top",
                top=None if top is None else top.subject,
                confirmed=_is_a_question(program),
            )
        except SubjectError:  # the finding stands without its place
            return nothing

    def _judged(
        self, program: Scenario, fault: Fault | None, coverage: Coverage
    ) -> list[tuple[RowResult, Tensor | None]]:
        """Run a program and judge its rows; where float64 alone raises, by the declared dtype alone."""
        try:
            return list(self._judged_rows(program, fault, self.uncached.rungs, coverage))
        except SubjectError as error:
            if self.uncached.top is None:
                raise
            coverage.made.clear()  # all of it is done again
            judged = list(self._judged_rows(program, fault, [self.uncached.declared], coverage))
            if fault is None:
                self._learned.without_top[program.name] = str(error).splitlines()[0]
            return judged

    def _excused(
        self, judged: list[tuple[RowResult, Tensor | None]], program: Scenario, fault: Fault | None
    ) -> list[tuple[RowResult, Tensor | None]]:
        """Call rounding what diverges by no more than tables hold of a lower dtype, if exact tables end it."""
        wrong = [row for row, _ in judged if row.verdict is Verdict.DIVERGED]
        level = TABLE_UNITS.value * torch.finfo(getattr(torch, self.subject.info.dtype)).eps
        small = [
            row
            for row in wrong
            if row.top_gap is not None and STRUCTURAL_FLOOR.value * row.scale < row.top_gap <= level * row.scale
        ]
        exact = self.uncached.exact_tables() if wrong and len(small) == len(wrong) else None
        if exact is None:
            return judged
        rung, names = exact
        try:
            if not self._agrees(rung, program, fault):
                return judged
        except SubjectError:  # what was found stands
            return judged
        others = f" and {len(names) - 1} other tables" if len(names) > 1 else ""
        why = f"the float64 gap goes away once {names[0]}{others} are computed in float64"
        return [(self.judge.without_tables(row, why) if row in small else row, top) for row, top in judged]

    def _chosen(
        self, judged: list[tuple[RowResult, Tensor | None]], program: Scenario, fault: Fault | None
    ) -> list[tuple[RowResult, Tensor | None]]:
        """Judge rows anew that hang on a discrete choice."""
        rows = decided(self.uncached, self.judge, program, fault, [row for row, _ in judged])
        return [(row, top) for row, (_, top) in zip(rows, judged, strict=True)]

    def _agrees(self, rung: Rung, program: Scenario, fault: Fault | None) -> bool:
        """Run a program at one float64 rung and say whether every row is the uncached one."""
        for call in run_program(rung.subject, program, plant(fault)):
            for row in call.rows:
                gap = gap_between(self.uncached.row_of(rung, row.prefix), row.logits)
                if not gap.size <= structural_limit(0.0, gap.scale):
                    return False
        return True

    def _judged_rows(
        self, program: Scenario, fault: Fault | None, rungs: Sequence[Rung], coverage: Coverage
    ) -> Iterator[tuple[RowResult, Tensor | None]]:
        """Run the cached path at the rungs in step; yield each row's result.

        Its row at the top rung comes with the first of each verdict that is no pass: others are let go at once.
        """
        shown: set[Verdict] = set()
        runs = [
            # What the rungs do in step is counted once.
            run_program(rung.subject, program, plant(fault), coverage if first else None)
            for first, rung in zip((True, *(False,) * len(rungs)), rungs, strict=False)
        ]
        for calls in zip(*runs, strict=True):
            self.uncached.know(row.prefix for row in calls[0].rows)
            for rows in zip(*(call.rows for call in calls), strict=True):
                top = rows[1].logits if len(rows) > 1 else None
                result = self.judge.row(rows[0], top)
                is_shown = not result.verdict.passes and result.verdict not in shown
                shown.add(result.verdict)
                yield result, top if is_shown else None

    def _four_ways(self, bad: RowResult, actual: Tensor | None) -> FourWays | None:
        if actual is None or bad.verdict is not Verdict.DIVERGED:
            return None
        try:
            return four_ways(self.uncached, bad.ids, actual)
        except SubjectError:  # the finding stands without it
            return None


def _place_of(divergence: Divergence) -> str:
    """Return the site of a divergence in words, as the certificate names it."""
    if divergence.introduced:
        return divergence.introduced[0].partition(" (by way of ")[0]
    return str(Site(divergence.stage, divergence.layer)) if divergence.stage is not Stage.MODULE else "a module"


def _is_a_question(program: Scenario) -> bool:
    """Return whether it is worth many runs to learn why rows differ: what few bits cost is known beforehand."""
    return program.cache is not CacheKind.QUANTISED
