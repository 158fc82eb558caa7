"""Operations that call the decoder: on one session, or through the decoder's own ``generate()``.

A program is data: each call names the token ids that it feeds, and the ids alone determine what each resulting
row must equal.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum

from kvproof.errors import ContextError, SubjectError
from kvproof.scenarios._operations import (
    Ability,
    Action,
    CacheKind,
    Claim,
    Draw,
    Limits,
    OpenSession,
    Operation,
    SessionOperation,
)
from kvproof.scenarios._states import Ids, SessionState, States

#: The names that `kvproof.scenarios` re-exports.
__all__ = ["Extend", "Feed", "Generate", "Method", "Refused"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Feed(SessionOperation):
    """An operation that gives each batch row new tokens in one call."""

    ids: tuple[Ids, ...]

    @property
    def needs(self) -> frozenset[Ability]:
        """`Ability.PAD` for rows of unequal length."""
        return frozenset({Ability.PAD}) if self.is_ragged else frozenset()

    @property
    def is_ragged(self) -> bool:
        """Whether rows get different numbers of tokens."""
        return len(set(map(len, self.ids))) > 1

    @property
    def num_columns(self) -> int:
        """The number of cache slots that the call fills."""
        return max(map(len, self.ids), default=0)

    def fits_state(self, state: SessionState) -> bool:
        """Return whether there is one row of tokens for each batch row."""
        return len(self.ids) == len(state.rows)

    def is_allowed(self, states: States, limits: Limits, cache: CacheKind) -> bool:
        """Return whether the tokens can be fed, ignoring whether the context has room for them."""
        if not all(self.ids) or (self.is_ragged and states[self.session].length):
            return False
        return all(0 <= token < limits.vocab_size for row in self.ids for token in row)

    def drop_row(self, before: int | None, after: int | None) -> "Feed":
        """Return the same call without the tokens of one row."""
        if before is None:
            return self
        return replace(self, ids=self.ids[:before] + self.ids[before + 1 :])


@dataclass(frozen=True, slots=True, kw_only=True)
class Extend(Feed):
    """Feed each batch row its new tokens in one call. Rows of unequal length may only start a session.

    With ``last_only``, only the row after each batch row's last new token is compared.
    """

    last_only: bool = False

    def change(self, state: SessionState) -> SessionState:
        """Append the new tokens."""
        changed = replace(
            state,
            rows=tuple(old + new for old, new in zip(state.rows, self.ids, strict=True)),
            columns=state.columns + self.num_columns,
            call_start=state.length,
        )
        return replace(changed, peak=max(state.peak, changed.length))

    def is_allowed(self, states: States, limits: Limits, cache: CacheKind) -> bool:
        """Return whether the tokens can be fed and the context has room for them."""
        end = states[self.session].length + self.num_columns
        return Feed.is_allowed(self, states, limits, cache) and end <= limits.context_len

    def compared(self, after: States) -> Iterator[tuple[Ids, int]]:
        """Yield each batch row, and the length of the prefix that ends with its first (or last) new token."""
        for row, new in zip(after[self.session].rows, self.ids, strict=True):
            yield row, len(row) if self.last_only else len(row) - len(new) + 1

    @classmethod
    def draw(cls, at: Draw) -> "Extend | None":
        """Draw the same number of new tokens for every row."""
        state = at.state
        if state.length >= at.max_len:
            return None
        num_new = at.draw(1, min(at.max_len - state.length, max(2, at.max_len // 2)))
        last = at.limits.vocab_size - 1
        ids = tuple(tuple(at.limits.nearest_id(at.draw(0, last)) for _ in range(num_new)) for _ in state.rows)
        return cls(ids=ids, session=at.session)

    @property
    def size(self) -> int:
        """The number of tokens."""
        return sum(map(len, self.ids))

    def simplify(self) -> Iterator["Extend"]:
        """Drop blocks of columns, from half of them down to one. Of ragged rows, drop one row's first token."""
        if self.is_ragged:
            for place, row in enumerate(self.ids):
                if len(row) > 1:
                    yield replace(self, ids=(*self.ids[:place], row[1:], *self.ids[place + 1 :]))
            return
        size = self.num_columns // 2
        while size:
            for start in range(self.num_columns - size + 1):
                yield replace(self, ids=tuple(row[:start] + row[start + size :] for row in self.ids))
            size //= 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused(Feed, Action):
    """Feed tokens that reach past the context: the session must refuse them and stay as it was."""

    def is_allowed(self, states: States, limits: Limits, cache: CacheKind) -> bool:
        """Return whether the tokens could be fed if the context had room, and it has none."""
        end = states[self.session].length + self.num_columns
        return Feed.is_allowed(self, states, limits, cache) and end > limits.context_len

    def act(self, session: OpenSession) -> Counter[Claim]:
        """Feed the tokens and expect a refusal."""
        before = session.ids
        try:
            session.extend(self.ids)
        except ContextError:
            if session.ids != before:
                raise SubjectError("a call that was refused for its length changed the session") from None
            return Counter({Claim.REFUSED: 1})
        raise SubjectError(f"{len(session)} tokens were taken, and the context ends before")


class Method(StrEnum):
    """A generation method of a library."""

    GREEDY = "greedy"
    BEAM = "beam search"
    PROMPT_LOOKUP = "prompt lookup"  #: tokens proposed from the prompt, verified in one call
    CHUNKED_PREFILL = "chunked prefill"
    STATIC_CACHE = "static cache"


@dataclass(frozen=True, slots=True, kw_only=True)
class Generate(Operation):
    """Generate from prompts through the decoder's own library, outside all sessions, with every choice forced.

    ``steps`` has an entry for each new token. For each batch row or beam, best first, the entry holds the row
    that it continues and the token that it appends. Beams all start from one prompt; other rows stay in place.
    """

    ability = Ability.GENERATE

    method: Method
    prompts: tuple[Ids, ...]
    steps: tuple[tuple[tuple[int, int], ...], ...]

    def prefixes(self) -> tuple[tuple[Ids, ...], ...]:
        """Return, for each step, the tokens of each row before that step's choice."""
        rows = self.prompts if self.method is not Method.BEAM else self.prompts * len(self.steps[0])
        prefixes = []
        for step in self.steps:
            prefixes.append(rows)
            rows = tuple((*rows[row], token) for row, token in step)
        return tuple(prefixes)

    def fits(self, states: States) -> bool:
        """Return True, because no session is involved."""
        return True

    def apply(self, states: States) -> States:
        """Return the states unchanged."""
        return states

    def is_allowed(self, states: States, limits: Limits, cache: CacheKind) -> bool:
        """Return False, because programs that generate are neither drawn at random nor shrunk."""
        return False

    def compared(self, after: States) -> Iterator[tuple[Ids, int]]:
        """Yield the prefix before each choice."""
        yield from ((row, len(row)) for rows in self.prefixes() for row in rows)
