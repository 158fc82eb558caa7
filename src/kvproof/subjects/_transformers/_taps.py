"""Taps on any torch module: its output, by a forward hook, in the order in which modules finish."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from kvproof._stages import Site, Stage
from kvproof._trace import Tap


@contextmanager
def tapped(model: nn.Module, tap: Tap, shape: tuple[int, int]) -> Iterator[None]:
    """Hand every module's output to the tap, in the order in which modules finish.

    Outputs are brought to (batch, new, …); what has neither those axes nor their product in front is passed
    by, and so are tokens in a row inside experts: there they are those that a router chose, in its order. Of an
    output that is a tuple, what is shaped as its first value is shown too: a rotation is a cosine and a sine. A
    module that runs more than once in a forward is told apart by a count.
    """
    calls: dict[str, int] = {}

    def hook(name: str, output: Any) -> Any:
        parts = output if isinstance(output, tuple) else (output,)
        value = parts[0] if parts else None
        if not isinstance(value, Tensor) or value.dim() < 2:
            return None
        in_a_row = tuple(value.shape[:2]) != shape
        if in_a_row and (value.shape[0] != shape[0] * shape[1] or "experts" in name.split(".")[:-1]):
            return None
        calls[name] = calls.get(name, 0) + 1
        label = name if calls[name] == 1 else f"{name} (run {calls[name]})"

        def shown(number: int, part: Any) -> Any:
            if not isinstance(part, Tensor) or (part.shape, part.dtype) != (value.shape, value.dtype):
                return part
            seen = part.reshape(*shape, *part.shape[1:]) if in_a_row else part
            changed = tap(Site(Stage.MODULE, layer_of(name), label, number), seen)
            return part if changed is seen else changed.reshape(part.shape)

        changed = tuple(shown(number, part) for number, part in enumerate(parts))
        if all(new is old for new, old in zip(changed, parts, strict=True)):
            return None
        return changed if isinstance(output, tuple) else changed[0]

    handles = [
        module.register_forward_hook(lambda module, args, output, name=name: hook(name, output))
        for name, module in model.named_modules()
        if name
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def layer_of(name: str) -> int | None:
    """Return the first number in a module's path: the layer that it belongs to."""
    return next((int(part) for part in name.split(".") if part.isdigit()), None)
