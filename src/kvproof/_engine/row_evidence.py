"""Gathers the evidence of one row. What it means is decided in `verdict_rules` alone."""

import dataclasses
import math

from torch import Tensor

from kvproof._engine.programs import Row
from kvproof._engine.rung import Prefix
from kvproof._engine.uncached_rows import BothWays, Uncached
from kvproof._engine.verdict_rules import (
    explained_error,
    judge,
    judge_margin,
    margin_with_more_evidence,
    needs_sampling,
)
from kvproof._numerics.gaps import Gap, error_of_row, gap_of_rows, mean_square_error
from kvproof.contract.results import (
    ChoiceEvidence,
    ChoiceFlip,
    Comparison,
    Evidence,
    ExactEvidence,
    RowResult,
    Tolerance,
    TruthEvidence,
)
from kvproof.subjects import Subject

#: Rows of a vocabulary up to this size are kept in the report whole.
KEPT_VOCABULARY = 256


class RowEvidence:
    """Gathers evidence of one subject's rows against what is known of its uncached path."""

    def __init__(self, subject: Subject, tolerance: Tolerance, uncached: Uncached) -> None:
        self.subject = subject
        self.tolerance = tolerance
        self.uncached = uncached

    def compare(self, row: Row, exact: Tensor | None) -> RowResult:
        """Compare a cached row with the uncached one; ``exact`` is the cached row at the top rung, if any."""
        prefix, actual = row.prefix, row.logits
        expected = self.uncached.row(prefix)
        gap = gap_of_rows(expected, actual)
        evidence = Evidence(
            gap=gap.size,
            allowed=self.tolerance.allowed(gap.scale),
            noise=self.uncached.noise(len(prefix)),
            scale=gap.scale,
            exact=None if exact is None else self._exact(prefix, actual, exact),
            coarsest_unit=None if exact is not None else self._coarsest_unit(),
            truth=self._truth(prefix, actual) if exact is None else None,
        )
        evidence = self.with_sampling(evidence, prefix)
        verdict, reason = judge(evidence)
        margin, margin_verdict = judge_margin(expected, actual, explained_error(evidence))
        return RowResult(
            ids=prefix,
            tokens=self.subject.decode(prefix),
            evidence=evidence,
            worst_id=gap.index[0],
            margin=margin,
            margin_verdict=margin_verdict,
            verdict=verdict,
            reason=reason,
            expected=tuple(expected.tolist()) if self.subject.info.vocab_size <= KEPT_VOCABULARY else None,
        )

    def compare_both_ways(self, both: BothWays) -> RowResult:
        """Compare the two uncached ways to a row: a subject for which they differ is not causal."""
        exact = None
        if both.top_gap is not None and both.top_scale is not None and both.error is not None:
            exact = ExactEvidence(
                gap=both.top_gap,
                noise=both.top_gap,
                scale=both.top_scale,
                uncached_error=both.error,
                cached_error=None,
                inner_rounding=self.uncached.ladder.inner_rounding * both.top_scale,
            )
        evidence = Evidence(
            comparison=Comparison.CAUSALITY,
            gap=both.gap,
            allowed=self.tolerance.allowed(both.scale),
            noise=both.gap,
            scale=both.scale,
            exact=exact,
            coarsest_unit=None if exact is not None else self._coarsest_unit(),
            leak=self.uncached.leak(both.prefix) if exact is None or exact.inner_rounding else None,
        )
        verdict, reason = judge(evidence)
        return RowResult(
            ids=both.prefix,
            tokens=self.subject.decode(both.prefix),
            evidence=evidence,
            worst_id=both.worst_id,
            margin=both.margin,
            margin_verdict=both.margin_verdict,
            verdict=verdict,
            reason=reason,
            expected=None,
        )

    def add_choices(self, row: RowResult, logits: Tensor, flip: ChoiceFlip | None) -> RowResult:
        """Judge a row again by logits in which every choice of experts is the uncached path's.

        ``flip`` is what the cached path chose otherwise, if it did.
        """
        truth = self.uncached.row_with_choices(self.uncached.source_sequence(row.ids), len(row.ids))
        choices = ChoiceEvidence(
            gap=gap_of_rows(self.uncached.row(row.ids), logits).size,
            uncached_error=self.uncached.error_with_choices(row.ids),
            cached_error=error_of_row(truth, logits),
            sampled_error=None,
            flip=flip,
        )
        evidence = dataclasses.replace(row.evidence, choices=choices)
        if needs_sampling(evidence):
            sampled = self.uncached.sampled_error(row.ids, with_choices=True)
            evidence = dataclasses.replace(evidence, choices=dataclasses.replace(choices, sampled_error=sampled))
        return judge_again(row, evidence)

    def add_rounded_tables(self, row: RowResult, tables: tuple[str, ...]) -> RowResult:
        """Judge a row again whose float64 gap goes away once these tables are computed in float64."""
        evidence = dataclasses.replace(row.evidence, rounded_tables=tables)
        return judge_again(row, self.with_sampling(evidence, row.ids))

    def with_sampling(self, evidence: Evidence, prefix: Prefix) -> Evidence:
        """Add how far random rounding moves the row, where that decides its verdict."""
        if not self.uncached.ladder.can_sample or not needs_sampling(evidence):
            return evidence
        return dataclasses.replace(evidence, sampled_error=self.uncached.sampled_error(prefix))

    def in_declared_dtype(self, row: Row, truth: Tensor) -> Evidence:
        """Return the evidence of a row as if float64 agreed: what its declared dtype alone shows."""
        gap = gap_of_rows(self.uncached.row(row.prefix), row.logits)
        evidence = Evidence(
            gap=gap.size,
            allowed=self.tolerance.allowed(gap.scale),
            noise=self.uncached.noise(len(row.prefix)),
            scale=gap.scale,
            exact=self._exact_of(
                Gap(size=0.0, index=(), scale=gap.scale), row.prefix, row.logits, truth, noise=0.0
            ),
        )
        return evidence if self.uncached.top is None else self.with_sampling(evidence, row.prefix)

    def _exact(self, prefix: Prefix, actual: Tensor, exact: Tensor) -> ExactEvidence:
        truth = self.uncached.row(prefix, top=True)
        noise = self.uncached.top_noise(len(prefix))
        return self._exact_of(gap_of_rows(truth, exact), prefix, actual, truth, noise=noise)

    def _exact_of(
        self, gap: Gap, prefix: Prefix, actual: Tensor, truth: Tensor, *, noise: float
    ) -> ExactEvidence:
        uncached, own = self.uncached, self.uncached.row(prefix)
        return ExactEvidence(
            gap=gap.size,
            noise=noise,
            scale=gap.scale,
            uncached_error=uncached.error(len(prefix)),
            cached_error=error_of_row(truth, actual),
            own_error=error_of_row(truth, own) if uncached.ladder.can_sample else None,
            uncached_rms=math.sqrt(mean_square_error(truth, own)),
            cached_rms=math.sqrt(mean_square_error(truth, actual)),
            inner_rounding=uncached.ladder.inner_rounding * gap.scale,
            is_watched=uncached.ladder.inside is None or uncached.ladder.inside.unseen is None,
        )

    def _truth(self, prefix: Prefix, actual: Tensor) -> TruthEvidence | None:
        if self.uncached.ladder.truth is None:
            return None
        truth, own = self.uncached.row_of(self.uncached.ladder.truth, prefix), self.uncached.row(prefix)
        return TruthEvidence(
            uncached_error=error_of_row(truth, own),
            cached_error=error_of_row(truth, actual),
            uncached_rms=math.sqrt(mean_square_error(truth, own)),
            cached_rms=math.sqrt(mean_square_error(truth, actual)),
        )

    def _coarsest_unit(self) -> float | None:
        inside = self.uncached.ladder.inside
        return None if inside is None else inside.coarsest


def judge_again(row: RowResult, evidence: Evidence) -> RowResult:
    """Return a row with more evidence, and the verdict that follows."""
    verdict, reason = judge(evidence)
    return dataclasses.replace(
        row,
        evidence=evidence,
        margin_verdict=margin_with_more_evidence(row, evidence),
        verdict=verdict,
        reason=reason,
    )
