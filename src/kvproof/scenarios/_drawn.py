"""Random programs: operations in any order that is legal, which no catalogue lists."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random

from kvproof.scenarios._data import (
    Ability,
    CacheKind,
    Crop,
    Extend,
    Fork,
    Open,
    Operation,
    Reorder,
    Reset,
    Scenario,
)
from kvproof.scenarios._legal import Limits, Walk, needs_of

#: The name under which random programs stand in a report.
RANDOM_PROGRAMS = "random programs"

#: Returns an integer from the first to the second, both included.
DrawInt = Callable[[int, int], int]

#: No program opens more sessions, or more rows in one.
MOST_SESSIONS = MOST_ROWS = 3
MOST_OPERATIONS = 10

_ABILITY = {"crop": Ability.CROP, "fork": Ability.FORK, "reorder": Ability.REORDER}


def random_program(draw: DrawInt, limits: Limits, max_len: int) -> Scenario:
    """Draw one program whose sessions hold at most ``max_len`` tokens, and that compares at least one row."""
    kinds = [CacheKind.DYNAMIC] * 3 + [CacheKind.STATIC] * (Ability.STATIC_CACHE in limits.abilities)
    cache = kinds[draw(0, len(kinds) - 1)]
    batch = draw(1, MOST_ROWS) if Ability.BATCH in limits.abilities else 1
    walk = Walk(limits, batch=batch, cache=cache)
    operations: list[Operation] = []
    feeds: int | None = 0  # the session that is fed next, whatever is drawn
    for _ in range(draw(2, MOST_OPERATIONS)):
        operation = _drawn(draw, walk, min(max_len, limits.boundaries.context_len), feeds)
        feeds = None
        if operation is None or not walk.allows(operation):
            continue
        walk.take(operation)
        operations.append(operation)
        # What an operation did shows in the rows that follow alone.
        if isinstance(operation, Crop | Reorder | Reset) and draw(0, 2):
            feeds = operation.session
    program = Scenario(
        name=RANDOM_PROGRAMS,
        exposes="what no program of the catalogue does in this order",
        operations=tuple(operations),
        batch=batch,
        cache=cache,
    )
    return replace(program, needs=needs_of(program))


def random_programs(limits: Limits, *, num: int, seed: int, max_len: int) -> tuple[Scenario, ...]:
    """Return ``num`` programs, drawn from the seed alone."""
    draw = Random(seed).randint
    return tuple(random_program(draw, limits, max_len) for _ in range(num))


def usable(limits: Limits) -> tuple[str, ...]:
    """Return the kinds of operations that random programs use on a subject, by name."""
    able = (name for name, ability in _ABILITY.items() if ability in limits.abilities)
    return ("extend", *able, "reset", "open")


def _drawn(draw: DrawInt, walk: Walk, max_len: int, feeds: int | None) -> Operation | None:
    """Draw the next operation, or none where what was drawn has nothing to act on."""
    session = draw(0, len(walk.sessions) - 1) if feeds is None else feeds
    state = walk.sessions[session]
    kinds: Sequence[str] = (*["extend"] * 2, *usable(walk.limits)) if feeds is None else ("extend",)
    kind = kinds[draw(0, len(kinds) - 1)]
    match kind:
        case "extend" if state.length < max_len:
            num_new = draw(1, min(max_len - state.length, max(2, max_len // 2)))
            vocab = walk.limits.vocab_size - 1
            ids = tuple(tuple(draw(0, vocab) for _ in range(num_new)) for _ in state.lengths)
            return Extend(ids=ids, session=session)
        case "crop" if state.length > state.floor:
            return Crop(length=draw(state.floor, state.length - 1), session=session)
        case "reorder":
            num_rows = len(state.lengths)
            # As a search keeps its number of beams: not every library's cache can have it changed.
            rows = tuple(draw(0, num_rows - 1) for _ in range(num_rows))
            stays = rows == tuple(range(num_rows))
            return Reorder(rows=rows[::-1] if stays else rows, session=session)
        case "reset":
            return Reset(session=session)
        case "fork" if len(walk.sessions) < MOST_SESSIONS:
            return Fork(session=session)
        case "open" if len(walk.sessions) < MOST_SESSIONS:
            return Open(batch=draw(1, MOST_ROWS) if walk.able(Ability.BATCH) else 1)
    return None
