"""Operations: the building blocks of a program, and the abilities that they need.

The class of an operation defines everything specific to it: the ability that it needs, how it changes what
sessions hold, where it is legal, how a session performs it, how it is drawn at random, and how it is
simplified. Operations that call the decoder, and therefore produce rows to compare, are in `_calls`.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import ClassVar, Protocol, final

from kvproof.scenarios._states import Ids, SessionState, States, nearest_id

#: The names that `kvproof.scenarios` re-exports.
__all__ = [
    "Ability",
    "Action",
    "Boundaries",
    "CacheKind",
    "Claim",
    "Crop",
    "Draw",
    "Fork",
    "Limits",
    "Open",
    "OpenSession",
    "Operation",
    "Poison",
    "Reorder",
    "Reset",
    "SessionOperation",
]

#: Returns a random integer from the first argument to the second, both included.
DrawInt = Callable[[int, int], int]

#: A random program opens at most this many sessions, each with at most this many rows.
MAX_SESSIONS = MAX_ROWS = 3


class Ability(StrEnum):
    """An ability that a subject or its sessions can declare. Abilities are declared, never probed."""

    CAST = "cast"  #: return the same decoder in another dtype
    TAP = "tap"  #: expose and replace intermediate values
    INSPECT = "inspect"  #: expose the cache's tensors
    EDIT = "edit"  #: replace the cache's tensors between calls
    BATCH = "batch"  #: hold several rows in one session
    CROP = "crop"  #: forget the newest tokens
    FORK = "fork"  #: continue one prefix twice
    REORDER = "reorder"  #: permute, repeat or drop batch rows
    PAD = "pad"  #: start a session with rows of unequal length, padded on the left
    POISON = "poison"  #: fill the cache's unused slots with garbage
    OMIT_POSITIONS = "omit-positions"  #: compute the positions of new tokens itself
    STATIC_CACHE = "static-cache"  #: keep a cache with preallocated buffers
    OFFLOADED_CACHE = "offloaded-cache"  #: keep a cache in different memory from the decoder's
    QUANTISED_CACHE = "quantised-cache"  #: keep keys and values in few bits
    GENERATE = "generate"  #: generate through the decoder's own library, with every choice forced
    GENERATE_CHUNKED = "generate-chunked"  #: let that library prefill a prompt in chunks
    GENERATE_ASSISTED = "generate-assisted"  #: let that library verify proposed tokens


class CacheKind(StrEnum):
    """The kind of cache that a session keeps."""

    DYNAMIC = "dynamic"  #: grows as tokens are fed, and drops entries that left a window
    STATIC = "static"
    OFFLOADED = "offloaded"
    QUANTISED = "quantised"

    @property
    def ability(self) -> Ability | None:
        """The ability that a subject must declare to keep such a cache; None for the dynamic one."""
        return None if self is CacheKind.DYNAMIC else Ability(f"{self.value}-cache")


class Claim(StrEnum):
    """An event that a scenario claims to exercise. A run in which it never happens shows nothing."""

    REFUSED = "tokens refused past the context"
    POISONED = "cache values overwritten with garbage"
    ACCEPTED = "proposed tokens accepted"
    REJECTED = "proposed tokens rejected"


@dataclass(frozen=True, slots=True, kw_only=True)
class Boundaries:
    """The lengths at which a subject changes its behaviour."""

    context_len: int  #: positions 0..context_len - 1 are accepted
    windows: tuple[int, ...] = ()  #: sliding windows, attention chunks, convolutions and scan blocks, in tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The limits on a subject's programs."""

    abilities: frozenset[Ability]
    vocab_size: int
    boundaries: Boundaries
    ids: tuple[int, ...] | None = None  #: the token ids that programs are drawn from; None for the vocabulary

    def nearest_id(self, token_id: int) -> int:
        """Return the id itself if programs may feed it, or else another one that depends on it alone."""
        return nearest_id(self.ids, token_id)

    @property
    def context_len(self) -> int:
        """The number of tokens that a session can hold."""
        return self.boundaries.context_len

    @property
    def window(self) -> int | None:
        """The smallest window, or None. A window of one token is ignored: it keeps nothing that could be lost."""
        return min((window for window in self.boundaries.windows if window >= 2), default=None)

    def min_crop(self, state: SessionState) -> int:
        """Return the shortest length that a session can be cropped to.

        Entries that leave a window are lost at the next call, so past a window only the last call can be undone.
        """
        return 0 if self.window is None or state.peak < self.window else state.call_start


