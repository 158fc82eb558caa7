"""The certificate: deliberate faults on this subject and these tokens, and what the audit sees of them.

A check that never rejects a broken cache is weak evidence. So every fault of the catalogue is planted wherever
the subject lets it be, in short programs of its own; a row is held against the same uncached row, by the same
limit, as in the audit. Uncached values are computed once for all of them, and a fault is dropped as soon as a
row and a value differ.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch

from kvproof._engine.calls import Layout, TracedCall
from kvproof._engine.localise import AgainstTheRun, compared, traced_calls
from kvproof._engine.programs import Row, run_program
from kvproof._engine.row_evidence import RowEvidence
from kvproof._engine.rung import Prefix, Rung
from kvproof._engine.uncached_rows import Uncached
from kvproof._engine.uncached_values import LiteralRuns, OnePassRuns, UncachedRuns
from kvproof._engine.verdict_rules import judge
from kvproof._numerics.gaps import gap_between, largest
from kvproof._system.pool import map_in_processes
from kvproof.contract.results import Certificate, Mutant, NotPlanted, Outcome, SmallestChange, Tolerance
from kvproof.contract.stages import Site, Stage
from kvproof.errors import KvproofError
from kvproof.faults import CatalogueFault, Place, Planting, PlantingSite, catalogue, probe, smallest
from kvproof.scenarios import Ability, Extend, Scenario, longest_sequences
from kvproof.subjects import Session

#: So many tokens are enough to plant every fault, and to pass a short window.
MOST_TOKENS = 16
#: The bisection ends at a factor of about this.
_FACTOR = 1.4


@dataclass(frozen=True, slots=True, kw_only=True)
class _Trial:
    """What one run of a program came to."""

    gap: float  #: relative to the row's scale; the first that is beyond the limit, or the largest
    differs: bool
    site: Site | None
    reason: str | None


@dataclass(frozen=True, slots=True)
class _Mutants:
    """One fault: what came of it in each place, or why it was not planted, and its programs' gap without it."""

    planted: tuple[Mutant, ...]
    not_planted: tuple[NotPlanted, ...]
    clean_gap: float


