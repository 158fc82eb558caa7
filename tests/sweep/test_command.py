"""``kvproof sweep``: real audits in real processes, its exit statuses, and what it refuses."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch
from tests.cli.running import Outcome, run

from kvproof._sweeping import SerialRunner
from kvproof._sweeping import sweep as _sweep
from kvproof.contract.codec import from_plain, strict_loads
from kvproof.contract.sweep_table import Ending, Job, Sweep

from .samples import ROOT, matching

SHORT = ("--length", 8, "--scenario", "fork", "--jobs", 2)


def read(folder: Path) -> Sweep:
    return from_plain(Sweep, strict_loads((folder / "sweep.json").read_text("utf-8")))


def replaced(monkeypatch: pytest.MonkeyPatch, work: Any = matching) -> None:
    """Let the command do other work than audits, in this process."""
    monkeypatch.setattr(_sweep, "audit_to_json", lambda job, **wanted: work(job))
    monkeypatch.setattr(_sweep, "ProcessRunner", lambda **options: SerialRunner())


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Outcome]:
    """A sweep of two real models, a type that is not one and a folder that is not there."""
    folder = tmp_path_factory.mktemp("sweep") / "out"
    targets = ("random:gpt2", "random:llama", "random:lama", "no-such-folder")
    return folder, run("sweep", *targets, "--dtype", "float32", "--dtype", "bfloat16", *SHORT, "--out", folder)


def test_real_models_come_to_a_cell_a_scenario(real: tuple[Path, Outcome]):
    table = read(real[0])
    finished = [group for group in table.groups if group.ending is Ending.FINISHED]
    assert [str(group.job) for group in finished] == [
        "random:gpt2, float32, eager",
        "random:gpt2, bfloat16, eager",
        "random:llama, float32, eager",
        "random:llama, bfloat16, eager",
    ]
    for group in finished:
        assert group.verdict.passes
        assert {cell.scenario: cell.num_rows for cell in group.cells}["fork"] == 10
        for cell in group.cells:
            assert (cell.target, cell.dtype) == (group.job.target, group.job.dtype)
            assert 0 <= cell.wall_s <= group.wall_s
            assert 10 < cell.peak_mb <= group.peak_mb


def test_what_cannot_be_built_is_refused_with_its_reason_and_fails_only_where_it_was_named(
    real: tuple[Path, Outcome],
):
    folder, outcome = real
    reasons = {g.job.target: g.reason for g in read(folder).groups if g.ending is Ending.REFUSED}
    assert "llama" in reasons["random:lama"]
    assert "no-such-folder" in reasons["no-such-folder"]
    assert outcome.status == 2
    assert outcome.err == ""
    assert outcome.out.startswith("8 groups: ")
    assert "4 refused." in outcome.out
    assert str(folder / "sweep.md") in outcome.out


def test_a_sweep_that_is_called_again_runs_nothing_again(
    real: tuple[Path, Outcome], monkeypatch: pytest.MonkeyPatch
):
    def work(job: Job) -> str:
        raise AssertionError(job)

    replaced(monkeypatch, work)
    folder, _ = real
    before = (folder / "cells.jsonl").read_bytes()
    outcome = run("sweep", "random:gpt2", "random:llama", *SHORT, "--out", folder, "--quiet")
    assert outcome.status == 0
    assert outcome.out.count("\n") == 1
    assert outcome.out.startswith("2 groups: ")
    assert (folder / "cells.jsonl").read_bytes() == before


def test_a_faulty_model_fails_the_sweep_and_is_told_in_a_sentence(tmp_path: Path):
    options = ("--length", 8, "--scenario", "chunked prefill", "--jobs", 1, "--out", tmp_path)
    outcome = run("sweep", "random:mamba", *options)
    assert outcome.status == 1
    (group,) = read(tmp_path).groups
    sentence = next(cell.sentence for cell in group.cells if cell.scenario == "chunked prefill")
    assert "mixer" in sentence
    assert "Likely cause:" in sentence
    assert "chunked prefill: **diverged**" in (tmp_path / "sweep.md").read_text("utf-8")


def test_a_child_computes_with_one_thread_and_leaves_this_process_as_it_was(tmp_path: Path):
    before = torch.get_num_threads()
    job = Job(target="random:gpt2", dtype="float32", attention="eager", length=8, seed=0)
    report = _sweep.audit_job(job, only=("fork",))
    assert report.environment.num_threads == 1
    assert torch.get_num_threads() == before


def test_every_type_is_every_type_of_the_library_and_a_refused_one_does_not_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from kvproof.errors import UsageError
    from kvproof.subjects._transformers import known_types

    def work(job: Job) -> str:
        if job.target == "random:gpt2":
            raise UsageError("not here")
        return matching(job)

    replaced(monkeypatch, work)
    outcome = run("sweep", "--all-types", "--out", tmp_path / "all", "--quiet")
    assert outcome.status == 0
    assert [g.job.target for g in read(tmp_path / "all").groups] == [f"random:{t}" for t in known_types()]
    assert run("sweep", "random:gpt2", "--all-types", "--out", tmp_path / "all", "--quiet").status == 2


@pytest.mark.parametrize(
    ("verdict", "status"), [("diverged", 1), ("raised", 6), ("inconclusive", 3), ("vacuous", 4), ("match", 0)]
)
def test_the_exit_status_is_that_of_the_worst_verdict(
    verdict: str, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def work(job: Job) -> str:
        return matching(job).replace('"match"', f'"{verdict}"') if job.target == "b" else matching(job)

    replaced(monkeypatch, work)
    assert run("sweep", "a", "b", "c", "--out", tmp_path).status == status


def test_a_crash_counts_as_inconclusive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def work(job: Job) -> str:
        raise ValueError("boom")

    replaced(monkeypatch, work)
    assert run("sweep", "a", "--out", tmp_path).status == 3


def test_progress_is_shown_on_a_terminal_and_not_in_a_pipe_or_when_quiet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    import threading

    num_threads = []

    def work(job: Job) -> str:
        num_threads.append(threading.active_count())
        return matching(job)

    replaced(monkeypatch, work)
    monkeypatch.setenv("TERM", "xterm")
    shown = run("sweep", "a", "b", "--out", tmp_path / "1", terminal=True)
    assert "2/2" in shown.err
    assert len(set(num_threads)) == 1  # a process that is forked beside a drawing thread can hang
    before = threading.active_count()
    assert num_threads[0] == before
    assert run("sweep", "a", "b", "--out", tmp_path / "2").err == ""
    assert run("sweep", "a", "b", "--out", tmp_path / "3", "--quiet", terminal=True).err == ""


def test_half_a_line_is_told_on_standard_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    replaced(monkeypatch)
    run("sweep", "a", "b", "--out", tmp_path)
    file = tmp_path / "cells.jsonl"
    file.write_bytes(file.read_bytes()[:-9])
    outcome = run("sweep", "a", "b", "--out", tmp_path, "--quiet")
    assert outcome.status == 0
    assert outcome.err == f"kvproof: {file} ends in a half-written line; that target will be run again\n"


def test_other_options_in_the_same_folder_are_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    replaced(monkeypatch)
    run("sweep", "a", "--out", tmp_path)
    outcome = run("sweep", "a", "--seed", 3, "--out", tmp_path)
    assert outcome.refused("--seed 0, but this one has 3", "--fresh", "--out")
    assert run("sweep", "a", "--seed", 3, "--out", tmp_path, "--fresh").status == 0


def test_a_scenario_that_is_not_there_is_refused_in_one_line(tmp_path: Path):
    outcome = run("sweep", "random:gpt2", "--scenario", "nonsense", "--out", tmp_path / "out")
    assert outcome.refused("no scenario 'nonsense'", "token-by-token")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--out", "x"],
        ["a"],
        ["a", "--out", "x", "--dtype", "int8"],
        ["a", "--out", "x", "--attention", "flash"],
        ["a", "--out", "x", "--length", "7"],
        ["a", "--out", "x", "--seed", "-1"],
        ["a", "--out", "x", "--seed", str(2**63)],
        ["a", "--out", "x", "--jobs", "0"],
        ["a", "--out", "x", "--limit", "0"],
        ["a", "--out", "x", "--limit", "nan"],
    ],
    ids=" ".join,
)
def test_a_wrong_option_is_refused(arguments: list[str]):
    outcome = run("sweep", *arguments)
    assert outcome.status == 2
    assert "Traceback" not in outcome.err
    assert not Path("x").exists()


def test_an_out_that_is_a_file_exits_with_73(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    replaced(monkeypatch)
    (tmp_path / "file").write_text("mine")
    outcome = run("sweep", "a", "--out", tmp_path / "file")
    assert (outcome.status, outcome.out) == (73, "")
    assert outcome.err == f"kvproof: cannot keep a sweep in {tmp_path / 'file'}: File exists\n"
    assert (tmp_path / "file").read_text() == "mine"


STUBBED = """
import sys, time
from kvproof._sweeping import sweep as _sweep
from kvproof import cli
from tests.sweep.samples import matching

