"""Audits: run every scenario on the cached path, gather evidence, judge it, and locate what is wrong."""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

from kvproof._engine.certificate import Certifier
from kvproof._engine.conclusion import empty_result, scenario_result, summarise
from kvproof._engine.conditions import add_conditions
from kvproof._engine.determinism import check_determinism
from kvproof._engine.errors_together import measured_errors
from kvproof._engine.fault_results import fault_result
from kvproof._engine.four_computations import four_ways
from kvproof._engine.localise import localise
from kvproof._engine.program_rows import ProgramRows, RowAuditor
from kvproof._engine.prompts import DEFAULT_LENGTH, programs_for
from kvproof._engine.rung import Prefix
from kvproof._engine.rung_proof import longest_causal_pass
from kvproof._engine.scenario_check import ScenarioCheck, SideResults
from kvproof._engine.spread import spreads_of
from kvproof._engine.uncached_rows import Reference, Uncached
from kvproof._engine.verdict_rules import (
    CAUSALITY,
    is_finding,
    is_of_declared_dtype_alone,
    judge_audit,
    judge_scenario,
    judge_scenarios,
    smallest_bug,
)
from kvproof._numerics.dtypes import dtype_of
from kvproof._numerics.gaps import largest
from kvproof._numerics.tolerances import CONSTANTS, declared_tolerance
from kvproof._system.machine import environment
from kvproof._system.pool import check_jobs, default_jobs, map_in_processes
from kvproof.contract.certified import misplaced_sentence
from kvproof.contract.report import VERSION, Report
from kvproof.contract.results import (
    Certificate,
    FaultResult,
    FourWays,
    Localisation,
    RowResult,
    ScenarioResult,
    Spread,
    Tolerance,
    Verdict,
)
from kvproof.errors import KvproofError, SubjectError, UsageError
from kvproof.faults import Fault, choose_place, choose_sequences
from kvproof.scenarios import (
    RANDOM_PROGRAMS,
    Ability,
    CacheKind,
    Scenario,
    compared_lengths,
    drawable_kinds,
    fit_calls,
    longest_sequences,
    walk,
)
from kvproof.subjects import Subject, as_subject, limits_of

