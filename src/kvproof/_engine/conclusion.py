"""What an audit comes to, in a sentence; the verdict itself is decided in `verdict_rules`."""

import dataclasses
from collections.abc import Sequence

from kvproof._engine.verdict_rules import CAUSALITY, DETERMINISM, are_too_large
from kvproof._numerics.gaps import largest
from kvproof.contract.certified import unseen_sentence
from kvproof.contract.results import Certificate, ErrorRatio, RowResult, ScenarioResult, Verdict
from kvproof.contract.sentences import raise_sentence


def summarise(
    verdict: Verdict,
    results: Sequence[ScenarioResult],
    certificate: Certificate | None,
    rung_problem: str | None = None,
) -> str:
    """Return in one sentence what was found, or how much was compared."""
    causality = next((result for result in results if result.name == CAUSALITY), None)
    repeated = next((result for result in results if result.name == DETERMINISM), None)
    if repeated is not None:
        gap = largest(row.gap for row in repeated.rows)
        return f"The decoder is not deterministic: {repeated.reason} (largest gap {gap:.4e})."
    results = [result for result in results if not result.advice and result is not causality]
    compared = [row for result in results for row in result.rows]
    gap = largest(result.largest_gap for result in results)
    text = f"{len(compared)} prefixes compared over the whole vocabulary, largest gap {gap:.4e}"
    located = next((result.divergence for result in results if result.divergence), None)
    row = next((row for row in compared if row.verdict is Verdict.DIVERGED), None)
    raised = _raised(results)
    if causality is not None and causality.verdict is Verdict.DIVERGED:
        also = ""
        if row is not None:
            also = f" Against literal rows the cached path diverges, too, after {row.tokens}: {row.reason}."
        return f"The uncached path is {causality.reason}.{also}{_also(raised)}"
    if verdict is Verdict.DIVERGED and located is not None:
        return f"The cached path diverges: {located.sentence}.{_also(raised)}"
    if row is not None:
        return f"The cached path diverges after {row.tokens}: {row.reason}.{_also(raised)}"
    together = next((r for r in results if r.errors is not None and are_too_large(r.errors)), None)
    if verdict is Verdict.DIVERGED and together is not None:
        text = describe_errors(together.name, together.errors)
        return f"The cached path diverges in its dtype alone: {text}.{_also(raised)}"
    if raised is not None:
        return f"{_capitalise(raised)}."
    if rung_problem is not None:
        return f"Could not decide: {rung_problem}. Without it, {text}."
    if verdict.passes:
        unseen = None if certificate is None else unseen_sentence(certificate)
        text += "" if unseen is None else f"; {unseen}"
        return f"The cached path computes the same logits as the uncached one: {text}."
    if certificate is not None and certificate.problem is not None:
        return f"Could not decide: {text}, but {certificate.problem}."
    if not compared:
        reason = next((result.reason for result in results if result.reason), "no scenario gave a row")
        return f"Could not decide: no prefix could be compared: {reason.splitlines()[0].rstrip('.')}."
    look = f"; look first where, {located.sentence}" if located is not None else ""
    return f"Could not decide: {text}, verdict {verdict.value}{look}."


def describe_errors(scenario: str, errors: ErrorRatio | None) -> str:
    """Return what the errors of all rows of a scenario show, in words."""
    assert errors is not None
    return (
        f"over {errors.num_rows} rows of {scenario} its root mean square error {errors.cached_rms:.2e} is "
        f"{errors.ratio:.3g} times the uncached path's, the median row's {errors.median:.3g} times: something is "
        "held in too low a dtype"
    )


def _raised(results: Sequence[ScenarioResult]) -> str | None:
    """Return what the cached path raised first, and in which call of which scenario."""
    first = next((result for result in results if result.raised is not None), None)
    if first is None or first.raised is None:
        return None
    return raise_sentence(first.raised, first.name)


def _also(raised: str | None) -> str:
    return "" if raised is None else f" Besides, {raised}."


def _capitalise(text: str) -> str:
    return text[:1].upper() + text[1:]


def scenario_result(
    name: str, verdict: Verdict, rows: tuple[RowResult, ...], *, reason: str | None = None
) -> ScenarioResult:
    """Return what a scenario came to by its rows alone."""
    return ScenarioResult(
        name=name,
        advice=False,
        verdict=verdict,
        rows=rows,
        largest_gap=largest(row.gap for row in rows),
        num_values_compared=0,
        reason=reason,
        divergence=None,
        four_ways=None,
    )


def empty_result(name: str, verdict: Verdict, reason: str, *, advice: bool) -> ScenarioResult:
    """Return the result of a scenario that gave no row, and why."""
    return dataclasses.replace(scenario_result(name, verdict, (), reason=reason), advice=advice)
