"""What an audit found, in sentences."""

from kvproof.contract.results import Divergence, ScenarioResult, Verdict


def finding_of(scenario: ScenarioResult) -> str:
    """Return the reason for a scenario's verdict, in one or more sentences."""
    return found(scenario) or scenario.reason or f"largest gap {scenario.largest_gap:.4g}"


def found(scenario: ScenarioResult) -> str | None:
    """Return what a scenario found: where it went wrong, which path is suspect, and whether it is only advice."""
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
    """Return where a path first went wrong, which contract that breaks, and whether it was confirmed."""
    lines = [f"{divergence.sentence}.", f"Likely cause: {divergence.contract}."]
    if divergence.introduced:
        lines.append(confirmation(divergence))
    return "\n".join(lines)


def confirmation(divergence: Divergence) -> str:
    """Return whether replacing values with the uncached ones made the paths agree, and which values."""
    places = divergence.introduced
    agree, made = "the logits agree", "the logits agree"
    if not divergence.logits_differ:
        agree, made = "every value agrees", "every value agree"
    if not divergence.confirmed:
        more = f" and {len(places) - 1} more value{'s' if len(places) > 2 else ''}" if len(places) > 1 else ""
        return f"Not confirmed: replacing {places[0]}{more} with uncached values does not show that {agree}."
    if len(places) == 1:
        return f"Confirmed: replacing {places[0]} with the uncached value makes {made}."
    return (
        f"Confirmed: replacing these {len(places)} values with the uncached ones makes {made}. Each is wrong "
        f"independently of the ones before it: {'; '.join(places)}."
    )
