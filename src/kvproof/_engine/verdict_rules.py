"""The verdict: evidence goes in, a verdict and its reason come out. Nothing else in kvproof decides.

`judge` decides one row, `judge_scenario` joins the rows of a scenario and `judge_audit` the scenarios of an
audit. Evidence is gathered elsewhere, in as many places as it takes; the functions between ask which more is
worth gathering. Every threshold stands here or on the constants' page, `kvproof._numerics.tolerances`.
"""

import dataclasses
import math
from collections.abc import Collection, Iterable, Sequence

from torch import Tensor

from kvproof._numerics.gaps import Gap, largest
from kvproof._numerics.tolerances import (
    FAR_FACTOR,
    HIDDEN_UNITS,
    MEDIAN_LIMIT,
    NOISE_FACTOR,
    NOISE_LIMIT,
    RATIO_LIMIT,
    ROUNDING_FACTOR,
    STRUCTURAL_FLOOR,
    TABLE_UNITS,
    UNKNOWN_PART,
    UNSAMPLED_FACTOR,
    UNSAMPLED_RATIO,
    structural_limit,
)
from kvproof.contract.ledger import MarginVerdict
from kvproof.contract.results import (
    Certificate,
    ChoiceFlip,
    Comparison,
    ErrorRatio,
    Evidence,
    ExactEvidence,
    FaultResult,
    Outcome,
    RowResult,
    ScenarioResult,
    TruthEvidence,
    Verdict,
    worst,
)

#: The check that comes before every scenario where rows are taken from one pass.
CAUSALITY = "causality"
#: The check that comes before all others, listed only where it fails.
DETERMINISM = "determinism"

Judgement = tuple[Verdict, str]


def judge(evidence: Evidence) -> Judgement:
    """Return a row's verdict and the reason in words."""
    if evidence.comparison is Comparison.CAUSALITY:
        return _judge_causality(evidence)
    if evidence.comparison is Comparison.REPEATED:
        return _judge_repeated(evidence)
    verdict, reason = _judge_row(_decisive(evidence))
    if evidence.choices is not None:
        return _qualify_by_choice(verdict, reason, evidence.choices.flip)
    if evidence.rounded_tables:
        first, *others = evidence.rounded_tables
        more = f" and {len(others)} other table{'s' if len(others) > 1 else ''}" if others else ""
        reason = f"the float64 gap goes away once {first}{more} are computed in float64; {reason}"
        return (Verdict.ROUNDING if verdict is Verdict.MATCH else verdict), reason
    return verdict, reason


def _decisive(evidence: Evidence) -> Evidence:
    """Return the plain numbers that decide: with rounded tables or choices of experts out of the way."""
    exact, choices = evidence.exact, evidence.choices
    if choices is not None and exact is not None:
        return dataclasses.replace(
            evidence,
            gap=choices.gap,
            noise=0.0,  # what two uncached ways differ by holds choices too
            exact=dataclasses.replace(
                exact,
                uncached_error=choices.uncached_error,
                cached_error=choices.cached_error,
                own_error=None,  # with these choices it was not measured
            ),
            sampled_error=choices.sampled_error,
        )
    if evidence.rounded_tables and exact is not None:
        clean = dataclasses.replace(exact, gap=0.0, noise=0.0)
        return dataclasses.replace(evidence, exact=clean)
    return evidence


def _judge_row(row: Evidence) -> Judgement:
    """Judge by plain numbers. The rules stand in the order that decides."""
    exact = row.exact
    if math.isinf(row.gap) or (exact is not None and math.isinf(exact.gap)):
        return Verdict.DIVERGED, "one path gives a value that is not finite where the other's is finite"
    if math.isnan(row.gap) or (exact is not None and math.isnan(exact.gap)):
        return Verdict.INCONCLUSIVE, "both paths give NaN at the same place"
    measured = [row.noise]
    if exact is not None:
        measured += [exact.noise, exact.uncached_error, exact.cached_error or 0.0]
    if not all(map(math.isfinite, measured)):
        return Verdict.INCONCLUSIVE, "the uncached path itself is not finite, or not the same function twice"
    if exact is None:
        return _judge_by_noise(row)
    if exact.noise > _clean_limit(exact, noise=0.0):
        return Verdict.INCONCLUSIVE, (
            f"two uncached ways to compute this row differ by {exact.noise:.2e} in float64: "
            "the uncached path is not causal, or not the same function twice"
        )
    limit = bug_limit(exact)
    if exact.gap > limit:
        return Verdict.DIVERGED, f"float64 gap {exact.gap:.2e} is beyond {limit:.2e}: not rounding"
    if exact.gap > _clean_limit(exact, noise=exact.noise):
        return Verdict.INCONCLUSIVE, (
            f"float64 gap {exact.gap:.2e} is beyond what results in a lower dtype inside explain "
            f"({exact.inner_rounding:.2e}), but not beyond {limit:.2e}, which would be a bug"
        )
    if row.gap <= row.allowed:
        return Verdict.MATCH, f"gap {row.gap:.2e} within the declared {row.allowed:.2e}"
    return _judge_by_errors(row, exact)


