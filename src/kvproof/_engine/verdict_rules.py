"""A row's evidence to its verdict. The rules stand here and nowhere else."""

import math
from dataclasses import dataclass

from torch import Tensor

from kvproof._numerics.gaps import largest
from kvproof._numerics.tolerances import NOISE_LIMIT, ROUNDING_FACTOR, STRUCTURAL_FLOOR, structural_limit
from kvproof.contract.ledger import MarginVerdict
from kvproof.contract.results import Verdict


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
