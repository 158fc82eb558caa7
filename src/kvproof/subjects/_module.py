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
    as_tensor,
    check_context_len,
    require_dtype,
)
from kvproof.subjects._decoder_calls import wrap_errors
from kvproof.subjects._module_state import random_parts, state_of_module
from kvproof.subjects._taps import layer_of, tapped


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
        cache: str,
        positions: str | None = None,
        mask: str | None = None,
        new_cache: str | None = None,
        cached_options: Mapping[str, Any] | None = None,
        uncached_options: Mapping[str, Any] | None = None,
        name: str | None = None,
        context_len: int = NO_END,
        windows: Sequence[int] = (),
        batch: bool = True,
        start: Callable[[Any], Any] | None = None,
        ops: CacheOps = CacheOps(),  # noqa: B008 - it is frozen
        true_float64: bool = False,
    ) -> None:
        """Wrap a module.

        ``cache``, ``positions`` and ``mask`` are the module's own names for these arguments; an argument without
        a name is not passed. Positions are (batch, new). The mask is (batch, seq): 1 for a token and 0 for the
        padding before it. ``cached_options`` and ``uncached_options`` are passed to each call of that path, such
        as ``{"use_cache": True}``. ``context_len`` is the number of positions, and ``windows`` are the lengths of
        sliding windows, if there are any; the audit chooses lengths around them. With ``batch``, sessions can
        hold several rows. ``start(module)`` returns an empty cache in the module's own dtype; without it the
        first call gets None. ``ops`` holds the operations on a cache besides feeding it. A module whose weights
        are float64, or that is said to be by ``true_float64``, computes in float64 where its code asks for less.

        Raises `UsageError` for a name that the module's ``forward`` does not accept, and `SubjectError` if a
        first call raises or does not return logits.
        """
        check_context_len(context_len)
        names = {"cache": cache, "positions": positions, "mask": mask}
        _check_names(module, {label: given for label, given in names.items() if given is not None})
        self.module = module.eval().requires_grad_(False)
        self.names = names
        self.new_cache = new_cache
        self.options = {True: dict(cached_options or {}), False: dict(uncached_options or {})}
        self.ops = ops
        self._start = start
        self.batch = batch
        self._boundaries = Boundaries(context_len=context_len, windows=tuple(windows))
        tensors = (*module.parameters(), *module.buffers())
        self.device = tensors[0].device if tensors else torch.device("cpu")
        self._true_float64 = true_float64 or any(tensor.dtype is torch.float64 for tensor in tensors)
        row = wrap_errors(lambda: self._rows([0], untouched))
        padded = positions is not None and mask is not None
        self._info = SubjectInfo(
            name=name or type(module).__name__,
            digest=weights_digest(module),
            mode="eval",
            dtype=name_of(row.dtype),
            num_layers=1 + max((layer_of(part) or 0 for part, _ in module.named_modules()), default=0),
            vocab_size=row.shape[-1],
            context_len=context_len,
            abilities=(
                Ability.CAST,
                Ability.TAP,
                *((Ability.BATCH,) if batch else ()),
                *((Ability.PAD,) if batch and padded else ()),
                *ops.abilities(),
            ),
        )

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
        return state_of_module(self.module)

    def random_parts(self) -> Iterator[str]:
        """Yield training mode, and dropout given as a number."""
        yield from random_parts(self.module)

    @property
    def root_module(self) -> nn.Module:
        """The module."""
        return self.module

    def start(self) -> Any:
        """Return an empty cache, or None if the module creates its own."""
        if self._start is None:
            return None
        with ExitStack() as stack:
            self._enter(stack)
            return self._start(self.module)

    def _enter(self, stack: ExitStack) -> None:
        """Enter what the module's own code runs in."""
        stack.enter_context(torch.no_grad())
        if self._true_float64:
            stack.enter_context(TrueFloat64())

    def step(
        self, old: Sequence[Sequence[int]], new: Sequence[Sequence[int]], cache: Any, tap: Tap
    ) -> tuple[Tensor, Any]:
        """Feed new tokens; shorter rows are padded on the left."""
        num_new = max(map(len, new))
        rows = [[*before, *ids] for before, ids in zip(old, new, strict=True)]
        total = max(map(len, rows))
        tokens = self._tensor([[0] * (total - len(row)) + row for row in rows])
        real = self._tensor([[0] * (total - len(row)) + [1] * len(row) for row in rows])
        positions = (real.cumsum(dim=1) - 1).clamp(min=0)[:, -num_new:]
        arguments = {"cache": cache, "positions": positions, "mask": real}
        output = self._call(tap, tokens[:, -num_new:], arguments, cached=True)
        return self._read(output, cache)

    def _rows(self, ids: Sequence[int], tap: Tap) -> Tensor:
        tokens = self._tensor([list(ids)])
        positions = torch.arange(len(ids), device=self.device)[None]
        output = self._call(tap, tokens, {"positions": positions}, cached=False)
        return _logits(output)[0]

    def _call(self, tap: Tap, tokens: Tensor, arguments: dict[str, Any], *, cached: bool) -> Any:
        named = {str(self.names[key]): value for key, value in arguments.items() if self.names[key] is not None}
        with ExitStack() as stack:
            self._enter(stack)
            if tap is not untouched:
                tokens = tap(Site(Stage.TOKEN), tokens)
                for stage, key in ((Stage.POSITION, "positions"), (Stage.MASK, "mask")):
                    if key in arguments and self.names[key] is not None:
                        named[str(self.names[key])] = tap(Site(stage), arguments[key])
                stack.enter_context(tapped(self.module, tap, (tokens.shape[0], tokens.shape[1])))
            return self.module(tokens, **named, **self.options[cached])

    def _read(self, output: Any, cache: Any) -> tuple[Tensor, Any]:
        """Return the logits and the cache from the output of a call with a cache."""
        logits = _logits(output)
        if self.new_cache is not None:
            if not hasattr(output, self.new_cache):
                raise SubjectError(f"the module returned a {type(output).__name__} without {self.new_cache!r}")
            return logits, getattr(output, self.new_cache)
        if isinstance(output, tuple) and len(output) == 2:
            return logits, output[1]
        if cache is None:
            raise SubjectError(
                f"the module returned a {type(output).__name__} and no cache: it returns (logits, cache); or "
                "new_cache= names the attribute, or start= makes a cache that changes in place"
            )
        return logits, cache

    def _tensor(self, rows: Sequence[Sequence[int]]) -> Tensor:
        return torch.tensor([list(row) for row in rows], dtype=torch.int64, device=self.device)

    def _cast(self, dtype: torch.dtype) -> "ModuleSubject":
        cast = ModuleSubject(
            cast_module(self.module, dtype),
            **dict(self.names.items()),  # type: ignore[arg-type]
            new_cache=self.new_cache,
            cached_options=self.options[True],
            uncached_options=self.options[False],
            name=self.info.name,
            context_len=self.info.context_len,
            windows=self._boundaries.windows,
            batch=self.batch,
            start=self._start,
            ops=self.ops,
            true_float64=dtype is torch.float64,
        )
        require_dtype(cast.info.dtype, dtype, "casting the module")
        return cast


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
    if logits.dim() != 3:
        raise MalformedRowError(
            f"the module gave logits of shape {tuple(logits.shape)}, not (batch, token, vocab)"
        )
    return logits
