"""``kvproof render`` and ``--baseline``: a saved report in other forms, and against an earlier one."""

import dataclasses
import html
import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from tests.cli.running import run
from tests.small_report import RAISED, REPORT

from kvproof.contract.baseline import changes
from kvproof.contract.report import Report, brief, brief_html
from kvproof.contract.results import Verdict
from kvproof.errors import ReportError
from kvproof.render import junit, sarif
from kvproof.render.html import render as to_html
from kvproof.render.json import render as to_json
from kvproof.render.markdown import render as to_markdown
from kvproof.render.terminal import render as to_text

SCHEMA = json.loads((Path(__file__).parents[1] / "data" / "sarif-2.1.0-rtm.5.json").read_text("utf-8"))


def of(**verdicts: Verdict) -> Report:
    """Return the small report with scenarios of these verdicts, named by letters."""
    (first, *_) = REPORT.scenarios
    scenarios = tuple(
        dataclasses.replace(
            first, name=name, verdict=verdict, reason=f"why {name}", advice=name.startswith("advice")
        )
        for name, verdict in verdicts.items()
    )
    return dataclasses.replace(REPORT, scenarios=scenarios, certificate=None)


@pytest.fixture
def saved(tmp_path: Path) -> Callable[[Report], Path]:
    def save(report: Report) -> Path:
        file = tmp_path / f"report-{len(list(tmp_path.iterdir()))}.json"
        file.write_text(to_json(report), "utf-8")
        return file

    return save


ALL = of(
    a=Verdict.MATCH,
    b=Verdict.ROUNDING,
    c=Verdict.DIVERGED,
    d=Verdict.INCONCLUSIVE,
    e=Verdict.VACUOUS,
    f=Verdict.NOT_CHECKED,
    advice_g=Verdict.DIVERGED,
    h=Verdict.RAISED,
)


def test_sarif_is_valid_and_holds_each_finding():
    log = json.loads(sarif.render(ALL))
    jsonschema.Draft4Validator(SCHEMA).validate(log)
    results = log["runs"][0]["results"]
    assert [(r["ruleId"], r["level"]) for r in results] == [
        ("diverged", "error"),
        ("inconclusive", "warning"),
        ("vacuous", "warning"),
        ("diverged", "note"),
        ("raised", "error"),
    ]
    assert {rule["id"] for rule in log["runs"][0]["tool"]["driver"]["rules"]} >= {r["ruleId"] for r in results}
    fingerprints = {json.dumps(r["partialFingerprints"]) for r in results}
    assert len(fingerprints) == len(results)


