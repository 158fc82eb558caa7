"""Random rounding: what the rounding of a dtype costs at one row, measured rather than guessed.

Two measured roundings of a row, noise and the uncached path's own error, may both be small by luck where the
row itself is badly conditioned: a norm over almost equal values, or two experts with almost equal scores.
Monte Carlo arithmetic (D. S. Parker, 1997) tells: the uncached path runs in float64 with every result moved
by a random part of what the dtype would round it by, a few times, and the row's spread is what its rounding
costs.

A norm that subtracts a mean is one operation to torch, and rounds inside: where a row's entries are almost equal,
what it rounds its mean by is much of what it gives, and no change of its input or its result is like it. So such
norms are computed in parts here, and each part is moved.
"""

from collections.abc import Callable, Sequence
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
        if func in _IN_PARTS:
            return _IN_PARTS[func](self._moved, *args, **(kwargs or {}))
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


def _layer_norm(
    move: Callable[[Tensor], Tensor],
    value: Tensor,
    shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what ``aten.native_layer_norm`` does: the result, the mean and the reciprocal deviation."""
    centred, mean, rstd = _centred(move, value, tuple(range(-len(shape), 0)), eps)
    return _affine(move, move(centred * rstd), weight, bias), mean, rstd


def _group_norm(
    move: Callable[[Tensor], Tensor],
    value: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    batch: int,
    channels: int,
    size: int,
    groups: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what ``aten.native_group_norm`` does: the result, the mean and the reciprocal deviation."""
    centred, mean, rstd = _centred(move, value.reshape(batch, groups, channels // groups * size), (-1,), eps)
    normed = move(centred * rstd).reshape(value.shape)
    over_channels = (1, channels, *(1,) * (value.dim() - 2))
    weight, bias = (part if part is None else part.view(over_channels) for part in (weight, bias))
    return _affine(move, normed, weight, bias), mean[..., 0], rstd[..., 0]


def _centred(
    move: Callable[[Tensor], Tensor], value: Tensor, axes: tuple[int, ...], eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    mean = move(value.mean(axes, keepdim=True))
    centred = move(value - mean)
    return centred, mean, move(torch.rsqrt(move(centred.square().mean(axes, keepdim=True)) + eps))


def _affine(
    move: Callable[[Tensor], Tensor], value: Tensor, weight: Tensor | None, bias: Tensor | None
) -> Tensor:
    value = value if weight is None else move(value * weight)
    return value if bias is None else move(value + bias)


_IN_PARTS: dict[Any, Callable[..., tuple[Tensor, Tensor, Tensor]]] = {
    torch.ops.aten.native_layer_norm.default: _layer_norm,
    torch.ops.aten.native_group_norm.default: _group_norm,
}
