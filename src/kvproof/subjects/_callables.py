"""The adapter for a decoder that consists of two functions, in any framework."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvproof._numerics.dtypes import name_of
from kvproof._numerics.taps import Tap, untouched
from kvproof._numerics.true_float64 import TrueFloat64
from kvproof.contract.results import SubjectInfo
from kvproof.contract.stages import Site, Stage
from kvproof.errors import MalformedRowError, UsageError
from kvproof.scenarios import Ability
from kvproof.subjects._cache_values import (
    NO_END,
    CacheOps,
    CacheValueSubject,
    as_tensor,
    check_context_len,
    require_dtype,
)
from kvproof.subjects._decoder_calls import wrap_errors
from kvproof.subjects._module_state import modules_behind, random_parts, state_of_function

#: ``full(ids)``: logits (seq, vocab) after each of the tokens, or (vocab,) after the last; ``ids`` is an int64
#: NumPy array (seq,).
Full = Callable[[Any], Any]
#: ``step(ids, cache)``: logits (new, vocab), or (vocab,) for a single token, and the cache for the next call.
Step = Callable[[Any, Any], tuple[Any, Any]]


class CallableSubject(CacheValueSubject):
    """A decoder whose uncached path is ``full(ids)`` and whose cached path is ``step(ids, cache)``.

    ``ids`` is a NumPy array (new,) of int64. The first call of a session gets None as its cache, and each later
    call gets the cache that the previous one returned. Logits can be torch tensors, NumPy arrays or anything that
    supports DLPack. The size of the vocabulary and the declared dtype are taken from ``full([0])``.
    """

    def __init__(
        self,
        full: Full,
        step: Step,
        *,
        name: str | None = None,
        context_len: int = NO_END,
        ops: CacheOps = CacheOps(),  # noqa: B008 - it is frozen
        cast: Callable[[str], tuple[Full, Step]] | None = None,
        true_float64: bool = False,
    ) -> None:
        """Wrap two functions.

        ``context_len`` is the number of positions, if it is limited. ``ops`` holds the operations on a cache
        besides stepping; the default only makes deep copies. ``cast(dtype)`` returns both functions in another
        dtype, such as ``"float64"``. Without it, only noise can separate rounding from bugs. Functions that
        return float64, or are said to compute in it by ``true_float64``, do so where they ask torch for less.

        Raises `UsageError` for an argument that is not callable, and `SubjectError` if ``full`` raises or does
        not return logits.
        """
        for label, function in (("full", full), ("step", step)):
            if not callable(function):
                raise UsageError(f"{label} must be a function, not a {type(function).__name__}")
        check_context_len(context_len)
        self.full, self._step, self._cast_to = full, step, cast
        self.ops = ops
        self._true_float64 = true_float64
        row = wrap_errors(lambda: self._kept_rows([0], untouched, range(1)))
        self._true_float64 |= row.dtype is torch.float64
        self._info = SubjectInfo(
            name=name or str(getattr(full, "__qualname__", type(full).__name__)),
            digest="unknown",
            mode="eval",
            dtype=name_of(row.dtype),
            num_layers=0,
            vocab_size=row.shape[-1],
            context_len=context_len,
            abilities=(Ability.TAP, *((Ability.CAST,) if cast else ()), *ops.abilities()),
        )

    @property
    def info(self) -> SubjectInfo:
        """The subject's description and abilities; kvproof cannot see its weights or layers."""
        return self._info

    def state(self) -> Mapping[str, object]:
        """What the two functions hold: in closures, in their own object, and in modules there."""
        return state_of_function(self.full) | state_of_function(self._step)

    def random_parts(self) -> Iterator[str]:
        """Yield training mode, and dropout given as a number, of modules that the functions hold."""
        modules = {id(m): m for f in (self.full, self._step) for _, m in modules_behind(f)}
        for module in modules.values():
            yield from random_parts(module)

    def step(
        self, old: Sequence[Sequence[int]], new: Sequence[Sequence[int]], cache: Any, tap: Tap
    ) -> tuple[Tensor, Any]:
        """Feed the new tokens of the single row."""
        with self._mode():
            returned = self._step(_shown(new[0], tap), cache)
        if not isinstance(returned, tuple) or len(returned) != 2:
            raise MalformedRowError(
                f"step(ids, cache) must return (logits, cache), not a {type(returned).__name__}"
            )
        logits = self._logits(returned[0], len(new[0]))
        if len(logits) != len(new[0]):
            raise MalformedRowError(f"step() gave {len(logits)} rows of logits for {len(new[0])} tokens")
        return logits[None], returned[1]

    def _rows(self, ids: Sequence[int], tap: Tap) -> Tensor:
        return self._kept_rows(ids, tap, range(len(ids)))

    def _kept_rows(self, ids: Sequence[int], tap: Tap, keep: range) -> Tensor:
        """Return rows from one call, or from one call per row if a call returns only its last row."""
        with self._mode():
            rows = self._logits(self.full(_shown(ids, tap)), len(ids))
        if len(rows) == len(ids):
            return rows[keep.start : keep.stop]
        if len(rows) != 1:
            raise MalformedRowError(f"full() gave {len(rows)} rows of logits for {len(ids)} tokens")
        with self._mode():
            each = (self.full(np.array(ids[: position + 1], dtype=np.int64)) for position in keep)
            return torch.cat([self._logits(row, 1) for row in each])

    def _mode(self) -> AbstractContextManager[object]:
        """Return what the two functions run in."""
        return TrueFloat64() if self._true_float64 else nullcontext()

    def _logits(self, value: Any, num_new: int) -> Tensor:
        """Return logits as (row, vocab), with at least one row."""
        logits = as_tensor(value, "the logits")
        if logits.dim() == 3 and len(logits) == 1:
            logits = logits[0]
        if logits.dim() == 1:
            logits = logits[None]
        if logits.dim() != 2:
            raise MalformedRowError(
                f"logits of shape {tuple(logits.shape)} after {num_new} tokens: they are (token, vocab), or "
                "(vocab,) of the last token"
            )
        return logits

    def _cast(self, dtype: torch.dtype) -> "CallableSubject":
        assert self._cast_to is not None
        name = name_of(dtype)
        full, step = self._cast_to(name)
        own = self.info
        cast = CallableSubject(
            full,
            step,
            name=own.name,
            context_len=own.context_len,
            ops=self.ops,
            cast=self._cast_to,
            true_float64=dtype is torch.float64,
        )
        require_dtype(cast.info.dtype, dtype, "casting the functions")
        return cast


def _shown(ids: Sequence[int], tap: Tap) -> np.ndarray:
    """Return tokens as an array, after the tap sees them: no other value inside the two functions is visible."""
    tokens = np.array(ids, dtype=np.int64)
    if tap is not untouched:
        tokens = tap(Site(Stage.TOKEN), torch.from_numpy(tokens)[None])[0].numpy()
    return tokens