def test_sarif_points_at_the_file_that_a_factory_stands_in():
    request = dataclasses.replace(REPORT.request, target="src/mine.py:decoder")
    log = json.loads(sarif.render(dataclasses.replace(ALL, request=request)))
    (uri,) = {r["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] for r in log["runs"][0]["results"]}
    assert uri == "src/mine.py"


def test_a_whole_small_report_is_valid_sarif():
    jsonschema.Draft4Validator(SCHEMA).validate(json.loads(sarif.render(REPORT)))


def test_junit_has_a_case_for_each_scenario():
    (suite,) = ET.fromstring(junit.render(ALL))
    kinds = {case.get("name"): [child.tag for child in case] for case in suite}
    assert kinds == {
        "a": [],
        "b": [],
        "c": ["failure"],
        "d": ["error"],
        "e": ["error"],
        "f": ["skipped"],
        "advice_g": ["skipped"],
        "h": ["failure"],
    }
    counted = {name: suite.get(name) for name in ("tests", "failures", "errors", "skipped")}
    assert counted == {"tests": "8", "failures": "2", "errors": "2", "skipped": "2"}


def test_junit_says_where_an_audit_could_not_have_failed():
    blind = dataclasses.replace(REPORT.certificate, problem="nothing was caught")
    (suite,) = ET.fromstring(junit.render(dataclasses.replace(REPORT, certificate=blind)))
    (case,) = [case for case in suite if case.get("name") == "certificate"]
    assert case.find("error").get("message") == "vacuous: nothing was caught"


def with_raise() -> Report:
    """Return the small report with a first scenario whose cached path raised."""
    (first, *_) = REPORT.scenarios
    raised = dataclasses.replace(first, verdict=Verdict.RAISED, four_ways=None, raised=RAISED)
    return dataclasses.replace(REPORT, verdict=Verdict.RAISED, scenarios=(raised,), certificate=None)


SENTENCE = "the cached path raises in call 2, fed A [red]<script> at position 1 after [red]<script>, in layer 0"


@pytest.mark.parametrize(
    "render",
    [junit.render, sarif.render, to_text, to_html, to_markdown, brief, brief_html],
    ids=lambda f: f.__name__,
)
def test_every_form_says_what_the_cached_path_raised(render: Callable[[Report], str]):
    text = render(with_raise())
    if render in (junit.render, to_html, brief_html):
        assert "<script>alert" not in text
        text = html.unescape(text)
    words = " ".join(re.sub(r"\\\\(.)", r"\1", text).split())
    if render is not to_html:
        assert SENTENCE in (words.replace("\\", "") if render is to_markdown else words)
    if render is not sarif.render:
        assert 'File "decoder.py", line 7, in forward' in words
        assert "ValueError: <script>alert(1)</script>" in words


@pytest.mark.parametrize("traceback", [None, RAISED.traceback])
def test_the_page_shows_where_it_raised_and_what_led_to_it(traceback: str | None):
    report = with_raise()
    raised = dataclasses.replace(RAISED, traceback=traceback, operation="crop", position=None)
    scenario = dataclasses.replace(report.scenarios[0], rows=(), raised=raised)
    text = to_html(dataclasses.replace(report, scenarios=(scenario,)))
    assert "crop before call 2, layer 0" in text
    assert ("Malformed row" in text) == (traceback is None)
    assert ("Traceback, the decoder" in text) == (traceback is not None)
    assert "kvproof shrink" not in text, "what raised cannot be shrunk"


@pytest.mark.parametrize(
    "render", [junit.render, sarif.render, to_markdown, brief, brief_html], ids=lambda f: f.__name__
)
def test_tokens_from_elsewhere_are_shown_and_never_act(render: Callable[[Report], str]):
    """The small report's vocabulary holds a token that is markup."""
    (first, *_) = REPORT.scenarios
    hostile = dataclasses.replace(first, name="<b>\x1b[31m\x00 | `", verdict=Verdict.DIVERGED)
    text = render(dataclasses.replace(REPORT, scenarios=(hostile,)))
    assert "\x1b" not in text
    assert "\x00" not in text
    if render in (junit.render, brief_html):
        assert "<b>" not in text
        assert "<script>" not in text
    if render is junit.render:
        ET.fromstring(text)
    if render is to_markdown:
        assert "\\<b\\>" in text


@pytest.mark.parametrize(
    "report",
    [
        ALL,
        of(a=Verdict.INCONCLUSIVE),
        of(a=Verdict.NOT_CHECKED, b=Verdict.NOT_CHECKED),
        dataclasses.replace(REPORT, scenarios=(), faults=(), certificate=None, spreads=(), milestone=None),
        dataclasses.replace(REPORT, request=None, notes=(), spreads=()),
    ],
    ids=["all", "inconclusive", "not checked", "bare", "without"],
)
def test_every_report_has_a_page(report: Report):
    text = to_html(report)
    assert text == to_html(report)
    assert f"<h1>{html.escape(report.summary)}</h1>" in text
    for scenario in report.scenarios:
        assert f'<th scope="row">{scenario.name}' in text
        assert f'<span class="badge {scenario.verdict.value}">' in text
    assert ("Could this audit have failed?" in text) is bool(report.certificate or report.faults)


def test_the_page_of_a_finding_says_how_to_repeat_it():
    broken = dataclasses.replace(REPORT.scenarios[0], verdict=Verdict.DIVERGED)
    report = dataclasses.replace(REPORT, scenarios=(broken,), milestone=None, verdict=Verdict.DIVERGED)
    text = to_html(report)
    assert report.request.command in text
    assert "kvproof shrink report.json" in text


def test_markdown_puts_the_verdict_first_and_one_line_a_scenario():
    text = to_markdown(ALL)
    assert text.startswith(f"# kvproof: {ALL.verdict.value}\n")
    lines = text.splitlines()
    assert sum(line.startswith("| ") for line in lines) == len(ALL.scenarios) + 1


def test_a_report_shows_itself_on_one_screen():
    assert repr(REPORT) == str(REPORT) == brief(REPORT)
    assert str(REPORT).startswith(REPORT.summary)
    assert len(str(REPORT).splitlines()) < 40
    assert REPORT._repr_html_() == brief_html(REPORT)


@pytest.mark.parametrize("form", ["junit", "sarif", "markdown", "json", "text"])
def test_a_saved_report_is_rendered_to_each_form(form: str, saved: Callable[[Report], Path], tmp_path: Path):
    file = saved(REPORT)
    shown = run("render", file, "--to", form)
    assert (shown.status, shown.err) == (0, "")
    out = tmp_path / "out"
    assert run("render", file, "--to", form, "--out", out).out == ""
    assert out.read_text("utf-8") == shown.out
    if form == "json":
        assert shown.out == file.read_text("utf-8")


def test_rendering_loads_no_torch(saved: Callable[[Report], Path]):
    code = (
        "import sys\nfrom kvproof.cli import main\n"
        f"sys.argv = ['kvproof', 'render', {str(saved(REPORT))!r}, '--to', 'markdown']\n"
        "try:\n    main()\nexcept SystemExit as left:\n    assert left.code == 0\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("no-such.json", "--to", "junit"), "no such report"),
        ((__file__, "--to", "junit"), "test_render.py"),
    ],
)
def test_what_is_no_report_is_refused(arguments: tuple[str, ...], words: str):
    outcome = run("render", *arguments)
    assert outcome.status == 2
    assert words in outcome.err


def test_a_form_that_is_not_there_is_refused(saved: Callable[[Report], Path]):
    outcome = run("render", saved(REPORT), "--to", "pdf")
    assert outcome.status == 2
    assert "'pdf' is not one of" in outcome.err


@pytest.mark.parametrize(
    ("before", "now", "worse", "better", "status"),
    [
        ({"a": Verdict.MATCH}, {"a": Verdict.ROUNDING}, [], [], 0),
        ({"a": Verdict.MATCH}, {"a": Verdict.DIVERGED}, ["a: match, and now diverged"], [], 1),
        ({"a": Verdict.DIVERGED}, {"a": Verdict.DIVERGED}, [], [], 0),
        ({"a": Verdict.DIVERGED}, {"a": Verdict.MATCH}, [], ["a: diverged, and now match"], 0),
        ({"a": Verdict.DIVERGED}, {"a": Verdict.INCONCLUSIVE}, [], ["a: diverged, and now inconclusive"], 0),
        ({"a": Verdict.INCONCLUSIVE}, {"a": Verdict.DIVERGED}, ["a: inconclusive, and now diverged"], [], 1),
        ({"a": Verdict.INCONCLUSIVE}, {"a": Verdict.RAISED}, ["a: inconclusive, and now raised"], [], 6),
        ({"a": Verdict.DIVERGED}, {"a": Verdict.RAISED}, [], ["a: diverged, and now raised"], 0),
        (
            {},
            {"a": Verdict.RAISED, "b": Verdict.INCONCLUSIVE},
            ["a: match, and now raised", "b: match, and now inconclusive"],
            [],
            6,
        ),
        ({"a": Verdict.MATCH}, {"a": Verdict.NOT_CHECKED}, ["a: match, and now not-checked"], [], 5),
        ({"a": Verdict.NOT_CHECKED}, {"a": Verdict.MATCH}, [], ["a: not-checked, and now match"], 0),
        ({"a": Verdict.NOT_CHECKED}, {"a": Verdict.DIVERGED}, ["a: not-checked, and now diverged"], [], 1),
        ({}, {"b": Verdict.VACUOUS}, ["b: match, and now vacuous"], [], 4),
        ({}, {"b": Verdict.NOT_CHECKED}, [], [], 0),
        ({"advice_a": Verdict.MATCH}, {"advice_a": Verdict.DIVERGED}, [], [], 0),
    ],
)
def test_what_changed_is_told_and_only_what_got_worse_fails(
    before: dict[str, Verdict], now: dict[str, Verdict], worse: list[str], better: list[str], status: int
):
    found = changes(of(**now), of(**before))
    assert (list(found.worse), list(found.better), found.exit_status) == (worse, better, status)
    assert len(found.sentences()) == len(worse) + len(better) + 1


def test_a_certificate_that_sees_nothing_any_more_got_worse():
    blind = dataclasses.replace(REPORT.certificate, problem="nothing was caught")
    seeing = dataclasses.replace(REPORT.certificate, problem=None)
    before, now = (dataclasses.replace(REPORT, certificate=certificate) for certificate in (seeing, blind))
    found = changes(now, before)
    assert found.worse == ("certificate: match, and now vacuous",)
    assert found.exit_status == 4


@pytest.mark.parametrize("change", [{"name": "another"}, {"dtype": "bfloat16"}])
def test_a_baseline_of_something_else_is_refused(change: dict[str, Any]):
    other = dataclasses.replace(REPORT, subject=dataclasses.replace(REPORT.subject, **change))
    with pytest.raises(ReportError, match="the baseline has another"):
        changes(REPORT, other)


EXAMPLES = Path(__file__).parents[2] / "examples"


def test_an_audit_fails_only_on_what_got_worse(tmp_path: Path):
    """The bug of the window shows in blocks alone; a baseline that has it says nothing got worse."""
    audit = (
        "audit",
        f"{EXAMPLES}/rotating_window.py:broken",
        "--no-certificate",
        "--scenario",
        "chunked prefill",
    )
    assert run(*audit, "--quiet", "--report", tmp_path).status == 1
    again = run(*audit, "--quiet", "--baseline", tmp_path / "report.json")
    assert again.status == 0
    assert again.out.endswith("nothing got worse than the baseline.\n")

    more = run(*audit, "--scenario", "multi-turn", "--quiet", "--baseline", tmp_path / "report.json")
    assert more.status == 1
    assert "worse: multi-turn: match, and now diverged\n" in more.out


def test_a_baseline_that_is_not_there_is_told_before_anything_runs():
    outcome = run("audit", "random:llama", "--baseline", "no-such.json")
    assert outcome.refused("no such report: no-such.json")


def test_a_factory_is_a_target(tmp_path: Path):
    passing = run(
        "audit", f"{EXAMPLES}/numpy_gpt.py:subject", "--scenario", "rollback", "--quiet", "--no-certificate"
    )
    assert passing.status == 0
    wrong = run("audit", f"{EXAMPLES}/numpy_gpt.py:nothing")
    assert wrong.refused("has no function 'nothing'")
    assert run("audit", f"{tmp_path}/none.py:subject").refused("no such file")
