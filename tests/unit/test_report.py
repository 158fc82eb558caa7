"""Verdicts, tolerances and exit statuses, and the report's own form."""

import dataclasses
import json
import math

import pytest
from tests.small_report import MILESTONE, REPORT

from kvproof.contract.milestone import Milestone
from kvproof.contract.report import Report
from kvproof.contract.results import Tolerance, Verdict, worst
from kvproof.errors import ReportError
from kvproof.render.json import parse, render

EXIT_STATUS = {
    Verdict.NOT_CHECKED: 5,
    Verdict.MATCH: 0,
    Verdict.ROUNDING: 0,
    Verdict.VACUOUS: 4,
    Verdict.INCONCLUSIVE: 3,
    Verdict.RAISED: 6,
    Verdict.DIVERGED: 1,
}
HELD = dataclasses.replace(MILESTONE, gate=MILESTONE.gate[:1])


def test_verdicts_stand_from_harmless_to_worst():
    assert list(Verdict) == list(EXIT_STATUS)


@pytest.mark.parametrize("verdict", Verdict)
def test_a_verdict_has_its_exit_status(verdict: Verdict):
    assert verdict.exit_status == EXIT_STATUS[verdict]


def test_only_match_and_rounding_pass():
    assert [verdict for verdict in Verdict if verdict.passes] == [Verdict.MATCH, Verdict.ROUNDING]


def test_the_worst_of_verdicts_wins_in_any_order():
    for place, verdict in enumerate(Verdict):
        up_to = list(Verdict)[: place + 1]
        assert worst(up_to) is verdict
        assert worst(up_to[::-1]) is verdict


def test_of_no_verdicts_nothing_was_checked():
    assert worst([]) is Verdict.NOT_CHECKED


def test_a_tolerance_adds_its_absolute_and_its_relative_part():
    tolerance = Tolerance(dtype="float32", absolute=0.5, relative=0.25, source="this test")
    assert [tolerance.allowed(scale) for scale in (0.0, 1.0, 8.0)] == [0.5, 0.75, 2.5]


def test_a_milestone_passes_where_every_line_of_its_gate_holds():
    assert HELD.passed
    assert not MILESTONE.passed


@pytest.mark.parametrize("verdict", Verdict)
@pytest.mark.parametrize("milestone", [None, HELD], ids=["no gate", "the gate holds"])
def test_a_report_exits_as_its_verdict_does(verdict: Verdict, milestone: Milestone | None):
    report = dataclasses.replace(REPORT, verdict=verdict, milestone=milestone)
    assert report.exit_status == EXIT_STATUS[verdict]


@pytest.mark.parametrize("verdict", Verdict)
def test_a_failed_gate_never_exits_0(verdict: Verdict):
    report = dataclasses.replace(REPORT, verdict=verdict, milestone=MILESTONE)
    assert report.exit_status == (EXIT_STATUS[verdict] or 1)


def test_a_real_report_comes_back_equal_from_json(report: Report):
    assert parse(render(report), "report.json") == report


def test_a_report_is_strict_json_though_its_numbers_are_not_finite():
    row = REPORT.scenarios[0].rows[0]
    assert row.evidence.exact is not None
    exact = dataclasses.replace(row.evidence.exact, gap=math.inf)
    evidence = dataclasses.replace(row.evidence, gap=math.nan, exact=exact)
    row = dataclasses.replace(row, evidence=evidence, expected=(-math.inf,))
    report = dataclasses.replace(REPORT, scenarios=(dataclasses.replace(REPORT.scenarios[0], rows=(row,)),))
    text = render(report)
    plain = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    written = plain["scenarios"][0]["rows"][0]
    assert (written["evidence"]["gap"], written["evidence"]["exact"]["gap"]) == ("nan", "inf")
    assert written["expected"] == ["-inf"]
    assert repr(parse(text, "report.json")) == repr(report)


def test_a_report_is_one_text_with_one_line_end_at_its_end():
    text = render(REPORT)
    assert text.endswith("}\n")
    assert not text.endswith("\n\n")