def bug_limit(exact: ExactEvidence) -> float:
    """Return the smallest gap between two rows of the more exact run that is called a bug."""
    return max(structural_limit(exact.noise, exact.scale), NOISE_FACTOR.value * exact.inner_rounding)


def _clean_limit(exact: ExactEvidence, *, noise: float) -> float:
    """Return the largest gap between two rows of the more exact run that shows nothing."""
    return max(structural_limit(noise, exact.scale), ROUNDING_FACTOR.value * exact.inner_rounding)


def _judge_by_errors(row: Evidence, exact: ExactEvidence) -> Judgement:
    """Judge a row whose more exact run agrees by how far the declared dtype is from it, on either path.

    What excuses a row is its own uncached error, or random rounding of that very row: the largest of all rows
    would excuse a bug in those that are better conditioned.
    """
    cached = math.inf if exact.cached_error is None else exact.cached_error
    factor = ROUNDING_FACTOR.value if exact.is_watched else UNSAMPLED_FACTOR.value
    measured = largest((row.noise, exact.uncached_error))
    if row.sampled_error is not None:
        by, known = "the largest rounding that was measured", largest((measured, row.sampled_error))
        if exact.own_error is not None:
            known = largest((exact.own_error, row.sampled_error))
    else:
        by, known = "the larger of noise and uncached error", measured
        if exact.own_error is not None:
            by, known = "its own uncached error", exact.own_error
    explained = factor * known
    if cached > explained:
        return Verdict.DIVERGED, (
            f"float64 agrees, but in the declared dtype the cached error {cached:.2e} exceeds {explained:.2e}: "
            "something is held in too low a dtype"
        )
    if cached > FAR_FACTOR.value * measured:
        return Verdict.INCONCLUSIVE, (
            f"the cached error {cached:.2e} is within what random rounding does to this row, and far beyond "
            f"{measured:.2e}, the largest error and noise that were measured"
        )
    return Verdict.ROUNDING, (
        f"float64 agrees, and the cached error {cached:.2e} is within {explained:.2e}, {factor:g} × {by}"
    )


def _judge_by_noise(row: Evidence) -> Judgement:
    """Judge a row that has no more exact run: noise excuses a gap, and one far beyond every noise is a bug.

    A noise of zero measures nothing: an engine that computes a row the same way each time moves it all the same
    when it steps.
    """
    if row.gap <= row.allowed:
        return Verdict.MATCH, f"gap {row.gap:.2e} within the declared {row.allowed:.2e}"
    if row.truth is not None:
        return _judge_by_truth(row, row.truth)
    if row.noise > NOISE_LIMIT.value * row.allowed:
        return Verdict.INCONCLUSIVE, (
            f"two uncached ways to compute a row differ by {row.noise:.2e}, too much to take for noise, "
            "and there is no float64 to decide"
        )
    explained = ROUNDING_FACTOR.value * row.noise
    factor = f"{ROUNDING_FACTOR.value:g}"
    if row.gap <= explained:
        return Verdict.ROUNDING, f"gap {row.gap:.2e} within {explained:.2e}, the noise × {factor}"
    limit = bug_limit_by_noise(row)
    if row.gap > limit:
        return Verdict.DIVERGED, f"gap {row.gap:.2e} is beyond {limit:.2e}, which no rounding explains"
    return Verdict.INCONCLUSIVE, (
        f"gap {row.gap:.2e} is beyond the noise × {factor}, but not beyond {limit:.2e}, which no rounding "
        "explains: there is no more exact run to decide"
    )


def _judge_by_truth(row: Evidence, truth: TruthEvidence) -> Judgement:
    """Judge by how far either row is from the truth; what one row leaves open, all rows together decide."""
    explained = ROUNDING_FACTOR.value * largest((row.noise, truth.uncached_error))
    if truth.cached_error <= explained:
        return Verdict.ROUNDING, (
            f"against the truth the cached row is off by {truth.cached_error:.2e}, the uncached one by "
            f"{truth.uncached_error:.2e}"
        )
    limit = bug_limit_by_noise(row)
    if row.gap > limit:
        return Verdict.DIVERGED, f"gap {row.gap:.2e} is beyond {limit:.2e}, which no rounding explains"
    return Verdict.INCONCLUSIVE, (
        f"against the truth the cached row is off by {truth.cached_error:.2e}, more than {explained:.2e}, "
        f"{ROUNDING_FACTOR.value:g} × what the uncached one is"
    )