def work(job, **wanted):
    if job.target.startswith("slow"):
        time.sleep(600)
    return matching(job)

_sweep.audit_to_json = work
_sweep.preload = lambda targets: None
sys.argv[0] = "kvproof"
cli.main()
"""


def started(folder: Path, *targets: str) -> "subprocess.Popen[str]":
    """Start a sweep in a process of its own, in which targets that are slow never end."""
    command = [sys.executable, "-c", STUBBED, "sweep", *targets, "--jobs", "2", "--out", folder]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, **pipes, text=True, env=environment, cwd=ROOT)


def children_of(sweeping: "subprocess.Popen[str]", file: Path, num_lines: int) -> list[int]:
    """Wait until so many lines are written and two slow targets are running; return their processes."""
    end = time.monotonic() + 60
    tree = Path(f"/proc/{sweeping.pid}/task/{sweeping.pid}/children")
    while True:
        written = file.exists() and file.read_bytes().count(b"\n") == num_lines
        children = [int(child) for child in tree.read_text().split()]
        if written and len(children) == 2:
            return children
        assert time.monotonic() < end
        time.sleep(0.02)


def test_ctrl_c_keeps_what_has_ended_ends_the_rest_and_exits_with_130(tmp_path: Path):
    sweeping = started(tmp_path, "a", "slow", "b", "slow too", "c")
    children = children_of(sweeping, tmp_path / "cells.jsonl", 3)
    sweeping.send_signal(signal.SIGINT)
    out, err = sweeping.communicate(timeout=60)
    assert (sweeping.returncode, out) == (130, "")
    assert err.strip() == "kvproof: interrupted; no file was left half-written"
    assert not any(Path(f"/proc/{child}").exists() for child in children)
    table = read(tmp_path)
    assert table.partial
    assert [group.job.target for group in table.groups] == ["a", "b"]
    assert "**Partial: 3 of 5" in (tmp_path / "sweep.md").read_text("utf-8")


def test_a_sweep_that_was_killed_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    sweeping = started(tmp_path, "a", "b", "slow", "c", "slow too", "d")
    children = children_of(sweeping, tmp_path / "cells.jsonl", 4)
    sweeping.kill()
    sweeping.communicate(timeout=60)
    for child in children:
        os.kill(child, signal.SIGKILL)
    ran: list[str] = []

    def work(job: Job) -> str:
        ran.append(job.target)
        return matching(job)

    replaced(monkeypatch, work)
    assert run("sweep", "a", "b", "slow", "c", "slow too", "d", "--out", tmp_path).status == 0
    assert ran == ["slow", "slow too", "d"]
    assert [group.job.target for group in read(tmp_path).groups] == ["a", "b", "slow", "c", "slow too", "d"]
