"""Scenarios, and a walk through their operations that needs no decoder.

The walk gives a program's sequences, its compared prefixes, and the cache capacity that it needs.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from kvproof.errors import UsageError
from kvproof.scenarios._operations import Ability, CacheKind, Claim, Limits, Operation
from kvproof.scenarios._states import Ids, SessionState, States


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A named program. When it starts, session 0 is open and has ``batch`` rows."""

    name: str
    exposes: str
    operations: tuple[Operation, ...]
    needs: frozenset[Ability] = frozenset()
    batch: int = 1
    cache: CacheKind = CacheKind.DYNAMIC  #: the kind that every session keeps
    omit_positions: bool = False  #: sessions leave the positions of new tokens to the decoder
    advice: bool = False  #: the library advises against this: reported, but ignored by the verdict
    crosses: tuple[int, ...] = ()  #: lengths at which at least one row must be compared
    claims: frozenset[Claim] = frozenset()  #: events that must happen at least once
    skipped: str | None = None  #: why the scenario cannot run on this subject


@dataclass(frozen=True, slots=True, kw_only=True)
class Transition:
    """One operation of a program, with what each open session holds before and after it."""

    operation: Operation
    before: States
    after: States


def initial_states(batch: int) -> States:
    """Return what the sessions hold when a program starts."""
    return (SessionState.empty(batch),)


def walk(program: Scenario) -> Iterator[Transition]:
    """Yield each operation with the states of the sessions around it.

    Raises `UsageError` at an operation whose session or rows do not exist.
    """
    states = initial_states(program.batch)
    for number, operation in enumerate(program.operations):
        if not operation.fits(states):
            raise UsageError(
                f"operation {number} of {program.name!r} names a session or rows that do not exist: {operation}"
            )
        after = operation.apply(states)
        yield Transition(operation=operation, before=states, after=after)
        states = after


def longest_sequences(scenario: Scenario) -> tuple[Ids, ...]:
    """Return every token sequence that the scenario feeds, except those that are a prefix of another."""
    seen = {sequence for sequence, _ in _compared(scenario)}
    return tuple(sorted(s for s in seen if not any(o != s and o[: len(s)] == s for o in seen)))


def compared_prefixes(scenario: Scenario) -> frozenset[Ids]:
    """Return every prefix whose row is compared when the scenario runs to its end."""
    return frozenset(
        sequence[:length] for sequence, first in _compared(scenario) for length in range(first, len(sequence) + 1)
    )


def compared_lengths(scenario: Scenario) -> dict[Ids, frozenset[int]]:
    """Return the scenario's longest sequences, each with the lengths of the prefixes whose rows are compared."""
    calls = list(_compared(scenario))
    return {
        sequence: frozenset(
            length for row, first in calls if sequence[: len(row)] == row for length in range(first, len(row) + 1)
        )
        for sequence in longest_sequences(scenario)
    }


def capacity(scenario: Scenario) -> int:
    """Return the largest number of tokens in any session of the scenario; caches are sized for it."""
    return max((len(sequence) for sequence, _ in _compared(scenario)), default=0)


def _compared(scenario: Scenario) -> Iterator[tuple[Ids, int]]:
    """Yield each row's tokens after each call, and the length of the first prefix that the call compares."""
    for transition in walk(scenario):
        yield from transition.operation.compared(transition.after)


def is_legal(program: Scenario, limits: Limits) -> bool:
    """Return whether the subject can run the program, and every operation is legal at its place."""
    if not program.needs <= limits.abilities or (program.batch > 1 and Ability.BATCH not in limits.abilities):
        return False
    states = initial_states(program.batch)
    for operation in program.operations:
        if not operation.is_legal(states, limits, program.cache):
            return False
        states = operation.apply(states)
    return True


def needs_of(program: Scenario) -> frozenset[Ability]:
    """Return the abilities that a program's operations and settings use."""
    needs = set() if program.cache.ability is None else {program.cache.ability}
    if program.omit_positions:
        needs.add(Ability.OMIT_POSITIONS)
    if program.batch > 1:
        needs.add(Ability.BATCH)
    return frozenset(needs).union(*(operation.needs for operation in program.operations))