NO_CERTIFICATE = "no certificate (--no-certificate): no faults were planted to prove that this audit can fail"
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
    repeats: int = 2,
    truth: object = None,
    ids: Collection[int] | None = None,
    avoid_ids: Collection[int] = (),
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
    ``fail_fast`` stops after the first scenario that diverges or raises; ``keep_partial`` returns what is done
    when Ctrl-C arrives. Both mark the report as partial. ``jobs`` processes, of one thread each, are forked for
    the scenarios, and again for the certificate; None asks for as many as torch has threads, where decoder and
    system can be forked. One uncached call and one cached program are made ``repeats`` times first: where their
    rows differ, the decoder is not deterministic, and nothing else is concluded. ``truth`` is the same weights in
    another implementation, which has float64, for a decoder that has none: the errors of both paths against it
    stand side by side. ``ids`` are the only token ids that programs are made of, and ``avoid_ids`` are never
    fed, nor is the padding token, where the decoder declares one. ``on_scenario`` is told what is being run.

    A scenario that needs an ability which the subject lacks is not checked. One in which the cached path raises,
    or gives a malformed row, is `raised`, and says what was raised and where; if the uncached path raises for
    these tokens too, it is inconclusive. What a session refuses comes through: the scenario is wrong.
    """
    subject = as_subject(decoder, ids=ids, avoid_ids=avoid_ids)
    certificate = scenarios is None if certificate is None else certificate
    programs = [
        fit_calls(program, max_block=subject.max_block, last_row=subject.last_row)
        for program in programs_for(subject, scenarios, length, seed)
    ]
    auditor = Auditor(
        subject, tolerance, reference, top_rung=top_rung, all_values=all_values, jobs=jobs, repeats=repeats
    )
    if truth is not None:
        auditor.uncached.ladder.set_truth(as_subject(truth))
    results, fault_results = list[ScenarioResult](), list[FaultResult]()
    evidence, partial = None, False
    try:
        for result in auditor.results(programs, on_scenario):
            results.append(result)
            if fail_fast and is_finding(result):
                partial = True
                break
        clean_gap = largest(result.largest_gap for result in results)
        for fault in () if partial else faults:
            on_scenario(f"fault {fault.name}")
            fault_results += [auditor.check_fault(fault, programs, clean_gap)]
        if certificate and not partial and judge_scenarios(results).passes:
            evidence = auditor.certificate(programs, on_scenario)
        if spread:
            auditor.add_spreads(programs, results)
    except KeyboardInterrupt:
        if not keep_partial:
            raise
        partial = True
    results = add_conditions(programs, results, subject.boundaries)
    return _report(auditor, results, fault_results, evidence, partial=partial, is_certified=certificate)


def _report(
    auditor: "Auditor",
    results: Sequence[ScenarioResult],
    fault_results: Sequence[FaultResult],
    evidence: Certificate | None,
    *,
    partial: bool,
    is_certified: bool,
) -> Report:
    """Return the report of an audit; ``is_certified`` says whether a certificate was asked for."""
    problem = auditor.uncached.ladder.problem
    verdict = judge_audit(results, evidence, rung_problem=problem)
    return Report(
        schema_version=VERSION.major,
        schema_minor=VERSION.minor,
        verdict=verdict,
        summary=summarise(verdict, results, evidence, problem),
        environment=environment(),
        request=None,
        subject=auditor.subject.info,
        tolerance=auditor.tolerance,
        constants=CONSTANTS,
        scenarios=tuple(results),
        faults=tuple(fault_results),
        certificate=evidence,
        notes=(*auditor.notes(), *((NO_CERTIFICATE,) if verdict.passes and not is_certified else ())),
        smallest_bug=smallest_bug(row for result in results if not result.advice for row in result.rows),
        partial=partial,
        spreads=auditor.spreads,
        milestone=None,
    )


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
        repeats: int = 2,
    ) -> None:
        self.repeats, self._top_rung = repeats, top_rung
        self.jobs = default_jobs(may_fork=subject.may_fork) if jobs is None else jobs
        check_jobs(self.jobs)
        self.subject = subject
        self.tolerance = tolerance or declared_tolerance(dtype_of(subject.info.dtype))
        self.uncached = Uncached(subject, reference, top_rung=top_rung)
        self.rows = RowAuditor(self.uncached, self.tolerance)
        self.all_values = all_values
        self._uncertified: str | None = None
        self._misplaced: str | None = None
        self._changes: tuple[str, ...] = ()  # of what the decoder keeps in itself
        self._side = SideResults()
        self.spreads: tuple[Spread, ...] = ()

    def results(
        self, programs: Sequence[Scenario], on_scenario: Callable[[str], None]
    ) -> Iterator[ScenarioResult]:
        """Check causality, where rows are taken from one pass, and then each name's programs."""
        if not programs:
            raise UsageError("an audit needs at least one scenario")
        groups = [
            [program for program in programs if program.name == name]
            for name in dict.fromkeys(program.name for program in programs)
        ]
        repeated = self._determinism(programs)
        if repeated is not None:
            yield repeated
            for group in groups:
                advice = any(program.advice for program in group)
                reason = "the decoder is not deterministic: nothing follows from rows that differ"
                yield empty_result(group[0].name, Verdict.NOT_CHECKED, reason, advice=advice)
            return
        on_scenario(CAUSALITY)
        self._prepare(programs, self.jobs)  # what raises here raises again where its own scenario is checked
        if self.uncached.reference == "one-pass":
            causality = self.causality()
            yield causality
            if causality.verdict is Verdict.DIVERGED:
                self._take_literal_rows(programs)
        checks = map_in_processes(lambda number: self._check_apart(groups[number]), len(groups), self.jobs)
        for group in groups:
            on_scenario(group[0].name)
            result, side = next(checks)
            self._side += side
            yield result

    def _determinism(self, programs: Sequence[Scenario]) -> ScenarioResult | None:
        """Make the same calls again; return a result only where they give other rows."""
        longest = max((s for program in programs for s in longest_sequences(program)), key=len, default=())
        if not longest or self.repeats < 2:
            return None
        result, self._changes = check_determinism(self.subject, longest, self.tolerance, self.repeats)
        return result

    def _take_literal_rows(self, programs: Sequence[Scenario]) -> None:
        """Judge the cached path of a subject that is not causal by literal rows: its passes give other ones."""
        truth = self.uncached.ladder.truth
        self.uncached = Uncached(self.subject, "literal", top_rung=self._top_rung, is_causal=False)
        self.uncached.ladder.truth = truth
        self.rows = RowAuditor(self.uncached, self.tolerance)
        self._prepare(programs, self.jobs)

    def _check_apart(self, programs: Sequence[Scenario]) -> tuple[ScenarioResult, SideResults]:
        """Check programs of one name; return their result and its side results, which a process must send."""
        before, self._side = self._side, SideResults()
        try:
            return self.check(programs), self._side
        finally:
            self._side = before

    def causality(self) -> ScenarioResult:
        """Say whether a row depends on the tokens after it: literal rows against rows of a longer pass."""
        rows = tuple(self.rows.evidence.compare_both_ways(both) for both in self.uncached.both_ways)
        bad = next((row for row in rows if row.verdict is Verdict.DIVERGED), None)
        reason = None
        if bad is not None:
            reason = f"not causal: the row after {len(bad.ids)} tokens changes when later tokens follow"
            reason += self._how_far_causal(bad.ids)
        return scenario_result(CAUSALITY, judge_scenario(rows), rows, reason=reason)

    def _how_far_causal(self, prefix: Prefix) -> str:
        """Say of how many tokens a pass may be without a row of it changing, by what is known of this prefix."""
        longer, top = self.uncached.continuation(prefix), self.uncached.top
        if longer is None or top is None or not self.uncached.ladder.is_exact:
            return ""
        try:
            longest = longest_causal_pass(top, longer)
        except SubjectError:
            return ""
        if longest == 1:
            return "; not even a pass of two tokens is causal"
        return f"; passes of up to {longest} tokens are causal"

    def check(self, programs: Sequence[Scenario], fault: Fault | None = None) -> ScenarioResult:
        """Run programs of one name, judge all their rows, and locate the first divergence."""
        scenario = programs[0]
        why_not = self._why_not(programs)
        if why_not is not None:
            return empty_result(scenario.name, Verdict.NOT_CHECKED, why_not, advice=scenario.advice)
        check, is_prepared = ScenarioCheck(), self._prepare(programs) is None
        for program in programs:
            problem = None if is_prepared else self._prepare([program])
            if problem is not None:
                check.undecided = check.undecided or f"no uncached row to compare with: {problem}"
                continue
            try:
                judged = self.rows.judge_program(program, fault)
            except SubjectError as error:
                check.undecided = check.undecided or str(error)
                continue
            check.rows += judged.rows
            check.raised = check.raised or judged.raised
            check.refused = check.refused or judged.refused
            check.undecided = check.undecided or judged.undecided
            if judged.coverage.failed is None:
                check.unreached = check.unreached or judged.coverage.missing(program)
            self._locate(check, fault, judged)
            if fault is None:
                self._note(program, judged)
        if scenario.cache is not CacheKind.QUANTISED:
            check.errors = measured_errors(self.uncached, check.rows, programs, fault)
        return check.result(scenario, is_proof=self._values_are_exact)

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
        return fault_result(fault, result, clean_gap)

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
            run = [program for program in programs if self._why_not([program]) is None and not program.advice]
            certifier = Certifier(self.uncached, self.tolerance, sequence, other, run)
            certificate = certifier.certificate(on_part, self.jobs)
        except SubjectError as error:
            self._uncertified = str(error).splitlines()[0]
            return None
        self._misplaced = misplaced_sentence(certificate)
        return certificate

    def add_spreads(self, programs: Sequence[Scenario], results: Sequence[ScenarioResult]) -> None:
        """Record how the first finding, or else a program without one, and each fault spread."""
        clean = programs if judge_scenarios(results).passes else ()
        self.spreads = spreads_of(self.uncached, self._side.found, clean)

    def notes(self) -> Iterator[str]:
        """Yield what a reader of the report must know besides the verdicts."""
        yield from self.uncached.ladder.notes()
        yield from self.subject.notes(self._changes)
        yield from self.subject.limitations()
        if self._uncertified is not None:
            yield f"no certificate: {self._uncertified}"
        if self._misplaced is not None:
            yield self._misplaced
        for name, reason in self._side.without_exact.items():
            yield f"{name} ran without the float64 rung, which raised: {reason}"
        made = self._side.made
        if made:
            kinds = ("row", *drawable_kinds(limits_of(self.subject)))
            listed = [f"{made[kind]} {kind}{'' if made[kind] == 1 else 's'}" for kind in kinds]
            text = f"the random programs compared {listed[0]}, and made {', '.join(listed[1:])}"
            none = [kind for kind in kinds if not made[kind]]
            yield text + (f"; not tried, though the subject is able: {', '.join(none)}" if none else "")

    def _prepare(self, programs: Iterable[Scenario], jobs: int = 1) -> str | None:
        """Measure the uncached path on all sequences; return what the decoder raised first, if it did."""
        programs = tuple(programs)
        sequences = {sequence for program in programs for sequence in longest_sequences(program)}
        self.uncached.compared = tuple(each for program in programs for each in compared_lengths(program).items())
        problem = self.uncached.prepare(sequences, jobs)
        self.uncached.prove()
        return problem

    def _why_not(self, programs: Sequence[Scenario]) -> str | None:
        """Return why these programs cannot be checked, or None: they are skipped, or the subject is not able."""
        skipped = next((program.skipped for program in programs if program.skipped), None)
        if skipped is not None:
            return skipped
        if self.subject.one_session and any(
            len(states) > 1 for program in programs for states in _states(program)
        ):
            return "the decoder holds one session at a time"
        needed = {ability for program in programs for ability in program.needs}
        missing = sorted(needed - set(self.subject.info.abilities), key=lambda ability: ability.value)
        if not missing:
            return None
        reasons = {reason for ability in missing if (reason := self.subject.lacks.get(ability))}
        why = f" ({'; '.join(sorted(reasons))})" if reasons else ""
        return f"the subject lacks the ability: {', '.join(a.value for a in missing)}{why}"

    def _note(self, program: Scenario, judged: ProgramRows) -> None:
        """Keep what the report's notes say of a program without a fault."""
        if program.name == RANDOM_PROGRAMS:
            self._side.made += judged.coverage.made
        if judged.without_exact is not None:
            self._side.without_exact[program.name] = judged.without_exact

    @property
    def _values_are_exact(self) -> bool:
        """Whether a value that differs on the way is a bug, and not what rounding may do."""
        return self.uncached.ladder.is_exact

    def _locate(self, check: ScenarioCheck, fault: Fault | None, judged: ProgramRows) -> None:
        """Look for the first wrong value and the wrong side; of the first program that shows one, and no more."""
        program, number = judged.program, judged.worst
        if not judged.rows and judged.coverage.failed is not None:
            return
        bad = None if number is None else judged.rows[number]
        if number is not None and check.four_ways is None and fault is None and _is_worth_confirming(program):
            check.four_ways = self._four_ways(judged)
        if check.divergence is None:
            located = self._first_wrong_value(program, fault, bad)
            check.num_values += located.num_values
            check.divergence = located.divergence
            if located.divergence is not None and not program.advice:
                self._side.found.setdefault(fault, (program, located.divergence))

    def _first_wrong_value(self, program: Scenario, fault: Fault | None, bad: RowResult | None) -> Localisation:
        """Find the first value on the way that is wrong: where a row is, or wherever values can be trusted.

        A row that is wrong in the declared dtype alone is looked for there.
        """
        nothing = Localisation(divergence=None, num_values=0)
        if Ability.TAP not in self.subject.info.abilities:
            return nothing
        if bad is None and not (self.all_values and self._values_are_exact):
            return nothing
        top = self.uncached.exact or self.uncached.top
        in_declared = bad is not None and top is not None and is_of_declared_dtype_alone(bad)
        try:
            return localise(
                self.subject,
                program,
                fault=fault,
                until=None if bad is None or self.all_values else bad.ids,
                one_pass=self.uncached.reference == "one-pass",
                rung="declared" if in_declared else "top",
                top=None if top is None else top.subject,
                confirmed=_is_worth_confirming(program),
                # Whether a row is wrong is judged already, with more evidence.
                compare_logits=bad is not None and bad.verdict is Verdict.DIVERGED,
            )
        except SubjectError:  # the finding stands without its place
            return nothing

    def _four_ways(self, judged: ProgramRows) -> FourWays | None:
        """Say which side is wrong by the first row that diverged, or by a longer one if only that tells."""
        first, longer = (self._ways_of(judged, number) for number in (judged.worst, judged.longer))
        is_open = first is not None and first.suspect is None and len(first.groups) > 1
        return longer if is_open and longer is not None and longer.suspect is not None else first

    def _ways_of(self, judged: ProgramRows, number: int | None) -> FourWays | None:
        actual = None if number is None else judged.exact_rows.get(number)
        if number is None or actual is None or judged.rows[number].verdict is not Verdict.DIVERGED:
            return None
        ids = judged.rows[number].ids
        row = "this row" if number == judged.worst else f"the row after {len(ids)} tokens"
        try:
            return four_ways(self.uncached, ids, actual, row=row)
        except SubjectError:  # the finding stands without it
            return None


def _states(program: Scenario) -> Iterator[Sequence[object]]:
    """Yield what the open sessions hold after each operation."""
    return (transition.after for transition in walk(program))


def _is_worth_confirming(program: Scenario) -> bool:
    """Return whether it is worth many runs to learn why rows differ: what few bits cost is known beforehand."""
    return program.cache is not CacheKind.QUANTISED
