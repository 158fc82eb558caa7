"""Renders a report as SARIF 2.1.0, which code hosts show next to the code."""

import json
from collections.abc import Iterator
from typing import Any

from kvproof.contract.report import Report
from kvproof.contract.results import ScenarioResult, Verdict
from kvproof.contract.sentences import finding_of

_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
#: The file name if the format requires one and the subject is not a file.
_NO_FILE = "kvproof"

_RULES = {
    Verdict.DIVERGED: ("error", "The cached path does not compute what the uncached one does."),
    Verdict.RAISED: (
        "error",
        "The cached path raises, or gives a malformed row, where the uncached path does not.",
    ),
    Verdict.INCONCLUSIVE: ("warning", "The evidence cannot tell whether the cached path is right."),
    Verdict.VACUOUS: ("warning", "The audit could not be shown able to fail."),
}


def render(report: Report) -> str:
    """Return one run with a result for each finding; advice becomes a note."""
    rules = [
        {"id": verdict.value, "shortDescription": {"text": text}, "defaultConfiguration": {"level": level}}
        for verdict, (level, text) in _RULES.items()
    ]
    tool = {"name": "kvproof", "version": report.environment.kvproof, "rules": rules}
    run = {
        "tool": {"driver": tool},
        "results": list(_results(report)),
        "invocations": [{"executionSuccessful": not report.partial}],
    }
    return (
        json.dumps({"$schema": _SCHEMA, "version": "2.1.0", "runs": [run]}, indent=1, ensure_ascii=False) + "\n"
    )


def _results(report: Report) -> Iterator[dict[str, Any]]:
    for scenario in report.scenarios:
        if scenario.verdict in _RULES:
            level = "note" if scenario.advice else _RULES[scenario.verdict][0]
            text = f"{scenario.name}: {finding_of(scenario)}"
            yield _result(report, scenario.verdict, level, text, _logical(report, scenario), scenario.name)
    if report.certificate is not None and report.certificate.problem is not None:
        text = f"certificate: {report.certificate.problem}"
        yield _result(report, Verdict.VACUOUS, "warning", text, report.subject.name, "certificate")


def _result(
    report: Report, verdict: Verdict, level: str, text: str, logical: str, scenario: str
) -> dict[str, Any]:
    return {
        "ruleId": verdict.value,
        "level": level,
        "message": {"text": text},
        "locations": [
            {
                "physicalLocation": {"artifactLocation": {"uri": _file(report)}, "region": {"startLine": 1}},
                "logicalLocations": [{"fullyQualifiedName": logical}],
            }
        ],
        "partialFingerprints": {"kvproof/v1": f"{report.subject.name}/{report.subject.dtype}/{scenario}"},
    }


def _file(report: Report) -> str:
    """Return the file that contains the factory; other targets have no file."""
    target = (report.request.target if report.request is not None else None) or ""
    home = target.rpartition(":")[0]
    return home.replace("\\", "/") if home.endswith(".py") else _NO_FILE


def _logical(report: Report, scenario: ScenarioResult) -> str:
    """Return the stage and layer of a finding."""
    found = scenario.divergence or scenario.raised
    if found is None:
        return report.subject.name
    layer = () if found.layer is None else (f"layer {found.layer}",)
    stage = () if scenario.divergence is None else (scenario.divergence.stage.value,)
    return "/".join((report.subject.name, *layer, *stage))
