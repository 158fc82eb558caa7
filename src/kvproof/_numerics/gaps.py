"""Two rows to a gap, and a row's evidence to a verdict.

The tensors are walked once, in `gap_between`; everything after it is a rule over a few numbers.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from kvproof._numerics.tolerances import NOISE_LIMIT, ROUNDING_FACTOR, STRUCTURAL_FLOOR, structural_limit
from kvproof.contract.ledger import MarginVerdict
from kvproof.contract.results import Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """The largest absolute difference of two values, and where it stands.

    ``size`` is NaN where both sides are NaN at the same place, and infinite where one side alone is not
    finite or the two hold different infinities. Equal infinities differ by nothing.
    """

    size: float
    index: tuple[int, ...]
    scale: float  #: the expected value's largest finite magnitude


def gap_between(expected: Tensor, actual: Tensor) -> Gap:
    """Compare two tensors of one shape in float64, every entry; raise `ValueError` if the shapes differ."""
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
    return Gap(size=size, index=_unravelled(flat, difference.shape), scale=float(e.abs().max()))


def _largest_entry(value: Tensor) -> tuple[int, float]:
    """Return the flat position of the largest entry, and the entry."""
    flat = int(value.argmax())
    return flat, float(value.flatten()[flat])


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """All that is known of one row, in absolute differences of logits.

    The top-rung members are None together, where there is no top rung to be had.
    """

    gap: float
    allowed: float
    noise: float
    top_gap: float | None = None
    top_noise: float | None = None
    top_scale: float | None = None
    uncached_error: float | None = None
    cached_error: float | None = None
    sampled_error: float | None = None

    @property
    def explained(self) -> float:
        """The largest error that rounding explains, by everything that was measured of it."""
        measured = (self.noise, self.uncached_error or 0.0, self.sampled_error or 0.0)
        return ROUNDING_FACTOR.value * largest(measured)

    @property
    def hangs_on_sampling(self) -> bool:
        """Whether float64 agrees and nothing measured so far explains the error in the declared dtype."""
        verdict, _ = judge(self)
        if verdict is not Verdict.DIVERGED or self.top_gap is None or self.top_noise is None:
            return False
        return math.isfinite(self.gap) and self.top_gap <= structural_limit(self.top_noise, self.top_scale or 0.0)


def judge(row: Evidence) -> tuple[Verdict, str]:
    """Return a row's verdict and the reason in words. The rules stand in the order that decides."""
    if math.isinf(row.gap) or (row.top_gap is not None and math.isinf(row.top_gap)):
        return Verdict.DIVERGED, "one path gives a value that is not finite where the other's is finite"
    if math.isnan(row.gap) or (row.top_gap is not None and math.isnan(row.top_gap)):
        return Verdict.INCONCLUSIVE, "both paths give NaN at the same place"
    others = (row.noise, row.top_noise, row.uncached_error, row.cached_error)
    if any(value is not None and not math.isfinite(value) for value in others):
        return Verdict.INCONCLUSIVE, "the uncached path itself is not finite, or not the same function twice"
    if row.top_gap is None or row.top_noise is None or row.top_scale is None:
        return _judge_by_noise(row)
    if row.top_noise > STRUCTURAL_FLOOR.value * row.top_scale:
        return Verdict.INCONCLUSIVE, (
            f"two uncached ways to compute this row differ by {row.top_noise:.2e} in float64: "
            "the uncached path is not causal, or not the same function twice"
        )
    limit = structural_limit(row.top_noise, row.top_scale)
    if row.top_gap > limit:
        return Verdict.DIVERGED, f"float64 gap {row.top_gap:.2e} is beyond {limit:.2e}: not rounding"
    if row.gap <= row.allowed:
        return Verdict.MATCH, f"gap {row.gap:.2e} within the declared {row.allowed:.2e}"
    explained = row.explained
    if row.cached_error is not None and row.cached_error <= explained:
        measured = "noise and uncached error" if row.sampled_error is None else "all rounding that was measured"
        return Verdict.ROUNDING, (
            f"float64 agrees, and the cached error {row.cached_error:.2e} is within {explained:.2e}, "
            f"{ROUNDING_FACTOR.value:g} × the larger of {measured}"
        )
    return Verdict.DIVERGED, (
        f"float64 agrees, but in the declared dtype the cached error {row.cached_error:.2e} exceeds "
        f"{explained:.2e}: something is held in too low a dtype"
    )


def _judge_by_noise(row: Evidence) -> tuple[Verdict, str]:
    """Judge a row that has no top rung: noise alone can excuse a gap, and never convicts one."""
    if row.gap <= row.allowed:
        return Verdict.MATCH, f"gap {row.gap:.2e} within the declared {row.allowed:.2e}"
    if row.noise > NOISE_LIMIT.value * row.allowed:
        return Verdict.INCONCLUSIVE, (
            f"two uncached ways to compute a row differ by {row.noise:.2e}, too much to take for noise, "
            "and there is no float64 to decide"
        )
    explained = ROUNDING_FACTOR.value * row.noise
    if row.gap <= explained:
        return (
            Verdict.ROUNDING,
            f"gap {row.gap:.2e} within {explained:.2e}, the noise × {ROUNDING_FACTOR.value:g}",
        )
    return Verdict.INCONCLUSIVE, (
        f"gap {row.gap:.2e} is beyond the noise × {ROUNDING_FACTOR.value:g}, and there is no float64 to decide"
    )


def judge_margin(row: Tensor, other: Tensor, error: float) -> tuple[float, MarginVerdict]:
    """Return the margin of a row's most likely token and whether rounding could flip it.

    A change of at most ``error`` in every logit changes a difference of two by at most twice that. The margin
    of a vocabulary of one token is infinite.
    """
    if len(row) == 1:
        return math.inf, MarginVerdict.SAFE
    first, second = row.topk(2).values.tolist()
    if first == second:
        return 0.0, MarginVerdict.TIE
    margin = first - second
    if not math.isfinite(error):
        return margin, MarginVerdict.UNEXPLAINED_FLIP
    if margin <= 2 * error:
        return margin, MarginVerdict.EXPLAINED_FLIP
    same = other is row or int(other.argmax()) == int(row.argmax())
    return margin, MarginVerdict.SAFE if same else MarginVerdict.UNEXPLAINED_FLIP
