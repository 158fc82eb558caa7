"""The adapter for any torch module."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from kvproof._numerics.casting import cast_module
from kvproof._numerics.digests import weights_digest
from kvproof._numerics.dtypes import name_of
from kvproof._numerics.taps import Tap, untouched
from kvproof._numerics.true_float64 import TrueFloat64
from kvproof.contract.results import SubjectInfo
from kvproof.contract.stages import Site, Stage
from kvproof.errors import MalformedRowError, SubjectError, UsageError
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
from kvproof.subjects._module_state import random_parts, state_of_module
from kvproof.subjects._taps import describe_compiled, layer_of, tapped
from kvproof.subjects._token_ids import declared_padding, first_id


class ModuleSubject(CacheValueSubject):
    """A torch module, called as ``module(ids, cache=…)`` with the module's own argument names.

    ``ids`` is (batch, new) of int64 and is the first argument. A call without a cache is the uncached path and
    returns the logits (batch, seq, vocab) of every position. A call with a cache returns the logits of the new
    tokens and the cache: as a tuple of both; as an object with ``.logits`` and an attribute named by
    ``new_cache``; or as the logits alone if the cache changes in place, which requires ``start``. The module is
    put into evaluation mode.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        cache: str | None = None,
        positions: str | None = None,
        mask: str | None = None,
        new_cache: str | None = None,
        cached_options: Mapping[str, Any] | None = None,
        uncached_options: Mapping[str, Any] | None = None,
        name: str | None = None,
        context_len: int = NO_END,
        windows: Sequence[int] = (),
        batch: bool = True,
        start: Callable[..., Any] | None = None,
        ops: CacheOps = CacheOps(),  # noqa: B008 - it is frozen
        true_float64: bool = False,
        ids: Sequence[int] | None = None,
        avoid_ids: Sequence[int] = (),
        first_options: Mapping[str, Any] | None = None,
        state: Sequence[str] = (),
        padding: bool | None = None,
        max_block: int | None = None,
        last_row: bool = False,
        one_session: bool = False,
        cast: Callable[[str], nn.Module] | None = None,
    ) -> None:
        """Wrap a module.

        ``cache``, ``positions`` and ``mask`` are the module's own names for these arguments; an argument without
        a name is not passed. Positions are (batch, new). The mask is (batch, seq): 1 for a token and 0 for the
        padding before it. ``cached_options`` and ``uncached_options`` are passed to each call of that path, such
        as ``{"use_cache": True}``. ``context_len`` is the number of positions, and ``windows`` are the lengths of
        sliding windows, if there are any; the audit chooses lengths around them. With ``batch``, sessions can
        hold several rows. ``start(module)``, or ``start(module, rows)``, returns an empty cache in the module's
        own dtype; without it the first call gets None. ``ops`` holds the operations on a cache besides feeding
        it. A module whose weights are float64, or that is said to be by ``true_float64``, computes
        in float64 where its code asks for less.

        ``ids`` are the only token ids to feed, and ``avoid_ids`` are never fed. By default every id is fed except
        the padding that the module declares: ``padding_idx`` of an embedding, or ``config.pad_token_id``. Shorter
        rows are filled up with that token, or with id 0.

        ``state`` names the buffers and attributes in which the module itself keeps its cache, such as
        ``("layers.*.k", "length")``: kvproof saves them after each call and puts them back before the session's
        next one, so that each session has its own. The operations in ``ops`` then get the module. A module whose
        state cannot be copied is declared with ``one_session``: sessions do not run side by side. ``padding``
        says whether sessions start with rows of unequal length; by default they do if ``positions`` and ``mask``
        are named. ``first_options`` take the place of ``cached_options`` in the first call of a session.
        ``max_block`` is the largest number of tokens that a call with a cache takes: longer calls are split. With
        ``last_row`` such a call returns the logits after its last token alone, and only these are compared.
        ``cast(dtype)`` returns the module in another dtype, such as ``"float64"``; by default that is a deep copy
        with every tensor cast.

        Raises `UsageError` for a name that the module's ``forward`` does not accept or a token id outside the
        vocabulary, and `SubjectError` if a first call raises or does not return logits.
        """
        self._given = keywords(locals(), without=("module", "name", "true_float64", "ids", "avoid_ids"))
        check_context_len(context_len)
        names = {"cache": cache, "positions": positions, "mask": mask}
        _check_names(module, {label: given for label, given in names.items() if given is not None})
        self.module = module.eval().requires_grad_(False)
        self.names = names
        self.new_cache = new_cache
        self.options = {True: dict(cached_options or {}), False: dict(uncached_options or {})}
        self._first_options = dict(first_options) if first_options is not None else self.options[True]
        self.ops = without_fork(ops) if one_session else ops
        self._start, self._cast_to, self._has_state = start, cast, bool(state) or one_session
        self.kept = KeptState.of_module(module, state) if state else None
        self._empty_state = None if self.kept is None else self.kept.save()
        self._calls = Calls(max_block=max_block, last_row=last_row, one_session=one_session)
        self._boundaries = Boundaries(context_len=context_len, windows=tuple(windows))
        tensors = (*module.parameters(), *module.buffers())
        self.device = tensors[0].device if tensors else torch.device("cpu")
        self._true_float64 = true_float64 or any(tensor.dtype is torch.float64 for tensor in tensors)
        self._padding = declared_padding(module)
        tried = first_id(ids, (*self._padding, *avoid_ids))
        row = wrap_errors(lambda: self._rows([tried], untouched))
        padded = (positions is not None and mask is not None) if padding is None else padding
        self._info = SubjectInfo(
            name=name or type(module).__name__,
            digest=weights_digest(module),
            mode="eval",
            dtype=name_of(row.dtype),
            num_layers=_num_layers(module),
            vocab_size=row.shape[-1],
            context_len=context_len,
            abilities=(Ability.CAST, Ability.TAP, *row_abilities(batch, padded), *self.ops.abilities()),
        )
        self._choose_ids(ids, avoid_ids)

    @property
    def info(self) -> SubjectInfo:
        """The subject's description and abilities."""
        return self._info

    @property
    def boundaries(self) -> Boundaries:
        """The declared context and windows."""
        return self._boundaries

    def state(self) -> Mapping[str, object]:
        """The module's tensors and plain attributes."""
        known = frozenset() if self.kept is None else self.kept.names
        return {name: mark for name, mark in state_of_module(self.module).items() if name not in known}

    def random_parts(self) -> Iterator[str]:
        """Yield training mode, and dropout given as a number."""
        yield from random_parts(self.module)

    def limitations(self) -> Iterator[str]:
        """Say if the module is compiled: its values are then looked at without the compiler."""
        yield from describe_compiled(self.module)

    @property
    def root_module(self) -> nn.Module:
        """The module."""
        return self.module

    def start(self, num_rows: int) -> Any:
        """Return an empty cache, or None if the module creates its own."""
        if self.kept is not None:
            self.kept.load(self._empty_state)
        made = None
        if self._start is not None:
            with ExitStack() as stack:
                self._enter(stack)
                made = call_start(self._start, self.module, num_rows)
        if self.kept is not None:
            return self.kept.save()
        return self.module if made is None and self.one_session else made

    def _enter(self, stack: ExitStack) -> None:
        """Enter what the module's own code runs in."""
        stack.enter_context(torch.no_grad())
        if self._true_float64:
            stack.enter_context(TrueFloat64())

    def step(
        self, old: Sequence[Sequence[int]], new: Sequence[Sequence[int]], cache: Any, tap: Tap
    ) -> tuple[Tensor, Any]:
        """Feed new tokens; shorter rows are padded on the left."""
        columns = Columns.of(old, new, self._padding[0] if self._padding else 0)
        arguments = {
            "cache": cache,
            "positions": self._tensor(columns.positions),
            "mask": self._tensor(columns.real),
        }
        options = self.options[True] if any(old) else self._first_options
        output = self._call(tap, self._tensor(columns.tokens), arguments, options)
        return self._read(output, cache)

    def _rows(self, ids: Sequence[int], tap: Tap) -> Tensor:
        return self._kept_rows(ids, tap, range(len(ids)))

    def _kept_rows(self, ids: Sequence[int], tap: Tap, keep: range) -> Tensor:
        """Return rows from one call, or from one call per row if a call returns only its last row."""
        rows = self._uncached(ids, tap)
        if len(rows) == len(ids):
            return rows[keep.start : keep.stop]
        if len(rows) != 1:
            raise MalformedRowError(f"the module gave {len(rows)} rows of logits for {len(ids)} tokens")
        return torch.cat([self._uncached(ids[: position + 1], untouched)[-1:] for position in keep])

    def _uncached(self, ids: Sequence[int], tap: Tap) -> Tensor:
        positions = torch.arange(len(ids), device=self.device)[None]
        output = self._call(tap, self._tensor([list(ids)]), {"positions": positions}, self.options[False])
        return _logits(output)[0]

    def _call(self, tap: Tap, tokens: Tensor, arguments: dict[str, Any], options: Mapping[str, Any]) -> Any:
        named = {str(self.names[key]): value for key, value in arguments.items() if self.names[key] is not None}
        with ExitStack() as stack:
            self._enter(stack)
            if tap is not untouched:
                tokens = tap(Site(Stage.TOKEN), tokens)
                for stage, key in ((Stage.POSITION, "positions"), (Stage.MASK, "mask")):
                    if key in arguments and self.names[key] is not None:
                        named[str(self.names[key])] = tap(Site(stage), arguments[key])
                stack.enter_context(tapped(self.module, tap, (tokens.shape[0], tokens.shape[1])))
            return self.module(tokens, **named, **options)

    def _read(self, output: Any, cache: Any) -> tuple[Tensor, Any]:
        """Return the logits and the cache from the output of a call with a cache."""
        logits = _logits(output)
        if self.new_cache is not None:
            if not hasattr(output, self.new_cache):
                raise SubjectError(f"the module returned a {type(output).__name__} without {self.new_cache!r}")
            return logits, getattr(output, self.new_cache)
        if isinstance(output, tuple) and len(output) == 2:
            return logits, output[1]
        if cache is None and not self._has_state:
            raise SubjectError(
                f"the module returned a {type(output).__name__} and no cache: it returns (logits, cache); or "
                "new_cache= names the attribute, or start= makes a cache that changes in place"
            )
        return logits, cache

    def _tensor(self, rows: Sequence[Sequence[int]]) -> Tensor:
        return torch.tensor([list(row) for row in rows], dtype=torch.int64, device=self.device)

    def _cast(self, dtype: torch.dtype) -> "ModuleSubject":
        if self.kept is not None:
            self.kept.load(self._empty_state)
        cast = ModuleSubject(
            cast_module(self.module, dtype) if self._cast_to is None else self._cast_to(name_of(dtype)),
            **self._given,
            name=self.info.name,
            true_float64=dtype is torch.float64,
            ids=self.token_ids.ids,
        )
        require_dtype(cast.info.dtype, dtype, "casting the module")
        return cast


def _num_layers(module: nn.Module) -> int:
    return 1 + max((layer_of(part) or 0 for part, _ in module.named_modules()), default=0)


def _check_names(module: nn.Module, names: Mapping[str, str]) -> None:
    """Raise `UsageError` for a name that the module does not accept, and list the names that it does."""
    signature = inspect.signature(module.forward)
    taken = signature.parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken.values()):
        return
    for label, name in names.items():
        if name not in taken:
            raise UsageError(
                f"{label}={name!r}: {type(module).__name__} has no such argument: forward{signature}"
            )


def _logits(output: Any) -> Tensor:
    """Return the logits (batch, token, vocab) from a module's output."""
    value = output[0] if isinstance(output, tuple) and output else getattr(output, "logits", output)
    logits = as_tensor(value, "the logits")
    if logits.dim() == 2:  # of the last token alone
        logits = logits[:, None]
    if logits.dim() != 3:
        raise MalformedRowError(
            f"the module gave logits of shape {tuple(logits.shape)}, not (batch, token, vocab)"
        )
    return logits
