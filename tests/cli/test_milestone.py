"""`kvproof milestone`: what it prints, what it writes, and its exit status."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvproof.contract.ledger import parse_ledger
from kvproof.contract.milestone import SWITCHES
from kvproof.contract.report import Report
from kvproof.reference import load_checkpoint
from kvproof.render.json import parse

from .conftest import Trained
from .running import run

WRITTEN = {"report.json", "report.html", "greedy.jsonl", "seeded.jsonl", "checkpoint.safetensors"}
PREFIXES = "all 16 prefixes match over the whole vocabulary"
SHAPES = "every cache's axes and length hold after each token"
FAILURES = "both deliberate failures are rejected"
POLICIES = "both policies are reproducible from their record"
STOPS = "every run records why it stopped"
#: The line of the gate that fails without each part.
FAILS_WITHOUT = {
    "wrong-position": FAILURES,
    "wrong-layer": FAILURES,
    "shape-assertions": SHAPES,
    "seed": POLICIES,
    "eos-stop": STOPS,
    "context-stop": STOPS,
}


def strict(text: str) -> dict:
    """Read one JSON document; JSON itself has no NaN and no infinity."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


def timeless(plain: object) -> object:
    """Return the report without the times at which its records were made."""
    if isinstance(plain, dict):
        return {name: timeless(value) for name, value in plain.items() if name != "created"}
    return [timeless(item) for item in plain] if isinstance(plain, list) else plain


def gate_of(text: str) -> dict[str, str]:
    """Read the gate's table, whose cells run over several lines: each item's name, and yes or NO."""
    lines = text.partition("acceptance gate\n")[2].partition("\n\n")[0].splitlines()
    cells = [[cell.strip() for cell in line.split("|")[1:3]] for line in lines if line.startswith("|")][1:]
    items: list[list[str]] = []
    for holds, name in cells:
        if holds:
            items.append([holds, name])
        else:
            items[-1][1] = f"{items[-1][1]} {name}".rstrip()
    return {name: holds for holds, name in items}


def test_it_exits_with_0_and_shows_the_five_lines_of_the_gate_and_both_traces(trained: Trained):
    assert (trained.outcome.status, trained.outcome.err) == (0, "")
    names = (PREFIXES, SHAPES, FAILURES, POLICIES, STOPS)
    assert gate_of(trained.outcome.out) == dict.fromkeys(names, "yes")
    titles = [line for line in trained.outcome.out.splitlines() if line.startswith(("greedy (", "seeded ("))]
    assert "<bos> A B D <eos>; stop reason eos" in titles[0]
    assert "<bos> Y X Y <eos>; stop reason eos" in titles[1]


def test_each_switch_has_a_line_of_the_gate():
    assert tuple(FAILS_WITHOUT) == SWITCHES


@pytest.mark.parametrize("switch", FAILS_WITHOUT)
def test_without_a_part_exactly_its_line_of_the_gate_fails(switch: str, saved: Path):
    outcome = run("milestone", "--checkpoint", saved, "--json", "--without", switch)
    shown = strict(outcome.out)["milestone"]
    assert outcome.status == 1
    assert shown["switched_off"] == [switch]
    assert [item["name"] for item in shown["gate"] if not item["passed"]] == [FAILS_WITHOUT[switch]]


def test_a_gate_that_fails_is_shown_as_failing(saved: Path, ready_failing: Report):
    outcome = run("milestone", "--checkpoint", saved)
    assert outcome.status == 1
    assert [name for name, holds in gate_of(outcome.out).items() if holds == "NO"] == [STOPS]


def test_json_prints_one_strict_document_and_nothing_else(saved: Path, ready: Report):
    outcome = run("milestone", "--checkpoint", saved, "--json")
    assert (outcome.status, outcome.err) == (0, "")
    strict(outcome.out)
    assert parse(outcome.out, "stdout") == ready


@pytest.mark.parametrize("terminal", [False, True])
def test_quiet_prints_the_verdict_alone(terminal: bool, saved: Path, ready: Report):
    outcome = run("milestone", "--checkpoint", saved, "--quiet", terminal=terminal)
    assert (outcome.status, outcome.out, outcome.err) == (0, f"{ready.summary}\n", "")


