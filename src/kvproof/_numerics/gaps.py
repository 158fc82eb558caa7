"""How far two values are apart. The tensors are walked once; what follows is a rule over a few numbers."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """The largest absolute difference of two values, and where it stands.

    ``size`` is NaN where both sides are NaN at the same place, and infinite where one side alone is not
    finite or the two hold different infinities. Equal infinities differ by nothing.
    """

    size: float
    index: tuple[int, ...]
    scale: float  #: the expected value's largest finite magnitude


#: Differences are equal where rounding may have parted them: by so many units of the compared values' dtype, …
_EQUAL_UNITS = 4.0
#: … of a float64 value by this part of its magnitude, which what was computed before it may have cost, …
_EQUAL_FLOAT64 = 2.0**-30
#: … and never by more than this part of the difference itself.
_EQUAL_PART = 2.0**-10


def gap_between(expected: Tensor, actual: Tensor) -> Gap:
    """Compare two tensors of one shape in float64, every entry; raise `ValueError` if the shapes differ.

    Of differences that are equal but for rounding the earliest is named, in the order of the axes: which of them
    is larger in its last digit depends on the processor.
    """
    if expected.shape != actual.shape:
        raise ValueError(f"shapes differ: {tuple(expected.shape)} and {tuple(actual.shape)}")
    if expected.numel() == 0:
        return Gap(size=0.0, index=(), scale=0.0)
    e, a = expected.detach().to(torch.float64), actual.detach().to(torch.float64)
    difference = (e - a).abs()
    flat, size = _largest_entry(difference)
    if not math.isfinite(size):  # NaN counts as the largest entry, so nothing else hides one
        difference = _ranked(e, a, difference)
        flat, size = _largest_entry(difference)
        e = torch.where(e.isfinite(), e, 0.0)
        if size == _BOTH_NAN and bool((expected.isnan() & actual.isnan()).any()):
            size = math.nan
    scale = float(e.abs().max())
    if 0.0 < size < _BOTH_NAN:
        flat = _earliest(difference, size, scale * _unit(expected, actual))
    return Gap(size=size, index=_unravelled(flat, difference.shape), scale=scale)


def _largest_entry(value: Tensor) -> tuple[int, float]:
    """Return the flat position of the largest entry, and the entry."""
    flat = int(value.argmax())
    return flat, float(value.flatten()[flat])


def _unit(expected: Tensor, actual: Tensor) -> float:
    """Return the part of their magnitude by which rounding may move values of these dtypes."""
    coarsest = max((torch.finfo(v.dtype).eps for v in (expected, actual) if v.is_floating_point()), default=0.0)
    return max(_EQUAL_FLOAT64, _EQUAL_UNITS * coarsest)


def _earliest(difference: Tensor, size: float, rounding: float) -> int:
    """Return the flat position of the first entry that is as large as the largest, but for rounding."""
    least = size - min(rounding, size * _EQUAL_PART)
    return int((difference.flatten() >= least).nonzero()[0])


def is_within(expected: Tensor, actual: Tensor, limit: float) -> bool:
    """Return whether two tensors of one shape are seen at a glance to differ by no more than a finite limit.

    What is not finite is not seen at a glance: `gap_between` tells.
    """
    e, a = expected.detach().to(torch.float64), actual.detach().to(torch.float64)
    return e.numel() == 0 or float((e - a).abs().max()) <= limit


#: Stands for NaN on both sides while gaps are ranked: no finite gap may hide it, and an infinite one may.
_BOTH_NAN = torch.finfo(torch.float64).max


def _ranked(e: Tensor, a: Tensor, difference: Tensor) -> Tensor:
    """Return differences that can be ranked where values are not finite."""
    difference = torch.where(e == a, 0.0, difference)  # inf - inf is NaN, and equal all the same
    both_nan = e.isnan() & a.isnan()
    one_sided = (e.isfinite() ^ a.isfinite()) | (difference.isnan() & ~both_nan)
    return torch.where(both_nan, _BOTH_NAN, torch.where(one_sided, math.inf, difference))


def _unravelled(flat: int, shape: torch.Size) -> tuple[int, ...]:
    """Return the index of a flat position. ``torch.unravel_index`` would import sympy, a second's work."""
    index = []
    for size in reversed(shape):
        flat, place = divmod(flat, size)
        index.append(place)
    return tuple(reversed(index))


def largest(gaps: Iterable[float]) -> float:
    """Return the largest gap, 0 of none; a NaN among them is never lost."""
    known = list(gaps)
    return math.nan if any(map(math.isnan, known)) else max(known, default=0.0)
