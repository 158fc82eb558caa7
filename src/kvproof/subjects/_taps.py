"""Taps on any torch module: forward hooks see each module's output, in the order in which modules finish."""

import functools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from kvproof._numerics.taps import Tap
from kvproof.contract.stages import Site, Stage


@contextmanager
def tapped(model: nn.Module, tap: Tap, shape: tuple[int, int]) -> Iterator[None]:
    """Pass every module's output to the tap, in the order in which modules finish.

    Outputs are reshaped to (batch, new, …). Outputs that start neither with these axes nor with their product are
    skipped. So are flattened tokens inside experts, because a router chose and ordered them. If an output is a
    tuple, the tap also sees each value with the shape of the first: a rotation is a cosine and a sine. Repeated
    runs of a module within one forward are numbered.
    """
    outputs = _Outputs(tap, shape)
    handles = [
        module.register_forward_hook(functools.partial(outputs.show, name))
        for name, module in model.named_modules()
        if name
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


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
        if not self._per_token(name, shape):
            return None
        self.calls[name] = calls = self.calls.get(name, 0) + 1
        label = name if calls == 1 else f"{name} (run {calls})"
        changed = tuple(
            self._seen(Site(Stage.MODULE, layer_of(name), label, number), part, shape)
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

    def _seen(self, site: Site, part: Tensor, shape: torch.Size) -> Tensor:
        seen = part if shape[:2] == self.shape else part.reshape(*self.shape, *shape[1:])
        changed = self.tap(site, seen)
        return part if changed is seen else changed.reshape(shape)


def _is_alike(part: Any, first: Tensor) -> bool:
    return isinstance(part, Tensor) and (part.shape, part.dtype) == (first.shape, first.dtype)


def layer_of(name: str) -> int | None:
    """Return the first number in a module's path, which is the number of its layer."""
    return next((int(part) for part in name.split(".") if part.isdigit()), None)
