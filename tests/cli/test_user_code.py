"""Code of the user's that ends, blocks or interrupts the process: never a pass, and it says where it happened."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from .running import run

DECODER = """import os, signal, sys, time
import numpy as np
{top}
table = np.random.default_rng(0).normal(size=(11, 11))
class Stopped(BaseException):
    pass
def full(ids):
    {full}
    return table[ids].cumsum(axis=0)
def step(ids, cache):
    {step}
    logits = (0 if cache is None else cache) + table[ids].cumsum(axis=0)
    return logits, logits[-1]
def make():
    {make}
    return full, step
"""
SHORT = ("--length", "8", "--scenario", "token-by-token", "--no-certificate")
#: What ends a process or a call, and what kvproof says about it; os._exit is not caught in this process.
ENDS = {
    "sys.exit(0)": "called sys.exit(0) in ",
    "sys.exit()": "called sys.exit(None) in ",
    "sys.exit('done')": "called sys.exit('done') in ",
    "exit(0)": "called sys.exit(0) in ",
    "raise SystemExit": "called sys.exit(None) in ",
    "raise GeneratorExit('gone')": "raised GeneratorExit: gone",
    "raise type('Stopped', (BaseException,), {})('here')": "raised Stopped: here",
}
KILLS = {
    "os._exit(0)": "ended the process with os._exit, so nothing is proved: ",
    "os._exit(1)": "ended the process with os._exit, so nothing is proved: ",
    "os.kill(os.getpid(), signal.SIGKILL)": "was killed by SIGKILL, so nothing is proved",
    "os.kill(os.getpid(), signal.SIGSEGV)": "was killed by SIGSEGV, so nothing is proved",
    "os.execv('/bin/true', ['true'])": "ended the process with exit status 0, so nothing is proved",
}
PLACES = ("top", "make", "full", "step")


def decoder(folder: Path, **code: str) -> Path:
    """Write a decoder that is right, with code at some of its places."""
    path = folder / "mine.py"
    path.write_text(DECODER.format(**{name: code.get(name, "pass") for name in PLACES}), "utf-8")
    return path


def line_of(path: Path, code: str) -> int:
    return 1 + path.read_text("utf-8").splitlines().index(
        next(s for s in path.read_text().splitlines() if code in s)
    )


def start(*arguments: object, **variables: str) -> "subprocess.Popen[str]":
    """Start the command line in a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-c", "from kvproof.cli import main; main()", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**{k: v for k, v in os.environ.items() if k != "CI"}, "OMP_NUM_THREADS": "1", **variables},
    )


def outcome_of(*arguments: object, **variables: str) -> tuple[int, str, str]:
    with start(*arguments, **variables) as process:
        out, err = process.communicate(timeout=120)
    return process.returncode, out, err


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("code", ENDS)
def test_a_decoder_that_calls_exit_is_wrong_usage_and_named_with_its_line(code: str, place: str, tmp_path: Path):
    """It ended with the decoder's own exit status and printed nothing: a gate passed with nothing checked."""
    path = decoder(tmp_path, **{place: code})
    outcome = run("audit", f"{path}:make", *SHORT)
    assert outcome.refused(ENDS[code], f"{path}, line {line_of(path, code)}, in "), outcome


@pytest.mark.parametrize(
    ("code", "place"), [*((code, "step") for code in KILLS), *(("os._exit(0)", place) for place in PLACES[:3])]
)
def test_a_decoder_that_ends_the_process_is_caught_from_outside(code: str, place: str, tmp_path: Path):
    path = decoder(tmp_path, **{place: code})
    status, out, err = outcome_of("audit", f"{path}:make", *SHORT)
    assert (status, out) == (2, "")
    assert err.startswith(f"kvproof: {path}:make")
    assert err.count("\n") == 1
    assert KILLS[code] in err
    if "_exit" in code:
        assert f"{path}, line {line_of(path, code)}, in " in err


