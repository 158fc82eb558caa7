"""What decoders that people bring have in common: a cache that is a value of theirs, and what it can do."""

import copy
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvproof._numerics.taps import Tap, untouched
from kvproof.errors import SubjectError
from kvproof.scenarios import Ability
from kvproof.subjects._base import Opening, Session, Subject

#: Where no end of the context is declared: more positions than any audit reaches.
NO_END = 2**31 - 1

#: Each layer's tensors by name, as `Session.cache_tensors` says.
Layers = Sequence[Mapping[str, Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheWays:
    """What can be done with a cache beside feeding it; what is left out is an ability that is not declared.

    Each takes a cache and returns one: the same, changed, or another.
    """

    fork: Callable[[Any], Any] | None = copy.deepcopy  #: one that shares nothing that either may change
    crop: Callable[[Any, int], Any] | None = None  #: of the first so many tokens
    reorder: Callable[[Any, Sequence[int]], Any] | None = None  #: row i is what was ``rows[i]``
    show: Callable[[Any], Layers] | None = None  #: its tensors, by layer and name
    put: Callable[[Any, Layers], Any] | None = None  #: with such tensors in place of its own

    def abilities(self) -> Iterator[Ability]:
        """Yield what follows from the ways that are there."""
        ways = {
            Ability.FORK: self.fork,
            Ability.CROP: self.crop,
            Ability.REORDER: self.reorder,
            Ability.INSPECT: self.show,
            Ability.EDIT: self.show and self.put,
        }
        yield from (ability for ability, way in ways.items() if way is not None)


class GivenSubject(Subject):
    """A decoder that someone brought, with what its cache can do."""

    ways: CacheWays

    @property
    def seed(self) -> int | None:
        """None: whoever brought it knows how to make it again."""
        return None

    def token(self, token_id: int) -> str:
        """Return the id itself."""
        return str(token_id)

    def _session(self, opening: Opening) -> "GivenSession":
        return GivenSession(self, [[] for _ in range(opening.batch)], self.start(), opening.tap)

    def start(self) -> Any:
        """Return an empty cache."""
        return None

    @abstractmethod
    def step(
        self, old: Sequence[Sequence[int]], new: Sequence[Sequence[int]], cache: Any, tap: Tap
    ) -> tuple[Tensor, Any]:
        """Feed new tokens after old ones; return the logits (batch, new, vocab) that follow, and the cache."""


class GivenSession(Session):
    """One cache. A call that raises may leave it half-changed, so it is filled anew."""

    def __init__(self, subject: GivenSubject, ids: Sequence[Sequence[int]], cache: Any, tap: Tap) -> None:
        super().__init__(subject, ids)
        self.given = subject
        self.cache = cache
        self.tap = tap

    def _extend(self, ids: Sequence[Sequence[int]], start: int) -> Tensor:
        try:
            logits, self.cache = self.given.step(self._ids, ids, self.cache, self.tap)
        except BaseException:
            self.cache = self.given.start()
            if start:
                _, self.cache = self.given.step([[] for _ in ids], self._ids, self.cache, untouched)
            raise
        return logits

    def _crop(self, length: int) -> None:
        assert self.given.ways.crop is not None
        self.cache = self.given.ways.crop(self.cache, length) if length else self.given.start()

    def _reorder(self, rows: Sequence[int]) -> None:
        assert self.given.ways.reorder is not None
        self.cache = self.given.ways.reorder(self.cache, tuple(rows))

    def _fork(self, tap: Tap) -> "GivenSession":
        assert self.given.ways.fork is not None
        return GivenSession(self.given, self.ids, self.given.ways.fork(self.cache), tap)

    def _reset(self) -> None:
        self.cache = self.given.start()

    def _cache_tensors(self) -> tuple[Mapping[str, Tensor], ...]:
        assert self.given.ways.show is not None
        return tuple(self.given.ways.show(self.cache))

    def _put_tensors(self, layers: Layers) -> None:
        assert self.given.ways.put is not None
        self.cache = self.given.ways.put(self.cache, layers)


def as_tensor(value: Any, what: str) -> Tensor:
    """Return an array of any framework as a tensor: a torch tensor, NumPy's, or what speaks DLPack.

    Raises `SubjectError` for anything else, and for values that are no floating-point numbers.
    """
    tensor = _converted(value, what).detach()
    if not tensor.is_floating_point():
        raise SubjectError(f"{what} hold {tensor.dtype}, no floating-point numbers")
    return tensor


def _converted(value: Any, what: str) -> Tensor:
    if isinstance(value, Tensor):
        return value
    if not hasattr(value, "__dlpack__"):
        raise SubjectError(
            f"{what} are a {type(value).__name__}: give a torch tensor, a NumPy array or what speaks DLPack"
        )
    try:
        return torch.utils.dlpack.from_dlpack(value)
    except BufferError:  # an array that must not be written to is not lent, so it is copied
        return torch.from_numpy(np.array(value))
