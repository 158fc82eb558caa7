"""The pytest plugin: kvproof's verdict as a test, with a fixture, one line a scenario, and reports of failures.

A test asks for the fixture ``kvproof`` and calls ``kvproof.assert_match(decoder)``. One that asks for
``kvproof_scenario`` too runs once for each scenario of the catalogue, or for those that its marker
``@pytest.mark.kvproof_scenarios("token-by-token", ...)`` names. Collecting loads no torch.
"""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from kvproof.contract.report import Report
    from kvproof.scenarios import Scenario

_MARKER = "kvproof_scenarios"
_NAME = "kvproof_scenario"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare what pyproject.toml may say."""
    parser.addini("kvproof_report_dir", "where reports of failed tests are kept", default="kvproof-reports")
    parser.addini("kvproof_length", "tokens in a sequence of the catalogue", default="28")
    parser.addini("kvproof_seed", "draws the tokens", default="0")
    parser.addini("kvproof_certificate", "plant faults after each pass", type="bool", default=False)


def pytest_configure(config: pytest.Config) -> None:
    """Declare the marker."""
    config.addinivalue_line("markers", f"{_MARKER}(*names): the scenarios that {_NAME} runs through")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test that asks for a scenario once for each."""
    if _NAME not in metafunc.fixturenames:
        return
    from kvproof.scenarios import catalogue

    known = list(dict.fromkeys(scenario.name for scenario in catalogue(range(8), range(8))))
    chosen = [name for marker in metafunc.definition.iter_markers(_MARKER) for name in marker.args] or known
    for name in chosen:
        if name not in known:
            raise pytest.UsageError(
                f"{metafunc.definition.nodeid}: no scenario {name!r}; there are: {', '.join(known)}"
            )
    metafunc.parametrize(_NAME, chosen, ids=[name.replace(" ", "-") for name in chosen])


class Kvproof:
    """What the fixture gives: audits with the options of pyproject.toml, kept where they fail."""

    def __init__(self, node: pytest.Item) -> None:
        self._node = node
        config = node.config
        self._folder = config.rootpath / str(config.getini("kvproof_report_dir"))
        self._options = {
            "length": _integer(config, "kvproof_length"),
            "seed": _integer(config, "kvproof_seed"),
            "certificate": bool(config.getini("kvproof_certificate")),
        }

    def assert_match(
        self, decoder: object, scenarios: "str | Iterable[Scenario | str] | None" = None, **options: Any
    ) -> "Report":
        """Audit a decoder and return the report; fail the test with the finding, and keep the report.

        Takes what `kvproof.assert_match` takes, and the name of one scenario. Where the decoder lacks the ability
        for all that was asked, the test is skipped, and says why.
        """
        __tracebackhide__ = True
        from kvproof._assert import MismatchError
        from kvproof._assert import assert_match as run
        from kvproof.contract.results import Verdict

        wanted = [scenarios] if isinstance(scenarios, str) else scenarios
        finding = None
        try:
            report = run(decoder, wanted, **{**self._options, **options})
        except MismatchError as error:
            report, finding = error.report, str(error)
        self._record(report)
        if finding is None:
            return report
        if report.verdict is Verdict.NOT_CHECKED:
            pytest.skip("; ".join(dict.fromkeys(s.reason for s in report.scenarios if s.reason)))
        file = self._kept(report)
        pytest.fail(f"{finding}\n\nThe whole report: {file}\n{_next(file, self._node.nodeid)}", pytrace=False)

    def _record(self, report: "Report") -> None:
        """Say in pytest's own JUnit file what was found."""
        self._node.user_properties += [
            ("kvproof_verdict", report.verdict.value),
            ("kvproof_subject", report.subject.name),
            ("kvproof_largest_gap", max((s.largest_gap for s in report.scenarios), default=0.0)),
            ("kvproof_rows", sum(len(s.rows) for s in report.scenarios)),
        ]

    def _kept(self, report: "Report") -> Path:
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
    """Audits whose failure is the finding: ``kvproof.assert_match(decoder)``."""
    return Kvproof(request.node)


def _next(file: Path, nodeid: str) -> str:
    return f"To read it: kvproof render {file} --to markdown\nTo repeat it: pytest '{nodeid}'"


def _integer(config: pytest.Config, name: str) -> int:
    text = str(config.getini(name))
    try:
        return int(text)
    except ValueError:
        raise pytest.UsageError(f"{name} must be a whole number, not {text!r}") from None
