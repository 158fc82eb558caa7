"""Which operations a subject can be asked for, one after the other: what programs are drawn and shrunk within."""

from dataclasses import dataclass

from kvproof.scenarios._data import (
    Ability,
    Boundaries,
    CacheKind,
    Crop,
    Extend,
    Fork,
    Generate,
    Open,
    Operation,
    Poison,
    Refused,
    Reorder,
    Reset,
    Scenario,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What bounds the programs of a subject."""

    abilities: frozenset[Ability]
    vocab_size: int
    boundaries: Boundaries


@dataclass(slots=True, kw_only=True)
class State:
    """What a session holds while a program is walked through."""

    lengths: list[int]  #: tokens of each batch row
    peak: int = 0  #: the longest that it was since it was empty
    floor: int = 0  #: a crop keeps at least so many tokens

    @property
    def length(self) -> int:
        """The number of tokens of the longest row."""
        return max(self.lengths)

    @property
    def ragged(self) -> bool:
        """Whether rows are of unequal length."""
        return len(set(self.lengths)) > 1


class Walk:
    """A program walked through operation by operation, without a decoder."""

    def __init__(self, limits: Limits, *, batch: int, cache: CacheKind) -> None:
        self.limits = limits
        self.cache = cache
        self.sessions: list[State] = []
        self._window = min((w for w in limits.boundaries.windows if w >= 2), default=None)
        self.take(Open(batch=batch))

    def able(self, *abilities: Ability) -> bool:
        """Return whether the subject declares all of these."""
        return self.limits.abilities.issuperset(abilities)

    def allows(self, operation: Operation) -> bool:
        """Return whether the operation is legal here; what goes through ``generate()`` never is."""
        index = getattr(operation, "session", 0)
        if not 0 <= index < len(self.sessions):
            return isinstance(operation, Open) and self._opens(operation)
        state = self.sessions[index]
        match operation:
            case Open():
                return self._opens(operation)
            case Extend(ids=ids):
                return self._feeds(state, ids) and state.length + max(map(len, ids)) <= self._context_len
            case Refused(ids=ids):
                return self._feeds(state, ids) and state.length + max(map(len, ids)) > self._context_len
            case Crop(length=length):
                able = self.able(Ability.CROP) and self.cache is CacheKind.DYNAMIC
                return able and not state.ragged and state.floor <= length <= state.length
            case Reorder(rows=rows):
                return self._reorders(state, rows)
            case Fork():
                return self.able(Ability.FORK)
            case Poison():
                return self.able(Ability.POISON) and self.cache is CacheKind.STATIC
            case Reset():
                return True
            case Generate():
                return False

    def take(self, operation: Operation) -> None:
        """Go on by an operation that is legal here."""
        match operation:
            case Open(batch=batch):
                self.sessions.append(State(lengths=[0] * batch))
            case Extend(session=index, ids=ids):
                self._extend(self.sessions[index], [len(row) for row in ids])
            case Crop(session=index, length=length):
                state = self.sessions[index]
                state.lengths = [length] * len(state.lengths)
                state.floor = 0 if self._is_short(state.peak) else length
            case Reorder(session=index, rows=rows):
                state = self.sessions[index]
                state.lengths = [state.lengths[row] for row in rows]
            case Fork(session=index):
                state = self.sessions[index]
                self.sessions.append(State(lengths=[*state.lengths], peak=state.peak, floor=state.floor))
            case Reset(session=index):
                self.sessions[index] = State(lengths=[0] * len(self.sessions[index].lengths))

    @property
    def _context_len(self) -> int:
        return self.limits.boundaries.context_len

    def _opens(self, operation: Open) -> bool:
        return operation.batch == 1 or self.able(Ability.BATCH)

    def _feeds(self, state: State, ids: tuple[tuple[int, ...], ...]) -> bool:
        """Return whether these are rows that the session can be fed; how many tokens there is room for aside."""
        if len(ids) != len(state.lengths) or not all(ids):
            return False
        ragged = len(set(map(len, ids))) > 1
        if ragged and (state.length or not self.able(Ability.PAD)):
            return False
        return all(0 <= token < self.limits.vocab_size for row in ids for token in row)

    def _reorders(self, state: State, rows: tuple[int, ...]) -> bool:
        """Return whether rows can move so; buffers made in advance keep their number."""
        if not self.able(Ability.REORDER) or not rows or not state.length:
            return False
        if len(rows) != len(state.lengths) and self.cache is not CacheKind.DYNAMIC:
            return False
        fits = all(0 <= row < len(state.lengths) for row in rows)
        return fits and (len(rows) == 1 or self.able(Ability.BATCH))

    def _extend(self, state: State, num_new: list[int]) -> None:
        start = state.length
        state.lengths = [old + new for old, new in zip(state.lengths, num_new, strict=True)]
        state.peak = max(state.peak, state.length)
        # What leaves a window goes for good at the next call, so the newest call alone can be taken back.
        state.floor = 0 if self._is_short(state.peak) else start

    def _is_short(self, length: int) -> bool:
        return self._window is None or length < self._window


def is_legal(program: Scenario, limits: Limits) -> bool:
    """Return whether every operation of a program is legal where it stands, and the subject able to run it."""
    if not program.needs <= limits.abilities or (program.batch > 1 and Ability.BATCH not in limits.abilities):
        return False
    walk = Walk(limits, batch=program.batch, cache=program.cache)
    for operation in program.operations:
        if not walk.allows(operation):
            return False
        walk.take(operation)
    return True


def needs_of(program: Scenario) -> frozenset[Ability]:
    """Return the abilities that a program's own operations and settings use."""
    used = {ability for ability in (program.cache.ability,) if ability is not None}
    used |= {Ability.OMIT_POSITIONS} if program.omit_positions else set()
    used |= {Ability.BATCH} if program.batch > 1 else set()
    kinds = {Crop: Ability.CROP, Fork: Ability.FORK, Reorder: Ability.REORDER, Poison: Ability.POISON}
    for operation in program.operations:
        used |= {kinds[type(operation)]} if type(operation) in kinds else set()
        match operation:
            case Open(batch=batch) if batch > 1:
                used |= {Ability.BATCH}
            case Reorder(rows=rows) if len(rows) > 1:
                used |= {Ability.BATCH}
            case Extend(ids=ids) if len(set(map(len, ids))) > 1:
                used |= {Ability.PAD}
            case Generate():
                used |= {Ability.GENERATE}
    return frozenset(used)
