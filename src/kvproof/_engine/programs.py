"""Runs a scenario's operations on sessions, call by call."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvproof._numerics.taps import Tap
from kvproof.contract.stages import Site, Stage
from kvproof.errors import ContextError, SubjectError
from kvproof.faults import Planting
from kvproof.scenarios import (
    Claim,
    Crop,
    Extend,
    Fork,
    Generate,
    Open,
    Operation,
    Poison,
    Refused,
    Reorder,
    Reset,
    Scenario,
    capacity,
)
from kvproof.subjects import Session, Subject


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row of logits that a call gave, with the tokens whose uncached row it must equal."""

    prefix: tuple[int, ...]
    batch_row: int
    offset: int  #: which of the call's new tokens
    is_last: bool
    logits: Tensor  #: (vocab,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One `Extend`, or one forward of a `Generate`, that ran; ``tap`` is its session's, or the forward's."""

    rows: tuple[Row, ...]
    tap: Tap


@dataclass(slots=True, kw_only=True)
class Coverage:
    """What a run really reached and did, to hold against what its scenario says."""

    lengths: set[int] = field(default_factory=set)  #: of the prefixes whose rows were compared
    counts: Counter[Claim] = field(default_factory=Counter)
    made: Counter[str] = field(default_factory=Counter)  #: operations by kind, and rows that were given

    def missing(self, scenario: Scenario) -> str | None:
        """Return what the scenario says it does and did not, in words, or none."""
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
    comes through. ``coverage`` is filled on the way. ``prompted`` is a session that has run the first operation,
    an `Extend`: the program continues from a fork of it.
    """
    coverage = Coverage() if coverage is None else coverage
    for call in _Run(subject, scenario, planting or Planting(), coverage).calls(prompted):
        coverage.lengths.update(len(row.prefix) for row in call.rows)
        coverage.made["row"] += len(call.rows)
        yield call


def _extend(session: Session, operation: Extend, tap: Tap) -> Call:
    logits = session.extend(operation.ids)
    num_new = logits.shape[1]
    rows = tuple(
        Row(
            prefix=ids[: len(ids) - num_new + offset + 1],
            batch_row=batch_row,
            offset=offset,
            is_last=offset == num_new - 1,
            logits=logits[batch_row, offset],
        )
        for offset in range(num_new)
        for batch_row, ids in enumerate(session.ids)
        # What stands before a shorter row is padding.
        if offset >= num_new - (1 if operation.last_only else len(operation.ids[batch_row]))
    )
    return Call(rows=rows, tap=tap)


class _Run:
    """The sessions of one run of a scenario, with the tap of each."""

    def __init__(self, subject: Subject, scenario: Scenario, planting: Planting, coverage: Coverage) -> None:
        self.subject = subject
        self.scenario = scenario
        self.planting = planting
        self.counts = coverage.counts
        self.made = coverage.made
        self.sessions: list[tuple[Session, Tap]] = []

    def calls(self, prompted: Session | None) -> Iterator[Call]:
        """Run the operations and yield what gave rows."""
        operations = self.scenario.operations
        if prompted is not None:
            self._go_on_from(prompted)
            operations = operations[1:]
        elif any(not isinstance(operation, Generate) for operation in operations):
            self._open(self.scenario.batch)
        for operation in operations:
            match operation:
                case Extend(session=index):
                    session, tap = self.sessions[index]
                    call = _extend(session, operation, tap)
                    self.planting.after_call(session)
                    self.made["extend"] += 1
                    yield call
                case Generate():
                    yield from self._generate(operation)
                case _:
                    self._apply(operation)
                    self.made[type(operation).__name__.lower()] += 1

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

    def _go_on_from(self, prompted: Session) -> None:
        """Fork a session in place of the first one; its tap is shown the tokens that it has not seen."""
        tap = self.planting()
        session = prompted.fork(tap=tap)
        longest = max(map(len, session.ids))
        tap(Site(Stage.TOKEN), torch.tensor([[0] * (longest - len(row)) + list(row) for row in session.ids]))
        self.sessions.append((session, tap))
        self.planting.after_call(session)

    def _apply(self, operation: Operation) -> None:
        match operation:
            case Open(batch=batch):
                self._open(batch)
            case Fork(session=index):
                tap = self.planting()
                self.sessions.append((self.planting.fork(self.sessions[index][0], tap), tap))
            case Crop(session=index, length=length):
                self.planting.crop(self.sessions[index][0], length)
            case Reorder(session=index, rows=rows):
                self.planting.reorder(self.sessions[index][0], rows)
            case Reset(session=index):
                self.planting.reset(self.sessions[index][0])
            case Poison(session=index):
                self.counts[Claim.POISONED] += self.sessions[index][0].poison()
            case Refused(session=index, ids=ids):
                self._be_refused(self.sessions[index][0], ids)

    def _be_refused(self, session: Session, ids: tuple[tuple[int, ...], ...]) -> None:
        before = session.ids
        try:
            session.extend(ids)
        except ContextError:
            if session.ids != before:
                raise SubjectError("a call that was refused for its length changed the session") from None
            self.counts[Claim.REFUSED] += 1
        else:
            raise SubjectError(f"{len(session)} tokens were taken, and the context ends before")

    def _generate(self, operation: Generate) -> Iterator[Call]:
        generated = self.subject.generate(operation, self.planting)
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
