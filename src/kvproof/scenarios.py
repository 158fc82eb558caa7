"""Scenarios: programs of cache operations whose every row has an oracle.

A program is data. Each `Extend` names the token ids that it feeds, so what the resulting rows must equal
follows from the ids alone: the uncached row of the same tokens, recomputed from nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from kvproof._errors import UsageError


class Ability(StrEnum):
    """What a subject or its sessions declare that they can do. Declared, never probed."""

    CAST = "cast"  #: give the same decoder in another dtype
    TAP = "tap"  #: show and replace intermediate values
    INSPECT = "inspect"  #: show the cache's tensors
    BATCH = "batch"  #: several rows in one session
    CROP = "crop"  #: forget the newest tokens
    FORK = "fork"  #: continue one prefix twice
    REORDER = "reorder"  #: permute, repeat or drop batch rows
    PAD = "pad"  #: start a session with rows of unequal length, padded on the left


@dataclass(frozen=True, slots=True, kw_only=True)
class Extend:
    """Feed each batch row its new tokens in one call; rows of unequal length may only start a session."""

    ids: tuple[tuple[int, ...], ...]
    session: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Crop:
    """Keep the first ``length`` tokens."""

    length: int
    session: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Reorder:
    """Let batch row i continue what was row ``rows[i]``."""

    rows: tuple[int, ...]
    session: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Fork:
    """Open a new session, numbered next, that continues from this one's state."""

    session: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Reset:
    """Forget everything and start again."""

    session: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Open:
    """Open a new, empty session, numbered next."""

    batch: int = 1


Operation = Extend | Crop | Reorder | Fork | Reset | Open


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A named program. Session 0 is open, with ``batch`` rows, when it starts."""

    name: str
    exposes: str
    operations: tuple[Operation, ...]
    needs: frozenset[Ability] = frozenset()
    batch: int = 1


def token_by_token(sequence: Sequence[int]) -> Scenario:
    """Consume one token a call, as generation does."""
    return Scenario(
        name="token-by-token",
        exposes="positions, appends and the mask of a single new token",
        operations=tuple(Extend(ids=((token,),)) for token in sequence),
    )


def prefill_and_steps(sequence: Sequence[int], split: int) -> Scenario:
    """Consume the first ``split`` tokens in one call and the rest one by one."""
    if not 1 <= split <= len(sequence):
        raise UsageError(f"cannot split {len(sequence)} tokens after {split}")
    steps = tuple(Extend(ids=((token,),)) for token in sequence[split:])
    return Scenario(
        name="prefill+steps",
        exposes="the first position and mask after a prompt",
        operations=(Extend(ids=(tuple(sequence[:split]),)), *steps),
    )


def chunked(sequence: Sequence[int], size: int) -> Scenario:
    """Consume ``size`` tokens a call, so that later chunks meet a warm cache."""
    if size < 1:
        raise UsageError(f"a chunk holds at least 1 token, not {size}")
    starts = range(0, len(sequence), size)
    return Scenario(
        name="chunked prefill",
        exposes="masks and recurrent state of a block on a warm cache",
        operations=tuple(Extend(ids=(tuple(sequence[i : i + size]),)) for i in starts),
    )


def rollback(sequence: Sequence[int], length: int, continuation: Sequence[int]) -> Scenario:
    """Consume a sequence, forget all but ``length`` tokens, and go on with other ones."""
    return Scenario(
        name="rollback",
        exposes="tails that survive a crop, and positions that do not go back",
        operations=(
            Extend(ids=(tuple(sequence),)),
            Crop(length=length),
            *(Extend(ids=((token,),)) for token in continuation),
        ),
        needs=frozenset({Ability.CROP}),
    )


def fork(prefix: Sequence[int], parent: Sequence[int], child: Sequence[int]) -> Scenario:
    """Continue one shared prefix twice, in turns."""
    turns: list[Operation] = []
    for token, other in zip(parent, child, strict=True):
        turns += [Extend(ids=((token,),), session=0), Extend(ids=((other,),), session=1)]
    return Scenario(
        name="fork",
        exposes="a shared prefix handed out by reference",
        operations=(Extend(ids=(tuple(prefix),)), Fork(session=0), *turns),
        needs=frozenset({Ability.FORK}),
    )


def interleaved(first: Sequence[int], second: Sequence[int]) -> Scenario:
    """Run two requests in turns, one token each."""
    turns: list[Operation] = []
    for token, other in zip(first, second, strict=True):
        turns += [Extend(ids=((token,),), session=0), Extend(ids=((other,),), session=1)]
    return Scenario(
        name="interleaved requests",
        exposes="state that requests share",
        operations=(Open(), *turns),
    )


def multi_turn(sequence: Sequence[int]) -> Scenario:
    """Consume a prompt, answer token by token, take a second prompt on the warm cache, and answer again."""
    quarter = max(1, len(sequence) // 4)
    first, answer, second, rest = (
        sequence[:quarter],
        sequence[quarter : 2 * quarter],
        sequence[2 * quarter : 3 * quarter],
        sequence[3 * quarter :],
    )
    parts = [tuple(first), *((t,) for t in answer), tuple(second), *((t,) for t in rest)]
    return Scenario(
        name="multi-turn",
        exposes="a second prompt on a warm cache",
        operations=tuple(Extend(ids=(part,)) for part in parts if part),
    )


def batch_of(name: str, exposes: str, rows: Sequence[Sequence[int]], steps: Sequence[Sequence[int]]) -> Scenario:
    """Start a session with several rows, of any lengths, and continue them together."""
    needs = {Ability.BATCH} if len(set(map(len, rows))) == 1 else {Ability.BATCH, Ability.PAD}
    operations = [Extend(ids=tuple(map(tuple, rows)))]
    operations += [Extend(ids=tuple((token,) for token in step)) for step in zip(*steps, strict=True)]
    return Scenario(
        name=name, exposes=exposes, operations=tuple(operations), needs=frozenset(needs), batch=len(rows)
    )


def beam_reorder(prefix: Sequence[int], orders: Sequence[Sequence[int]], tokens: Sequence[int]) -> Scenario:
    """Run several rows of one prefix and let them take each other's place between steps."""
    batch = len(orders[0])
    operations: list[Operation] = [Extend(ids=(tuple(prefix),) * batch)]
    for number, order in enumerate(orders):
        step = tuple((tokens[(number + row) % len(tokens)],) for row in range(batch))
        operations += [Extend(ids=step), Reorder(rows=tuple(order))]
    operations.append(Extend(ids=tuple((tokens[row % len(tokens)],) for row in range(batch))))
    return Scenario(
        name="beam reorder",
        exposes="state that stays behind when rows move",
        operations=tuple(operations),
        needs=frozenset({Ability.BATCH, Ability.REORDER}),
        batch=batch,
    )


