"""Random rounding: what the rounding of a dtype costs at one row, measured rather than guessed.

Two measured roundings of a row, noise and the uncached path's own error, may both be small by luck where the
row itself is badly conditioned: a norm over almost equal values, or two experts with almost equal scores.
Monte Carlo arithmetic (D. S. Parker, 1997) tells: the uncached path runs in float64 with every result moved
by a random part of what the dtype would round it by, a few times, and the row's spread is what its rounding
costs.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

#: Beyond this, a mask's stand-in for minus infinity: moved by a part of itself, it would overflow.
_FINITE = 1e300


class RandomRounding(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is entered, each float64 result is moved by up to half a unit in the last place of ``dtype``."""

    def __init__(self, dtype: torch.dtype, seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._unit = torch.finfo(dtype).eps / 2
        self._generators: dict[torch.device, torch.Generator] = {}
        self._seed = seed

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run one operation and move what it computed; views and writes in place are left alone."""
        result = func(*args, **(kwargs or {}))
        if any(returned.alias_info is not None for returned in func._schema.returns):
            return result
        return _mapped(self._moved, result)

    def _moved(self, value: Tensor) -> Tensor:
        if value.dtype is not torch.float64 or value.numel() == 0:
            return value
        if value.device not in self._generators:
            self._generators[value.device] = torch.Generator(value.device).manual_seed(self._seed)
        generator = self._generators[value.device]
        part = torch.empty_like(value).uniform_(-self._unit, self._unit, generator=generator)
        moved = torch.addcmul(value, value, part)
        return torch.where(value.abs() < _FINITE, moved, value)


def _mapped(move: Callable[[Tensor], Tensor], result: Any) -> Any:
    if isinstance(result, Tensor):
        return move(result)
    if isinstance(result, tuple | list):
        return type(result)(_mapped(move, item) for item in result)
    return result
