"""What was the case in the call that gave a row: a pure function of the program, and of its rows' verdicts.

The first wrong row of a session can leave wrong entries in its cache. What follows from these is wrong whatever
its own call is like, so it says nothing, until a crop or a reset takes them away, or a later call's row is right.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from kvproof.contract.results import RowResult, ScenarioResult, Verdict
from kvproof.scenarios import (
    CacheKind,
    Crop,
    Extend,
    Fork,
    Generate,
    Open,
    Reorder,
    Reset,
    Scenario,
    SessionOperation,
    SessionState,
    walk,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """The conditions of one row. Positions and rows count from 0; the history is that of the session."""

    width: int  #: columns of the call: new tokens of its longest row
    start: int  #: position of the batch row's first new token
    position: int  #: of the token that the row follows
    batch: int  #: rows in the batch
    batch_row: int
    padding: int  #: columns of padding before the batch row
    batch_padding: int  #: the largest padding in the batch
    num_calls: int  #: earlier calls since the session was last empty
    first_width: int  #: of the first of them, or of this call
    previous_width: int  #: of the last of them; 0 if there is none
    num_crops: int
    num_reorders: int
    num_forks: int  #: how often the session, or one that it comes from, was forked from another
    num_resets: int
    num_others: int  #: other open sessions
    omits_positions: bool
    cache: CacheKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """A row, or all rows of one call that count together, and whether it is wrong."""

    conditions: Conditions
    call: tuple[str, int, int]  #: the scenario, the program's number, and the operation's
    is_wrong: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _History:
    num_calls: int = 0
    first_width: int = 0
    previous_width: int = 0
    num_crops: int = 0
    num_reorders: int = 0
    num_forks: int = 0
    num_resets: int = 0
    #: for each batch row, the position from which its cache may be wrong; None while it is right
    wrong_from: tuple[int | None, ...]


@dataclass(slots=True)
class _Sessions:
    """The histories of all open sessions of a program, in the order of `States`."""

    histories: list[_History] = field(default_factory=list)

    def apply(self, operation: object, states: tuple[SessionState, ...]) -> None:
        """Follow an operation that gives no rows; ``states`` are those before it."""
        histories = self.histories
        if isinstance(operation, Open):
            histories.append(_History(wrong_from=(None,) * operation.batch))
        elif isinstance(operation, Fork):
            own = histories[operation.session]
            histories.append(replace(own, num_forks=own.num_forks + 1))
        elif isinstance(operation, SessionOperation):
            histories[operation.session] = _changed(
                histories[operation.session], operation, states[operation.session]
            )


def _changed(own: _History, operation: SessionOperation, state: SessionState) -> _History:
    match operation:
        case Crop(length=length):
            kept = tuple(None if at is None or length <= at else at for at in own.wrong_from)
            return replace(own, num_crops=own.num_crops + 1, wrong_from=kept)
        case Reorder(rows=rows):
            moved = tuple(own.wrong_from[row] for row in rows)
            return replace(own, num_reorders=own.num_reorders + 1, wrong_from=moved)
        case Reset():
            return _History(num_resets=own.num_resets + 1, wrong_from=(None,) * len(state.rows))
    return own


def observe(programs: Iterable[Scenario], results: Iterable[ScenarioResult]) -> list[Observation]:
    """Return every row that says something, in order, with the conditions of its call.

    Left out are rows that may be wrong because an earlier one was, rows that are not decided, and whole scenarios
    whose rows are wrong for a known reason or whose calls are not the program's own: those on a quantised cache,
    those that are advice, and those that go through ``generate()``.
    """
    programs = tuple(programs)
    observed: list[Observation] = []
    for result in results:
        own = [program for program in programs if program.name == result.name]
        # A value on the way is wrong and no row shows it: which calls are right is not known.
        is_hidden = result.divergence is not None and result.verdict is not Verdict.DIVERGED
        is_hidden |= result.divergence is not None and not any(map(_is_wrong, result.rows))
        if own and not result.advice and not is_hidden and all(map(_can_follow, own)):
            observed += _observe_scenario(own, result.rows)
    return observed


def _can_follow(program: Scenario) -> bool:
    is_own = not any(isinstance(operation, Generate) for operation in program.operations)
    return is_own and program.cache is not CacheKind.QUANTISED


def _is_wrong(row: RowResult) -> bool:
    return row.verdict is Verdict.DIVERGED


def _observe_scenario(programs: Sequence[Scenario], rows: Sequence[RowResult]) -> list[Observation]:
    """Give the rows of a scenario to its programs in turn; nothing where they do not fit."""
    observed, used = [], 0
    for number, program in enumerate(programs):
        for observation, num_rows in _follow(program, number, rows[used:]):
            used += num_rows
            observed += [] if observation is None else [observation]
    return observed if used == len(rows) else []


def _follow(
    program: Scenario, number: int, rows: Sequence[RowResult]
) -> Iterator[tuple[Observation | None, int]]:
    """Yield what each row of a program says, and the number of rows that it takes; stop where the program did."""
    sessions = _Sessions([_History(wrong_from=(None,) * program.batch)])
    given = iter(rows)
    for place, step in enumerate(walk(program)):
        operation = step.operation
        if not isinstance(operation, Extend):
            sessions.apply(operation, step.before)
            continue
        before, after = step.before[operation.session], step.after[operation.session]
        history = sessions.histories[operation.session]
        wrong_from = list(history.wrong_from)
        for offset, batch_row in _rows_of(operation):
            row, prefix = next(given, None), _prefix(operation, after, batch_row, offset)
            if row is None or row.ids != prefix:
                return
            # A right row of a later call reads the same cache, so that is right again.
            if row.verdict.passes and history.wrong_from[batch_row] is not None:
                wrong_from[batch_row] = None
            is_explained = wrong_from[batch_row] is not None and not row.verdict.passes
            if not row.verdict.passes and not is_explained:
                wrong_from[batch_row] = len(before.rows[batch_row])
            conditions = _conditions(program, operation, step.before, history, batch_row, len(prefix) - 1)
            call = (program.name, number, place)
            known = row.verdict.passes or (_is_wrong(row) and not is_explained)
            yield Observation(conditions=conditions, call=call, is_wrong=_is_wrong(row)) if known else None, 1
        sessions.histories[operation.session] = replace(
            history,
            num_calls=history.num_calls + 1,
            first_width=history.first_width or operation.num_columns,
            previous_width=operation.num_columns,
            wrong_from=tuple(wrong_from),
        )


def _rows_of(operation: Extend) -> Iterator[tuple[int, int]]:
    """Yield the offset and the batch row of each row that a call compares, in the order of `run_program`."""
    width = operation.num_columns
    for offset in range(width):
        for batch_row, ids in enumerate(operation.ids):
            if offset >= width - (1 if operation.last_only else len(ids)):
                yield offset, batch_row


def _prefix(operation: Extend, after: SessionState, batch_row: int, offset: int) -> tuple[int, ...]:
    ids = after.rows[batch_row]
    return ids[: len(ids) - operation.num_columns + offset + 1]


def _conditions(
    program: Scenario,
    operation: Extend,
    before: tuple[SessionState, ...],
    history: _History,
    batch_row: int,
    position: int,
) -> Conditions:
    state, width = before[operation.session], operation.num_columns
    columns = state.columns + width
    padding = [columns - len(row) - len(new) for row, new in zip(state.rows, operation.ids, strict=True)]
    return Conditions(
        width=width,
        start=len(state.rows[batch_row]),
        position=position,
        batch=len(state.rows),
        batch_row=batch_row,
        padding=padding[batch_row],
        batch_padding=max(padding),
        num_calls=history.num_calls if state.length else 0,
        first_width=(history.first_width if state.length else 0) or width,
        previous_width=history.previous_width if state.length else 0,
        num_crops=history.num_crops,
        num_reorders=history.num_reorders,
        num_forks=history.num_forks,
        num_resets=history.num_resets,
        num_others=len(before) - 1,
        omits_positions=program.omit_positions,
        cache=program.cache,
    )
