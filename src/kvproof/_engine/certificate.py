"""The certificate: deliberate faults on this subject and these tokens, and which of them the audit sees.

A check that never rejects a broken cache is weak evidence. So every fault of the catalogue is planted in every
place that the subject offers, in short programs of its own. It is planted again as far as the audit's programs
went: at the end of the longest sequence, in the largest block on a warm cache, and in the last row of the largest
batch. Each row is compared with the same uncached row, within the same limit, as in the audit. Uncached values
are computed once for all programs, and a run ends as soon as both a row and a value on the way differ.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

import torch

from kvproof._engine.calls import Layout, TracedCall
from kvproof._engine.errors_together import FEWEST_ROWS, errors_together
from kvproof._engine.localise import AgainstTheRun, compared, traced_calls
from kvproof._engine.programs import Row, run_program
from kvproof._engine.reach import furthest, largest_block, reach_of
from kvproof._engine.row_evidence import RowEvidence
from kvproof._engine.rung import Prefix, Rung
from kvproof._engine.uncached_rows import Uncached
from kvproof._engine.uncached_values import LiteralRuns, OnePassRuns, UncachedRuns
from kvproof._engine.verdict_rules import are_too_large, judge, why_vacuous
from kvproof._numerics.dtypes import dtype_of
from kvproof._numerics.gaps import gap_of_rows, largest
from kvproof._system.pool import map_in_processes
from kvproof.contract.results import (
    Certificate,
    Evidence,
    FaultResult,
    NotPlanted,
    Outcome,
    Reach,
    SmallestChange,
    SmallestStep,
    Tolerance,
)
from kvproof.contract.stages import Site, Stage
from kvproof.errors import KvproofError
from kvproof.faults import (
    NUM_STEPS,
    Carrier,
    Fault,
    Place,
    Planting,
    PlantingSite,
    block,
    catalogue,
    choose_sequences,
    fits_one_row,
    in_last_row,
    probe,
    smallest,
)
from kvproof.scenarios import Ability, Extend, Scenario, fit_calls, longest_sequences
from kvproof.subjects import Session

#: The bisection stops once its bounds are within this factor.
_FACTOR = 1.4
#: So many of a sequence's tokens come after a fault's late place.
_AFTER = 4
#: Where each prefix is run on its own, sequences have at most so many tokens: noise takes a run of every prefix.
_MOST_LITERAL = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class _Trial:
    """The outcome of one run of a program."""

    gap: float  #: relative to the row's scale: the first one beyond the limit, or the largest one
    differs: bool
    site: Site | None
    batch_row: int | None = None  #: in which the site's value differs
    reason: str | None


@dataclass(frozen=True, slots=True)
class _Part:
    """One part of a certificate: the smallest change seen at a rung, or one fault's results in its places."""

    changes: tuple[SmallestChange, ...] = ()
    steps: tuple[SmallestStep, ...] = ()
    results: tuple[FaultResult, ...] = ()
    not_planted: tuple[NotPlanted, ...] = ()
    clean_gap: float = 0.0  #: of the fault's programs without it
    #: of the programs in which it was planted
    reach: Reach = dataclasses.field(default_factory=lambda: furthest(()))


