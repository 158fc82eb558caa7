"""Renders a report as JUnit XML, which any CI can show: one test case per scenario."""

import xml.etree.ElementTree as ET

from kvproof.contract.report import Report
from kvproof.contract.results import ScenarioResult, Verdict
from kvproof.contract.sentences import finding_of, traceback_of
from kvproof.contract.text import printable


def render(report: Report) -> str:
    """Return one test suite: what diverged or raised is a failure, and an undecided scenario is an error."""
    cases = [_case(report, scenario) for scenario in report.scenarios]
    if report.certificate is not None:
        cases.append(_certificate(report))
    counts = {
        kind: sum(case.find(kind) is not None for case in cases) for kind in ("failure", "error", "skipped")
    }
    suite = ET.Element(
        "testsuite",
        name=_text(f"kvproof {report.subject.name} {report.subject.dtype}"),
        tests=str(len(cases)),
        failures=str(counts["failure"]),
        errors=str(counts["error"]),
        skipped=str(counts["skipped"]),
        timestamp=report.environment.created,
    )
    suite.extend(cases)
    suites = ET.Element("testsuites")
    suites.append(suite)
    ET.indent(suites)
    return ET.tostring(suites, encoding="unicode", xml_declaration=True) + "\n"


def _case(report: Report, scenario: ScenarioResult) -> ET.Element:
    case = ET.Element("testcase", classname=_text(report.subject.name), name=_text(scenario.name))
    verdict = scenario.verdict
    kind = None
    if verdict is Verdict.NOT_CHECKED or (scenario.advice and not verdict.passes):
        kind = "skipped"
    elif not verdict.passes:
        kind = "failure" if verdict in (Verdict.DIVERGED, Verdict.RAISED) else "error"
    if kind is not None:
        finding = finding_of(scenario)
        message = f"{verdict.value}{', advice' if scenario.advice else ''}: {finding.splitlines()[0]}"
        element = ET.SubElement(case, kind, message=_text(message))
        element.text = _text("\n".join(filter(None, (finding, traceback_of(scenario)))))
    return case


def _certificate(report: Report) -> ET.Element:
    """Return the certificate's test case: it is an error if nothing showed that the audit can fail."""
    assert report.certificate is not None
    case = ET.Element("testcase", classname=_text(report.subject.name), name="certificate")
    if report.certificate.problem is not None:
        ET.SubElement(case, "error", message=_text(f"vacuous: {report.certificate.problem}"))
    return case


def _text(text: str) -> str:
    """Return text without characters that XML cannot hold."""
    return "\n".join(map(printable, text.split("\n")))
