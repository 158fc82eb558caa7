"""Simpler programs than one: what a failing program is tried as, the largest steps first."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from kvproof.scenarios._data import (
    CacheKind,
    Crop,
    Extend,
    Fork,
    Open,
    Operation,
    Poison,
    Refused,
    Reorder,
    Reset,
    Scenario,
)
from kvproof.scenarios._legal import needs_of

Ids = tuple[tuple[int, ...], ...]
Feeding = Extend | Refused
Acting = Feeding | Crop | Reorder | Fork | Reset | Poison
Cost = tuple[int, ...]


def cost_of(program: Scenario) -> Cost:
    """Return how much a program asks of its reader; the less, the simpler. What comes first weighs most."""
    fed = [row for operation in program.operations if isinstance(operation, Extend) for row in operation.ids]
    opened = [operation.batch for operation in program.operations if isinstance(operation, Open)]
    moved = [operation.rows for operation in program.operations if isinstance(operation, Reorder)]
    return (
        (program.cache is not CacheKind.DYNAMIC) + program.omit_positions,
        len(program.operations),
        sum(map(len, fed)) + program.batch + sum(opened) + sum(map(len, moved)),
        sum(operation.length for operation in program.operations if isinstance(operation, Crop)),
        len({token for row in fed for token in row}),
        sum(map(sum, fed)),
    )


def num_tokens(program: Scenario) -> int:
    """Return how many tokens a program feeds, over all calls and batch rows."""
    operations = program.operations
    return sum(len(row) for operation in operations if isinstance(operation, Extend) for row in operation.ids)


def smaller(program: Scenario) -> Iterator[Scenario]:
    """Yield programs that are like this one and simpler; not all of them are legal."""
    for operations in _by_operations(program):
        yield _tidied(replace(program, operations=operations))
    if program.cache is not CacheKind.DYNAMIC:
        yield _tidied(replace(program, cache=CacheKind.DYNAMIC))
    if program.omit_positions:
        yield _tidied(replace(program, omit_positions=False))
    for session in range(1 + sum(isinstance(o, Open | Fork) for o in program.operations)):
        yield from map(_tidied, _without_session(program, session))
        yield from map(_tidied, _without_fork(program, session))
        yield from map(_tidied, _fewer_rows(program, session))
    for operations in _by_tokens(program):
        yield _tidied(replace(program, operations=operations))


def _tidied(program: Scenario) -> Scenario:
    """Return a program whose crops fit what is left of it, and that needs and says what it does, no more."""
    lengths, operations = [0], []
    for operation in program.operations:
        match operation:
            case Open():
                lengths.append(0)
            case Fork(session=session):
                lengths.append(lengths[session] if session < len(lengths) else 0)
            case Extend(session=session, ids=ids) if session < len(lengths):
                lengths[session] += max(map(len, ids), default=0)
            case Crop(session=session, length=length) if session < len(lengths):
                lengths[session] = min(length, lengths[session])
                operation = replace(operation, length=lengths[session])
            case Reset(session=session) if session < len(lengths):
                lengths[session] = 0
        operations.append(operation)
    program = replace(program, operations=tuple(operations), crosses=(), claims=frozenset())
    return replace(program, needs=needs_of(program))


def _by_operations(program: Scenario) -> Iterator[tuple[Operation, ...]]:
    """Leave operations out, in blocks from half of them down to one, or make two calls one."""
    operations = program.operations
    size = len(operations) // 2
    while size:
        for start in range(0, len(operations) - size + 1):
            left_out = operations[start : start + size]
            if not any(isinstance(operation, Open | Fork) for operation in left_out):
                yield operations[:start] + operations[start + size :]
        size //= 2
    for place, operation in enumerate(operations):
        if isinstance(operation, Extend):
            yield from _joined(operations, place, operation)


def _joined(operations: Sequence[Operation], place: int, first: Extend) -> Iterator[tuple[Operation, ...]]:
    """Make a call and the next one of the same session one call, if nothing happens to the session between."""
    for later in range(place + 1, len(operations)):
        other = operations[later]
        if not isinstance(other, Acting) or other.session != first.session:
            continue
        if isinstance(other, Extend) and len(first.ids) == len(other.ids):
            ids = tuple(a + b for a, b in zip(first.ids, other.ids, strict=True))
            joined = replace(first, ids=ids, last_only=False)
            yield (*operations[:place], joined, *operations[place + 1 : later], *operations[later + 1 :])
        return


def _without_session(program: Scenario, session: int) -> Iterator[Scenario]:
    """Leave a session out with all that it does, where no other goes on from it."""
    operations: list[Operation] = []
    opened = 0
    for operation in program.operations:
        if isinstance(operation, Fork) and operation.session == session:
            return
        opened += isinstance(operation, Open | Fork)
        if isinstance(operation, Open | Fork) and opened == session:
            continue
        if isinstance(operation, Acting):
            if operation.session == session:
                continue
            if operation.session > session:
                operation = replace(operation, session=operation.session - 1)
        operations.append(operation)
    if session:
        yield replace(program, operations=tuple(operations))
        return
    # Session 0 is there from the start: the next one takes its place, if it is opened empty.
    first = next((o for o in operations if isinstance(o, Open | Fork)), None)
    if isinstance(first, Open):
        operations.remove(first)
        yield replace(program, operations=tuple(operations), batch=first.batch)


def _without_fork(program: Scenario, session: int) -> Iterator[Scenario]:
    """Let the session that a fork came from do itself what the fork does."""
    operations: list[Operation] = []
    opened, parent = 0, None
    for operation in program.operations:
        opened += isinstance(operation, Open | Fork)
        if isinstance(operation, Fork) and opened == session and parent is None:
            parent = operation.session
            continue
        if isinstance(operation, Acting) and parent is not None and operation.session >= session:
            at = parent if operation.session == session else operation.session - 1
            operation = replace(operation, session=at)
        operations.append(operation)
    if parent is not None:
        yield replace(program, operations=tuple(operations))


def _fewer_rows(program: Scenario, session: int) -> Iterator[Scenario]:
    """Leave out one batch row of a session and its forks: everywhere, or between two reorders of other sizes."""
    family, batch, opened = {session}, program.batch if session == 0 else 0, 0
    for operation in program.operations:
        if isinstance(operation, Open | Fork):
            opened += 1
            if isinstance(operation, Open) and opened == session:
                batch = operation.batch
            elif isinstance(operation, Fork) and operation.session in family:
                family.add(opened)
    moves = [o for o in program.operations if isinstance(o, Reorder) and o.session in family]
    sizes = [batch, *(len(move.rows) for move in moves)]
    if len(set(sizes)) == 1:
        for row in range(batch if batch > 1 else 0):
            yield _without_row(program, family, session, dict.fromkeys(range(len(sizes)), row))
    elif len(family) == 1 and batch:
        for number, num_rows in enumerate(sizes):
            for row in range(num_rows if num_rows > 1 else 0):
                yield _without_row(program, family, session, {number: row})


def _without_row(program: Scenario, family: set[int], root: int, dropped: dict[int, int]) -> Scenario:
    """Return a program in which a family of sessions lacks a row after so many of its reorders: ``{0: row}``."""
    operations: list[Operation] = []
    segment, opened, batch = 0, 0, program.batch - (root == 0 and 0 in dropped)
    for operation in program.operations:
        opened += isinstance(operation, Open | Fork)
        if isinstance(operation, Open) and opened == root and 0 in dropped:
            operation = replace(operation, batch=operation.batch - 1)
        elif isinstance(operation, Reorder) and operation.session in family:
            before = dropped.get(segment)
            segment += 1
            rows = [row for place, row in enumerate(operation.rows) if place != dropped.get(segment)]
            if before is not None:
                rows = [0 if row == before else row - (row > before) for row in rows]
            operation = replace(operation, rows=tuple(rows))
        elif isinstance(operation, Feeding) and operation.session in family and segment in dropped:
            ids = operation.ids[: dropped[segment]] + operation.ids[dropped[segment] + 1 :]
            operation = replace(operation, ids=ids)
        operations.append(operation)
    return replace(program, operations=tuple(operations), batch=batch)


def _by_tokens(program: Scenario) -> Iterator[tuple[Operation, ...]]:
    """Feed fewer tokens, keep fewer at a crop, and let the tokens be simpler ones."""
    operations = program.operations
    for place, operation in enumerate(operations):
        shorter: Iterator[Operation] = iter(())
        if isinstance(operation, Extend):
            shorter = (replace(operation, ids=ids) for ids in _shorter(operation.ids))
        elif isinstance(operation, Crop):
            lower = dict.fromkeys((0, operation.length // 2, operation.length - 1))
            shorter = (replace(operation, length=length) for length in lower if length >= 0)
        for new in shorter:
            yield (*operations[:place], new, *operations[place + 1 :])
    for names in _renamings(operations):
        yield tuple(_renamed(operation, names) for operation in operations)


def _renamed(operation: Operation, names: dict[int, int]) -> Operation:
    if not isinstance(operation, Feeding):
        return operation
    return replace(operation, ids=tuple(tuple(names[token] for token in row) for row in operation.ids))


def _shorter(ids: Ids) -> Iterator[Ids]:
    """Leave columns out, in blocks from half of them down to one; of unequal rows, the first token of one."""
    if len(set(map(len, ids))) > 1:
        for place, row in enumerate(ids):
            if len(row) > 1:
                yield (*ids[:place], row[1:], *ids[place + 1 :])
        return
    size = len(ids[0]) // 2
    while size:
        for start in range(0, len(ids[0]) - size + 1):
            yield tuple(row[:start] + row[start + size :] for row in ids)
        size //= 2


def _renamings(operations: Sequence[Operation]) -> Iterator[dict[int, int]]:
    """Yield what each token becomes: small numbers in order of appearance, and then one token another."""
    seen = dict.fromkeys(t for o in operations if isinstance(o, Feeding) for row in o.ids for t in row)
    yield {token: number for number, token in enumerate(seen, 1)}
    for token in seen:
        for other in sorted({1, *seen}):
            if other < token:
                yield {**{t: t for t in seen}, token: other}
