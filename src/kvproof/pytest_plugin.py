"""The pytest plugin: kvproof's verdict as a test, one test per scenario, and the reports of failed tests.

A test that uses the fixture ``kvproof`` calls ``kvproof.assert_match(decoder)``. A test that also uses
``kvproof_scenario`` runs once for each scenario of the catalogue, or for each one that its marker
``@pytest.mark.kvproof_scenarios("token-by-token", ...)`` names. Collecting tests does not import torch.
"""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

import pytest

if TYPE_CHECKING:
    from kvproof._assert import AuditKeywords
    from kvproof.contract.report import Report
    from kvproof.scenarios import Scenario

_MARKER = "kvproof_scenarios"
_NAME = "kvproof_scenario"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the settings that pyproject.toml can hold."""
    parser.addini("kvproof_report_dir", "folder for the reports of failed tests", default="kvproof-reports")
    parser.addini("kvproof_length", "number of tokens per sequence of the catalogue", default="28")
    parser.addini("kvproof_seed", "seed for the tokens", default="0")
    parser.addini("kvproof_certificate", "plant faults after each pass", type="bool", default=False)


def pytest_configure(config: pytest.Config) -> None:
    """Declare the marker."""
    config.addinivalue_line("markers", f"{_MARKER}(*names): the scenarios that {_NAME} takes")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test that uses a scenario once for each scenario."""
    if _NAME not in metafunc.fixturenames:
        return
    from kvproof.errors import UsageError
    from kvproof.scenarios import catalogue, check_names

    known = list(dict.fromkeys(scenario.name for scenario in catalogue(range(8), range(8))))
    chosen = [name for marker in metafunc.definition.iter_markers(_MARKER) for name in marker.args] or known
    try:
        check_names(chosen, known)
    except UsageError as error:
        raise pytest.UsageError(f"{metafunc.definition.nodeid}: {error}") from None
    metafunc.parametrize(_NAME, chosen, ids=[name.replace(" ", "-") for name in chosen])


class Kvproof:
    """What the fixture returns: it audits with the settings of pyproject.toml, and keeps reports of failures."""

    def __init__(self, node: pytest.Item) -> None:
        self._node = node
        config = node.config
        self._folder = config.rootpath / str(config.getini("kvproof_report_dir"))
        self._settings: AuditKeywords = {
            "length": _read_integer(config, "kvproof_length"),
            "seed": _read_integer(config, "kvproof_seed"),
            "certificate": bool(config.getini("kvproof_certificate")),
        }

    def assert_match(
        self,
        decoder: object,
        scenarios: "str | Iterable[Scenario | str] | None" = None,
        **keywords: "Unpack[AuditKeywords]",
    ) -> "Report":
        """Audit a decoder and return the report; if it does not pass, fail the test and keep the report.

        Takes the arguments of `kvproof.assert_match`, and also the name of a single scenario. If the decoder can
        run none of the scenarios, the test is skipped and says why.
        """
        __tracebackhide__ = True
        from kvproof._assert import MismatchError
        from kvproof._assert import assert_match as run
        from kvproof.contract.results import Verdict

        wanted = [scenarios] if isinstance(scenarios, str) else scenarios
        settings: AuditKeywords = {**self._settings, **keywords}
        finding = None
        try:
            report = run(decoder, wanted, **settings)
        except MismatchError as error:
            report, finding = error.report, str(error)
        self._record(report)
        if finding is None:
            return report
        if report.verdict is Verdict.NOT_CHECKED:
            pytest.skip("; ".join(dict.fromkeys(s.reason for s in report.scenarios if s.reason)))
        file = self._keep_report(report)
        next_steps = describe_next_steps(file, self._node.nodeid)
        pytest.fail(f"{finding}\n\nThe whole report: {file}\n{next_steps}", pytrace=False)

    def _record(self, report: "Report") -> None:
        """Add the result to pytest's own JUnit file."""
        self._node.user_properties += [
            ("kvproof_verdict", report.verdict.value),
            ("kvproof_subject", report.subject.name),
            ("kvproof_largest_gap", max((s.largest_gap for s in report.scenarios), default=0.0)),
            ("kvproof_rows", sum(len(s.rows) for s in report.scenarios)),
        ]

    def _keep_report(self, report: "Report") -> Path:
        """Write the report to the folder of reports; return its file."""
        from kvproof._system.files import write_whole
        from kvproof.render.json import render

        name = re.sub(r"[^\w.-]+", "-", self._node.nodeid).strip("-")
        self._folder.mkdir(parents=True, exist_ok=True)
        file = self._folder / f"{name}.json"
        write_whole(file, render(report).encode())
        self._node.user_properties.append(("kvproof_report", str(file)))
        return file


@pytest.fixture
def kvproof(request: pytest.FixtureRequest) -> Kvproof:
    """Audit decoders with ``kvproof.assert_match(decoder)``; a failure shows the finding."""
    return Kvproof(request.node)


def describe_next_steps(file: Path, nodeid: str) -> str:
    """Return the commands that read a report and repeat its test."""
    return f"To read it: kvproof render {file} --to markdown\nTo repeat it: pytest '{nodeid}'"


def _read_integer(config: pytest.Config, name: str) -> int:
    text = str(config.getini(name))
    try:
        return int(text)
    except ValueError:
        raise pytest.UsageError(f"{name} must be a whole number, not {text!r}") from None
