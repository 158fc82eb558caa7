"""The abstract subject and session, and the checks that every adapter gets from them.

Public methods are final: they validate, call the adapter's underscored twin, and only then write the
session's own ledger of ids. The engine reads that ledger to know what a row must equal, so it need not
trust the adapter. What an adapter raises becomes `SubjectError`, with its cause kept.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TypeVar, final

import torch
from jaxtyping import Float
from torch import Tensor

from kvproof._errors import (
    AbilityError,
    ContextError,
    KvproofError,
    SessionError,
    SubjectError,
    TokenError,
    UsageError,
)
from kvproof._report import SubjectInfo
from kvproof._trace import Tap, untouched
from kvproof.scenarios import Ability

T = TypeVar("T")


class Subject(ABC):
    """A decoder under audit."""

    @property
    @abstractmethod
    def info(self) -> SubjectInfo:
        """What the subject is and can do."""

    @property
    @abstractmethod
    def seed(self) -> int | None:
        """The seed that recreates the subject, where there is one."""

    @abstractmethod
    def token(self, token_id: int) -> str:
        """Return the text of a token."""

    @final
    def decode(self, ids: Sequence[int]) -> str:
        """Return the texts of ``ids``, separated by spaces."""
        return " ".join(self.token(i) for i in ids)

    @final
    def rows(self, ids: Sequence[int], *, tap: Tap = untouched) -> Float[Tensor, "seq vocab"]:
        """Return the uncached logits of one forward over a complete prefix.

        Raises `TokenError`, `ContextError`, or `SubjectError` where the decoder itself raises.
        """
        check_ids(ids, self.info)
        check_context(0, len(ids), self.info)
        rows = at_the_seam(lambda: self._rows(ids, tap))
        _check_shape(rows, (len(ids), self.info.vocab_size))
        return rows

    @final
    def session(self, *, batch: int = 1, tap: Tap = untouched, needs: Collection[Ability] = ()) -> "Session":
        """Open a session: one request's state, or ``batch`` requests' in step.

        ``needs`` names abilities that will be used, for caches that must be told before they are filled.
        """
        if not _is_integer(batch) or batch < 1:
            raise UsageError(f"batch must be an integer of at least 1, not {batch!r}")
        if batch != 1:
            self.require(Ability.BATCH)
        for ability in needs:
            self.require(ability)
        return at_the_seam(lambda: self._session(batch, tap, frozenset(needs)))

    @final
    def cast(self, dtype: torch.dtype) -> "Subject":
        """Return the same decoder computing in another dtype."""
        self.require(Ability.CAST)
        return at_the_seam(lambda: self._cast(dtype))

    @final
    def require(self, ability: Ability) -> None:
        """Raise `AbilityError` unless the subject declares the ability."""
        if ability not in self.info.abilities:
            raise AbilityError(f"{self.info.name} does not declare the ability {ability.value!r}")

    @abstractmethod
    def _rows(self, ids: Sequence[int], tap: Tap) -> Float[Tensor, "seq vocab"]: ...

    @abstractmethod
    def _session(self, batch: int, tap: Tap, needs: frozenset[Ability]) -> "Session": ...

    @abstractmethod
    def _cast(self, dtype: torch.dtype) -> "Subject": ...


class Session(ABC):
    """State that consumes tokens in pieces. A call that raises leaves it as it was."""

    def __init__(self, subject: Subject, ids: Sequence[Sequence[int]]) -> None:
        self.subject = subject
        self._ids = [list(row) for row in ids]

    @property
    def ids(self) -> tuple[tuple[int, ...], ...]:
        """The consumed tokens of each batch row."""
        return tuple(tuple(row) for row in self._ids)

    def __len__(self) -> int:
        """Return the length of the longest row."""
        return max(map(len, self._ids))

    @final
    def extend(self, ids: Sequence[Sequence[int]]) -> Float[Tensor, "batch new vocab"]:
        """Consume each batch row's new tokens; return the logits that follow them.

        Rows of unequal length may only start a session, and need `Ability.PAD`; they are aligned on the right,
        so that the last logits of each row follow its last token. Raises `TokenError`, `ContextError`,
        `CacheError` or `SubjectError`.
        """
        info, start = self.subject.info, len(self)
        _check_list("rows of token ids", ids)
        if len(ids) != len(self._ids):
            raise SessionError(f"{len(ids)} rows of tokens for a session of {len(self._ids)}")
        for row in ids:
            check_ids(row, info)
        num_new = max(map(len, ids))
        for row in ids:
            if len(row) != num_new and (start or Ability.PAD not in info.abilities):
                raise SessionError(f"rows of {len(row)} and {num_new} tokens in one call")
        check_context(start, num_new, info)
        logits = at_the_seam(lambda: self._extend(ids, start))
        _check_shape(logits, (len(ids), num_new, info.vocab_size))
        for consumed, row in zip(self._ids, ids, strict=True):
            consumed.extend(row)
        return logits

    @final
    def crop(self, length: int) -> None:
        """Forget all but the first ``length`` tokens."""
        self.subject.require(Ability.CROP)
        if len(set(map(len, self._ids))) > 1:
            raise SessionError("rows of unequal length cannot be cropped to one length")
        if not _is_integer(length) or not 0 <= length <= len(self):
            raise SessionError(f"cannot crop {len(self)} tokens to {length!r}")
        at_the_seam(lambda: self._crop(length))
        self._ids = [row[:length] for row in self._ids]

    @final
    def reorder(self, rows: Sequence[int]) -> None:
        """Let batch row i continue what was row ``rows[i]``; rows may repeat or be left out."""
        self.subject.require(Ability.REORDER)
        _check_list("batch rows", rows)
        for row in rows:
            if not _is_integer(row) or not 0 <= row < len(self._ids):
                raise SessionError(f"no batch row {row!r}: the session has {len(self._ids)}")
        if not rows:
            raise SessionError("a session keeps at least one batch row")
        at_the_seam(lambda: self._reorder(rows))
        self._ids = [list(self._ids[row]) for row in rows]

    @final
    def fork(self, *, tap: Tap = untouched) -> "Session":
        """Return an independent session that continues from this one's state."""
        self.subject.require(Ability.FORK)
        return at_the_seam(lambda: self._fork(tap))

    @final
    def reset(self) -> None:
        """Forget everything."""
        at_the_seam(self._reset)
        self._ids = [[] for _ in self._ids]

    @final
    def cache_tensors(self) -> tuple[Mapping[str, Tensor], ...]:
        """Return each layer's tensors by name; for attention ``k`` and ``v``, (batch, head, slot, head_dim)."""
        self.subject.require(Ability.INSPECT)
        return at_the_seam(self._cache_tensors)

    @abstractmethod
    def _extend(self, ids: Sequence[Sequence[int]], start: int) -> Float[Tensor, "batch new vocab"]: ...

    @abstractmethod
    def _crop(self, length: int) -> None: ...

    @abstractmethod
    def _reorder(self, rows: Sequence[int]) -> None: ...

    @abstractmethod
    def _fork(self, tap: Tap) -> "Session": ...

    @abstractmethod
    def _reset(self) -> None: ...

    @abstractmethod
    def _cache_tensors(self) -> tuple[Mapping[str, Tensor], ...]: ...