class Certifier:
    """Plants faults in one subject, at the highest rung there is."""

    def __init__(self, uncached: Uncached, tolerance: Tolerance, sequence: Prefix, other: Prefix) -> None:
        self.uncached = uncached
        self._evidence = RowEvidence(uncached.declared.subject, tolerance, uncached)
        self.rung: Rung = uncached.exact or uncached.top or uncached.declared
        self.ground = probe(self.rung.subject, sequence, other)
        self.programs: dict[tuple[str, int], Scenario] = {}
        self.runs: UncachedRuns = LiteralRuns(self.rung.subject)
        self._clean: dict[Scenario, _Trial] = {}
        self._prompts: dict[tuple[Rung, Extend, int, frozenset[Ability]], Session] = {}

    def certificate(self, on_part: Callable[[str], None] = lambda name: None, jobs: int = 1) -> Certificate:
        """Plant everything, in ``jobs`` processes at a time, and say what came of it."""
        faults = catalogue()
        not_planted: list[NotPlanted] = []
        chosen: list[tuple[CatalogueFault, list[Place]]] = []
        for fault in faults:
            places = list(self._places(fault))
            reason = self._why_not(fault, places)
            if reason is not None:
                not_planted.append(NotPlanted(fault=fault.name, reason=reason))
            else:
                chosen.append((fault, places))
        self._prepare([self._program(fault, place) for fault, places in chosen for place in places], jobs)
        rungs = list(dict.fromkeys((self.uncached.declared, self.rung)))
        chosen.sort(key=self._num_operations, reverse=True)  # the longest first, so that no process waits for it

        def part(number: int) -> tuple[_Mutants | None, SmallestChange | None]:
            if number < len(rungs):  # each takes longer than any fault
                return None, self._smallest_change(rungs[number])
            return self._mutants(*chosen[number - len(rungs)]), None

        names = [f"smallest change seen in {rung.subject.info.dtype}" for rung in rungs]
        names += [f"fault {fault.name}" for fault, _ in chosen]
        parts = map_in_processes(part, len(names), jobs)
        mutants: list[Mutant] = []
        changes: list[SmallestChange] = []
        clean = 0.0
        for name in names:
            on_part(name)
            found, change = next(parts)
            changes += [change] if change is not None else []
            if found is not None:
                mutants += found.planted
                not_planted += found.not_planted
                clean = largest((clean, found.clean_gap))
        place_of = {fault.name: place for place, fault in enumerate(faults)}
        mutants.sort(key=lambda mutant: place_of[mutant.fault])
        not_planted.sort(key=lambda left_out: place_of[left_out.fault])
        caught = [mutant.gap for mutant in mutants if mutant.outcome is Outcome.CAUGHT]
        return Certificate(
            dtype=self.rung.subject.info.dtype,
            sequence=self.ground.sequence,
            mutants=tuple(mutants),
            not_planted=tuple(not_planted),
            clean_gap=clean,
            margin=min(caught) / max(clean, 2.0**-53) if caught else None,
            smallest_changes=tuple(reversed(changes)),
            problem=_problem(mutants, faults, self.ground),
        )

    def _mutants(self, fault: CatalogueFault, places: Sequence[Place]) -> _Mutants:
        """Plant one fault in each of its places, unless a program of its own fails without it."""
        trials = [self._clean_trial(self._program(fault, place)) for place in places]
        clean = largest(trial.gap for trial in trials if trial.reason is None)
        reason = next((trial.reason for trial in trials if trial.reason is not None), None)
        if reason is not None:
            reason = f"its program fails without a fault: {reason}"
            return _Mutants((), (NotPlanted(fault=fault.name, reason=reason),), clean)
        return _Mutants(tuple(self._mutant(fault, place) for place in places), (), clean)

    def _places(self, fault: CatalogueFault) -> Iterator[Place]:
        num = len(self.ground.sequence)
        late = num - 4
        late = max(2, late)
        for number, layer in enumerate(fault.layers(self.ground)):
            # One layer is enough to see what is special about a short prompt.
            for position in dict.fromkeys((2, late) if number == 0 and not fault.late else (late,)):
                yield Place(layer=layer, position=position, ground=self.ground)

    def _why_not(self, fault: CatalogueFault, places: Sequence[Place]) -> str | None:
        """Return why a fault cannot be planted, or None."""
        able = set(self.rung.subject.info.abilities)
        needed = fault.carrier(self.ground.sequence, self.ground.other, 2).needs
        needed |= {Ability.EDIT} if fault.keeps else set()
        missing = sorted(ability.value for ability in needed - able)
        if missing:
            return f"the subject lacks the ability: {', '.join(missing)}"
        return None if places else "the subject has no place for it"

    def _program(self, fault: CatalogueFault, place: Place) -> Scenario:
        key = (fault.carrier.__name__, place.position)
        if key not in self.programs:
            self.programs[key] = fault.carrier(self.ground.sequence, self.ground.other, place.position)
        return self.programs[key]

    def _num_operations(self, planted: tuple[CatalogueFault, Sequence[Place]]) -> int:
        fault, places = planted
        return sum(len(self._program(fault, place).operations) for place in places)

    def _prepare(self, programs: Sequence[Scenario], jobs: int) -> None:
        """Share uncached runs among all programs, where a run over a longer sequence serves its prefixes."""
        if self.uncached.reference == "one-pass":
            wanted = {sequence for program in programs for sequence in longest_sequences(program)}
            whole = [s for s in wanted if not any(o != s and o[: len(s)] == s for o in wanted)]
            self.runs = OnePassRuns(self.rung.subject, sorted(whole))
            if jobs > 1:  # each process would make them all for itself
                with suppress(KvproofError):  # what raises here raises again where it is needed
                    self.runs.prepare(sorted(whole))

    def _clean_trial(self, program: Scenario) -> _Trial:
        """Run a program without a fault, for its rows alone: what differs then is no fault's doing."""
        if program not in self._clean:
            differs, gap, reason = False, 0.0, None
            try:
                prompted = self._prompted(self.rung, program)
                for call in run_program(self.rung.subject, program, prompted=prompted):
                    for row in call.rows:
                        gap = largest((gap, self._gap(row)))
                        differs = differs or self._is_beyond_limit(row)
            except KvproofError as error:
                reason = str(error).splitlines()[0]
            reason = "its rows differ all the same" if differs else reason
            self._clean[program] = _Trial(gap=gap, differs=differs, site=None, reason=reason)
        return self._clean[program]

    def _gap(self, row: Row) -> float:
        """Return a row's gap, relative to its scale."""
        gap = gap_between(self.runs.over(row.prefix).row(len(row.prefix)), row.logits)
        return gap.size / gap.scale if gap.scale else gap.size

    def _mutant(self, fault: CatalogueFault, place: Place) -> Mutant:
        trial = self._trial(self._program(fault, place), fault.plant(place))
        if trial.reason is not None:
            outcome = Outcome.RAISED
        elif trial.differs:
            outcome = Outcome.CAUGHT
        else:
            outcome = Outcome.EQUIVALENT if trial.site is None else Outcome.HIDDEN
        return Mutant(
            fault=fault.name,
            layer=place.layer,
            position=place.position,
            outcome=outcome,
            where=None if trial.site is None else str(trial.site),
            right_stage=None if trial.site is None else self._is_right(fault, place, trial.site),
            gap=trial.gap,
            reason=trial.reason,
        )

    def _trial(self, program: Scenario, planting: Planting) -> _Trial:
        judge = AgainstTheRun(self.runs)
        first, differs, gap, reason = None, False, 0.0, None
        try:
            for rows, trace in traced_calls(
                self.rung.subject, program, planting, self._prompted(self.rung, program)
            ):
                if any(len(row.prefix) == row.offset + 1 for row in rows):
                    continue  # faults act on a warm cache: a prompt's values are what they were without one
                if first is None:
                    call = TracedCall(self.runs, Layout.of(rows, trace), trace)
                    _, first = compared(judge, call, search=True)
                for row in rows if not differs else ():
                    gap = largest((gap, self._gap(row)))
                    differs = differs or self._is_beyond_limit(row)
                if first and differs:
                    break
        except KvproofError as error:
            reason = str(error).splitlines()[0]
        site = None if first is None else first.comparison.site
        return _Trial(gap=gap, differs=differs, site=site, reason=None if differs else reason)

    def _prompted(self, rung: Rung, program: Scenario) -> Session | None:
        """Return a session that has run the program's prompt, the same for all faults."""
        prompt = program.operations[0]
        if not isinstance(prompt, Extend) or Ability.FORK not in rung.subject.info.abilities:
            return None
        key = (rung, prompt, program.batch, program.needs)
        if key not in self._prompts:
            session = rung.subject.session(batch=program.batch, needs=program.needs)
            session.extend(prompt.ids)
            self._prompts[key] = session
        return self._prompts[key]

    def _is_right(self, fault: CatalogueFault, place: Place, site: Site) -> bool:
        """Return whether a fault shows first where it must; modules stand for what is not shown."""
        if place.layer is not None and site.layer != place.layer:
            return False
        shown = {s.stage for s in self.ground.shown if place.layer is None or s.layer == place.layer}
        return site.stage in fault.stages or (site.stage is Stage.MODULE and not fault.stages & shown)

    def _smallest_change(self, rung: Rung) -> SmallestChange | None:
        """Find by bisection the smallest change of one entry that shows at a rung; None where nothing can."""
        entry = smallest.entry(self.ground)
        if entry is None:
            return None
        layer, tensor = entry
        place = Place(layer=layer, position=max(2, len(self.ground.sequence) - 4), ground=self.ground)
        program = smallest.program(place)
        is_wrong = self._is_beyond_limit if rung.subject is self.rung.subject else self._is_beyond_rounding

        def seen(change: float) -> bool:
            planting = smallest.planting(place, tensor, change)
            calls = run_program(rung.subject, program, planting, prompted=self._prompted(rung, program))
            return any(is_wrong(row) for call in calls for row in call.rows)

        if seen(0.0):
            return None  # what this dtype does by itself hides any change
        return SmallestChange(
            dtype=rung.subject.info.dtype,
            layer=layer,
            tensor=tensor,
            position=place.position - 1,
            value=_bisected(seen, torch.finfo(getattr(torch, rung.subject.info.dtype)).eps / 4),
        )

    def _is_beyond_limit(self, row: Row) -> bool:
        return self.runs.over(row.prefix).logits_differ(len(row.prefix), row.logits)

    def _is_beyond_rounding(self, row: Row) -> bool:
        """Return whether a row is wrong in the declared dtype, were there no gap in float64."""
        truth = self.uncached.row_of(self.rung, row.prefix)
        return not judge(self._evidence.in_declared_dtype(row, truth))[0].passes


