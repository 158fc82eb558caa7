"""Random rounding: what the rounding of a dtype costs at one row, measured rather than guessed.

Two measured roundings of a row, noise and the uncached path's own error, may both be small by luck where the
row itself is badly conditioned: a norm over almost equal values, or two experts with almost equal scores.
Monte Carlo arithmetic (D. S. Parker, 1997) tells: the uncached path runs in float64 with every result moved
by a random part of what the dtype would round it by, a few times, and the row's spread is what its rounding
costs.

A norm that subtracts a mean is one operation to torch, and rounds inside: where a row's entries are almost equal,
what it rounds its mean by is much of what it gives, and no change of its input or its result is like it. So such
norms are computed in parts here, and each part is moved.

A model in bfloat16 computes much in float32 by name: norms, softmax, rotary angles. To move those by bfloat16's
unit would excuse the very bug of holding them in bfloat16. So each result is moved by the unit of the dtype that
the same operation had when the uncached path ran in the declared dtype (`UnitRecorder`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from kvproof._numerics.modes import PairedMode

#: Beyond this, a mask's stand-in for minus infinity: moved by a part of itself, it would overflow.
_FINITE = 1e300


@dataclass(frozen=True, slots=True)
class Unit:
    """What one torch function rounded its result by in the declared dtype."""

    name: str
    eps: float | None  #: of the result's dtype; None if it is no floating-point tensor
    lowers: bool  #: whether the result's dtype is coarser than every argument's: a cast that rounds


class UnitRecorder(TorchFunctionMode):
    """While it is entered, notes the dtype of every torch function's result, in the order in which they run."""

    def __init__(self) -> None:
        super().__init__()
        self.units: list[Unit] = []

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run one torch function and note its result's dtype."""
        result = func(*args, **(kwargs or {}))
        eps = _eps_of(result)
        given = [each for each in map(_eps_of, (*args, *(kwargs or {}).values())) if each is not None]
        lowers = eps is not None and bool(given) and eps > max(given)
        self.units.append(Unit(_name_of(func), eps, lowers))
        return result


class RandomRounding(PairedMode):  # type: ignore[no-untyped-call]
    """While it is entered, each float64 result is moved by up to half a unit in the last place of its dtype.

    That is the dtype which the same operation had in the run that ``units`` were recorded in; ``dtype``, where
    the operation has no counterpart there. ``exact`` is the dtype of the results that are moved.
    """

    def __init__(
        self, dtype: torch.dtype, seed: int, units: Sequence[Unit] = (), exact: torch.dtype = torch.float64
    ) -> None:
        super().__init__()
        self._default = self._unit = torch.finfo(dtype).eps / 2
        self._exact = exact
        self._generators: dict[torch.device, torch.Generator] = {}
        self._seed = seed
        self.functions = _Follower(self, units)

    def run(self, call: Callable[[], Any], unit: Unit | None) -> Any:
        """Run one torch function with the unit that it has in the declared dtype."""
        self._unit = self._default if unit is None or unit.eps is None else unit.eps / 2
        if unit is not None and unit.name == _CAST:
            self._unit, half = 0.0, self._unit
            result = call()
            # In float64 a cast to it is no operation, so what it rounds in the declared dtype is moved here.
            if unit.lowers:
                self._unit = half
                result = _mapped(self._moved, result)
        else:
            result = call()
        self._unit = self._default
        return result

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
        if value.dtype is not self._exact or value.numel() == 0 or not self._unit:
            return value
        if value.device not in self._generators:
            self._generators[value.device] = torch.Generator(value.device).manual_seed(self._seed)
        generator = self._generators[value.device]
        part = torch.empty_like(value).uniform_(-self._unit, self._unit, generator=generator)
        moved = torch.addcmul(value, value, part)
        return torch.where(value.abs() < _FINITE, moved, value)


class InnerRounding(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is entered, each result in a coarser dtype than ``exact`` is moved by up to half its own unit.

    A constant is not: both paths hold the same.
    """

    def __init__(self, exact: torch.dtype, seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._eps = torch.finfo(exact).eps
        self._generator = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one operation and move what it computed in a coarser dtype."""
        result = func(*args, **(kwargs or {}))
        is_view = any(returned.alias_info is not None for returned in func._schema.returns)
        if is_view or all(_eps_of(value) is None for value in (*args, *(kwargs or {}).values())):
            return result
        return _mapped(self._moved, result)

    def _moved(self, value: Tensor) -> Tensor:
        if not value.is_floating_point() or value.numel() == 0 or torch.finfo(value.dtype).eps <= self._eps:
            return value
        half = torch.finfo(value.dtype).eps / 2
        part = torch.rand(value.shape, generator=self._generator, dtype=torch.float64).to(value.device) * 2 - 1
        moved = (value.double() * (1 + half * part)).to(value.dtype)
        # Half a unit, rounded again, often changes nothing: a whole one up or down is what rounding may do.
        stepped = torch.nextafter(value, torch.full_like(value, torch.inf) * part.sign().to(value.dtype))
        return torch.where(value.isfinite() & (value != 0), torch.where(moved != value, moved, stepped), value)


class _Follower(TorchFunctionMode):
    """Counts torch functions along with the run that units were recorded in."""

    def __init__(self, rounding: RandomRounding, units: Sequence[Unit]) -> None:
        super().__init__()
        self._rounding = rounding
        self._units = units
        self._by_name: dict[str, list[Unit]] = {}
        for unit in units:
            self._by_name.setdefault(unit.name, []).append(unit)
        self._number = 0
        self._seen: dict[str, int] = {}

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run one torch function with its own unit."""
        unit = self._unit(_name_of(func)) if self._units else None
        return self._rounding.run(lambda: func(*args, **(kwargs or {})), unit)

    def _unit(self, name: str) -> Unit | None:
        """Return the unit of the function of this number, or else of the same one as often called before."""
        number, occurrence = self._number, self._seen.get(name, 0)
        self._number, self._seen[name] = number + 1, occurrence + 1
        if number < len(self._units) and self._units[number].name == name:
            return self._units[number]
        alike = self._by_name.get(name, [])
        return alike[occurrence] if occurrence < len(alike) else None


#: Every way to ask for another type: which of them a model uses may hang on the type it has.
_CAST = "to"
_CASTS = frozenset({"to", "float", "half", "bfloat16", "double", "type", "type_as"})


def _name_of(func: Callable[..., Any]) -> str:
    name = getattr(func, "__name__", str(func))
    return _CAST if name in _CASTS else "topk" if name == "stable_top_k" else name


def _eps_of(value: Any) -> float | None:
    """Return the unit of a floating-point tensor, or of the first in a tuple."""
    if isinstance(value, Tensor):
        is_number = value.is_floating_point() or value.is_complex()
        return torch.finfo(value.dtype).eps if is_number else None
    if isinstance(value, tuple | list):
        return next((eps for eps in map(_eps_of, value) if eps is not None), None)
    return None


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
