"""Streams that are full or closed: the exit status says so, and what could be written was."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


def started(redirection: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run the command line in a process of its own, under a shell that redirects its streams."""
    code = "from kvproof.cli import main; main()"
    command = f'exec "$0" -c "{code}" "$@" {redirection}'
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        ["bash", "-c", command, sys.executable, *map(str, arguments)],
        env=environment,
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["audit", "--list"]], ids=str)
def test_help_that_cannot_be_printed_exits_with_73(arguments: list[str], full_device: Path):
    """It was taken for an error inside kvproof."""
    done = started(f">{full_device}", *arguments)
    assert done.returncode == 73
    assert done.stderr == "kvproof: cannot write to standard output: No space left on device\n"


@pytest.fixture
def taking_nothing(request: pytest.FixtureRequest) -> str:
    """Where a stream can go that takes nothing: a full device, or nowhere."""
    return str(request.getfixturevalue("full_device")) if request.param == "full" else "&-"


@pytest.mark.parametrize(
    ("taking_nothing", "cause"),
    [("full", "No space left on device"), ("closed", "it is closed")],
    indirect=["taking_nothing"],
)
def test_a_replay_that_cannot_be_told_exits_with_73(
    taking_nothing: str, cause: str, ledgers: dict[str, str], scratch: Path, saved: Path
):
    """It ended in a traceback, or as if a line of the record had failed."""
    scratch.write_text(ledgers["greedy"], "utf-8")
    redirection = f">{taking_nothing}"
    done = started(redirection, "replay", scratch, "--checkpoint", saved)
    assert done.returncode == 73
    assert done.stderr == f"kvproof: cannot write to standard output: {cause}\n"


def test_a_closed_standard_output_does_not_lose_the_report(saved: Path, tmp_path: Path):
    done = started(">&-", "milestone", "--checkpoint", saved, "--report", tmp_path / "report")
    assert done.returncode == 73
    assert (tmp_path / "report" / "report.json").exists()


@pytest.mark.parametrize("taking_nothing", ["closed", "full"], indirect=True)
def test_a_standard_error_that_takes_nothing_leaves_the_exit_status(
    taking_nothing: str, ledgers: dict[str, str], scratch: Path, saved: Path
):
    scratch.write_text(ledgers["greedy"], "utf-8")
    redirection = f"2>{taking_nothing}"
    assert started(redirection, "replay", scratch, "--checkpoint", saved).returncode == 0
    assert started(redirection, "replay", scratch.parent / "missing.jsonl").returncode == 2
    assert started(redirection, "nonsense").returncode == 2


@pytest.mark.parametrize("arguments", [["faults"], ["audit", "--list"]], ids=str)
def test_a_list_that_cannot_be_printed_exits_with_73(arguments: list[str]):
    """It exited with 0."""
    done = started(">&-", *arguments)
    assert done.returncode == 73
    assert done.stderr == "kvproof: cannot write to standard output: it is closed\n"


def test_a_closed_standard_output_is_told_once():
    done = started(">&-", "audit", "random:gpt2", "--length", 8, "--scenario", "fork", "--no-certificate")
    assert done.returncode == 73
    assert done.stderr == "kvproof: cannot write to standard output: it is closed\n"