def _bisected(seen: Callable[[float], bool], least: float) -> float | None:
    """Return the smallest change that is seen, from ``least`` on, below which no value changes, to 1."""
    low, high = math.log10(least), 0.0
    if not seen(1.0):
        return None
    while high - low > math.log10(_FACTOR):
        middle = (low + high) / 2
        low, high = (low, middle) if seen(10.0**middle) else (middle, high)
    return float(10.0**high)


def _problem(mutants: Sequence[Mutant], faults: Sequence[CatalogueFault], ground: PlantingSite) -> str | None:
    """Return why the audit could not be shown able to fail.

    Something must have been caught, and in every layer that keeps something a fault that puts one token's content
    in another's place: else the audit would not see what stands where in that layer's cache.
    """
    caught = {Outcome.CAUGHT, Outcome.RAISED}
    if not any(mutant.outcome is Outcome.CAUGHT for mutant in mutants):
        return "no planted fault changed a row of logits"
    kept = {fault.name for fault in faults if fault.mixes}
    blind = [
        layer
        for layer in ground.keeping()
        if not any(m.layer == layer and m.outcome in caught and m.fault in kept for m in mutants)
    ]
    if blind:
        return f"nothing misplaced in the cache of layer {', '.join(map(str, blind))} changed a row of logits"
    return None
