"""Runs the operations of a scenario on sessions, call by call."""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvproof._engine.raises import describe_raise
from kvproof._numerics.taps import Tap
from kvproof.contract.results import Raise
from kvproof.contract.stages import Site, Stage
from kvproof.errors import RefusedError, SubjectError
from kvproof.faults import Planting
from kvproof.scenarios import (
    Action,
    Claim,
    Extend,
    Fork,
    Generate,
    Method,
    Open,
    Operation,
    Scenario,
    SessionOperation,
    capacity,
)
from kvproof.subjects import Session, Subject


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row of logits from a call, with the tokens whose uncached row it must equal."""

    prefix: tuple[int, ...]
    batch_row: int
    offset: int  #: which of the call's new tokens
    is_last: bool
    logits: Tensor  #: (vocab,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One `Extend`, or one forward of a `Generate`, with the tap of its session or of the forward."""

    rows: tuple[Row, ...]
    tap: Tap


@dataclass(slots=True, kw_only=True)
class Coverage:
    """What a run reached and did, to compare with what its scenario promises."""

    lengths: set[int] = field(default_factory=set)  #: of the prefixes whose rows were compared
    counts: Counter[Claim] = field(default_factory=Counter)
    made: Counter[str] = field(default_factory=Counter)  #: how many operations of each kind, and rows, there were
    num_finished: int = 0  #: how many operations have returned
    num_calls: int = 0  #: how many calls gave rows
    failed: str | None = None  #: why the operation after these did not return
    refused: str | None = None  #: the same, if the decoder cannot carry out that operation there, by design
    raised: Raise | None = None  #: the same, if the decoder raised or gave a malformed row

    def missing(self, scenario: Scenario) -> str | None:
        """Say what the scenario promises and the run did not do, or return None."""
        lengths = [str(length) for length in scenario.crosses if length not in self.lengths]
        parts = [f"no row after {', '.join(lengths)} tokens"] if lengths else []
        parts += [f"no {claim.value}" for claim in sorted(scenario.claims) if not self.counts[claim]]
        return "; ".join(parts) or None


def run_program(
    subject: Subject,
    scenario: Scenario,
    planting: Planting | None = None,
    coverage: Coverage | None = None,
    *,
    prompted: Session | None = None,
) -> Iterator[Call]:
    """Run a scenario's operations in order and yield each `Extend`, and each forward of a `Generate`, as a call.

    ``planting`` makes a tap for every session and for every forward of a `Generate`, carries out the other
    operations, and may act between calls. None plants nothing. What the session refuses or the decoder raises
    comes through. ``coverage`` is filled on the way, and describes what the decoder raised. ``prompted`` is a
    session that has run the first operation, an `Extend`: the program continues from a fork of it.
    """
    coverage = Coverage() if coverage is None else coverage
    for call in _ProgramRun(subject, scenario, planting or Planting(), coverage).calls(prompted):
        coverage.num_calls += 1
        coverage.lengths.update(len(row.prefix) for row in call.rows)
        coverage.made["row"] += len(call.rows)
        yield call


def _extend(session: Session, operation: Extend, tap: Tap) -> Call:
    logits, num_new = session.extend(operation.ids), operation.num_columns
    last_only = operation.last_only or logits.shape[1] < num_new  # a decoder may return its last row alone
    rows = tuple(
        Row(
            prefix=ids[: len(ids) - num_new + offset + 1],
            batch_row=batch_row,
            offset=offset,
            is_last=offset == num_new - 1,
            logits=logits[batch_row, offset - num_new],
        )
        for offset in range(num_new)
        for batch_row, ids in enumerate(session.ids)
        # The columns before a shorter row hold padding.
        if offset >= num_new - (1 if last_only else len(operation.ids[batch_row]))
    )
    return Call(rows=rows, tap=tap)


def _may_be_refused(operation: Operation) -> bool:
    """Return whether an operation may be refused: feeding tokens, and generating greedily, may not."""
    if isinstance(operation, Extend):
        return operation.is_ragged
    if isinstance(operation, Generate):
        return operation.method is not Method.GREEDY
    return not isinstance(operation, Open)


