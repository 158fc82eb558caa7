"""Decoders whose cache is a value in the caller's code: each call takes a cache and returns the next one."""

import copy
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvproof._numerics.dtypes import name_of
from kvproof._numerics.taps import Tap, untouched
from kvproof.errors import MalformedRowError, SubjectError, UsageError
from kvproof.scenarios import Ability
from kvproof.subjects._base import Opening, Session, Subject

#: The context length of a decoder that declares none: more positions than any audit reaches.
NO_END = 2**31 - 1

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

    def abilities(self) -> Iterator[Ability]:
        """Yield the abilities that the given operations provide."""
        ops = {
            Ability.FORK: self.fork,
            Ability.CROP: self.crop,
            Ability.REORDER: self.reorder,
            Ability.INSPECT: self.show,
            Ability.EDIT: self.show and self.put,
        }
        yield from (ability for ability, operation in ops.items() if operation is not None)


class CacheValueSubject(Subject):
    """A decoder whose cache is a value that the caller's code creates, takes and returns."""

    ops: CacheOps

    @property
    def seed(self) -> int | None:
        """None: kvproof did not build the decoder."""
        return None

    def token(self, token_id: int) -> str:
        """Return the id as text."""
        return str(token_id)

    def _session(self, opening: Opening) -> "CacheValueSession":
        return CacheValueSession(self, [[] for _ in range(opening.batch)], self.start(), opening.tap)

    def start(self) -> Any:
        """Return an empty cache."""
        return None

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
        try:
            logits, self.cache = self.decoder.step(self._ids, ids, self.cache, self.tap)
        except BaseException:
            self.cache = self.decoder.start()
            if start:
                with suppress(Exception):  # what the call itself raised is the finding
                    _, self.cache = self.decoder.step([[] for _ in ids], self._ids, self.cache, untouched)
            raise
        return logits

    def _crop(self, length: int) -> None:
        assert self.decoder.ops.crop is not None
        self.cache = self.decoder.ops.crop(self.cache, length) if length else self.decoder.start()

    def _reorder(self, rows: Sequence[int]) -> None:
        assert self.decoder.ops.reorder is not None
        self.cache = self.decoder.ops.reorder(self.cache, tuple(rows))

    def _fork(self, tap: Tap) -> "CacheValueSession":
        assert self.decoder.ops.fork is not None
        return CacheValueSession(self.decoder, self.ids, self.decoder.ops.fork(self.cache), tap)

    def _reset(self) -> None:
        self.cache = self.decoder.start()

    def _cache_tensors(self) -> tuple[Mapping[str, Tensor], ...]:
        assert self.decoder.ops.show is not None
        return tuple(self.decoder.ops.show(self.cache))

    def _put_tensors(self, layers: Layers) -> None:
        assert self.decoder.ops.put is not None
        self.cache = self.decoder.ops.put(self.cache, layers)


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
