"""Renders a report as Markdown, for an issue, a pull request or a job summary."""

from collections.abc import Iterator

from kvproof.contract.findings import group_findings
from kvproof.contract.report import Report
from kvproof.contract.results import ScenarioResult, Verdict
from kvproof.contract.sentences import traceback_of
from kvproof.contract.text import printable
from kvproof.render.sweep_markdown import escape

#: The verdicts that are told in sentences.
_TOLD = (Verdict.DIVERGED, Verdict.RAISED, Verdict.INCONCLUSIVE, Verdict.VACUOUS)


def render(report: Report) -> str:
    """Return the report: the verdict, then each scenario, then the findings in sentences."""
    return "\n".join(_lines(report)) + "\n"


def _lines(report: Report) -> Iterator[str]:
    subject, made = report.subject, report.environment
    yield f"# kvproof: {report.verdict.value}"
    yield ""
    yield escape(report.summary)
    yield ""
    sizes = f"{subject.num_layers} layers, vocabulary {subject.vocab_size}, {subject.dtype}"
    yield f"- {escape(subject.name)}, {sizes}"
    yield f"- kvproof {made.kvproof}, torch {escape(made.torch)}, {escape(made.platform)}, {escape(made.created)}"
    if report.partial:
        yield "- partial: stopped before its end"
    yield from (f"- {escape(note)}" for note in report.notes)
    yield ""
    yield "| scenario | rows | gap | float64 gap | verdict |"
    yield "|---|---:|---:|---:|---|"
    yield from map(_row, report.scenarios)
    yield ""
    for group in group_findings(scenario for scenario in report.scenarios if scenario.verdict in _TOLD):
        yield f"**{escape(group.first.name)}**{' (advice)' if group.first.advice else ''}: "
        yield from (f"{escape(line)}  " for line in group.text.split("\n"))
        yield ""
        if (traceback := traceback_of(group.first)) is not None:
            yield from (f"    {printable(line)}" for line in traceback.split("\n"))
            yield ""
    certificate = report.certificate
    if certificate is not None:
        caught = sum(result.caught for result in certificate.faults)
        yield f"Certificate: {caught} of {len(certificate.faults)} planted faults changed a row and were caught."


def _row(scenario: ScenarioResult) -> str:
    top = [row.top_gap for row in scenario.rows if row.top_gap is not None]
    gaps = f"{scenario.largest_gap:.1e} | {max(top):.1e}" if top else f"{scenario.largest_gap:.1e} | "
    gaps = gaps if scenario.rows else " | "
    advice = " (advice)" if scenario.advice else ""
    return f"| {escape(scenario.name)} | {len(scenario.rows)} | {gaps} | {scenario.verdict.value}{advice} |"