def bug_limit_by_noise(row: Evidence) -> float:
    """Return the smallest gap that is called a bug without a more exact run."""
    if row.coarsest_unit is None:
        return max(UNKNOWN_PART.value * row.scale, NOISE_FACTOR.value * row.noise)
    return NOISE_FACTOR.value * max(row.noise, HIDDEN_UNITS.value * row.coarsest_unit * row.scale)


def _judge_repeated(row: Evidence) -> Judgement:
    """Judge two results of the same call."""
    if row.gap <= row.allowed or math.isnan(row.gap):  # NaN twice is the same twice
        return Verdict.MATCH, f"the same call twice gives the same row within {row.gap:.2e}"
    return Verdict.INCONCLUSIVE, f"the same call twice gives rows that differ by {row.gap:.2e}: not a function"


def _judge_causality(row: Evidence) -> Judgement:
    """Judge a row by its two uncached ways, in which float64 decides."""
    exact = row.exact
    if exact is None:
        return _judge_leak(row)
    if math.isnan(exact.gap) or math.isnan(row.gap):
        return Verdict.INCONCLUSIVE, "both ways give NaN at the same place"
    if math.isinf(row.gap) or exact.gap > max(
        STRUCTURAL_FLOOR.value * exact.scale, NOISE_FACTOR.value * exact.inner_rounding
    ):
        reason = f"two uncached ways to compute this row differ by {exact.gap:.2e} in float64: not causal"
        return Verdict.DIVERGED, reason
    if exact.gap > _clean_limit(exact, noise=0.0) and row.leak != 0:
        return Verdict.INCONCLUSIVE, (
            f"two uncached ways to compute this row differ by {exact.gap:.2e} in float64: more than what is "
            "computed in a lower dtype inside explains, and too little for a leak"
        )
    if row.gap <= row.allowed:
        return Verdict.MATCH, f"gap {row.gap:.2e} within the declared {row.allowed:.2e}"
    return Verdict.ROUNDING, f"in float64 both ways agree within {exact.gap:.2e}"


def _judge_leak(row: Evidence) -> Judgement:
    """Judge by what happens to a row if the tokens after it alone change: it must not move by a bit.

    Kernels that group tokens, as those of experts do, may move it by rounding.
    """
    if row.leak is None:
        return Verdict.NOT_CHECKED, "no float64 rung to tell a leak from rounding"
    if row.leak > bug_limit_by_noise(dataclasses.replace(row, noise=0.0)) or math.isinf(row.leak):
        return Verdict.DIVERGED, f"changing only the later tokens moves this row by {row.leak:.2e}: not causal"
    if row.leak > row.allowed or math.isnan(row.leak):
        return Verdict.INCONCLUSIVE, (
            f"changing only the later tokens moves this row by {row.leak:.2e}, and there is no float64 to decide"
        )
    verdict = Verdict.MATCH if row.gap <= row.allowed else Verdict.ROUNDING
    return verdict, f"changing only the later tokens moves this row by {row.leak:.2e}"


def _qualify_by_choice(verdict: Verdict, reason: str, flip: ChoiceFlip | None) -> Judgement:
    """Say what the other choice means: one that no rounding decides is a bug, a near-tie is no match."""
    if flip is None:
        return verdict, reason
    if not is_near_tie(flip):
        return Verdict.DIVERGED, f"{_describe_flip(flip)}: no rounding decides that"
    verdict = Verdict.ROUNDING if verdict.passes else verdict
    return verdict, f"{_describe_flip(flip)}; with the uncached path's choices {reason}"


def _describe_flip(flip: ChoiceFlip) -> str:
    how = "an exact tie" if flip.margin == 0 else f"by scores that differ by {flip.margin:.2e}"
    return (
        f"top-k {flip.number + 1} of position {flip.position} takes {flip.taken} where the uncached "
        f"path takes {flip.rejected}, {how}, and rounding moves them by {flip.error:.2e}"
    )


