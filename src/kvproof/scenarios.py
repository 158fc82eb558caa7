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


@dataclass(frozen=True, slots=True, kw_only=True)
class Extend:
    """Feed each batch row its new tokens in one call."""

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
