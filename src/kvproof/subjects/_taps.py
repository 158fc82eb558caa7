"""Taps on any torch module: forward hooks see each module's output, in the order in which modules finish."""

import functools
import math
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from kvproof._numerics.taps import Tap
from kvproof.contract.stages import Site, Stage


@contextmanager
def tapped(model: nn.Module, tap: Tap, shape: tuple[int, int]) -> Iterator[None]:
    """Pass every module's output to the tap, in the order in which modules finish.

    Outputs are reshaped to (batch, new, …), also those of shape (batch, heads, new, head_dim). Outputs in which
    the tokens are not found are skipped. So are flattened tokens inside experts, because a router chose and
    ordered them. If an output is a tuple, the tap also sees each value with the shape of the first: a rotation is
    a cosine and a sine. Repeated runs of a module within one forward are numbered. Compiled modules run without
    the compiler: compiled code calls no hooks.
    """
    outputs = _Outputs(tap, shape)
    handles = [
        module.register_forward_hook(functools.partial(outputs.show, _plain(name)))
        for name, module in model.named_modules()
        if _plain(name)
    ]
    try:
        with torch.compiler.set_stance("force_eager") if _is_compiled(model) else nullcontext():
            yield
    finally:
        for handle in handles:
            handle.remove()


def describe_compiled(model: nn.Module) -> Iterator[str]:
    """Say if a model is compiled: what the compiler makes of its modules cannot be looked into."""
    if _is_compiled(model):
        yield (
            "the decoder is compiled (torch.compile): its rows come from compiled code, and values inside it are "
            "looked at with the compiler off; where only compiled code is wrong, kvproof cannot look inside"
        )


def _is_compiled(model: nn.Module) -> bool:
    return any(
        _WRAPPED in module._modules or getattr(module, "_compiled_call_impl", None) is not None
        for module in model.modules()
    )


def _plain(name: str) -> str:
    """Return a module's path as in the code that was compiled; empty for what stands for the whole model."""
    return ".".join(part for part in name.split(".") if part != _WRAPPED)


#: The name under which a compiled module holds the one that it was made from.
_WRAPPED = "_orig_mod"
#: Whether a module's outputs have heads before tokens, learned where the numbers of both differ.
_HEADS_FIRST: "weakref.WeakKeyDictionary[nn.Module, bool]" = weakref.WeakKeyDictionary()


class _Outputs:
    """The outputs of all modules in one forward."""

    def __init__(self, tap: Tap, shape: tuple[int, int]) -> None:
        self.tap = tap
        self.shape = shape
        self.calls: dict[str, int] = {}

    def show(self, name: str, module: nn.Module, args: Any, output: Any) -> Any:
        """Return the output with the tap's changes, or None without changes. This is a forward hook."""
        parts = output if isinstance(output, tuple) else (output,)
        first = parts[0] if parts else None
        if not isinstance(first, Tensor):
            return None
        shape = first.shape  # read once: in a float64 model even this goes through a torch function mode
        heads_first = self._has_heads_first(module, shape)
        if heads_first is None or not (heads_first or self._per_token(name, shape)):
            return None
        self.calls[name] = calls = self.calls.get(name, 0) + 1
        label = name if calls == 1 else f"{name} (run {calls})"
        changed = tuple(
            self._seen(Site(Stage.MODULE, layer_of(name), label, number), part, shape, heads_first=heads_first)
            if part is first or _is_alike(part, first)
            else part
            for number, part in enumerate(parts)
        )
        if all(new is old for new, old in zip(changed, parts, strict=True)):
            return None
        return changed if isinstance(output, tuple) else changed[0]

    def _per_token(self, name: str, shape: torch.Size) -> bool:
        if shape[:2] == self.shape:
            return True
        in_a_row = len(shape) >= 2 and shape[0] == math.prod(self.shape)
        return in_a_row and "experts" not in name.split(".")[:-1]

    def _has_heads_first(self, module: nn.Module, shape: torch.Size) -> bool | None:
        """Return whether an output is (batch, heads, new, head_dim), or None if it cannot be told yet.

        As many heads as new tokens leave both readings open: then what the module gave before decides, and until
        it gave something clear nothing is compared. A last axis as long as the tokens may count slots, as in
        attention weights, and slots are no part of a token's value.
        """
        batch, new = self.shape
        if len(shape) != 4 or shape[0] != batch or new not in shape[1:3]:
            return False
        if shape[1] == shape[2] == 1:
            return False  # both readings are the same
        if shape[1] != shape[2]:
            _HEADS_FIRST[module] = shape[2] == new
        heads_first = _HEADS_FIRST.get(module)
        return None if heads_first and shape[3] == new else heads_first

    def _seen(self, site: Site, part: Tensor, shape: torch.Size, *, heads_first: bool) -> Tensor:
        if heads_first:
            turned = part.transpose(1, 2)
            changed = self.tap(site, turned)
            return part if changed is turned else changed.transpose(1, 2)
        seen = part if shape[:2] == self.shape else part.reshape(*self.shape, *shape[1:])
        changed = self.tap(site, seen)
        return part if changed is seen else changed.reshape(shape)


def _is_alike(part: Any, first: Tensor) -> bool:
    return isinstance(part, Tensor) and (part.shape, part.dtype) == (first.shape, first.dtype)


def layer_of(name: str) -> int | None:
    """Return the first number in a module's path, which is the number of its layer."""
    return next((int(part) for part in name.split(".") if part.isdigit()), None)