def smallest_bug(rows: Iterable[RowResult]) -> float | None:
    """Return the smallest change, as a part of a row's scale, that is called a bug in every one of these rows."""
    found = [0.0]
    for row in rows:
        evidence, exact = row.evidence, row.evidence.exact
        if evidence.comparison is Comparison.CACHED and evidence.scale:
            limit = bug_limit_by_noise(evidence) if exact is None else bug_limit(exact)
            found.append(limit / (evidence.scale if exact is None else exact.scale or evidence.scale))
    return largest(found) or None


def is_near_tie(flip: ChoiceFlip) -> bool:
    """Return whether rounding of both scores, by both paths, may decide a choice."""
    return flip.margin <= 2 * ROUNDING_FACTOR.value * flip.error


def needs_sampling(evidence: Evidence) -> bool:
    """Return whether float64 agrees and nothing measured so far explains the error in the declared dtype."""
    decisive = _decisive(evidence)
    if _judge_row(decisive)[0] is not Verdict.DIVERGED or not math.isfinite(decisive.gap):
        return False
    return decisive.exact is not None and _is_clean(decisive)


def may_come_from_tables(evidence: Evidence, unit: float) -> bool:
    """Return whether a float64 gap is as small as what tables in a lower dtype, of this unit, may leave."""
    exact = evidence.exact
    if exact is None or judge(evidence)[0] is not Verdict.DIVERGED:
        return False
    return STRUCTURAL_FLOOR.value * evidence.scale < exact.gap <= TABLE_UNITS.value * unit * evidence.scale


def may_come_from_choices(evidence: Evidence) -> bool:
    """Return whether a choice of experts may have moved a row: float64 agrees, and its dtype alone is off."""
    verdict, _ = judge(evidence)
    undecided = (Verdict.ROUNDING, Verdict.INCONCLUSIVE, Verdict.DIVERGED)
    if verdict not in undecided or not math.isfinite(evidence.gap):
        return False
    exact = evidence.exact
    return exact is not None and exact.cached_error is not None and _is_clean(evidence)


def explains_error(evidence: Evidence, uncached_error: float) -> bool:
    """Return whether an uncached error, made with the same choices, explains the cached one by itself."""
    error = None if evidence.exact is None else evidence.exact.cached_error
    return error is not None and error <= ROUNDING_FACTOR.value * uncached_error


def is_of_declared_dtype_alone(row: RowResult) -> bool:
    """Return whether a row diverged although float64 agrees: the cause is to be looked for in its own dtype."""
    exact = row.evidence.exact
    if row.verdict is not Verdict.DIVERGED or exact is None:
        return False
    return exact.gap <= max(STRUCTURAL_FLOOR.value * row.evidence.scale, bug_limit(exact))


def are_equal_in_float64(gap: Gap) -> bool:
    """Return whether two float64 rows of a decoder are one and the same but for regrouping."""
    return gap.size <= structural_limit(0.0, gap.scale)


def has_known_errors(evidence: Evidence) -> bool:
    """Return whether a row's errors are those of its dtype alone: nothing else is wrong with it or its reference.

    A row that a choice of experts moved, or one whose tables were rounded, has others.
    """
    if evidence.choices is not None or evidence.rounded_tables:
        return False
    exact = evidence.exact
    if exact is None:
        return evidence.truth is not None
    return exact.noise <= _clean_limit(exact, noise=0.0) and _is_clean(evidence)


def _is_clean(evidence: Evidence) -> bool:
    """Return whether float64 shows nothing."""
    exact = evidence.exact
    return exact is not None and exact.gap <= _clean_limit(exact, noise=exact.noise)


def judge_scenario(
    rows: Iterable[RowResult],
    *,
    errors: ErrorRatio | None = None,
    wrong_value: bool = False,
    raised: bool = False,
    undecided: bool = False,
    unreached: bool = False,
    refused: bool = False,
) -> Verdict:
    """Join the verdicts of a scenario's rows with everything else that happened in it.

    ``errors``: those of all rows together. ``wrong_value``: an intermediate value differs by more than rounding
    can explain. ``raised``: the cached path raised, or gave a malformed row, where the uncached path gives a row.
    ``undecided``: there was no uncached row to compare with, or kvproof could not tell what a call did.
    ``unreached``: the scenario did not reach or do what it promises.
    ``refused``: the decoder cannot do a part of it, by design; a pass without that part is not checked.
    """
    verdicts = [row.verdict for row in rows]
    verdicts += [Verdict.DIVERGED] if wrong_value or (errors is not None and are_too_large(errors)) else []
    verdicts += [Verdict.RAISED] if raised else []
    verdicts += [Verdict.INCONCLUSIVE] if undecided else []
    verdicts += [Verdict.VACUOUS] if unreached else []
    verdict = worst(verdicts)
    return Verdict.NOT_CHECKED if refused and verdict.passes else verdict


