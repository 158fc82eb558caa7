"""One row's evidence, gathered and judged."""

import dataclasses
import math

from torch import Tensor

from kvproof._engine.programs import Row
from kvproof._engine.rung import Prefix
from kvproof._engine.uncached_rows import BothWays, Uncached
from kvproof._engine.verdict_rules import Evidence, judge, judge_margin
from kvproof._numerics.gaps import gap_between
from kvproof._numerics.tolerances import STRUCTURAL_FLOOR
from kvproof.contract.results import RowResult, Tolerance, Verdict
from kvproof.subjects import Subject

#: Rows of a vocabulary up to this size are kept in the report whole.
KEPT_VOCABULARY = 256


class RowJudge:
    """Judges rows of one subject against what is known of its uncached path."""

    def __init__(self, subject: Subject, tolerance: Tolerance, uncached: Uncached) -> None:
        self.subject = subject
        self.tolerance = tolerance
        self.uncached = uncached

    def row(self, row: Row, top_actual: Tensor | None) -> RowResult:
        """Judge a cached row, with the same row at the top rung where there is one."""
        prefix, actual = row.prefix, row.logits
        expected = self.uncached.row(prefix)
        gap = gap_between(expected, actual)
        evidence = Evidence(
            gap=gap.size, allowed=self.tolerance.allowed(gap.scale), noise=self.uncached.noise(len(prefix))
        )
        if top_actual is not None:
            truth = self.uncached.row(prefix, top=True)
            measured = gap_between(truth, top_actual)
            evidence = dataclasses.replace(
                evidence,
                top_gap=measured.size,
                top_scale=measured.scale,
                top_noise=self.uncached.top_noise(len(prefix)),
                uncached_error=self.uncached.error(len(prefix)),
                cached_error=gap_between(truth, actual).size,
            )
        evidence = self._sampled(evidence, prefix)
        verdict, reason = judge(evidence)
        margin, margin_verdict = judge_margin(expected, actual, gap.size)
        return RowResult(
            ids=prefix,
            tokens=self.subject.decode(prefix),
            gap=gap.size,
            worst_id=gap.index[0],
            allowed=evidence.allowed,
            noise=evidence.noise,
            scale=gap.scale,
            top_gap=evidence.top_gap,
            top_noise=evidence.top_noise,
            uncached_error=evidence.uncached_error,
            cached_error=evidence.cached_error,
            sampled_error=evidence.sampled_error,
            margin=margin,
            margin_verdict=margin_verdict,
            verdict=verdict,
            reason=reason,
            expected=tuple(expected.tolist()) if self.subject.info.vocab_size <= KEPT_VOCABULARY else None,
        )

    def both_ways(self, both: BothWays) -> RowResult:
        """Judge a row by its two uncached ways, in which float64 decides."""
        gap, top_gap, top_scale = both.gap, both.top_gap, both.top_scale
        allowed = self.tolerance.allowed(both.scale)
        if top_gap is None or top_scale is None:
            verdict, reason = Verdict.NOT_CHECKED, "no float64 rung to tell a leak from rounding"
        elif math.isnan(top_gap) or math.isnan(gap):
            verdict, reason = Verdict.INCONCLUSIVE, "both ways give NaN at the same place"
        elif math.isinf(gap) or top_gap > STRUCTURAL_FLOOR.value * top_scale:
            verdict = Verdict.DIVERGED
            reason = f"two uncached ways to compute this row differ by {top_gap:.2e} in float64: not causal"
        elif gap <= allowed:
            verdict, reason = Verdict.MATCH, f"gap {gap:.2e} within the declared {allowed:.2e}"
        else:
            verdict, reason = Verdict.ROUNDING, f"in float64 both ways agree within {top_gap:.2e}"
        return RowResult(
            ids=both.prefix,
            tokens=self.subject.decode(both.prefix),
            gap=gap,
            worst_id=both.worst_id,
            allowed=allowed,
            noise=gap,
            scale=both.scale,
            top_gap=top_gap,
            top_noise=top_gap,
            uncached_error=both.error,
            cached_error=None,
            sampled_error=None,
            margin=both.margin,
            margin_verdict=both.margin_verdict,
            verdict=verdict,
            reason=reason,
            expected=None,
        )

    def as_chosen(self, row: RowResult, logits: Tensor, *, why: str, may_be_rounding: bool) -> RowResult:
        """Judge a row again by logits with the uncached path's choices, as all that it is held to has them.

        ``why`` says what the cached path chose otherwise, if it did. A choice that no rounding decides is a bug.
        """
        truth = self.uncached.as_chosen(self.uncached.home(row.ids), len(row.ids))
        evidence = Evidence(
            gap=gap_between(self.uncached.row(row.ids), logits).size,
            allowed=row.allowed,
            noise=0.0,  # what two uncached ways differ by holds choices too
            top_gap=row.top_gap,
            top_noise=row.top_noise,
            top_scale=row.scale,
            uncached_error=self.uncached.error_as_chosen(row.ids),
            cached_error=gap_between(truth, logits).size,
        )
        if evidence.hangs_on_sampling:
            sampled = self.uncached.sampled_error(row.ids, as_chosen=True)
            evidence = dataclasses.replace(evidence, sampled_error=sampled)
        verdict, reason = judge(evidence)
        if not may_be_rounding:
            verdict, reason = Verdict.DIVERGED, f"{why}: no rounding decides that"
        elif why:
            verdict = Verdict.ROUNDING if verdict.passes else verdict
            reason = f"{why}; with the uncached path's choices {reason}"
        return dataclasses.replace(
            row,
            verdict=verdict,
            reason=reason,
            uncached_error=evidence.uncached_error,
            cached_error=evidence.cached_error,
            sampled_error=evidence.sampled_error,
        )

    def without_tables(self, row: RowResult, why: str) -> RowResult:
        """Judge a row again as if its float64 gap were none: what is left is the declared dtype's own."""
        evidence = Evidence(
            gap=row.gap,
            allowed=row.allowed,
            noise=row.noise,
            top_gap=0.0,
            top_noise=0.0,
            top_scale=row.scale,
            uncached_error=row.uncached_error,
            cached_error=row.cached_error,
        )
        evidence = self._sampled(evidence, row.ids)
        verdict, reason = judge(evidence)
        if verdict is Verdict.MATCH:
            verdict = Verdict.ROUNDING
        return dataclasses.replace(
            row, verdict=verdict, reason=f"{why}; {reason}", sampled_error=evidence.sampled_error
        )

    def _sampled(self, evidence: Evidence, prefix: Prefix) -> Evidence:
        """Add what random rounding moves the row by, where the verdict hangs on it."""
        if not evidence.hangs_on_sampling:
            return evidence
        return dataclasses.replace(evidence, sampled_error=self.uncached.sampled_error(prefix))