class OpenSession(Protocol):
    """The part of a session that actions use."""

    @property
    def ids(self) -> tuple[Ids, ...]: ...
    def __len__(self) -> int: ...
    def extend(self, ids: Sequence[Sequence[int]]) -> object: ...
    def crop(self, length: int) -> None: ...
    def reorder(self, rows: Sequence[int]) -> None: ...
    def reset(self) -> None: ...
    def poison(self) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """The state of a random program when its next operation is drawn."""

    draw: DrawInt
    limits: Limits
    max_len: int
    states: States
    session: int  #: the session that the operation acts on, if it acts on one

    @property
    def state(self) -> SessionState:
        """The state of that session."""
        return self.states[self.session]

    @property
    def can_open(self) -> bool:
        """Whether the program may open another session."""
        return len(self.states) < MAX_SESSIONS


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation(ABC):
    """One step of a program."""

    ability: ClassVar[Ability | None] = None  #: the ability that a subject must have to do this at all

    @classmethod
    def kind(cls) -> str:
        """Return the operation's name in reports."""
        return cls.__name__.lower()

    def describe(self) -> str:
        """Return the operation in words."""
        return self.kind()

    @property
    def needs(self) -> frozenset[Ability]:
        """Every ability that the operation uses."""
        return frozenset() if self.ability is None else frozenset({self.ability})

    @abstractmethod
    def fits(self, states: States) -> bool:
        """Return whether the sessions and rows that the operation names exist."""

    @abstractmethod
    def apply(self, states: States) -> States:
        """Return what the sessions hold after the operation."""

    @final
    def is_legal(self, states: States, limits: Limits, cache: CacheKind) -> bool:
        """Return whether a subject with these limits must be able to perform the operation here."""
        return self.fits(states) and self.needs <= limits.abilities and self.is_allowed(states, limits, cache)

    def is_allowed(self, states: States, limits: Limits, cache: CacheKind) -> bool:
        """Return whether the operation is legal here, given that it fits and the subject has the abilities."""
        return True

    def compared(self, after: States) -> Iterator[tuple[Ids, int]]:
        """Yield each sequence whose rows are compared, and the length of its first compared prefix."""
        yield from ()

    @classmethod
    def draw(cls, at: Draw) -> "Operation | None":
        """Draw an operation of this kind, or return None if there is nothing to act on."""
        return None

    @property
    def size(self) -> int:
        """How many tokens and rows the operation names; smaller is simpler."""
        return 0

    @property
    def magnitude(self) -> int:
        """How large the operation's other numbers are; smaller is simpler."""
        return 0

    def trim(self, states: States) -> "Operation":
        """Return the operation without the parts that have no effect here."""
        return self

    def simplify(self) -> Iterator["Operation"]:
        """Yield simpler operations of the same kind, starting with those that drop the most."""
        yield from ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionOperation(Operation):
    """An operation on one session."""

    session: int = 0

    def fits(self, states: States) -> bool:
        """Return whether the session is open and the operation fits it."""
        return 0 <= self.session < len(states) and self.fits_state(states[self.session])

    def fits_state(self, state: SessionState) -> bool:
        """Return whether the rows that the operation names exist in its session."""
        return True

    def apply(self, states: States) -> States:
        """Return the states, with the state of the operation's session changed."""
        changed = self.change(states[self.session])
        return (*states[: self.session], changed, *states[self.session + 1 :])

    def change(self, state: SessionState) -> SessionState:
        """Return what the operation's session holds after it."""
        return state

    def drop_row(self, before: int | None, after: int | None) -> "SessionOperation":
        """Return the operation with row ``before`` dropped from the session before it, and ``after`` after it."""
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class Action(SessionOperation):
    """An operation that a session performs by itself, and that produces no rows to compare.

    Its effect shows in the rows of later calls.
    """

    @abstractmethod
    def act(self, session: OpenSession) -> Counter[Claim]:
        """Perform the operation; return how often each claim came true."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Poison(Action):
    """Fill the slots of the session's cache that hold no token with large finite garbage.

    This must change nothing. The garbage is not NaN, because ``0 × NaN`` is NaN even where every mask is right.
    """

    ability = Ability.POISON

    def is_allowed(self, states: States, limits: Limits, cache: CacheKind) -> bool:
        """Return whether the cache allocates slots before they hold tokens."""
        return cache is CacheKind.STATIC

    def act(self, session: OpenSession) -> Counter[Claim]:
        """Overwrite the slots and count the values."""
        return Counter({Claim.POISONED: session.poison()})


@dataclass(frozen=True, slots=True, kw_only=True)
class Crop(Action):
    """Keep the first ``length`` tokens."""

    ability = Ability.CROP

    length: int

    def describe(self) -> str:
        """Return the operation in words."""
        return f"crop to {self.length}"

    def fits_state(self, state: SessionState) -> bool:
        """Return whether the length is valid."""
        return self.length >= 0

    def change(self, state: SessionState) -> SessionState:
        """Cut every row."""
        length = min(self.length, state.length)
        return replace(
            state,
            rows=tuple(row[:length] for row in state.rows),
            columns=state.columns - (state.length - length),
            call_start=length,
        )

    def is_allowed(self, states: States, limits: Limits, cache: CacheKind) -> bool:
        """Return whether all rows have the same length, and the cache still holds the entries to keep."""
        state = states[self.session]
        in_range = limits.min_crop(state) <= self.length <= state.length
        return in_range and not state.is_ragged and cache is CacheKind.DYNAMIC

    def act(self, session: OpenSession) -> Counter[Claim]:
        """Crop the session."""
        session.crop(self.length)
        return Counter()

    @classmethod
    def draw(cls, at: Draw) -> "Crop | None":
        """Draw a length below the current one."""
        shortest = at.limits.min_crop(at.state)
        if at.state.length <= shortest:
            return None
        return cls(length=at.draw(shortest, at.state.length - 1), session=at.session)

    @property
    def magnitude(self) -> int:
        """The number of tokens that are kept."""
        return self.length

    def trim(self, states: States) -> "Crop":
        """Limit the length to the number of tokens."""
        return replace(self, length=min(self.length, states[self.session].length))

    def simplify(self) -> Iterator["Crop"]:
        """Keep fewer tokens."""
        for length in dict.fromkeys((0, self.length // 2, self.length - 1)):
            if length >= 0:
                yield replace(self, length=length)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reorder(Action):
    """Make batch row i continue the old row ``rows[i]``."""

    ability = Ability.REORDER

    rows: tuple[int, ...]

    @property
    def needs(self) -> frozenset[Ability]:
        """Its own ability, and `Ability.BATCH` for more than one row."""
        return frozenset({Ability.REORDER, *((Ability.BATCH,) if len(self.rows) > 1 else ())})

    def fits_state(self, state: SessionState) -> bool:
        """Return whether at least one row is named, and each named row exists."""
        return bool(self.rows) and all(0 <= row < len(state.rows) for row in self.rows)

    def change(self, state: SessionState) -> SessionState:
        """Move the rows."""
        return replace(state, rows=tuple(state.rows[row] for row in self.rows))

    def is_allowed(self, states: States, limits: Limits, cache: CacheKind) -> bool:
        """Return whether there are tokens to move; preallocated buffers must keep their number of rows."""
        state = states[self.session]
        same_number = len(self.rows) == len(state.rows)
        return state.length > 0 and (same_number or cache is CacheKind.DYNAMIC)

    def act(self, session: OpenSession) -> Counter[Claim]:
        """Reorder the session's rows."""
        session.reorder(self.rows)
        return Counter()

    @classmethod
    def draw(cls, at: Draw) -> "Reorder":
        """Draw as many rows as the session has, because some libraries' caches cannot change the number."""
        num_rows = len(at.state.rows)
        rows = tuple(at.draw(0, num_rows - 1) for _ in range(num_rows))
        moves_nothing = rows == tuple(range(num_rows))
        return cls(rows=rows[::-1] if moves_nothing else rows, session=at.session)

    @property
    def size(self) -> int:
        """The number of rows."""
        return len(self.rows)

    def drop_row(self, before: int | None, after: int | None) -> "Reorder":
        """Return the same reordering without a row; the other rows are renumbered."""
        rows = [row for place, row in enumerate(self.rows) if place != after]
        if before is not None:
            rows = [0 if row == before else row - (row > before) for row in rows]
        return replace(self, rows=tuple(rows))


