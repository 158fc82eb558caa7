"""The adapter for a decoder that consists of two functions, in any framework."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
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
from kvproof.scenarios import Ability, Boundaries
from kvproof.subjects._cache_values import (
    NO_END,
    CacheOps,
    CacheValueSubject,
    Calls,
    Columns,
    as_tensor,
    call_start,
    check_context_len,
    keywords,
    require_dtype,
    row_abilities,
    without_fork,
)
from kvproof.subjects._decoder_calls import wrap_errors
from kvproof.subjects._kept_state import KeptState
from kvproof.subjects._module_state import modules_behind, random_parts, state_of_function
from kvproof.subjects._token_ids import declared_padding, first_id

#: ``full(ids)``: logits (seq, vocab) after each of the tokens, or (vocab,) after the last; ``ids`` is an int64
#: NumPy array (seq,).
Full = Callable[[Any], Any]
#: ``step(ids, cache)``: logits (new, vocab), or (vocab,) for a single token, and the cache for the next call.
Step = Callable[..., tuple[Any, Any]]
#: ``first(ids)``: what ``step`` returns, in the first call of a session.
First = Callable[..., tuple[Any, Any]]


class CallableSubject(CacheValueSubject):
    """A decoder whose uncached path is ``full(ids)`` and whose cached path is ``step(ids, cache)``.

    ``ids`` is a NumPy array (new,) of int64. The first call of a session gets None as its cache, and each later
    call gets the cache that the previous one returned. Logits can be torch tensors, NumPy arrays or anything that
    supports DLPack. The size of the vocabulary and the declared dtype are taken from one call of ``full``.
    """

    def __init__(
        self,
        full: Full,
        step: Step,
        *,
        name: str | None = None,
        context_len: int = NO_END,
        ops: CacheOps = CacheOps(),  # noqa: B008 - it is frozen
        cast: Callable[[str], tuple[Any, ...]] | None = None,
        true_float64: bool = False,
        ids: Collection[int] | None = None,
        avoid_ids: Collection[int] = (),
        first: First | None = None,
        start: Callable[..., Any] | None = None,
        state: tuple[Callable[[], Any], Callable[[Any], None]] | None = None,
        windows: Sequence[int] = (),
        batch: bool = False,
        positions: str | None = None,
        mask: str | None = None,
        lengths: str | None = None,
        max_block: int | None = None,
        last_row: bool = False,
        one_session: bool = False,
    ) -> None:
        """Wrap two functions.

        ``context_len`` is the number of positions, if it is limited. ``ops`` holds the operations on a cache
        besides stepping; the default only makes deep copies. ``cast(dtype)`` returns both functions in another
        dtype, such as ``"float64"``, and after them a dict with ``first``, ``start`` and ``state``,
        if given here. Without it, only noise can separate rounding from bugs. Functions that return float64, or
        are said to compute in it by ``true_float64``, do so where they ask torch for less.

        ``ids`` are the only token ids to feed, and ``avoid_ids`` are never fed, such as the padding token's. By
        default every id is fed, except padding that a torch module inside the functions declares.

        ``first(ids)`` takes the place of ``step`` in the first call of a session, and ``start()``, or
        ``start(rows)``, makes the cache that the first call gets. ``state`` is for functions that keep the cache
        in an object of theirs: ``save()`` returns a copy of it, and ``load(copy)`` puts one back, so that each
        session has its own. If it cannot be copied, ``one_session`` says that sessions do not run side by side.

        With ``batch``, ``step`` gets ids (batch, new) and returns logits (batch, new, vocab). ``positions`` and
        ``mask`` are the names under which it takes the positions of the new tokens, of the shape of the ids, and
        a mask (batch, seq), or (seq,), of 1 for a token and 0 for the padding before it. With ``batch`` and
        ``mask``, sessions start with rows of unequal length. With ``lengths``, the name under which ``step``
        takes how many tokens each row holds after the call, (batch,), shorter rows are padded on the right
        instead. ``windows`` are the lengths of sliding windows. ``max_block`` is the largest number of tokens
        that a call of ``step`` takes: longer calls are split. With ``last_row`` a call returns the logits after
        its last token alone, and only these are compared.

        Raises `UsageError` for an argument that is not callable or a token id outside the vocabulary, and
        `SubjectError` if ``full`` raises or does not return logits.
        """
        self._given = keywords(locals(), without=("full", "step", "name", "true_float64", "ids", "avoid_ids"))
        for label, function in (("full", full), ("step", step), ("first", first), ("start", start)):
            if not callable(function) and (function is not None or label in ("full", "step")):
                raise UsageError(f"{label} must be a function, not a {type(function).__name__}")
        check_context_len(context_len)
        self.full, self._step, self._cast_to, self._first, self._start = full, step, cast, first, start
        self.ops = without_fork(ops) if one_session else ops
        self.kept = None if state is None else KeptState(None, *state)
        self._empty_state = None if self.kept is None else self.kept.save()
        self._batch, self._names = batch, {"positions": positions, "mask": mask, "lengths": lengths}
        self._calls = Calls(max_block=max_block, last_row=last_row, one_session=one_session)
        self._boundaries = Boundaries(context_len=context_len, windows=tuple(windows))
        self._true_float64 = true_float64
        modules = {id(m): m for f in (full, step) for _, m in modules_behind(f)}.values()
        self._padding = tuple({i for module in modules for i in declared_padding(module)})
        tried = first_id(ids, (*self._padding, *avoid_ids))
        row = wrap_errors(lambda: self._kept_rows([tried], untouched, range(1)))
        self._true_float64 |= row.dtype is torch.float64
        self._info = SubjectInfo(
            name=name or str(getattr(full, "__qualname__", type(full).__name__)),
            digest="unknown",
            mode="eval",
            dtype=name_of(row.dtype),
            num_layers=0,
            vocab_size=row.shape[-1],
            context_len=context_len,
            abilities=(
                Ability.TAP,
                *((Ability.CAST,) if cast else ()),
                *row_abilities(batch, mask is not None or lengths is not None),
                *self.ops.abilities(),
            ),
        )
        self._choose_ids(ids, avoid_ids)

    @property
    def info(self) -> SubjectInfo:
        """The subject's description and abilities; kvproof cannot see its weights or layers."""
        return self._info

    @property
    def boundaries(self) -> Boundaries:
        """The declared context and windows."""
        return self._boundaries

    def start(self, num_rows: int) -> Any:
        """Return an empty cache, or None if the first call makes its own."""
        if self.kept is not None:
            self.kept.load(self._empty_state)
        made = None if self._start is None else call_start(self._start, num_rows)
        return made if self.kept is None else self.kept.save()

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
        """Feed new tokens; shorter rows are padded on the left."""
        columns = Columns.of(old, new, self._padding[0] if self._padding else 0)
        given = {"positions": np.array(columns.positions), "mask": np.array(columns.real)}
        given["lengths"] = given["mask"].sum(axis=1)
        tokens = _shown(columns.tokens, tap)
        pads = [max(map(len, new)) - len(ids) if self._names["lengths"] else 0 for ids in new]
        if self._names["lengths"]:
            given["mask"] = -np.sort(-given["mask"], axis=1)
            given["positions"] = _shift(given["positions"], pads)
            tokens = _shift(tokens, pads)
        named = {str(name): given[key] for key, name in self._names.items() if name is not None}
        if not self._batch:
            tokens, named = tokens[0], {name: value[0] for name, value in named.items()}
        with self._mode():
            if self._first is not None and not any(old):
                returned = self._first(tokens, **named)
            else:
                returned = self._step(tokens, cache, **named)
        if not isinstance(returned, tuple) or len(returned) != 2:
            raise MalformedRowError(
                f"step(ids, cache) must return (logits, cache), not a {type(returned).__name__}"
            )
        logits, num_new = as_tensor(returned[0], "the logits"), max(map(len, new))
        if self._batch:
            logits = logits[:, None] if logits.dim() == 2 else logits
        else:
            logits = self._logits(logits, num_new)
            if len(logits) not in (1, num_new):
                raise MalformedRowError(f"step() gave {len(logits)} rows of logits for {num_new} tokens")
            logits = logits[None]
        if logits.dim() != 3:
            raise MalformedRowError(f"logits of shape {tuple(logits.shape)}: they are (batch, token, vocab)")
        if any(pads) and logits.shape[1] > 1:  # the interface aligns rows at their last token
            logits = torch.stack([row.roll(pad, dims=0) for row, pad in zip(logits, pads, strict=True)])
        return logits, returned[1]

    def _rows(self, ids: Sequence[int], tap: Tap) -> Tensor:
        return self._kept_rows(ids, tap, range(len(ids)))

    def _kept_rows(self, ids: Sequence[int], tap: Tap, keep: range) -> Tensor:
        """Return rows from one call, or from one call per row if a call returns only its last row."""
        with self._mode():
            rows = self._logits(self.full(_shown([ids], tap)[0]), len(ids))
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
        full, step, *more = self._cast_to(name)
        also = more[0] if more else {}
        for label in ("first", "start", "state"):
            if self._given[label] is not None and label not in also:
                raise UsageError(
                    f"cast= must return (full, step, {{{label!r}: …}}): {label}= has a dtype of its own, too"
                )
        given = {**self._given, **also}
        own = self.info
        cast = CallableSubject(
            full,
            step,
            name=own.name,
            true_float64=dtype is torch.float64,
            ids=self.token_ids.ids,
            **given,
        )
        require_dtype(cast.info.dtype, dtype, "casting the functions")
        return cast


def _shift(values: np.ndarray, places: Sequence[int]) -> np.ndarray:
    """Return each row moved to the left by so many places, with what falls off at its end."""
    return np.stack([np.roll(row, -num) for row, num in zip(values, places, strict=True)])


def _shown(ids: Sequence[Sequence[int]], tap: Tap) -> np.ndarray:
    """Return tokens as an array, after the tap sees them: no other value inside the two functions is visible."""
    tokens = np.array(ids, dtype=np.int64)
    if tap is not untouched:
        tokens = tap(Site(Stage.TOKEN), torch.from_numpy(tokens)).numpy()
    return tokens
