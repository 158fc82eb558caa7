"""The verdict: evidence goes in, a verdict and its reason come out. Nothing else in kvproof decides.

`judge` decides one row, `judge_scenario` joins the rows of a scenario and `judge_audit` the scenarios of an
audit. Evidence is gathered elsewhere, in as many places as it takes; the functions between ask which more is
worth gathering. Every threshold stands here or on the constants' page, `kvproof._numerics.tolerances`.
"""

import dataclasses
import math
from collections.abc import Iterable, Sequence

from torch import Tensor

from kvproof._numerics.gaps import Gap, largest
from kvproof._numerics.tolerances import (
    NOISE_LIMIT,
    ROUNDING_FACTOR,
    STRUCTURAL_FLOOR,
    TABLE_UNITS,
    structural_limit,
)
from kvproof.contract.ledger import MarginVerdict
from kvproof.contract.results import (
    Certificate,
    ChoiceFlip,
    Comparison,
    Evidence,
    RowResult,
    ScenarioResult,
    Verdict,
    worst,
)

#: The check that comes before every scenario where rows are taken from one pass.
CAUSALITY = "causality"

Judgement = tuple[Verdict, str]


def judge(evidence: Evidence) -> Judgement:
    """Return a row's verdict and the reason in words."""
    if evidence.comparison is Comparison.CAUSALITY:
        return _judge_causality(evidence)
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
        errors = {"uncached_error": choices.uncached_error, "cached_error": choices.cached_error}
        return dataclasses.replace(
            evidence,
            gap=choices.gap,
            noise=0.0,  # what two uncached ways differ by holds choices too
            exact=dataclasses.replace(exact, **errors),
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
    if exact.noise > STRUCTURAL_FLOOR.value * exact.scale:
        return Verdict.INCONCLUSIVE, (
            f"two uncached ways to compute this row differ by {exact.noise:.2e} in float64: "
            "the uncached path is not causal, or not the same function twice"
        )
    limit = structural_limit(exact.noise, exact.scale)
    if exact.gap > limit:
        return Verdict.DIVERGED, f"float64 gap {exact.gap:.2e} is beyond {limit:.2e}: not rounding"
    if row.gap <= row.allowed:
        return Verdict.MATCH, f"gap {row.gap:.2e} within the declared {row.allowed:.2e}"
    explained = ROUNDING_FACTOR.value * largest((row.noise, exact.uncached_error, row.sampled_error or 0.0))
    if exact.cached_error is not None and exact.cached_error <= explained:
        by = "noise and uncached error" if row.sampled_error is None else "all rounding that was measured"
        return Verdict.ROUNDING, (
            f"float64 agrees, and the cached error {exact.cached_error:.2e} is within {explained:.2e}, "
            f"{ROUNDING_FACTOR.value:g} × the larger of {by}"
        )
    return Verdict.DIVERGED, (
        f"float64 agrees, but in the declared dtype the cached error {exact.cached_error:.2e} exceeds "
        f"{explained:.2e}: something is held in too low a dtype"
    )


def _judge_by_noise(row: Evidence) -> Judgement:
    """Judge a row that has no top rung: noise alone can excuse a gap, and never convicts one."""
    if row.gap <= row.allowed:
        return Verdict.MATCH, f"gap {row.gap:.2e} within the declared {row.allowed:.2e}"
    if row.noise > NOISE_LIMIT.value * row.allowed:
        return Verdict.INCONCLUSIVE, (
            f"two uncached ways to compute a row differ by {row.noise:.2e}, too much to take for noise, "
            "and there is no float64 to decide"
        )
    explained = ROUNDING_FACTOR.value * row.noise
    factor = f"{ROUNDING_FACTOR.value:g}"
    if row.gap <= explained:
        return Verdict.ROUNDING, f"gap {row.gap:.2e} within {explained:.2e}, the noise × {factor}"
    return Verdict.INCONCLUSIVE, (
        f"gap {row.gap:.2e} is beyond the noise × {factor}, and there is no float64 to decide"
    )


def _judge_causality(row: Evidence) -> Judgement:
    """Judge a row by its two uncached ways, in which float64 decides."""
    exact = row.exact
    if exact is None:
        return Verdict.NOT_CHECKED, "no float64 rung to tell a leak from rounding"
    if math.isnan(exact.gap) or math.isnan(row.gap):
        return Verdict.INCONCLUSIVE, "both ways give NaN at the same place"
    if math.isinf(row.gap) or exact.gap > STRUCTURAL_FLOOR.value * exact.scale:
        reason = f"two uncached ways to compute this row differ by {exact.gap:.2e} in float64: not causal"
        return Verdict.DIVERGED, reason
    if row.gap <= row.allowed:
        return Verdict.MATCH, f"gap {row.gap:.2e} within the declared {row.allowed:.2e}"
    return Verdict.ROUNDING, f"in float64 both ways agree within {exact.gap:.2e}"


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
    if verdict not in (Verdict.ROUNDING, Verdict.DIVERGED) or not math.isfinite(evidence.gap):
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
    return exact.gap <= STRUCTURAL_FLOOR.value * row.evidence.scale


def are_equal_in_float64(gap: Gap) -> bool:
    """Return whether two float64 rows of a decoder are one and the same but for regrouping."""
    return gap.size <= structural_limit(0.0, gap.scale)


def _is_clean(evidence: Evidence) -> bool:
    """Return whether float64 shows nothing."""
    exact = evidence.exact
    return exact is not None and exact.gap <= structural_limit(exact.noise, exact.scale)


def judge_scenario(
    rows: Iterable[RowResult],
    *,
    wrong_value: bool = False,
    raised: bool = False,
    undecided: bool = False,
    unreached: bool = False,
) -> Verdict:
    """Join the verdicts of a scenario's rows with everything else that happened in it.

    ``wrong_value``: an intermediate value differs by more than rounding can explain. ``raised``: the cached path
    raised, or gave a malformed row, where the uncached path gives a row. ``undecided``: there was no uncached row
    to compare with, or kvproof could not tell what a call did. ``unreached``: the scenario did not reach or do
    what it promises.
    """
    verdicts = [row.verdict for row in rows]
    verdicts += [Verdict.DIVERGED] if wrong_value else []
    verdicts += [Verdict.RAISED] if raised else []
    verdicts += [Verdict.INCONCLUSIVE] if undecided else []
    verdicts += [Verdict.VACUOUS] if unreached else []
    return worst(verdicts)


def is_finding(result: ScenarioResult) -> bool:
    """Return whether a scenario found something wrong with the decoder, and is no mere advice."""
    return result.verdict in (Verdict.RAISED, Verdict.DIVERGED) and not result.advice


def judge_scenarios(results: Sequence[ScenarioResult]) -> Verdict:
    """Join what counts; causality alone, with no scenario checked, shows nothing of a cache."""
    counted = [result for result in results if not result.advice]
    verdicts = [result.verdict for result in counted if result.name != CAUSALITY]
    causality = [result.verdict for result in counted if result.name == CAUSALITY]
    if worst(verdicts) is Verdict.NOT_CHECKED and worst(causality).passes:
        return Verdict.NOT_CHECKED
    return worst(verdicts + causality)


def judge_audit(results: Sequence[ScenarioResult], certificate: Certificate | None) -> Verdict:
    """Join the scenarios with what the certificate could not show."""
    problem = certificate is not None and certificate.problem is not None
    return worst([judge_scenarios(results), *((Verdict.VACUOUS,) if problem else ())])


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