PLAIN = json.loads(render(REPORT))
BROKEN = {
    "cut off": (render(REPORT)[:100], "a.json: not JSON: Unterminated string starting at at line 5 column 13"),
    "empty": ("", "a.json: not JSON: Expecting value at line 1 column 1"),
    "not an object": ("[]", "a.json is not a report"),
    "without a version": ("{}", "a.json has schema version None; this kvproof reads 1 to 2"),
    "of a later version": (
        json.dumps({**PLAIN, "schema_version": 3}),
        "a.json has schema version 3, written by a newer kvproof; this one reads 1 to 2: upgrade kvproof",
    ),
    "of a version that is text": (
        json.dumps({**PLAIN, "schema_version": "1"}),
        "a.json has schema version '1'; this kvproof reads 1 to 2",
    ),
    "with an unknown member": (json.dumps({**PLAIN, "extra": 0}), "a.json: $ has unknown key 'extra'"),
    "with a member of the wrong type": (
        json.dumps({**PLAIN, "summary": None}),
        "a.json: $.summary must be a string, not None",
    ),
    "without a member": (
        json.dumps({name: value for name, value in PLAIN.items() if name != "faults"}),
        "a.json: $ is missing key 'faults'",
    ),
}


@pytest.mark.parametrize(("text", "message"), BROKEN.values(), ids=BROKEN)
def test_a_broken_report_is_refused_by_name(text: str, message: str):
    with pytest.raises(ReportError) as caught:
        parse(text, "a.json")
    assert str(caught.value).startswith(message)


UNREADABLE = "a.json: not JSON that can be read: "
#: JSON, or what lenient readers take for it, that stands where a float belongs.
VALUES = {
    "an integer of 400 digits": (
        "1" + "0" * 399,
        "a.json: $.tolerance.absolute must be a number that a float can hold, not 1000",
    ),
    "an integer of 5001 digits": ("1" + "0" * 5000, UNREADABLE),
    "a deep list": ("[" * 100_000, UNREADABLE),
    "a deep object": ('{"a":' * 100_000, UNREADABLE),
    "NaN": ("NaN", f"{UNREADABLE}NaN is not JSON; write it as a string"),
    "Infinity": ("Infinity", f"{UNREADABLE}Infinity is not JSON; write it as a string"),
    "-Infinity": ("-Infinity", f"{UNREADABLE}-Infinity is not JSON; write it as a string"),
    "1e999": ("1e999", f"{UNREADABLE}1e999 is too large for a number"),
    "a duplicate key": ('0.5, "absolute": 0.5', f"{UNREADABLE}duplicate key 'absolute'"),
}


@pytest.mark.parametrize(("value", "message"), VALUES.values(), ids=VALUES)
def test_a_value_beyond_reason_is_refused_by_name_in_one_line(value: str, message: str):
    """Each ended in an error of Python's own, or became a number that JSON does not have."""
    mark = "here stands the value"
    text = json.dumps({**PLAIN, "tolerance": {**PLAIN["tolerance"], "absolute": mark}})
    with pytest.raises(ReportError) as caught:
        parse(text.replace(f'"{mark}"', value), "a.json")
    assert str(caught.value).startswith(message)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("text", ["\ud800", "A\udfff", "\udc00\ud800"])
def test_a_lone_surrogate_is_refused_by_its_path(text: str):
    """It was read without a word, and the first attempt to print it ended in a traceback."""
    with pytest.raises(ReportError) as caught:
        parse(json.dumps({**PLAIN, "summary": text}), "a.json")
    assert str(caught.value) == f"a.json: $.summary must be text without lone surrogates, not {text!r}"
    assert str(caught.value).isascii()


def test_a_policy_that_cannot_be_is_refused_by_its_path():
    """The refusal named neither the file nor the place, and was none of a report."""
    plain = json.loads(render(REPORT))
    plain["milestone"]["runs"][0]["cached"]["header"]["stops"]["max_tokens"] = 0
    with pytest.raises(ReportError) as caught:
        parse(json.dumps(plain), "a.json")
    place = "$.milestone.runs[0].cached.header.stops"
    assert str(caught.value).startswith(f"a.json: {place}: max_tokens must be at least 1, not 0")