def at_the_seam(call: Callable[[], T]) -> T:
    """Run an adapter's call; what is not ours becomes `SubjectError`, with its cause kept."""
    try:
        return call()
    except KvproofError:
        raise
    except Exception as error:
        raise SubjectError(f"the decoder raised {type(error).__name__}: {error}") from error


def check_ids(ids: Sequence[int], info: SubjectInfo) -> None:
    """Raise `TokenError` unless ``ids`` holds at least one token and all lie in the vocabulary."""
    _check_list("token ids", ids)
    if not ids:
        raise TokenError("no token: a prefix holds at least one")
    for token_id in ids:
        if not _is_integer(token_id):
            raise TokenError(f"token id {token_id!r} is a {type(token_id).__name__}, not an integer")
        if not 0 <= token_id < info.vocab_size:
            raise TokenError(f"token id {token_id} is outside the vocabulary 0..{info.vocab_size - 1}")


def _check_list(what: str, value: object) -> None:
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise TokenError(f"{what} must be a list or tuple of integers, not a {type(value).__name__}")


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def check_context(start: int, num_new: int, info: SubjectInfo) -> None:
    """Raise `ContextError` if a token would stand past the last position."""
    if start + num_new > info.context_len:
        raise ContextError(
            f"position {max(start, info.context_len)} is past the context: {info.name} accepts positions "
            f"0..{info.context_len - 1}, {start} tokens are consumed and {num_new} more were given"
        )


def _check_shape(logits: Tensor, expected: tuple[int, ...]) -> None:
    if tuple(logits.shape) != expected:
        raise SubjectError(f"the decoder gave logits of shape {tuple(logits.shape)}, not {expected}")
