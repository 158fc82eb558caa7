"""A report on one screen, as it stands in a terminal's prompt, a notebook, or a failing test."""

from collections.abc import Iterator
from html import escape

from kvproof.contract.results import Report, ScenarioResult, Verdict
from kvproof.contract.text import printable
from kvproof.render.findings import found


def brief(report: Report) -> str:
    """Return the verdict, what led to it, and what was not checked."""
    return "\n".join(printable(line) for part in _parts(report) for line in part.split("\n"))


def brief_html(report: Report) -> str:
    """Return the same for a notebook; what tokens hold is shown and never run."""
    return f"<pre>{escape(brief(report))}</pre>"


def finding_of(scenario: ScenarioResult) -> str:
    """Return what led to a scenario's verdict, in a sentence or a few."""
    return found(scenario) or scenario.reason or f"largest gap {scenario.largest_gap:.4g}"


def _parts(report: Report) -> Iterator[str]:
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
        caught = sum(mutant.outcome.value == "caught" for mutant in report.certificate.mutants)
        yield f"certificate: {caught} of {len(report.certificate.mutants)} planted faults were caught"
    yield from (f"note: {note}" for note in report.notes)