def buffer_reuse(first: Sequence[int], second: Sequence[int]) -> Scenario:
    """Run one request, reset, and run another in the same session."""
    return Scenario(
        name="buffer reuse",
        exposes="what a reset leaves behind",
        operations=(
            Extend(ids=(tuple(first),)),
            Reset(),
            *(Extend(ids=((token,),)) for token in second),
        ),
    )


def catalogue(sequence: Sequence[int], other: Sequence[int]) -> tuple[Scenario, ...]:
    """Return every named scenario over two token sequences of one length, at least 8.

    A name may stand more than once, with other split points; an audit reports it once.
    """
    n = len(sequence)
    if n < 8 or len(other) != n:
        raise UsageError(
            f"the catalogue needs two sequences of one length of at least 8, not {n} and {len(other)}"
        )
    half, third = n // 2, n // 3
    return (
        token_by_token(sequence),
        *(prefill_and_steps(sequence, split) for split in (1, half, n - 1)),
        *(chunked(sequence, size) for size in (2, third)),
        multi_turn(sequence),
        rollback(sequence[:half], 0, other[:third]),
        rollback(sequence[:half], half - 1, other[:third]),
        rollback(sequence, third, other[third : third + 4]),
        fork(sequence[:half], sequence[half : half + 3], other[half : half + 3]),
        interleaved(sequence[:half], other[:half]),
        batch_of(
            "batch",
            "rows that feel each other",
            (sequence[:half], other[:half]),
            (sequence[half : half + 3], other[half : half + 3]),
        ),
        batch_of(
            "left-padded batch",
            "padding that is attended to, or counted as a position",
            (sequence[:half], other[:third], sequence[:2]),
            (sequence[half : half + 3], other[third : third + 3], sequence[2:5]),
        ),
        beam_reorder(sequence[:half], ((1, 0, 2), (2, 2, 0)), other[:5]),
        buffer_reuse(other[:half], sequence[:half]),
    )


def named(
    scenarios: Sequence[Scenario], *, only: Sequence[str] = (), without: Sequence[str] = ()
) -> tuple[Scenario, ...]:
    """Return the scenarios of these names, or all but some; raise `UsageError` for a name that is not there."""
    names = list(dict.fromkeys(scenario.name for scenario in scenarios))
    for name in (*only, *without):
        if name not in names:
            raise UsageError(f"no scenario {name!r}; there are: {', '.join(names)}")
    return tuple(s for s in scenarios if (not only or s.name in only) and s.name not in without)


def longest_sequences(scenario: Scenario) -> tuple[tuple[int, ...], ...]:
    """Return every token sequence that the scenario consumes and none of whose continuations it does."""
    sessions: list[list[tuple[int, ...]]] = [[()] * scenario.batch]
    seen: set[tuple[int, ...]] = set()
    for operation in scenario.operations:
        match operation:
            case Open(batch=batch):
                sessions.append([()] * batch)
            case Fork(session=index):
                sessions.append(list(sessions[index]))
            case Extend(session=index, ids=ids):
                sessions[index] = [old + new for old, new in zip(sessions[index], ids, strict=True)]
                seen.update(sessions[index])
            case Crop(session=index, length=length):
                sessions[index] = [row[:length] for row in sessions[index]]
            case Reorder(session=index, rows=rows):
                sessions[index] = [sessions[index][row] for row in rows]
            case Reset(session=index):
                sessions[index] = [()] * len(sessions[index])
    return tuple(sorted(s for s in seen if not any(o != s and o[: len(s)] == s for o in seen)))
