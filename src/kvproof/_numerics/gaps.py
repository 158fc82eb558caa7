"""How far two values are apart, and where. The tensors are walked once; the rest are rules over a few numbers.

A size is the largest there is. A place is the earliest at which the difference is that large, or so nearly that
rounding alone may have decided: of two differences that are equal by algebra one processor makes the first
larger, another the second, and a finding must name the same place on both.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """The largest absolute difference of two values, and the earliest place at which it stands.

    ``size`` is NaN where both sides are NaN at the same place, and infinite where one side alone is not
    finite or the two hold different infinities. Equal infinities differ by nothing.
    """

    size: float
    index: tuple[int, ...]
    scale: float  #: the expected value's largest finite magnitude

    @property
    def relative(self) -> float:
        """The size as a part of the scale; the size itself where the scale is 0."""
        return self.size / self.scale if self.scale else self.size


#: Two differences are the same where rounding may have parted them: by so many units of the coarser dtype's, …
_ALIKE_UNITS = 4.0
#: … of float64 by the part of the magnitude that is taken for rounding there (`STRUCTURAL_FLOOR`), …
_ALIKE_FLOAT64 = 2.0**-30
#: … and never by more than this part of the larger: where rounding is all there is, what differs is named still.
_ALIKE_PART = 2.0**-3


def gap_between(expected: Tensor, actual: Tensor, *, first_axis: int = 0) -> Gap:
    """Compare two tensors of one shape in float64, every entry; raise `ValueError` if the shapes differ.

    Among differences that are the same but for rounding, the earliest is named: first along ``first_axis``, then
    along the others in turn.
    """
    if expected.shape != actual.shape:
        raise ValueError(f"shapes differ: {tuple(expected.shape)} and {tuple(actual.shape)}")
    if expected.numel() == 0:
        return Gap(size=0.0, index=(), scale=0.0)
    e, a = expected.detach().to(torch.float64), actual.detach().to(torch.float64)
    difference = (e - a).abs()
    size = float(difference.max())
    if not math.isfinite(size):  # NaN counts as the largest entry, so nothing else hides one
        difference = _ranked(e, a, difference)
        size = float(difference.max())
        least = size
        e = torch.where(e.isfinite(), e, 0.0)
        if size == _BOTH_NAN and bool((expected.isnan() & actual.isnan()).any()):
            size = math.nan
    scale = float(e.abs().max())
    if math.isfinite(size):
        unit = max(_rounding_part(expected.dtype), _rounding_part(actual.dtype))
        least = size - min(unit * (scale + size), _ALIKE_PART * size)  # neither value is larger than their sum
    return Gap(size=size, index=_first(difference >= least, first_axis), scale=scale)


def gap_beside_nan(expected: Tensor, actual: Tensor, *, first_axis: int = 0) -> Gap:
    """Compare two tensors as `gap_between` does, without the entries that are NaN in both.

    What both computations make NaN is no difference between them, and must not hide one beside it.
    """
    gap = gap_between(expected, actual, first_axis=first_axis)
    if not math.isnan(gap.size):
        return gap
    both = expected.isnan() & actual.isnan()
    return gap_between(expected.masked_fill(both, 0.0), actual.masked_fill(both, 0.0), first_axis=first_axis)


#: An entry this far below a row's largest has no share in its softmax: that of float64 ends at 745.
UNSEEN = 1000.0
#: Units in the last place within which two entries that no softmax sees are equal.
_EQUAL_UNITS = 4.0


def gap_of_rows(expected: Tensor, actual: Tensor) -> Gap:
    """Compare two rows of logits (vocab,) of one dtype.

    Entries that are masked, on both sides, set no scale and are compared by equality: -1e9 in three entries would
    allow a gap of a thousand in all others. Within the rounding of their own magnitude they are equal, so that a
    mask may be added.
    """
    return _gap_of_rows(expected, actual, _EQUAL_UNITS)


def error_of_row(exact: Tensor, row: Tensor) -> float:
    """Return how far a row (vocab,) is from the same row in a more exact dtype; masked entries have no error."""
    return _gap_of_rows(exact, row, None).size


def mean_square_error(exact: Tensor, row: Tensor) -> float:
    """Return the mean square of a row's differences from the more exact one; masked entries have no error."""
    e, a = exact.detach().to(torch.float64), row.detach().to(torch.float64)
    difference = torch.where(_unseen(e) & _unseen(a), 0.0, e - a)
    return float(difference.square().mean())


def scale_of_rows(rows: Tensor) -> float:
    """Return the largest magnitude of logits (…, vocab), masked entries left out."""
    values = rows.detach().to(torch.float64)
    return float(torch.where(_unseen(values) | ~values.isfinite(), 0.0, values).abs().max())


def _gap_of_rows(expected: Tensor, actual: Tensor, equal_units: float | None) -> Gap:
    if expected.shape != actual.shape:
        raise ValueError(f"shapes differ: {tuple(expected.shape)} and {tuple(actual.shape)}")
    e, a = expected.detach().to(torch.float64), actual.detach().to(torch.float64)
    unseen = _unseen(e) & _unseen(a)
    if not bool(unseen.any()):
        return gap_between(expected, actual)
    same = unseen
    if equal_units is not None:
        unit = max(torch.finfo(expected.dtype).eps, torch.finfo(actual.dtype).eps)
        same = unseen & ((e - a).abs() <= equal_units * unit * e.abs()) | (e == a)
    gap = gap_between(torch.where(same, 0.0, expected), torch.where(same, 0.0, actual))
    return Gap(size=gap.size, index=gap.index, scale=scale_of_rows(expected))


def _unseen(rows: Tensor) -> Tensor:
    """Return which entries of float64 logits (…, vocab) no softmax can see."""
    finite = torch.where(rows.isfinite(), rows, -math.inf)
    return rows < finite.amax(dim=-1, keepdim=True) - UNSEEN


def first_of_largest(sizes: Sequence[float], within: float) -> int:
    """Return the place of the first of some sizes that is the largest, or less by no more than ``within``."""
    least = max(sizes) - within
    return next(place for place, size in enumerate(sizes) if size >= least)


def _rounding_part(dtype: torch.dtype) -> float:
    """Return the part of their magnitude by which rounding may move values of a dtype."""
    return max(_ALIKE_FLOAT64, _ALIKE_UNITS * torch.finfo(dtype).eps) if dtype.is_floating_point else 0.0


def _first(among: Tensor, first_axis: int) -> tuple[int, ...]:
    """Return the index of the first true entry, which there is, with one axis before all others."""
    ordered = among.movedim(first_axis, 0) if first_axis else among
    index = list(_unravelled(int(ordered.flatten().to(torch.uint8).argmax()), ordered.shape))
    if first_axis:
        index.insert(first_axis, index.pop(0))
    return tuple(index)


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