def test_a_terminal_shows_progress_beside_the_json(saved: Path, ready: Report, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    outcome = run("milestone", "--checkpoint", saved, "--json", terminal=True)
    assert "loading torch" in outcome.err
    assert parse(outcome.out, "stdout") == ready


def test_the_saved_checkpoint_gives_the_same_report(trained: Trained):
    outcome = run("milestone", "--checkpoint", trained.checkpoint, "--json")
    assert outcome.status == 0
    again, before = strict(outcome.out), strict((trained.folder / "report.json").read_text("utf-8"))
    assert again["milestone"]["checkpoint"].pop("source") == str(trained.checkpoint)
    assert before["milestone"]["checkpoint"].pop("source") == "trained"
    assert again["scenarios"] == before["scenarios"]
    assert timeless(again) == timeless(before)


def test_a_report_folder_holds_the_report_both_ledgers_and_the_checkpoint(
    saved: Path, ready: Report, tmp_path: Path
):
    folder = tmp_path / "new" / "report"
    outcome = run("milestone", "--checkpoint", saved, "--json", "--report", folder)
    assert outcome.status == 0
    assert {path.name for path in folder.iterdir()} == WRITTEN
    assert (folder / "report.json").read_text("utf-8") == outcome.out
    again = run("render", folder / "report.json", "--to", "html")
    assert again.out == (folder / "report.html").read_text("utf-8")
    assert load_checkpoint(folder / "checkpoint.safetensors").digest == ready.subject.digest
    for pair in ready.milestone.runs[:2]:
        ledger = parse_ledger((folder / f"{pair.name}.jsonl").read_text("utf-8"), pair.name)
        assert (ledger.run, ledger.damage) == (pair.cached, None)


def test_a_second_run_replaces_each_file_whole_and_leaves_others_alone(
    saved: Path, ready: Report, tmp_path: Path
):
    run("milestone", "--checkpoint", saved, "--report", tmp_path / "first")
    second = tmp_path / "second"
    second.mkdir()
    for name in (*WRITTEN, "notes.txt"):
        (second / name).write_text("of an earlier, longer run\n" * 20_000)
    assert run("milestone", "--checkpoint", saved, "--report", second).status == 0
    assert {path.name for path in second.iterdir()} == {*WRITTEN, "notes.txt"}
    for name in WRITTEN - {"checkpoint.safetensors"}:
        assert (second / name).read_bytes() == (tmp_path / "first" / name).read_bytes()
    assert load_checkpoint(second / "checkpoint.safetensors").digest == ready.subject.digest
    assert (second / "notes.txt").read_text().startswith("of an earlier")


def test_a_report_folder_that_cannot_be_made_still_prints_the_result(saved: Path, ready: Report, tmp_path: Path):
    stands = tmp_path / "report"
    stands.write_text("a file\n")
    outcome = run("milestone", "--checkpoint", saved, "--quiet", "--report", stands)
    assert (outcome.status, outcome.out) == (73, f"{ready.summary}\n")
    assert outcome.err.startswith(f"kvproof: cannot make the report folder {stands}: ")
    assert outcome.err.count("\n") == 1
    assert stands.read_text() == "a file\n"


def test_a_gate_that_fails_outranks_a_report_that_cannot_be_written(
    saved: Path, ready_failing: Report, tmp_path: Path
):
    stands = tmp_path / "report"
    stands.write_text("a file\n")
    outcome = run("milestone", "--checkpoint", saved, "--report", stands)
    assert outcome.status == 1
    assert "cannot make the report folder" in outcome.err


@pytest.mark.parametrize("blocked", sorted(WRITTEN))
def test_nothing_half_written_is_left_where_a_file_cannot_be_replaced(
    blocked: str, saved: Path, ready: Report, tmp_path: Path
):
    (tmp_path / blocked).mkdir()
    outcome = run("milestone", "--checkpoint", saved, "--quiet", "--report", tmp_path)
    assert (outcome.status, outcome.out) == (73, f"{ready.summary}\n")
    assert str(tmp_path / blocked) in outcome.err
    assert {path.name for path in tmp_path.iterdir()} <= WRITTEN
    assert list((tmp_path / blocked).iterdir()) == []


@pytest.mark.parametrize("refused", ["write", "replace"])
def test_a_full_disk_leaves_the_earlier_report_as_it_was(
    refused: str, saved: Path, ready: Report, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    run("milestone", "--checkpoint", saved, "--report", tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def full(*arguments: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, {"write": "fdopen", "replace": "replace"}[refused], full)
    outcome = run("milestone", "--checkpoint", saved, "--quiet", "--report", tmp_path)
    monkeypatch.undo()
    assert outcome.status == 73
    assert os.strerror(errno.ENOSPC) in outcome.err
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_checkpoint_that_cannot_be_saved_still_prints_the_result(saved: Path, ready: Report, tmp_path: Path):
    target = tmp_path / "missing folder" / "weights.safetensors"
    outcome = run("milestone", "--checkpoint", saved, "--quiet", "--save-checkpoint", target)
    assert (outcome.status, outcome.out) == (73, f"{ready.summary}\n")
    assert str(target) in outcome.err
    assert list(tmp_path.iterdir()) == []


def test_a_saved_checkpoint_replaces_what_stood_there(trained: Trained, ready: Report, tmp_path: Path):
    target = tmp_path / "weights.safetensors"
    target.write_text("something longer than a checkpoint\n" * 1000)
    assert run("milestone", "--checkpoint", trained.checkpoint, "--save-checkpoint", target).status == 0
    assert load_checkpoint(target).digest == load_checkpoint(trained.checkpoint).digest


def started(saved: Path, folder: Path, output: Any, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own, with its standard output where it is told."""
    return subprocess.run(
        [
            *(sys.executable, "-c", "from kvproof.cli import main; main()"),
            *("milestone", "--checkpoint", saved, "--report", folder, *arguments),
        ],
        stdout=output,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )


def assert_written_though_not_printed(done: subprocess.CompletedProcess[str], folder: Path, cause: int) -> None:
    assert done.stderr == f"kvproof: cannot write to standard output: {os.strerror(cause)}\n"
    assert done.returncode == 73
    assert {path.name for path in folder.iterdir()} == WRITTEN
    assert parse((folder / "report.json").read_text("utf-8"), "report.json").exit_status == 0


def test_a_full_standard_output_exits_with_73_and_the_report_is_written_all_the_same(
    saved: Path, full_device: Path, tmp_path: Path
):
    with full_device.open("w") as output:
        done = started(saved, tmp_path / "report", output, "--json")
    assert_written_though_not_printed(done, tmp_path / "report", errno.ENOSPC)


def test_a_standard_output_that_nobody_reads_exits_with_73_and_the_report_is_written_all_the_same(
    saved: Path, tmp_path: Path
):
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = started(saved, tmp_path / "report", writer)
    finally:
        os.close(writer)
    assert_written_though_not_printed(done, tmp_path / "report", errno.EPIPE)


def test_a_gate_that_fails_outranks_a_standard_output_that_is_full(
    saved: Path, full_device: Path, tmp_path: Path
):
    with full_device.open("w") as output:
        done = started(saved, tmp_path / "report", output, "--without", "seed")
    assert done.stderr == f"kvproof: cannot write to standard output: {os.strerror(errno.ENOSPC)}\n"
    assert done.returncode == 1
    assert {path.name for path in (tmp_path / "report").iterdir()} == WRITTEN


@pytest.mark.parametrize(
    ("terminal", "variables", "boxes", "colours"),
    [
        (False, {}, False, False),
        (True, {}, True, True),
        (True, {"NO_COLOR": "1"}, True, False),
        (True, {"TERM": "dumb"}, False, False),
        (True, {"TERM": "dumb", "NO_COLOR": "1"}, False, False),
        (True, {"TERM": "dumb", "FORCE_COLOR": "1"}, True, True),
        (True, {"NO_COLOR": ""}, True, True),
        (False, {"NO_COLOR": "1"}, False, False),
        (False, {"FORCE_COLOR": "1"}, True, True),
        (False, {"FORCE_COLOR": ""}, False, False),
        (False, {"FORCE_COLOR": "1", "NO_COLOR": "1"}, True, False),
    ],
)
def test_colours_and_box_lines_follow_the_terminal_and_the_environment(
    terminal: bool,
    variables: dict[str, str],
    boxes: bool,
    colours: bool,
    saved: Path,
    ready: Report,
    monkeypatch: pytest.MonkeyPatch,
):
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    text = run("milestone", "--checkpoint", saved, terminal=terminal).out
    assert ("╭" in text, "\x1b[" in text) == (boxes, colours)
