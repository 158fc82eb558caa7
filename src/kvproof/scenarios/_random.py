"""Random programs: legal operations in any order, in addition to the catalogue."""

from dataclasses import replace
from random import Random

from kvproof.scenarios._calls import Extend
from kvproof.scenarios._operations import (
    MAX_ROWS,
    RANDOM_OPERATIONS,
    Ability,
    Action,
    CacheKind,
    Draw,
    DrawInt,
    Limits,
    Operation,
)
from kvproof.scenarios._walk import Scenario, initial_states, needs_of

#: The name under which reports list random programs.
RANDOM_PROGRAMS = "random programs"

MAX_OPERATIONS = 10


def random_program(draw: DrawInt, limits: Limits, max_len: int) -> Scenario:
    """Draw one program that compares at least one row and whose sessions hold at most ``max_len`` tokens."""
    kinds = [CacheKind.DYNAMIC] * 3 + [CacheKind.STATIC] * (Ability.STATIC_CACHE in limits.abilities)
    cache = kinds[draw(0, len(kinds) - 1)]
    batch = draw(1, MAX_ROWS) if Ability.BATCH in limits.abilities else 1
    states = initial_states(batch)
    operations: list[Operation] = []
    feed_next: int | None = 0  # the session that the next operation must feed
    for _ in range(draw(2, MAX_OPERATIONS)):
        session = draw(0, len(states) - 1) if feed_next is None else feed_next
        classes = _drawable(limits) if feed_next is None else (Extend,)
        feed_next = None
        max_tokens = min(max_len, limits.context_len)
        at = Draw(draw=draw, limits=limits, max_len=max_tokens, states=states, session=session)
        operation = classes[draw(0, len(classes) - 1)].draw(at)
        if operation is None or not operation.is_legal(states, limits, cache):
            continue
        states = operation.apply(states)
        operations.append(operation)
        # The effect of an action shows only in the rows of later calls.
        if isinstance(operation, Action) and draw(0, 2):
            feed_next = operation.session
    program = Scenario(
        name=RANDOM_PROGRAMS,
        exposes="an order of operations that no program of the catalogue has",
        operations=tuple(operations),
        batch=batch,
        cache=cache,
    )
    return replace(program, needs=needs_of(program))


def random_programs(limits: Limits, *, num: int, seed: int, max_len: int) -> tuple[Scenario, ...]:
    """Return ``num`` programs that depend only on the seed and the limits."""
    draw = Random(seed).randint
    return tuple(random_program(draw, limits, max_len) for _ in range(num))


def drawable_kinds(limits: Limits) -> tuple[str, ...]:
    """Return the names of the operations that random programs use on a subject."""
    return tuple(dict.fromkeys(operation.kind() for operation in _drawable(limits)))


def _drawable(limits: Limits) -> tuple[type[Operation], ...]:
    """Return the operations that a subject can perform. The one that feeds tokens is listed three times."""
    able = (kind for kind in RANDOM_OPERATIONS if kind.ability is None or kind.ability in limits.abilities)
    return (Extend, Extend, Extend, *able)