def are_too_large(errors: ErrorRatio) -> bool:
    """Return whether the cached path's errors show, over all rows, that something is held in too low a dtype.

    A near-tie may move one row far, so the median row must show it, too. What the cached path's own operations
    cost more than the uncached one's, by rounding at random, is no bug; where that cannot be tried, only a factor
    that no regrouping makes is one.
    """
    if not may_be_too_large(errors):
        return False
    if errors.sampled_ratio is None:
        return errors.lowest > UNSAMPLED_RATIO.value
    return errors.lowest > RATIO_LIMIT.value * errors.sampled_ratio


def may_be_too_large(errors: ErrorRatio) -> bool:
    """Return whether it is worth measuring what the cached path's own operations cost."""
    return errors.lowest > RATIO_LIMIT.value and errors.median > MEDIAN_LIMIT.value


def is_finding(result: ScenarioResult) -> bool:
    """Return whether a scenario found something wrong with the decoder, and is no mere advice."""
    return result.verdict in (Verdict.RAISED, Verdict.DIVERGED) and not result.advice


def judge_scenarios(results: Sequence[ScenarioResult]) -> Verdict:
    """Join what counts; causality alone, with no scenario checked, shows nothing of a cache."""
    counted = [result for result in results if not result.advice]
    if any(result.name == DETERMINISM for result in counted):
        return Verdict.INCONCLUSIVE
    verdicts = [result.verdict for result in counted if result.name != CAUSALITY]
    causality = [result.verdict for result in counted if result.name == CAUSALITY]
    if worst(verdicts) is Verdict.NOT_CHECKED and worst(causality).passes:
        return Verdict.NOT_CHECKED
    return worst(verdicts + causality)


def judge_audit(
    results: Sequence[ScenarioResult], certificate: Certificate | None, *, rung_problem: str | None = None
) -> Verdict:
    """Join the scenarios with what the certificate could not show, and with a more exact run that is none."""
    verdicts = [judge_scenarios(results)]
    if certificate is not None and certificate.problem is not None:
        verdicts.append(Verdict.VACUOUS)
    if rung_problem is not None:
        verdicts.append(Verdict.INCONCLUSIVE)
    return worst(verdicts)


def why_vacuous(
    results: Sequence[FaultResult], *, misplacing: Collection[str], keeping: Iterable[int]
) -> str | None:
    """Return why planted faults could not show that the audit can fail, or None.

    Some fault must be caught, and in each layer of ``keeping``, one of ``misplacing``, the faults that put the
    content of one token in another's place: or else the audit would not notice misplaced entries in that layer's
    cache. Any other fault that is hidden does not make the audit vacuous: rows showed what others did to the same
    layer. The summary names it.
    """
    if not any(result.caught for result in results):
        return "no planted fault changed a row of logits"
    seen = (Outcome.CAUGHT, Outcome.RAISED)
    noticed = {result.layer for result in results if result.name in misplacing and result.outcome in seen}
    blind = [layer for layer in keeping if layer not in noticed]
    if blind:
        return f"nothing misplaced in the cache of layer {', '.join(map(str, blind))} changed a row of logits"
    return None


def explained_error(evidence: Evidence) -> float:
    """Return the error in a logit that rounding explains: the ``error`` by which an audit judges a row's margin.

    The gap of a row that passes is rounding. The gap of any other row must not explain itself: there, it is the
    largest of the noise, the uncached error and the sampled error. No error explains a gap that is not finite.
    """
    if not math.isfinite(evidence.gap):
        return evidence.gap
    exact = evidence.exact
    measured = [evidence.noise, evidence.sampled_error or 0.0, 0.0 if exact is None else exact.uncached_error]
    return largest((*measured, evidence.gap) if judge(evidence)[0].passes else measured)


def judge_margin(row: Tensor, other: Tensor, error: float) -> tuple[float, MarginVerdict]:
    """Return the margin of a row's most likely token and whether rounding could flip it.

    ``error`` is how far rounding may move a logit, which changes a difference of two by at most twice that. The
    margin of a vocabulary of one token is infinite.
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


def margin_with_more_evidence(row: RowResult, evidence: Evidence) -> MarginVerdict:
    """Return whether rounding could flip a row's most likely token, where more evidence may clear the row."""
    is_cleared = row.margin <= 2 * explained_error(evidence)
    if row.margin_verdict is MarginVerdict.UNEXPLAINED_FLIP and is_cleared:
        return MarginVerdict.EXPLAINED_FLIP
    return row.margin_verdict
