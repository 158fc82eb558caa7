"""Simpler programs than a given one: what shrinking tries, the largest steps first."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from kvproof.errors import UsageError
from kvproof.scenarios import (
    CacheKind,
    Extend,
    Feed,
    Fork,
    Open,
    Operation,
    Reorder,
    Scenario,
    SessionOperation,
    needs_of,
    walk,
)

Cost = tuple[int, ...]


def cost_of(program: Scenario) -> Cost:
    """Return how much a program asks of its reader: less is simpler, and earlier numbers weigh more."""
    operations = program.operations
    rows = [row for operation in operations if isinstance(operation, Extend) for row in operation.ids]
    return (
        (program.cache is not CacheKind.DYNAMIC) + program.omit_positions,
        len(operations),
        program.batch + sum(operation.size for operation in operations),
        sum(operation.magnitude for operation in operations),
        len({token for row in rows for token in row}),
        sum(map(sum, rows)),
    )


def num_tokens(program: Scenario) -> int:
    """Return the number of tokens that a program feeds, over all calls and batch rows."""
    operations = program.operations
    return sum(len(row) for operation in operations if isinstance(operation, Extend) for row in operation.ids)


def simpler_programs(program: Scenario) -> Iterator[Scenario]:
    """Yield programs that are like this one and simpler; not all of them are legal."""
    for candidate in _candidates(program):
        tidy = _tidy(candidate)
        if tidy is not None:
            yield tidy


def _candidates(program: Scenario) -> Iterator[Scenario]:
    """Yield simpler programs, in some of which an operation asks for more than there is left."""
    for operations in _by_operations(program):
        yield replace(program, operations=operations)
    if program.cache is not CacheKind.DYNAMIC:
        yield replace(program, cache=CacheKind.DYNAMIC)
    if program.omit_positions:
        yield replace(program, omit_positions=False)
    for session in range(1 + sum(isinstance(o, Open | Fork) for o in program.operations)):
        yield from _without_session(program, session)
        yield from _without_fork(program, session)
        yield from _fewer_rows(program, session)
    for operations in _by_tokens(program):
        yield replace(program, operations=operations)


def _tidy(program: Scenario) -> Scenario | None:
    """Return the program without what has no effect and with the needs and claims that are left.

    None where an operation names a session or rows that are gone.
    """
    try:
        operations = tuple(step.operation.trim(step.before) for step in walk(program))
    except UsageError:
        return None
    program = replace(program, operations=operations, crosses=(), claims=frozenset())
    return replace(program, needs=needs_of(program))


def _by_operations(program: Scenario) -> Iterator[tuple[Operation, ...]]:
    """Leave out operations, in blocks from half of them down to one, or merge two calls."""
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
            yield from _merge(operations, place, operation)


def _merge(operations: Sequence[Operation], place: int, first: Extend) -> Iterator[tuple[Operation, ...]]:
    """Merge a call with the next one of its session, if nothing happens to the session in between."""
    for later in range(place + 1, len(operations)):
        other = operations[later]
        if not isinstance(other, SessionOperation) or other.session != first.session:
            continue
        if isinstance(other, Extend) and len(first.ids) == len(other.ids):
            ids = tuple(a + b for a, b in zip(first.ids, other.ids, strict=True))
            merged = replace(first, ids=ids, last_only=False)
            yield (*operations[:place], merged, *operations[place + 1 : later], *operations[later + 1 :])
        return


def _without_session(program: Scenario, session: int) -> Iterator[Scenario]:
    """Leave out a session with everything that it does, unless another session is forked from it."""
    operations: list[Operation] = []
    opened = 0
    for operation in program.operations:
        if isinstance(operation, Fork) and operation.session == session:
            return
        opened += isinstance(operation, Open | Fork)
        if isinstance(operation, Open | Fork) and opened == session:
            continue
        if isinstance(operation, SessionOperation):
            if operation.session == session:
                continue
            if operation.session > session:
                operation = replace(operation, session=operation.session - 1)
        operations.append(operation)
    if session:
        yield replace(program, operations=tuple(operations))
        return
    # Session 0 is open from the start, so the next one must take its place, which it can if it starts empty.
    first = next((o for o in operations if isinstance(o, Open | Fork)), None)
    if isinstance(first, Open):
        operations.remove(first)
        yield replace(program, operations=tuple(operations), batch=first.batch)


def _without_fork(program: Scenario, session: int) -> Iterator[Scenario]:
    """Leave out a fork: the session that it came from does what the fork did."""
    operations: list[Operation] = []
    opened, parent = 0, None
    for operation in program.operations:
        opened += isinstance(operation, Open | Fork)
        if isinstance(operation, Fork) and opened == session and parent is None:
            parent = operation.session
            continue
        if isinstance(operation, SessionOperation) and parent is not None and operation.session >= session:
            at = parent if operation.session == session else operation.session - 1
            operation = replace(operation, session=at)
        operations.append(operation)
    if parent is not None:
        yield replace(program, operations=tuple(operations))


def _fewer_rows(program: Scenario, session: int) -> Iterator[Scenario]:
    """Leave out one batch row of a session and its forks: everywhere, or only between two reorders.

    The second form is for a session whose reorders change its number of rows.
    """
    family, sizes = {session}, [program.batch if session == 0 else 0]
    for step in walk(program):
        operation, new = step.operation, len(step.before)
        if isinstance(operation, Open) and new == session:
            sizes = [operation.batch]
        elif isinstance(operation, Fork) and operation.session in family:
            family.add(new)
        elif isinstance(operation, Reorder) and operation.session in family:
            sizes.append(len(operation.rows))
    if len(set(sizes)) == 1:
        for row in range(sizes[0] if sizes[0] > 1 else 0):
            yield _without_row(program, family, session, dict.fromkeys(range(len(sizes)), row))
    elif len(family) == 1 and sizes[0]:
        for number, num_rows in enumerate(sizes):
            for row in range(num_rows if num_rows > 1 else 0):
                yield _without_row(program, family, session, {number: row})


def _without_row(program: Scenario, family: set[int], root: int, dropped: dict[int, int]) -> Scenario:
    """Return the program without some batch rows of a family of sessions.

    ``dropped`` maps a number of reorders to the row that the sessions lack after that many.
    """
    operations: list[Operation] = []
    segment, batch = 0, program.batch - (root == 0 and 0 in dropped)
    for step in walk(program):
        operation = step.operation
        if isinstance(operation, Open) and len(step.before) == root and 0 in dropped:
            operation = replace(operation, batch=operation.batch - 1)
        elif isinstance(operation, SessionOperation) and operation.session in family:
            before = dropped.get(segment)
            segment += isinstance(operation, Reorder)
            operation = operation.drop_row(before, dropped.get(segment))
        operations.append(operation)
    return replace(program, operations=tuple(operations), batch=batch)


def _by_tokens(program: Scenario) -> Iterator[tuple[Operation, ...]]:
    """Make one operation simpler, and then the tokens of all."""
    operations = program.operations
    for place, operation in enumerate(operations):
        for simpler in operation.simplify():
            yield (*operations[:place], simpler, *operations[place + 1 :])
    for numbers in _renumberings(operations):
        yield tuple(_renumber(operation, numbers) for operation in operations)


def _renumber(operation: Operation, numbers: dict[int, int]) -> Operation:
    if not isinstance(operation, Feed):
        return operation
    return replace(operation, ids=tuple(tuple(numbers[token] for token in row) for row in operation.ids))


def _renumberings(operations: Sequence[Operation]) -> Iterator[dict[int, int]]:
    """Yield what each token becomes: first small numbers in order of appearance, then one token another one."""
    seen = dict.fromkeys(t for o in operations if isinstance(o, Feed) for row in o.ids for t in row)
    yield {token: number for number, token in enumerate(seen, 1)}
    for token in seen:
        for smaller_token in sorted({1, *seen}):
            if smaller_token < token:
                yield {**{t: t for t in seen}, token: smaller_token}
