"""Runs a scenario's operations on sessions, call by call."""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from kvproof._trace import Tap
from kvproof.faults import MakeTap, no_fault
from kvproof.scenarios import Crop, Extend, Fork, Open, Operation, Reorder, Reset, Scenario
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
    """One `Extend` that ran; ``tap`` is its session's."""

    rows: tuple[Row, ...]
    tap: Tap


def run_program(subject: Subject, scenario: Scenario, make_tap: MakeTap = no_fault) -> Iterator[Call]:
    """Run a scenario's operations in order and yield each `Extend` as a call.

    Every session gets a tap of its own from ``make_tap``. What the session refuses or the decoder raises
    comes through.
    """
    tap = make_tap()
    sessions = [(subject.session(batch=scenario.batch, tap=tap, needs=scenario.needs), tap)]
    for operation in scenario.operations:
        if isinstance(operation, Extend):
            session, tap = sessions[operation.session]
            yield _extend(session, operation, tap)
        else:
            _apply(subject, scenario, operation, sessions, make_tap)


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
        if offset >= num_new - len(operation.ids[batch_row])  # what stands before a shorter row is padding
    )
    return Call(rows=rows, tap=tap)


def _apply(
    subject: Subject,
    scenario: Scenario,
    operation: Operation,
    sessions: list[tuple[Session, Tap]],
    make_tap: MakeTap,
) -> None:
    match operation:
        case Open(batch=batch):
            tap = make_tap()
            sessions.append((subject.session(batch=batch, tap=tap, needs=scenario.needs), tap))
        case Fork(session=index):
            tap = make_tap()
            sessions.append((sessions[index][0].fork(tap=tap), tap))
        case Crop(session=index, length=length):
            sessions[index][0].crop(length)
        case Reorder(session=index, rows=rows):
            sessions[index][0].reorder(rows)
        case Reset(session=index):
            sessions[index][0].reset()