@pytest.mark.parametrize("command", ["generate", "audit --truth", "replay"])
def test_every_command_that_runs_your_code_is_guarded(command: str, tmp_path: Path):
    path = decoder(tmp_path, make="os._exit(0)")
    arguments = {
        "generate": ["generate", f"{path}:make", "--ids", "1"],
        "audit --truth": ["audit", "random:gpt2", "--truth", f"{path}:make", *SHORT],
        "replay": ["replay", tmp_path / "ledger.jsonl", "--target", f"{path}:make"],
    }[command]
    if command == "replay":
        fine = decoder(tmp_path)
        assert outcome_of("generate", f"{fine}:make", "--ids", 1, "--ledger", tmp_path / "ledger.jsonl")[0] == 0
        decoder(tmp_path, make="os._exit(0)")
    status, out, err = outcome_of(*arguments)
    assert (status, out) == (2, "")
    assert "ended the process with os._exit" in err


def test_a_decoder_that_is_fine_has_the_same_result_in_a_process_of_its_own(tmp_path: Path):
    path = decoder(tmp_path)
    status, out, err = outcome_of(
        "audit", f"{path}:make", *SHORT, "--timeout", 60, "--report", tmp_path / "report"
    )
    assert (status, err) == (0, "")
    assert "token-by-token" in out
    assert (tmp_path / "report" / "report.json").exists()
    wrong = decoder(tmp_path, step="ids = ids + (cache is not None) * (ids < 10)")
    assert outcome_of("audit", f"{wrong}:make", *SHORT)[0] == 1


def test_what_a_decoder_prints_and_forks_comes_through(tmp_path: Path):
    fork = "pid = os.fork(); pid or os._exit(0); os.waitpid(pid, 0); print('made')"
    status, out, _ = outcome_of("audit", f"{decoder(tmp_path, make=fork)}:make", *SHORT)
    assert status == 0
    assert out.startswith("made\n")


HANGS = {"time.sleep(600)": "time.sleep(600)", "while True: pass": "while True: pass"}


@pytest.mark.parametrize("place", ["top", "make", "step"])
@pytest.mark.parametrize("code", HANGS)
def test_a_call_that_hangs_is_ended_and_says_where(code: str, place: str, tmp_path: Path):
    path = decoder(tmp_path, **{place: code})
    status, out, err = outcome_of("audit", f"{path}:make", *SHORT, "--timeout", 1)
    assert (status, out) == (2, "")
    assert err.startswith(
        f"kvproof: {path}:make: a call did not return within 1 s (--timeout); it is in {path}, line "
    )
    assert f"{path}, line {line_of(path, code)}, in " in err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_keeps_what_was_done(number: int, tmp_path: Path):
    """SIGTERM ended the process at once, without a word or a report."""
    told = tmp_path / "told"
    code = f"cache is None and len(ids) == 2 and (open({str(told)!r}, 'w').close(), time.sleep(60))"
    path = decoder(tmp_path, step=code)
    arguments = ("--scenario", "chunked prefill", "--report", tmp_path / "report")
    with start("audit", f"{path}:make", *SHORT, *arguments) as process:
        while not told.exists():
            time.sleep(0.05)
            assert process.poll() is None
        process.send_signal(number)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err == "kvproof: interrupted; the report holds what was done so far\n"
    assert (tmp_path / "report" / "report.json").exists()


def test_a_sigterm_while_nothing_can_be_kept_says_so_too(tmp_path: Path):
    told = tmp_path / "told"
    path = decoder(tmp_path, make=f"open({str(told)!r}, 'w').close(); time.sleep(60)")
    with start("audit", f"{path}:make", *SHORT) as process:
        while not told.exists():
            time.sleep(0.05)
            assert process.poll() is None
        process.terminate()
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err.strip() == "kvproof: interrupted; no file was left half-written"


@pytest.mark.parametrize("place", ["top", "make", "full"])
def test_a_decoder_that_raises_is_named_with_its_own_lines(place: str, tmp_path: Path):
    path = decoder(tmp_path, **{place: "{}['weight']"})
    outcome = run("audit", f"{path}:make", *SHORT)
    assert outcome.refused("KeyError: 'weight'", f"({path}, line {line_of(path, 'weight')}, in "), outcome


def test_an_uncached_path_that_raises_later_is_undecided_and_named_with_its_own_lines(tmp_path: Path):
    path = decoder(tmp_path, full="len(ids) > 3 and {}['weight']")
    outcome = run("audit", f"{path}:make", *SHORT, "--quiet")
    assert outcome.status == 3
    assert f"KeyError: 'weight' ({path}, line {line_of(path, 'weight')}, in full: " in outcome.out
