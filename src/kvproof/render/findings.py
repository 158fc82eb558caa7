"""What an audit found, in sentences."""

from kvproof.contract.results import Divergence, ScenarioResult, Verdict


def found(scenario: ScenarioResult) -> str | None:
    """Say what a scenario found: where it went wrong, which side is suspect, and whether it is advice alone."""
    bad = next((row for row in scenario.rows if row.verdict is Verdict.DIVERGED), None)
    lines = []
    if scenario.divergence is not None:
        lines.append(finding(scenario.divergence))
    elif bad is not None:
        lines.append(f"after {bad.tokens}: {bad.reason}.")
    if scenario.four_ways is not None:
        lines.append(f"Which side: {scenario.four_ways.sentence}.")
    if lines and scenario.advice:
        lines.append("This is advice, and no part of the verdict: the caller chose what leads to it.")
    return "\n".join(lines) or None


def finding(divergence: Divergence) -> str:
    """Say where a path went wrong first, what contract that breaks, and whether it was confirmed."""
    lines = [f"{divergence.sentence}.", f"Likely contract: {divergence.contract}."]
    if divergence.introduced:
        lines.append(confirmation(divergence))
    return "\n".join(lines)


def confirmation(divergence: Divergence) -> str:
    """Say whether putting the uncached values in place made the paths agree, and where that was needed."""
    places = divergence.introduced
    agree = "the logits agree" if divergence.logits_differ else "every value agrees"
    if not divergence.confirmed:
        more = f" and at {len(places) - 1} more place{'s' if len(places) > 2 else ''}" if len(places) > 1 else ""
        return f"Not confirmed: with the uncached value of {places[0]}{more}, it was not shown that {agree}."
    if len(places) == 1:
        return f"Confirmed: with the uncached value of {places[0]} put in its place, {agree}."
    return (
        f"Confirmed in {len(places)} places, each wrong even where those before it are put right; with the "
        f"uncached values of all of them, {agree}: {'; '.join(places)}."
    )