@dataclass(frozen=True, slots=True, kw_only=True)
class Reset(Action):
    """Forget everything and start again."""

    def change(self, state: SessionState) -> SessionState:
        """Return an empty session with the same number of rows."""
        return SessionState.empty(len(state.rows))

    def act(self, session: OpenSession) -> Counter[Claim]:
        """Reset the session."""
        session.reset()
        return Counter()

    @classmethod
    def draw(cls, at: Draw) -> "Reset":
        """Return the one possible reset."""
        return cls(session=at.session)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fork(SessionOperation):
    """Open a new session, with the next number, that continues from this one's state."""

    ability = Ability.FORK

    def apply(self, states: States) -> States:
        """Add a copy of the session."""
        return (*states, states[self.session])

    @classmethod
    def draw(cls, at: Draw) -> "Fork | None":
        """Return a fork, or None if no more sessions may be opened."""
        return cls(session=at.session) if at.can_open else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Open(Operation):
    """Open a new, empty session with the next number."""

    batch: int = 1

    @property
    def needs(self) -> frozenset[Ability]:
        """`Ability.BATCH` for more than one row."""
        return frozenset({Ability.BATCH}) if self.batch > 1 else frozenset()

    def fits(self, states: States) -> bool:
        """Return whether the new session has at least one row."""
        return self.batch >= 1

    def apply(self, states: States) -> States:
        """Add an empty session."""
        return (*states, SessionState.empty(self.batch))

    @classmethod
    def draw(cls, at: Draw) -> "Open | None":
        """Draw a number of rows, or return None if no more sessions may be opened."""
        if not at.can_open:
            return None
        return cls(batch=at.draw(1, MAX_ROWS) if Ability.BATCH in at.limits.abilities else 1)

    @property
    def size(self) -> int:
        """The number of rows."""
        return self.batch


#: The operations in random programs besides `Extend`. Their order determines which program a seed gives, so add
#: new operations at the end.
RANDOM_OPERATIONS: tuple[type[Operation], ...] = (Crop, Fork, Reorder, Reset, Open)