class Certifier:
    """Plants faults in one subject, at its highest rung."""

    def __init__(
        self,
        uncached: Uncached,
        tolerance: Tolerance,
        sequence: Prefix,
        other: Prefix,
        audited: Sequence[Scenario] = (),
    ) -> None:
        self.uncached = uncached
        self._evidence = RowEvidence(uncached.declared.subject, tolerance, uncached)
        self.rung: Rung = uncached.exact or uncached.top or uncached.declared
        self.site = probe(self.rung.subject, sequence, other)
        self.reached = reach_of(audited) if audited else None
        max_tokens = 2**62 if uncached.reference == "one-pass" else _MOST_LITERAL
        longest = choose_sequences(audited, max_tokens)
        is_longer = len(longest[0]) > len(sequence)
        self.far = probe(self.rung.subject, *longest) if is_longer else self.site  #: the longest sequences
        self.programs: dict[tuple[Carrier, int, int], Scenario] = {}
        self.runs: UncachedRuns = LiteralRuns(self.rung.subject)
        self._clean: dict[Scenario, _Trial] = {}
        self._prompts: dict[tuple[Rung, Extend, int, frozenset[Ability]], Session] = {}

    def certificate(self, on_part: Callable[[str], None] = lambda name: None, jobs: int = 1) -> Certificate:
        """Plant every fault, with ``jobs`` processes at a time, and return the results."""
        faults = catalogue()
        not_planted: list[NotPlanted] = []
        planted: list[list[Fault]] = []  #: each fault in each of its places
        for fault in faults:
            placed = list(self._in_places(fault))
            reason = self._reason_against(fault, placed)
            if reason is not None:
                not_planted.append(NotPlanted(fault=fault.name, reason=reason))
            else:
                planted.append(placed)
        self._prepare([self._program(fault) for placed in planted for fault in placed], jobs)
        rungs = list(dict.fromkeys((self.uncached.declared, self.rung)))
        planted.sort(key=self._num_operations, reverse=True)  # the longest first, so that no process waits for it

        changed = [(rung, *entry) for rung in rungs for entry in smallest.entries(self.site)]

        def run_part(number: int) -> _Part:
            if number < len(changed):  # each of these takes longer than any fault
                return self._smallest_change(*changed[number])
            if number < len(changed) + len(rungs):
                return _Part(steps=tuple(self._smallest_steps(rungs[number - len(changed)])))
            return self._results(planted[number - len(changed) - len(rungs)])

        names = [f"smallest change of {name} seen in {rung.subject.info.dtype}" for rung, _, name in changed]
        names += [f"smallest step seen in {rung.subject.info.dtype}" for rung in rungs]
        names += [f"fault {placed[0].name}" for placed in planted]
        parts: list[_Part] = []
        running = map_in_processes(run_part, len(names), jobs)
        for name in names:
            on_part(name)
            parts.append(next(running))
        order = {fault.name: number for number, fault in enumerate(faults)}
        results = sorted((result for part in parts for result in part.results), key=lambda r: order[r.name])
        not_planted += (left_out for part in parts for left_out in part.not_planted)
        clean = largest(part.clean_gap for part in parts)
        caught = [result.gap for result in results if result.caught]
        return Certificate(
            dtype=self.rung.subject.info.dtype,
            sequence=self.site.sequence,
            faults=tuple(results),
            not_planted=tuple(sorted(not_planted, key=lambda left_out: order[left_out.fault])),
            clean_gap=clean,
            margin=min(caught) / max(clean, 2.0**-53) if caught else None,
            smallest_changes=_exact_first(change for part in parts for change in part.changes),
            problem=why_vacuous(
                results,
                misplacing={fault.name for fault in faults if fault.misplaces},
                keeping=self.site.layers_keeping(),
            ),
            reached=self.reached,
            planted_in=furthest(part.reach for part in parts),
            smallest_steps=_exact_first(step for part in parts for step in part.steps),
            shown_stages=tuple(dict.fromkeys(site.stage for site in self.site.shown)),
        )

    def _results(self, placed: Sequence[Fault]) -> _Part:
        """Plant one fault in each of its places, except where its program fails without it."""
        trials = [self._clean_trial(self._program(fault)) for fault in placed]
        sound = [fault for fault, trial in zip(placed, trials, strict=True) if trial.reason is None]
        reasons: dict[str, int] = {}  #: with the first position where the program fails
        for fault, trial in zip(placed, trials, strict=True):
            if trial.reason is not None:
                reasons.setdefault(trial.reason, fault.place.known_position)
        return _Part(
            results=tuple(map(self._result, sound)),
            not_planted=tuple(
                NotPlanted(
                    fault=placed[0].name,
                    reason=f"{f'after {at} tokens ' if sound else ''}its program fails without a fault: {reason}",
                )
                for reason, at in reasons.items()
            ),
            clean_gap=largest(trial.gap for trial in trials if trial.reason is None),
            reach=reach_of(map(self._program, sound)),
        )

    def _in_places(self, fault: Fault) -> Iterator[Fault]:
        """Yield a fault of the catalogue in each place to plant it."""
        if fault.layers is None:
            return
        late = _late(self.site)
        for number, layer in enumerate(fault.layers(self.site)):
            # One layer is enough to see what is special about a short prompt.
            for position in dict.fromkeys((2, late) if number == 0 and not fault.fills_window else (late,)):
                yield dataclasses.replace(fault, place=Place(layer=layer, position=position, site=self.site))
        yield from self._far_away(fault)

    def _far_away(self, fault: Fault) -> Iterator[Fault]:
        """Yield a fault in the places that are as far as the audit's programs went."""
        if self.reached is None or fault.layers is None:
            return
        after = max(NUM_STEPS, self.reached.block_len if fault.program is block else 0)
        position = max(2, len(self.far.sequence) - after)
        if self.far is not self.site or position < _late(self.site):
            for layer in fault.layers(self.far):
                yield dataclasses.replace(fault, place=Place(layer=layer, position=position, site=self.far))
        is_able = Ability.BATCH in self.rung.subject.info.abilities
        if is_able and self.reached.num_rows > 1 and fits_one_row(fault):
            for layer in list(fault.layers(self.site))[-1:]:
                place = Place(layer=layer, position=_late(self.site), site=self.site)
                yield in_last_row(dataclasses.replace(fault, place=place), self.reached.num_rows)

    def _reason_against(self, fault: Fault, placed: Sequence[Fault]) -> str | None:
        """Return why a fault cannot be planted, or None."""
        needed = set(fault.program(self.site.sequence, self.site.other, 2).needs)
        needed |= {Ability.EDIT} if fault.edits_cache else set()
        missing = sorted(ability.value for ability in needed - set(self.rung.subject.info.abilities))
        if missing:
            return f"the subject lacks the ability: {', '.join(missing)}"
        return None if placed else "the subject has no place for it"

    def _program(self, fault: Fault) -> Scenario:
        """Return the program in which a fault is planted, one object for all faults that share it."""
        position, site = fault.place.known_position, fault.place.known_site
        key = (fault.program, position, len(site.sequence))
        if key not in self.programs:
            subject, program = self.rung.subject, fault.program(site.sequence, site.other, position)
            self.programs[key] = fit_calls(program, max_block=subject.max_block, last_row=subject.last_row)
        return self.programs[key]

    def _num_operations(self, placed: Sequence[Fault]) -> int:
        return sum(len(self._program(fault).operations) for fault in placed)

    def _prepare(self, programs: Sequence[Scenario], jobs: int) -> None:
        """Share uncached runs among all programs where a run over a longer sequence serves its prefixes."""
        if self.uncached.reference == "one-pass":
            wanted = {sequence for program in programs for sequence in longest_sequences(program)}
            whole = [s for s in wanted if not any(o != s and o[: len(s)] == s for o in wanted)]
            self.runs = OnePassRuns(self.rung.subject, sorted(whole))
            if jobs > 1:  # or else each process makes them all for itself
                with suppress(KvproofError):  # what raises here raises again where it is needed
                    self.runs.prepare(sorted(whole))

    def _clean_trial(self, program: Scenario) -> _Trial:
        """Run a program without a fault and compare its rows alone: no fault can explain what differs here."""
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
        return gap_of_rows(self.runs.over(row.prefix).row(len(row.prefix)), row.logits).relative

    def _result(self, fault: Fault) -> FaultResult:
        """Plant a fault in its place and return what came of it."""
        trial = self._trial(fault)
        if trial.reason is not None:
            outcome = Outcome.RAISED
        elif trial.differs:
            outcome = Outcome.CAUGHT
        else:
            outcome = Outcome.EQUIVALENT if trial.site is None else Outcome.HIDDEN
        row = fault.place.batch_row
        is_right = trial.site is not None and fault.must_show_at(trial.site.stage, trial.site.layer)
        return FaultResult(
            name=fault.name,
            breaks=fault.breaks,
            expected_stages=tuple(stage for stage in Stage if stage in fault.stages),
            layer=fault.place.layer,
            position=fault.place.position,
            outcome=outcome,
            where=None if trial.site is None else str(trial.site),
            right_stage=None if trial.site is None else is_right and row in (None, trial.batch_row),
            gap=trial.gap,
            reason=trial.reason,
            verdict=None,
            largest_gap=None,
            tolerance=None,
            num_rows_beyond=None,
            margin=None,
            divergence=None,
            batch_row=row,
            block_len=largest_block(self._program(fault)),
        )

    def _trial(self, fault: Fault) -> _Trial:
        program = self._program(fault)
        judge = AgainstTheRun(self.runs)
        first, differs, gap, reason = None, False, 0.0, None
        try:
            for rows, trace in traced_calls(
                self.rung.subject, program, fault.plant(), self._prompted(self.rung, program)
            ):
                if any(len(row.prefix) == row.offset + 1 for row in rows):
                    continue  # faults act on a warm cache alone, so the values of a prompt are right
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
        where = None if first is None else first.comparison
        return _Trial(
            gap=gap,
            differs=differs,
            site=None if where is None else where.site,
            batch_row=None if where is None else where.token.batch_row,
            reason=None if differs else reason,
        )

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

    def _smallest_change(self, rung: Rung, layer: int, tensor: str) -> _Part:
        """Find by bisection the smallest change of one entry that shows at a rung; none where none can show."""
        place = Place(layer=layer, position=_late(self.site), site=self.site)
        programs = list(smallest.programs(place, self._num_rows(rung)))

        def seen(change: float) -> bool:
            planted = ((program, smallest.planting(at, tensor, change)) for at, program in programs)
            return self._is_seen(rung, planted)

        if seen(0.0):
            return _Part()  # the rounding of this dtype hides any change
        change = SmallestChange(
            dtype=rung.subject.info.dtype,
            layer=layer,
            tensor=tensor,
            position=place.known_position - 1,
            value=_bisect(seen, torch.finfo(dtype_of(rung.subject.info.dtype)).eps / 4),
        )
        return _Part(changes=(change,))

    def _smallest_steps(self, rung: Rung) -> Iterator[SmallestStep]:
        """Yield whether positions off by one, and a mask that hides one slot, show at a rung."""
        for what, fault in smallest.whole_steps(self.site, _late(self.site)):
            programs = smallest.programs(fault.place, self._num_rows(rung))
            seen = self._is_seen(rung, ((program, fault.make(at)) for at, program in programs))
            yield SmallestStep(dtype=rung.subject.info.dtype, what=what, layer=fault.place.layer, seen=seen)

    def _num_rows(self, rung: Rung) -> int:
        """Return how many rows it takes to judge by: below the highest rung, as many as show their spread."""
        return 1 if rung.subject is self.rung.subject else FEWEST_ROWS

    def _is_seen(self, rung: Rung, planted: Iterable[tuple[Scenario, Planting]]) -> bool:
        """Return whether a row of these programs is wrong at a rung, or all of them together are."""
        evidence: list[Evidence] = []
        for program, planting in planted:
            for call in run_program(rung.subject, program, planting, prompted=self._prompted(rung, program)):
                if rung.subject is self.rung.subject:
                    if any(map(self._is_beyond_limit, call.rows)):
                        return True
                    continue
                evidence += map(self._in_declared_dtype, call.rows)
                if any(not judge(row)[0].passes for row in evidence[-len(call.rows) :]):
                    return True
        errors = errors_together(evidence)
        return errors is not None and are_too_large(errors)

    def _is_beyond_limit(self, row: Row) -> bool:
        return self.runs.over(row.prefix).logits_differ(len(row.prefix), row.logits)

    def _in_declared_dtype(self, row: Row) -> Evidence:
        """Return the evidence of a row in the declared dtype as if there were no gap in float64."""
        return self._evidence.in_declared_dtype(row, self.uncached.row_of(self.rung, row.prefix))


_Measured = TypeVar("_Measured", SmallestChange, SmallestStep)


def _exact_first(measured: Iterable[_Measured]) -> tuple[_Measured, ...]:
    """Return what was measured at the declared rung after what was measured at the highest one."""
    by_dtype: dict[str, list[_Measured]] = {}
    for each in measured:
        by_dtype.setdefault(each.dtype, []).append(each)
    return tuple(each for own in reversed(by_dtype.values()) for each in own)


def _late(site: PlantingSite) -> int:
    """Return a late place in a site's sequence, after which there is room for a fault to show."""
    return max(2, len(site.sequence) - _AFTER)


def _bisect(seen: Callable[[float], bool], least: float) -> float | None:
    """Return the smallest change that is seen, between ``least``, below which no value changes, and 1."""
    low, high = math.log10(least), 0.0
    if not seen(1.0):
        return None
    while high - low > math.log10(_FACTOR):
        middle = (low + high) / 2
        low, high = (low, middle) if seen(10.0**middle) else (middle, high)
    return float(10.0**high)
