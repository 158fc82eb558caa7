"""What an audit found, in sentences; and a report on one screen, for a prompt, a notebook, or a failing test."""

from collections.abc import Iterator
from html import escape
from typing import TYPE_CHECKING

from kvproof.contract.results import Divergence, ScenarioResult, Verdict
from kvproof.contract.text import printable

if TYPE_CHECKING:
    from kvproof.contract.report import Report


def brief(report: "Report") -> str:
    """Return the verdict, what led to it, and what was not checked."""
    return "\n".join(printable(line) for part in _parts(report) for line in part.split("\n"))


def brief_html(report: "Report") -> str:
    """Return the same for a notebook; what tokens hold is shown and never run."""
    return f"<pre>{escape(brief(report))}</pre>"


def finding_of(scenario: ScenarioResult) -> str:
    """Return the reason for a scenario's verdict, in one or more sentences."""
    return found(scenario) or scenario.reason or f"largest gap {scenario.largest_gap:.4g}"


def _parts(report: "Report") -> Iterator[str]:
    subject = report.subject
    yield report.summary
    yield f"{subject.name}: {subject.num_layers} layers, vocabulary {subject.vocab_size}, {subject.dtype}"
    for scenario in report.scenarios:
        if not scenario.verdict.passes and scenario.verdict is not Verdict.NOT_CHECKED:
            advice = ", advice" if scenario.advice else ""
            yield f"\n{scenario.name} ({scenario.verdict.value}{advice}): {finding_of(scenario)}"
    yield ""
    for verdict in Verdict:
        names = [s.name for s in report.scenarios if s.verdict is verdict]
        if names:
            yield f"{verdict.value} ({len(names)}): {', '.join(names)}"
    if report.certificate is not None:
        caught = sum(result.caught for result in report.certificate.faults)
        yield f"certificate: {caught} of {len(report.certificate.faults)} planted faults were caught"
    yield from (f"note: {note}" for note in report.notes)


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
