"""Decoders whose cache is a value in the caller's code: each call takes a cache and returns the next one."""

import copy
import inspect
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvproof._numerics.dtypes import name_of
from kvproof._numerics.taps import Tap, untouched
from kvproof.errors import MalformedRowError, RefusedError, SubjectError, UsageError
from kvproof.scenarios import Ability
from kvproof.subjects._base import Opening, Session, Subject

#: The context length of a decoder that declares none: more positions than any audit reaches.
NO_END = 2**31 - 1

#: A note names so many parts of a decoder's own state.
_MAX_NAMED = 4

#: Each layer's tensors by name, as `Session.cache_tensors` returns them.
Layers = Sequence[Mapping[str, Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheOps:
    """The operations on a cache besides feeding it. If one is left out, its ability is not declared.

    Each operation takes a cache and returns a cache: the same one, changed, or a new one.
    """

    fork: Callable[[Any], Any] | None = copy.deepcopy  #: return a copy that shares no mutable state
    crop: Callable[[Any, int], Any] | None = None  #: keep the first N tokens
    reorder: Callable[[Any, Sequence[int]], Any] | None = None  #: new row i is old row ``rows[i]``
    show: Callable[[Any], Layers] | None = None  #: return the cache's tensors, by layer and name
    put: Callable[[Any, Layers], Any] | None = None  #: return the cache with its tensors replaced by these
    reset: Callable[[Any], Any] | None = None  #: return the cache emptied, to be filled again; default: a new one
    #: fill the slots that hold no token with large finite garbage; return the cache and how many values that were
    poison: Callable[[Any], tuple[Any, int]] | None = None

    def abilities(self) -> Iterator[Ability]:
        """Yield the abilities that the given operations provide."""
        ops = {
            Ability.FORK: self.fork,
            Ability.CROP: self.crop,
            Ability.REORDER: self.reorder,
            Ability.INSPECT: self.show,
            Ability.EDIT: self.show and self.put,
            Ability.POISON: self.poison,
            Ability.STATIC_CACHE: self.poison,  # what has slots without a token was allocated beforehand
        }
        yield from (ability for ability, operation in ops.items() if operation is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Calls:
    """What a call of a decoder takes and returns."""

    max_block: int | None = None
    last_row: bool = False
    one_session: bool = False

    def __post_init__(self) -> None:
        size = self.max_block
        if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
            raise UsageError(f"max_block must be an integer of at least 1, not {size!r}")


class CacheValueSubject(Subject):
    """A decoder whose cache is a value that the caller's code creates, takes and returns."""

    ops: CacheOps
    _calls = Calls()
    _padding: tuple[int, ...] = ()
    kept: Any = None  #: a `KeptState`, if the decoder keeps state in itself, which each session takes along
    newest: Any = None  #: the session that was opened last

    @property
    def max_block(self) -> int | None:
        """The most tokens that one call takes for each row, as declared."""
        return self._calls.max_block

    @property
    def last_row(self) -> bool:
        """Whether a call returns its last row of logits alone, as declared."""
        return self._calls.last_row

    @property
    def one_session(self) -> bool:
        """Whether sessions cannot run side by side, as declared."""
        return self._calls.one_session

    def notes(self, changes: Sequence[str] = ()) -> Iterator[str]:
        """Yield what a reader must know, and which undeclared state sessions share."""
        yield from super().notes(changes)
        if changes and not self.one_session:
            more = f" and {len(changes) - _MAX_NAMED} more" if len(changes) > _MAX_NAMED else ""
            listed = f"{', '.join(changes[:_MAX_NAMED])}{more}"
            yield f"the decoder keeps something in itself that calls change and all sessions share: {listed}"
            yield "if that is its cache, declare it with state= or one_session=: findings may come from that"

    @property
    def seed(self) -> int | None:
        """None: kvproof did not build the decoder."""
        return None

    def token(self, token_id: int) -> str:
        """Return the id as text."""
        return str(token_id)

    def _session(self, opening: Opening) -> "CacheValueSession":
        cache = self.start(opening.batch)
        session = CacheValueSession(self, [[] for _ in range(opening.batch)], cache, opening.tap)
        self.newest = session
        return session

    def _choose_ids(self, ids: Collection[int] | None, avoid_ids: Collection[int]) -> None:
        """Keep the token ids that the caller chose, once the size of the vocabulary is known."""
        self._padding = tuple(sorted(i for i in self._padding if i < self.info.vocab_size))
        if ids is not None or avoid_ids:
            self._ids = self.with_ids(ids, avoid_ids).token_ids

    @property
    def avoided_ids(self) -> tuple[int, ...]:
        """The padding ids that the decoder's torch modules declare."""
        return self._padding

    def start(self, num_rows: int) -> Any:
        """Return an empty cache for so many rows."""
        return None

    def change(self, cache: Any, operation: Callable[[Any], Any]) -> Any:
        """Return the cache after an operation; state that the decoder keeps in itself is put there, and saved."""
        if self.kept is None:
            changed = operation(cache)
            return cache if changed is None and self.one_session else changed
        self.kept.load(cache)
        operation(self.kept.owner)
        return self.kept.save()

    @abstractmethod
    def step(
        self, old: Sequence[Sequence[int]], new: Sequence[Sequence[int]], cache: Any, tap: Tap
    ) -> tuple[Tensor, Any]:
        """Feed new tokens after old ones; return the logits (batch, new, vocab) that follow, and the cache."""


class CacheValueSession(Session):
    """One cache. A call that raises may leave it partly changed, so it is then rebuilt from the tokens so far."""

    def __init__(self, subject: CacheValueSubject, ids: Sequence[Sequence[int]], cache: Any, tap: Tap) -> None:
        super().__init__(subject, ids)
        self.decoder = subject
        self.cache = cache
        self.tap = tap

    def _extend(self, ids: Sequence[Sequence[int]], start: int) -> Tensor:
        decoder = self.decoder
        if decoder.one_session and decoder.newest is not self:
            raise SubjectError(
                "the decoder holds one session at a time, and another one was opened after this one"
            )
        try:
            logits, self.cache = self._feed(self._ids, ids, self.cache, self.tap)
        except BaseException:
            self.cache = decoder.start(len(ids))
            if start:
                with suppress(Exception):  # what the call itself raised is the finding
                    _, self.cache = self._feed([[] for _ in ids], self._ids, self.cache, untouched)
            raise
        return logits

    def _feed(
        self, old: Sequence[Sequence[int]], new: Sequence[Sequence[int]], cache: Any, tap: Tap
    ) -> tuple[Tensor, Any]:
        """Feed tokens in calls of the largest size that the decoder takes."""
        decoder, num_new = self.decoder, max(map(len, new))
        size = decoder.max_block or num_new
        if num_new <= size:
            logits, cache = self._step(old, new, cache, tap)
            return self._kept(logits, num_new), cache
        if len(set(map(len, new))) > 1:
            raise RefusedError(f"a padded batch of {num_new} tokens is longer than the largest call of {size}")
        parts = []
        for start in range(0, num_new, size):
            before = [[*row, *fed[:start]] for row, fed in zip(old, new, strict=True)]
            logits, cache = self._step(before, [row[start : start + size] for row in new], cache, tap)
            parts.append(self._kept(logits, min(size, num_new - start)))
        return parts[-1] if decoder.last_row else torch.cat(parts, dim=1), cache

    def _step(
        self, old: Sequence[Sequence[int]], new: Sequence[Sequence[int]], cache: Any, tap: Tap
    ) -> tuple[Tensor, Any]:
        kept = self.decoder.kept
        if kept is None:
            return self.decoder.step(old, new, cache, tap)
        kept.load(cache)
        logits, _ = self.decoder.step(old, new, None, tap)
        return logits, kept.save()

    def _kept(self, logits: Tensor, num_new: int) -> Tensor:
        """Return what a call of so many tokens gives, or raise `MalformedRowError` for another number of rows."""
        num_rows = logits.shape[1] if isinstance(logits, Tensor) and logits.ndim == 3 else None
        if num_rows == num_new > 1 and self.decoder.last_row:
            raise MalformedRowError(
                f"the decoder gave {num_rows} rows of logits for {num_new} tokens, and last_row=True means one"
            )
        if num_rows == 1 < num_new and not self.decoder.last_row:
            raise MalformedRowError(
                f"the decoder gave 1 row of logits for {num_new} tokens: if a call returns its last row alone, "
                "pass last_row=True"
            )
        return logits

    def _crop(self, length: int) -> None:
        crop = self.decoder.ops.crop
        assert crop is not None
        if length:
            self.cache = self.decoder.change(self.cache, lambda cache: crop(cache, length))
        else:
            self._empty()

    def _reorder(self, rows: Sequence[int]) -> None:
        reorder = self.decoder.ops.reorder
        assert reorder is not None
        self.cache = self.decoder.change(self.cache, lambda cache: reorder(cache, tuple(rows)))

    def _poison(self) -> int:
        poison, counts = self.decoder.ops.poison, list[int]()
        assert poison is not None

        def change(cache: Any) -> Any:
            cache, num_values = poison(cache)
            counts.append(num_values)
            return cache

        self.cache = self.decoder.change(self.cache, change)
        return counts[0]

    def _empty(self) -> None:
        reset = self.decoder.ops.reset
        if reset is not None:
            self.cache = self.decoder.change(self.cache, reset)
        elif self.decoder.kept is not None:
            raise RefusedError("nothing says how the decoder's own state is emptied: give CacheOps(reset=…)")
        else:
            self.cache = self.decoder.start(len(self._ids))

    def _fork(self, tap: Tap) -> "CacheValueSession":
        assert self.decoder.ops.fork is not None
        return CacheValueSession(self.decoder, self.ids, self.decoder.ops.fork(self.cache), tap)

    def _reset(self) -> None:
        self._empty()

    def _cache_tensors(self) -> tuple[Mapping[str, Tensor], ...]:
        show, kept = self.decoder.ops.show, self.decoder.kept
        assert show is not None
        if kept is None:
            return tuple(show(self.cache))
        kept.load(self.cache)
        # The next call of any session writes into what the decoder shows.
        return tuple({name: value.clone() for name, value in layer.items()} for layer in show(kept.owner))

    def _put_tensors(self, layers: Layers) -> None:
        put = self.decoder.ops.put
        assert put is not None
        self.cache = self.decoder.change(self.cache, lambda cache: put(cache, layers))


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """The columns of one call: the new tokens, and what the cache holds of each row, padded on the left."""

    tokens: list[list[int]]  #: (batch, new)
    real: list[list[int]]  #: (batch, columns): 1 for a token and 0 for the padding before it
    positions: list[list[int]]  #: (batch, new); of padding, 0

    @classmethod
    def of(cls, old: Sequence[Sequence[int]], new: Sequence[Sequence[int]], padding: int) -> "Columns":
        """Return the columns of a call that feeds new tokens after old ones; shorter rows get padding."""
        num_new = max(map(len, new))
        rows = [[*before, *ids] for before, ids in zip(old, new, strict=True)]
        total = max(map(len, rows))
        missing = [total - len(row) for row in rows]
        return cls(
            tokens=[([padding] * num + row)[-num_new:] for num, row in zip(missing, rows, strict=True)],
            real=[[0] * num + [1] * len(row) for num, row in zip(missing, rows, strict=True)],
            positions=[[max(0, at - num) for at in range(total - num_new, total)] for num in missing],
        )


def call_start(start: Callable[..., Any], *arguments: Any) -> Any:
    """Call ``start`` with all the arguments, or without the number of rows, the last one, if it takes none."""
    try:
        parameters = inspect.signature(start).parameters.values()
    except (TypeError, ValueError):  # a builtin may not say
        return start(*arguments[:-1])
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    # A parameter with a default is something else, unless it is called so.
    taken = [p for p in parameters if p.kind in positional and (p.default is p.empty or p.name == "rows")]
    return start(*arguments) if len(taken) >= len(arguments) else start(*arguments[:-1])


def keywords(given: Mapping[str, Any], without: Collection[str]) -> dict[str, Any]:
    """Return the keyword arguments with which a subject was made, to make its cast twin with them."""
    return {name: value for name, value in given.items() if name not in (*without, "self", "__class__")}


def row_abilities(batch: bool, padded: bool) -> Iterator[Ability]:
    """Yield the abilities of a decoder that holds several rows, of unequal length if ``padded``."""
    yield from ((Ability.BATCH, *((Ability.PAD,) if padded else ())) if batch else ())


def without_fork(ops: CacheOps) -> CacheOps:
    """Return the same operations for a decoder that holds one session at a time."""
    return replace(ops, fork=None)


def check_context_len(context_len: object) -> None:
    """Raise `UsageError` unless a declared number of positions is an integer of at least 1."""
    if not isinstance(context_len, int) or isinstance(context_len, bool) or context_len < 1:
        raise UsageError(f"context_len must be an integer of at least 1, not {context_len!r}")


def require_dtype(given: str, wanted: torch.dtype, what: str) -> None:
    """Raise `SubjectError` if a cast decoder's logits are not in the dtype that it was cast to."""
    if given != name_of(wanted):
        raise SubjectError(
            f"{what} to {name_of(wanted)} gave a decoder whose logits are {given}: something in it is not cast"
        )


def as_tensor(value: Any, what: str) -> Tensor:
    """Return a copy of an array as a tensor: of a torch tensor, a NumPy array or anything that supports DLPack.

    It is a copy because a decoder may write its next result into the same memory. Raises `MalformedRowError` for
    anything else, and for values that are not floating-point numbers.
    """
    tensor = _convert(value, what)
    if not tensor.is_floating_point():
        raise MalformedRowError(f"{what} hold {tensor.dtype}{_shape_of(tensor)}, not floating-point numbers")
    if tensor.dtype.itemsize < 2:  # torch computes nothing in such a dtype, not even a maximum
        raise MalformedRowError(f"{what} hold {tensor.dtype}{_shape_of(tensor)}: cast them to a wider dtype")
    return tensor.detach().clone()


def _convert(value: Any, what: str) -> Tensor:
    if isinstance(value, Tensor):
        return value
    if not hasattr(value, "__dlpack__"):
        raise MalformedRowError(
            f"{what} are a {type(value).__name__}: give a torch tensor, a NumPy array or one that supports DLPack"
        )
    try:
        return torch.utils.dlpack.from_dlpack(value)
    except (BufferError, TypeError, ValueError, RuntimeError):  # a read-only array, or one that holds no numbers
        array = np.array(value)
    if not np.issubdtype(array.dtype, np.floating):
        raise MalformedRowError(f"{what} hold {array.dtype}{_shape_of(array)}, not floating-point numbers")
    if array.dtype.itemsize > 8:
        raise MalformedRowError(f"{what} hold {array.dtype}{_shape_of(array)}: torch has no such dtype")
    return torch.from_numpy(array.astype(array.dtype.newbyteorder("=")))


def _shape_of(array: Any) -> str:
    return f" of shape {tuple(array.shape)}"
