"""Runs one program on the cached path and judges every row that it gives.

The program runs at all rungs in step. A row is judged as it comes, and let go. Where the decoder raises, the
rows before that are judged, and the uncached path is asked for the row that is missing. What first looks like a
bug may be looked at twice more: once with tables that the model holds in a lower dtype computed in float64, and
once with every choice of experts as the uncached path makes it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from kvproof._engine.expert_ties import rejudge_expert_ties
from kvproof._engine.four_computations import SHORTEST_IN_PARTS
from kvproof._engine.programs import Coverage, run_program
from kvproof._engine.row_evidence import RowEvidence
from kvproof._engine.rung import Rung
from kvproof._engine.uncached_rows import Uncached
from kvproof._engine.verdict_rules import are_equal_in_float64, may_come_from_tables
from kvproof._numerics.dtypes import dtype_of
from kvproof._numerics.gaps import gap_of_rows
from kvproof.contract.results import Raise, RowResult, Tolerance, Verdict
from kvproof.errors import SubjectError
from kvproof.faults import Fault, plant
from kvproof.scenarios import Scenario


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramRows:
    """All rows of one program, and what its run did."""

    program: Scenario  #: as far as it ran: without the operation that raised, and those after it
    rows: tuple[RowResult, ...]
    #: Cached float64 rows by their number: the first of each verdict that is no pass, and the first that diverged
    #: and is long enough to be computed in parts.
    exact_rows: dict[int, Tensor]
    coverage: Coverage
    without_exact: str | None  #: why the float64 rung was left out, where it alone raised
    raised: Raise | None  #: what the cached path raised where the uncached path gives a row
    refused: str | None  #: which operation the decoder cannot carry out there, by design
    undecided: str | None  #: why it ended early, where that proves nothing about the cached path

    @property
    def longer(self) -> int | None:
        """The number of the first row that diverged and is long enough to be computed in parts."""
        diverged = (n for n in self.exact_rows if self.rows[n].verdict is Verdict.DIVERGED)
        return next((n for n in diverged if len(self.rows[n].ids) >= SHORTEST_IN_PARTS), None)

    @property
    def worst(self) -> int | None:
        """The number of the first row that diverged, else of the first that does not pass."""
        failing = [number for number, row in enumerate(self.rows) if not row.verdict.passes]
        failing.sort(key=lambda number: self.rows[number].verdict is not Verdict.DIVERGED)
        return failing[0] if failing else None


@dataclass(slots=True, kw_only=True)
class _Run:
    """One run of a program: its rows, as they were first judged, and what it did in the declared dtype."""

    coverage: Coverage = field(default_factory=Coverage)
    rows: list[RowResult] = field(default_factory=list)
    exact_rows: dict[int, Tensor] = field(default_factory=dict)


class RowAuditor:
    """Judges the rows of programs of one subject."""

    def __init__(self, uncached: Uncached, tolerance: Tolerance) -> None:
        self.uncached = uncached
        self.subject = uncached.declared.subject
        self.evidence = RowEvidence(self.subject, tolerance, uncached)

    def judge_program(self, program: Scenario, fault: Fault | None) -> ProgramRows:
        """Run a program and judge its rows; where float64 alone raises, by the declared dtype alone.

        Raises `SubjectError` where that is not the cached path's doing.
        """
        try:
            run, without_exact = self._run(program, fault, self.uncached.rungs), None
        except SubjectError as error:
            if self.uncached.top is None:
                raise
            run, without_exact = self._run(program, fault, [self.uncached.declared]), str(error).splitlines()[0]
        raised, undecided, refused = run.coverage.raised, run.coverage.failed, run.coverage.refused
        if refused is not None:
            undecided = None
        if raised is not None:
            problem = self._uncached_problem(raised)
            raised, undecided = (raised, None) if problem is None else (None, problem)
        if run.coverage.failed is not None:
            program = replace(program, operations=program.operations[: run.coverage.num_finished])
        rows = self._excuse_rounded_tables(run.rows, program, fault)
        rows = rejudge_expert_ties(self.uncached, self.evidence, program, fault, rows)
        return ProgramRows(
            program=program,
            rows=tuple(rows),
            exact_rows=run.exact_rows,
            coverage=run.coverage,
            without_exact=without_exact,
            raised=raised,
            refused=refused,
            undecided=undecided,
        )

    def _uncached_problem(self, raised: Raise) -> str | None:
        """Return why the uncached path gives no row for the tokens at which the cached path raised, or None."""
        fed = raised.fed or ((),) * len(raised.consumed)
        for before, new in zip(raised.consumed or ((),) * len(fed), fed, strict=True):
            try:
                if before or new:
                    self.uncached.declared.literal((*before, *new))
            except SubjectError as error:
                return f"the uncached path raises for the same tokens too: {error}"
        return None

    def _run(self, program: Scenario, fault: Fault | None, rungs: Sequence[Rung]) -> _Run:
        """Run a program up to its end, or to where it fails in the declared dtype; raise what fails elsewhere."""
        run, shown = _Run(), set[tuple[Verdict, bool]]()
        try:
            for result, exact in self._compare_rows(program, fault, rungs, run.coverage):
                is_long = len(result.ids) >= SHORTEST_IN_PARTS
                kind = (result.verdict, result.verdict is Verdict.DIVERGED and is_long)
                if exact is not None and not result.verdict.passes and kind not in shown:
                    run.exact_rows[len(run.rows)] = exact  # other rows are let go at once: they may be large
                    shown.add(kind)
                run.rows.append(result)
        except SubjectError:
            if run.coverage.failed is None:
                raise
        return run

    def _compare_rows(
        self, program: Scenario, fault: Fault | None, rungs: Sequence[Rung], coverage: Coverage
    ) -> Iterator[tuple[RowResult, Tensor | None]]:
        """Run the cached path at the rungs in step; yield each row's result, and its row at the top rung."""
        runs = [
            # What the rungs do in step is counted once.
            run_program(rung.subject, program, plant(fault), coverage if first else None)
            for first, rung in zip((True, *(False,) * len(rungs)), rungs, strict=False)
        ]
        for calls in zip(*runs, strict=True):
            self.uncached.measure(row.prefix for row in calls[0].rows)
            for rows in zip(*(call.rows for call in calls), strict=True):
                exact = rows[1].logits if len(rows) > 1 else None
                yield self.evidence.compare(rows[0], exact), exact

    def _excuse_rounded_tables(
        self, rows: list[RowResult], program: Scenario, fault: Fault | None
    ) -> list[RowResult]:
        """Judge again what diverges by no more than tables in a lower dtype leave, if exact tables end it."""
        unit = torch.finfo(dtype_of(self.subject.info.dtype)).eps
        diverged = [row for row in rows if row.verdict is Verdict.DIVERGED]
        if not diverged or not all(may_come_from_tables(row.evidence, unit) for row in diverged):
            return rows
        exact = self.uncached.exact_tables()
        if exact is None:
            return rows
        rung, tables = exact
        try:
            if not self._agrees(rung, program, fault):
                return rows
        except SubjectError:  # what was found stands
            return rows
        return [
            self.evidence.add_rounded_tables(row, tables) if row.verdict is Verdict.DIVERGED else row
            for row in rows
        ]

    def _agrees(self, rung: Rung, program: Scenario, fault: Fault | None) -> bool:
        """Run a program at one float64 rung and say whether every row is the uncached one."""
        for call in run_program(rung.subject, program, plant(fault)):
            for row in call.rows:
                expected = self.uncached.row_of(rung, row.prefix)
                if not are_equal_in_float64(gap_of_rows(expected, row.logits)):
                    return False
        return True
