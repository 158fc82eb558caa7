"""Files that an older kvproof wrote still serve every command that takes a file."""

import json
import shutil
from pathlib import Path

import pytest
from tests.cli.running import run

from kvproof.cli.report import FORMS

OLD = Path(__file__).parents[1] / "data" / "version-1"
REPORTS = ("pass.json", "diverged.json", "milestone.json", "every-part.json")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", REPORTS)
def test_an_old_report_is_rendered_to_every_form(name: str, form: str):
    outcome = run("render", OLD / name, "--to", form)
    assert (outcome.status, outcome.err) == (0, "")
    names = [scenario["name"] for scenario in json.loads((OLD / name).read_text("utf-8"))["scenarios"]]
    if form == "sarif":  # which holds findings alone
        names = [result["ruleId"] for result in json.loads(outcome.out)["runs"][0]["results"]]
    assert all(name in outcome.out for name in names)


@pytest.mark.parametrize("name", REPORTS)
def test_an_old_report_that_is_written_again_is_of_todays_version(name: str, tmp_path: Path):
    first, again = run("render", OLD / name, "--to", "json"), tmp_path / "report.json"
    again.write_text(first.out, "utf-8")
    assert json.loads(first.out)["schema_version"] == 2
    assert run("render", again, "--to", "json").out == first.out


@pytest.mark.parametrize("as_json", [False, True])
def test_an_old_report_is_a_baseline(as_json: bool):
    options = ("--length", 8, "--scenario", "token-by-token", "--no-certificate")
    shown = "--json" if as_json else "--quiet"
    outcome = run("audit", "random:llama", *options, shown, "--baseline", OLD / "pass.json")
    assert (outcome.status, outcome.err) == (0, "")
    if as_json:
        assert json.loads(outcome.out)["schema_version"] == 2
    else:
        assert outcome.out.endswith("nothing got worse than the baseline.\n")


def test_a_finding_of_an_old_report_is_shrunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("kvproof._shrinking.reproduce.MAX_TRIES", 0)
    outcome = run("shrink", OLD / "diverged.json", "--out", tmp_path / "found.py", "--quiet")
    assert (outcome.status, outcome.err) == (0, "")
    assert (tmp_path / "found.py").exists()


@pytest.mark.parametrize("name", ["greedy.jsonl", "seeded.jsonl", "greedy-ledger-1.jsonl"])
def test_an_old_ledger_replays(name: str):
    outcome = run("replay", OLD / name)
    assert (outcome.status, outcome.err) == (0, "")
    assert "lines replay through both paths" in outcome.out


def test_a_sweep_that_an_older_kvproof_began_is_resumed_or_refused_by_name(tmp_path: Path):
    """Its groups count only for the versions of the libraries that ran them."""
    shutil.copy(OLD / "cells.jsonl", tmp_path)
    options = ("--scenario", "token-by-token", "--length", 8, "--jobs", 1, "--quiet", "--out", tmp_path)
    outcome = run("sweep", "random:llama", "random:mamba", *options)
    if outcome.status == 2:
        assert "holds a sweep with" in outcome.err
    else:
        assert (outcome.status, outcome.err) == (0, "")
        assert (tmp_path / "cells.jsonl").read_bytes() == (OLD / "cells.jsonl").read_bytes()


NEWER = "was written by a newer kvproof (schema version 2.99; this one reads up to 2."


@pytest.fixture
def newer(tmp_path: Path) -> Path:
    """A report of a newer minor version, with a key that this kvproof does not know."""
    plain = json.loads(run("render", OLD / "pass.json", "--to", "json").out)
    plain |= {"schema_minor": 99, "colour": "red"}
    (tmp_path / "newer.json").write_text(json.dumps(plain), "utf-8")
    return tmp_path / "newer.json"


def test_a_note_on_a_newer_report_leaves_json_alone(newer: Path):
    outcome = run("render", newer, "--to", "json")
    assert (outcome.status, outcome.out) == (0, run("render", OLD / "pass.json", "--to", "json").out)
    assert outcome.err.startswith(f"kvproof: {newer} {NEWER}")
    assert outcome.err.endswith("ignored unknown keys: $.colour\n")
    assert outcome.err.count("\n") == 1


def test_a_note_on_a_newer_baseline_leaves_json_alone(newer: Path):
    options = ("--length", 8, "--scenario", "token-by-token", "--no-certificate", "--json")
    outcome = run("audit", "random:llama", *options, "--baseline", newer)
    assert outcome.status == 0
    assert json.loads(outcome.out)["schema_version"] == 2
    assert f"kvproof: {newer} {NEWER}" in outcome.err


def test_a_note_on_a_newer_report_comes_before_shrinking(newer: Path):
    outcome = run("shrink", newer)
    assert outcome.status == 2
    assert f"kvproof: {newer} {NEWER}" in outcome.err
    assert "nothing diverged" in outcome.err
