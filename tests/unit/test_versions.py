"""Files of older and newer versions: what is read, with which note, and what is refused by name."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from tests.small_report import GREEDY_RUN, REPORT
from tests.unit.test_codec import contract_types

from kvproof.contract.baseline import changes
from kvproof.contract.codec import CodecError, added_in, from_plain
from kvproof.contract.ledger import LEDGER_MINOR, End, Header, Step, ledger_lines, parse_ledger
from kvproof.contract.ledger import VERSION as LEDGER
from kvproof.contract.report import VERSION, Report
from kvproof.contract.results import Comparison, Verdict
from kvproof.contract.sweep_table import VERSION as TABLE
from kvproof.contract.sweep_table import Sweep
from kvproof.contract.versions import Version
from kvproof.errors import LedgerError, ReportError
from kvproof.render import html, junit, markdown, sarif, terminal
from kvproof.render.json import parse, read, render

#: Written by the last kvproof that wrote version 1, and left as they were.
OLD = Path(__file__).parents[1] / "data" / "version-1"
REPORTS = ("pass.json", "diverged.json", "milestone.json", "every-part.json")
PLAIN = json.loads(render(REPORT))


@pytest.mark.parametrize("name", REPORTS)
def test_a_report_of_version_1_reads_and_shows_itself_in_every_form(name: str):
    plain = json.loads((OLD / name).read_text("utf-8"))
    assert plain["schema_version"] == 1
    report = read(OLD / name)
    assert (report.schema_version, report.verdict, report.summary) == (2, plain["verdict"], plain["summary"])
    for form in (html, junit, markdown, sarif, terminal):
        assert form.render(report)
    assert read(OLD / name) == parse(render(report), "again.json")


@pytest.mark.parametrize("name", REPORTS)
def test_no_number_of_a_row_of_version_1_is_lost(name: str):
    plain, report = json.loads((OLD / name).read_text("utf-8")), read(OLD / name)
    num_rows = 0
    for old, scenario in zip(plain["scenarios"], report.scenarios, strict=True):
        for before, row in zip(old["rows"], scenario.rows, strict=True):
            num_rows += 1
            members = ("gap", "allowed", "noise", "scale", "sampled_error", "top_gap", "top_noise")
            members += ("uncached_error", "cached_error", "margin", "verdict", "reason")
            assert {name: getattr(row, name) for name in members} == {name: before[name] for name in members}
            is_causality = row.evidence.comparison is Comparison.CAUSALITY
            assert is_causality == (scenario.name == "causality")
    assert num_rows


@pytest.mark.parametrize("name", REPORTS)
def test_a_fault_of_version_1_keeps_what_was_said_of_it(name: str):
    plain, report = json.loads((OLD / name).read_text("utf-8")), read(OLD / name)
    for before, fault in zip(plain["faults"], report.faults, strict=True):
        assert (fault.name, fault.caught, fault.verdict) == (before["name"], before["caught"], before["verdict"])
        assert fault.expected_stages == (before["expected_stage"],)
        assert bool(fault.right_stage) == before["right_stage"]
    certified = () if report.certificate is None else report.certificate.faults
    old = (plain["certificate"] or {}).get("mutants", [])
    members = ("layer", "position", "outcome", "where", "right_stage", "gap", "reason")
    for before, fault in zip(old, certified, strict=True):
        assert fault.name == before["fault"]
        assert {name: getattr(fault, name) for name in members} == {name: before[name] for name in members}


def test_a_report_of_version_1_is_a_baseline():
    before = read(OLD / "pass.json")
    assert changes(before, before).exit_status == 0
    broken = dataclasses.replace(before.scenarios[1], verdict=Verdict.DIVERGED)
    now = dataclasses.replace(before, verdict=Verdict.DIVERGED, scenarios=(before.scenarios[0], broken))
    assert changes(now, before).exit_status == Verdict.DIVERGED.exit_status


def test_a_ledger_without_a_minor_version_reads():
    text = (OLD / "greedy.jsonl").read_text("utf-8")
    assert "ledger_minor" not in json.loads(text.splitlines()[0])
    record = parse_ledger(text, "greedy.jsonl")
    assert record.damage is None
    assert record.run.header.ledger_minor == LEDGER_MINOR


def test_a_table_without_a_minor_version_reads():
    plain = json.loads((OLD / "sweep.json").read_text("utf-8"))
    assert "schema_minor" not in plain
    assert len(from_plain(Sweep, plain).groups) == 2


NEWER = {**PLAIN, "schema_minor": VERSION.minor + 1, "colour": "red"}


def test_what_a_newer_minor_version_added_is_ignored_with_a_note():
    notes: list[str] = []
    plain = json.loads(json.dumps(NEWER))
    for scenario in plain["scenarios"]:
        for row in scenario["rows"]:
            row["evidence"] |= {"mood": [1], "\x1b[2J": 0}
    report = parse(json.dumps(plain), "a.json", notes.append)
    assert report == REPORT, "it holds what this version writes, and says so"
    assert notes == [
        f"a.json was written by a newer kvproof (schema version 2.{VERSION.minor + 1}; this one reads up to "
        f"2.{VERSION.minor}); ignored unknown keys: $.scenarios[].rows[].evidence.\\x1b[2J, "
        "$.scenarios[].rows[].evidence.mood, $.colour"
    ]


def test_a_newer_minor_version_that_holds_nothing_unknown_needs_no_note():
    plain = json.dumps({**PLAIN, "schema_minor": VERSION.minor + 1})
    assert parse(plain, "a.json", pytest.fail) == REPORT


def test_the_same_member_is_refused_where_the_version_does_not_promise_it():
    with pytest.raises(ReportError, match=r"^a\.json: \$ has unknown key 'colour'$"):
        parse(json.dumps({**NEWER, "schema_minor": VERSION.minor}), "a.json")


@pytest.mark.parametrize("member", ["summary", "scenarios"])
def test_a_newer_minor_version_may_leave_nothing_out(member: str):
    plain = {name: value for name, value in NEWER.items() if name != member}
    with pytest.raises(ReportError, match=f"is missing key '{member}'.*newer kvproof"):
        parse(json.dumps(plain), "a.json")


def test_a_verdict_that_only_a_newer_kvproof_knows_is_refused_by_name():
    with pytest.raises(
        ReportError,
        match=r"\$\.verdict must be one of .*, not 'raised-again'; the file was written by a newer kvproof",
    ):
        parse(json.dumps({**NEWER, "verdict": "raised-again"}), "a.json")


@pytest.mark.parametrize("minor", [-1, "1", 0.5, None, True])
def test_a_minor_version_that_is_no_number_is_refused(minor: Any):
    with pytest.raises(ReportError, match="minor version"):
        parse(json.dumps({**PLAIN, "schema_minor": minor}), "a.json")


def _ledger(**header: Any) -> str:
    first, *rest = ledger_lines(GREEDY_RUN)
    return "".join(f"{line}\n" for line in (json.dumps({**json.loads(first), **header}), *rest))


def test_a_ledger_of_a_newer_minor_version_is_read_with_a_note():
    notes: list[str] = []
    record = parse_ledger(_ledger(ledger_minor=LEDGER_MINOR + 1, colour="red"), "a.jsonl", notes.append)
    assert record.run.steps == GREEDY_RUN.steps
    (note,) = notes
    assert note.startswith("a.jsonl was written by a newer kvproof (ledger version 2.")
    assert note.endswith("ignored unknown keys: $.colour")
    with pytest.raises(LedgerError, match="unknown key 'colour'"):
        parse_ledger(_ledger(colour="red"), "a.jsonl")


def test_a_ledger_of_a_newer_version_is_refused_by_name():
    with pytest.raises(LedgerError, match="ledger version 3, written by a newer kvproof; this one reads 1 to 2"):
        parse_ledger(_ledger(ledger_version=3), "a.jsonl")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Box:
    """A made-up contract of version 3.1: it was a width and a height, then an area, then a volume."""

    box_version: int
    box_minor: int
    volume: int
    colour: str = added_in(1, default="brown")


def _area(plain: dict[str, Any]) -> dict[str, Any]:
    return {"box_version": 2, "area": plain["width"] * plain["height"]}


BOX = Version(
    what="box",
    major=3,
    minor=1,
    upgrades={
        1: _area,
        2: lambda plain: {"box_version": 3, "box_minor": 0, "volume": 10 * plain["area"]},
    },
)


@pytest.mark.parametrize(
    "plain",
    [
        {"box_version": 1, "width": 2, "height": 3},
        {"box_version": 2, "area": 6},
        {"box_version": 3, "volume": 60},
        {"box_version": 3, "box_minor": 1, "volume": 60, "colour": "brown"},
        {"box_version": 3, "box_minor": 2, "volume": 60, "weight": 1},
    ],
)
def test_every_version_reads_as_the_current_one(plain: dict[str, Any]):
    before = dict(plain)
    assert BOX.reader(plain).read(Box, plain) == Box(box_version=3, box_minor=1, volume=60)
    assert plain == before


@pytest.mark.parametrize("version", [0, 4, None, "3", 3.0, True])
def test_a_version_without_an_upgrade_is_refused_by_name(version: Any):
    with pytest.raises(CodecError, match=rf"^has box version {version!r}.* reads 1 to 3"):
        BOX.reader({"box_version": version, "volume": 60})


@pytest.mark.parametrize(
    ("kind", "version", "elsewhere"),
    [(Report, VERSION, {Header, Step, End}), (Header | Step | End, LEDGER, set()), (Sweep, TABLE, set())],
)
def test_the_minor_version_has_risen_with_each_member_that_was_added(
    kind: Any, version: Version, elsewhere: set[type]
):
    """Ledgers within a report have versions of their own."""
    minors = [
        field.metadata.get("added_in", 0)
        for part in contract_types(kind) - elsewhere
        for field in dataclasses.fields(part)
    ]
    assert max(minors) == version.minor
