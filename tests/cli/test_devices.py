"""A result that is sent to a device, a pipe or through a link leaves each of them what it is."""

import os
import threading
from pathlib import Path

import pytest
from safetensors.torch import load

from kvproof.contract.report import Report
from kvproof.render.json import render

from .running import run


@pytest.fixture
def report_file(report: Report, tmp_path: Path) -> Path:
    """A saved report."""
    path = tmp_path / "report.json"
    path.write_text(render(report), "utf-8")
    return path


def received_by(pipe: Path, *arguments: object) -> tuple[int, bytes]:
    """Run a command that writes to a pipe; return its exit status and what the pipe received."""
    os.mkfifo(pipe)
    received: list[bytes] = []
    reader = threading.Thread(target=lambda: received.append(pipe.read_bytes()), daemon=True)
    reader.start()
    outcome = run(*arguments)
    reader.join(timeout=20)
    assert pipe.is_fifo()
    return outcome.status, received[0]


def test_a_page_can_go_into_a_pipe(report_file: Path, tmp_path: Path):
    """It replaced the pipe by a file, and whoever read the pipe waited forever."""
    pipe = tmp_path / "pipe"
    status, received = received_by(pipe, "render", report_file, "--to", "html", "--out", pipe)
    assert status == 0
    assert received.startswith(b"<!doctype html>")


def test_weights_can_go_into_a_pipe(saved: Path, ready: Report, tmp_path: Path):
    pipe = tmp_path / "pipe"
    status, received = received_by(pipe, "milestone", "--checkpoint", saved, "--save-checkpoint", pipe)
    assert status == 0
    assert load(received).keys() == load(saved.read_bytes()).keys()


def test_a_lesson_can_go_into_a_pipe(saved: Path, tmp_path: Path):
    pipe = tmp_path / "pipe"
    status, received = received_by(pipe, "lesson", "--checkpoint", saved, "--out", pipe)
    assert status == 0
    assert b"</html>" in received


def test_a_ledger_can_go_into_a_pipe(tmp_path: Path):
    pipe = tmp_path / "pipe"
    short = ("generate", "random:gpt2", "--ids", "1,2", "--max-tokens", 2)
    status, received = received_by(pipe, *short, "--ledger", pipe)
    assert status == 0
    assert received.count(b"\n") == 4


@pytest.mark.parametrize("form", ["html", "json", "sarif"])
def test_a_report_that_goes_to_a_device_leaves_the_device(form: str, report_file: Path, null_device: Path):
    """Run by root, it replaced /dev/null by a regular file, for every process of the machine."""
    assert run("render", report_file, "--to", form, "--out", null_device).status == 0
    assert null_device.is_char_device()
    assert os.listdir(null_device.parent) == ["null"]


def test_a_full_device_is_told_and_stays(report_file: Path, full_device: Path):
    outcome = run("render", report_file, "--to", "html", "--out", full_device)
    assert outcome.status == 73
    assert outcome.err == f"kvproof: cannot write {full_device}: No space left on device\n"
    assert full_device.is_char_device()


def test_a_ledger_on_a_device_leaves_the_device(null_device: Path):
    short = ("generate", "random:gpt2", "--ids", "1,2", "--max-tokens", 2, "--ledger", null_device)
    assert run(*short).status == 0
    assert run(*short, "--full-logits").refused(null_device, "is not a regular file", "leave out --full-logits")
    assert null_device.is_char_device()
    assert os.listdir(null_device.parent) == ["null"]


def test_a_report_folder_with_links_keeps_them(tmp_path: Path):
    folder, kept = tmp_path / "report", tmp_path / "kept.json"
    folder.mkdir()
    (folder / "report.json").symlink_to(kept)
    short = ("audit", "random:gpt2", "--length", 8, "--scenario", "fork", "--no-certificate", "--quiet")
    assert run(*short, "--report", folder).status == 0
    assert (folder / "report.json").is_symlink()
    assert kept.read_text("utf-8").startswith("{")


def test_a_reproduction_through_a_pipe_is_run_all_the_same(tmp_path: Path):
    folder, pipe = tmp_path / "report", tmp_path / "pipe"
    short = ("--length", 8, "--scenario", "chunked prefill", "--no-certificate", "--quiet")
    assert run("audit", "random:mamba", *short, "--report", folder).status == 1
    status, received = received_by(pipe, "shrink", folder / "report.json", "--out", pipe, "--quiet")
    assert status == 0
    assert b"import torch" in received