class _ProgramRun:
    """One run of a scenario: its sessions, each with its tap."""

    def __init__(self, subject: Subject, scenario: Scenario, planting: Planting, coverage: Coverage) -> None:
        self.subject = subject
        self.scenario = scenario
        self.planting = planting
        self.coverage = coverage
        self.counts = coverage.counts
        self.made = coverage.made
        self.sessions: list[tuple[Session, Tap]] = []
        self.num_forwards = 0  #: that a `Generate` has begun

    def calls(self, prompted: Session | None) -> Iterator[Call]:
        """Run the operations and yield each call that gives rows."""
        operations = self.scenario.operations
        if prompted is not None:
            self._start_from(prompted)
            operations = operations[1:]
        elif any(not isinstance(operation, Generate) for operation in operations):
            with self._describing(Open(batch=self.scenario.batch)):
                self._open(self.scenario.batch)
        for operation in operations:
            if isinstance(operation, Generate):
                yield from self._generate(operation)
            elif isinstance(operation, Extend):
                yield self._call(operation)
            else:
                with self._describing(operation):
                    self._apply(operation)
                self.made[operation.kind()] += 1
            self.coverage.num_finished += 1

    def _call(self, operation: Extend) -> Call:
        session, tap = self.sessions[operation.session]
        with self._describing(operation):
            call = _extend(session, operation, tap)
        self.planting.after_call(session)
        self.made[operation.kind()] += 1
        return call

    @contextmanager
    def _describing(self, operation: Operation) -> Iterator[None]:
        """Describe in ``coverage`` what the decoder raises in an operation, and let it through."""
        self.num_forwards = 0
        try:
            yield
        except SubjectError as error:
            consumed: Sequence[Sequence[int]] = ()
            if isinstance(operation, SessionOperation):
                consumed = self.sessions[operation.session][0].ids
            fed = operation.prompts if isinstance(operation, Generate) else ()
            fed = operation.ids if isinstance(operation, Extend) else fed
            self.coverage.failed = str(error)
            if isinstance(error, RefusedError) and _may_be_refused(operation):
                fed_before = f" after {max(map(len, consumed))} tokens" if consumed else ""
                self.coverage.refused = f"{operation.describe()}{fed_before} was refused: {error}"
            self.coverage.raised = describe_raise(
                error,
                self.subject,
                call=self.coverage.num_calls + max(0, self.num_forwards - 1),
                operation=operation.kind(),
                consumed=consumed,
                fed=fed,
            )
            raise

    def _open(self, batch: int) -> None:
        tap = self.planting()
        session = self.subject.session(
            batch=batch,
            tap=tap,
            needs=self.scenario.needs,
            cache=self.scenario.cache,
            capacity=capacity(self.scenario) or None,
            omit_positions=self.scenario.omit_positions,
        )
        self.sessions.append((session, tap))

    def _start_from(self, prompted: Session) -> None:
        """Fork a session to be the first one, and show its tap the tokens that it has not seen."""
        tap = self.planting()
        session = prompted.fork(tap=tap)
        longest = max(map(len, session.ids))
        tap(Site(Stage.TOKEN), torch.tensor([[0] * (longest - len(row)) + list(row) for row in session.ids]))
        self.sessions.append((session, tap))
        self.planting.after_call(session)

    def _apply(self, operation: Operation) -> None:
        """Carry out an operation that gives no rows."""
        match operation:
            case Open(batch=batch):
                self._open(batch)
            case Fork(session=index):
                tap = self.planting()
                self.sessions.append((self.planting.fork(self.sessions[index][0], tap), tap))
            case Action(session=index):
                self.counts.update(self.planting.act(operation, self.sessions[index][0]))
            case _:
                raise TypeError(f"no run can carry out {operation!r}")

    def _tap_of_forward(self) -> Tap:
        self.num_forwards += 1
        return self.planting()

    def _generate(self, operation: Generate) -> Iterator[Call]:
        with self._describing(operation):
            generated = self.subject.generate(operation, self._tap_of_forward)
        self.counts.update(generated.counts)
        for call in generated.calls:
            rows = tuple(
                Row(
                    prefix=prefix,
                    batch_row=batch_row,
                    offset=call.offset + kept,
                    is_last=call.offset + kept == call.num_new - 1,
                    logits=call.logits[batch_row, kept],
                )
                for kept, prefixes in enumerate(call.prefixes)
                for batch_row, prefix in enumerate(prefixes)
            )
            yield Call(rows=rows, tap=call.tap)
