"""A child process: its result, its limit, its output and the cause of its death, without a pool or a sweep."""

import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial

import pytest
from tests.processes import is_running, list_children

from kvproof._system.children import Children, Exit, send_result, take_result
from kvproof.errors import UsageError

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")


def end_of(work: Callable[[], object], children: Children) -> Exit:
    """Return how a child that sends no result ended."""
    with children:
        child = children.start(partial(send_result, work=work))
        assert children.wait() == [child]
        with pytest.raises(EOFError):
            child.receive()
        return children.end(child)


def result_of(work: Callable[[], object], children: Children) -> object:
    with children:
        child = children.start(partial(send_result, work=work))
        children.wait()
        return take_result(child.receive())


def print_and_exit(output: bytes) -> None:
    os.write(2, output)
    os._exit(9)


def test_a_result_comes_back_and_what_was_raised_is_raised():
    def refuse() -> None:
        raise UsageError("no such model")

    others = list_children()
    assert result_of(lambda: {"pid": os.getppid()}, Children()) == {"pid": os.getpid()}
    with pytest.raises(UsageError, match="no such model") as raised:
        result_of(refuse, Children(own_group=True, capture_output=True, limit_s=60))
    assert "in refuse" in raised.value.__notes__[0]
    assert list_children() <= others


def test_captured_output_does_not_reach_the_terminal_and_there_is_no_input(capfd: pytest.CaptureFixture[str]):
    def speak() -> bytes:
        sys.stdout.write("half a line")
        return os.read(0, 10)

    assert result_of(speak, Children(capture_output=True)) == b""
    assert capfd.readouterr() == ("", "")
    assert result_of(speak, Children()) == b""


@pytest.mark.parametrize(
    ("death", "cause"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "killed by SIGKILL"),
        (lambda: os.kill(os.getpid(), 40), "killed by signal 40"),
        (lambda: os._exit(3), "ended with exit status 3 and no result"),
        (lambda: sys.exit(3), "ended with exit status 1 and no result: SystemExit: 3"),
        (
            lambda: os.write(2, b"a\nout of\x1b memory\n \n") and os._exit(9),
            "ended with exit status 9 and no result: out of\\x1b memory",
        ),
    ],
    ids=["SIGKILL", "a signal without a name", "exit status", "SystemExit", "last line"],
)
def test_the_cause_of_death_is_one_sentence(death: Callable[[], object], cause: str):
    end = end_of(death, Children(own_group=True, capture_output=True, limit_s=60))
    assert end.cause == cause
    assert not end.is_timeout


def test_a_child_that_is_out_of_time_is_killed_with_what_it_started(tmp_path):
    def work() -> None:
        pid = os.fork()
        if pid == 0:
            time.sleep(600)
        (tmp_path / "new").write_text(str(pid))
        (tmp_path / "new").rename(tmp_path / "pid")
        time.sleep(600)

    end = end_of(work, Children(own_group=True, capture_output=True, limit_s=1))
    assert (end.cause, end.is_timeout, end.signal) == ("cut off after 1 s", True, signal.SIGKILL)
    assert end.wall_s >= 1
    deadline = time.monotonic() + 10
    while is_running(int((tmp_path / "pid").read_text())) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not is_running(int((tmp_path / "pid").read_text()))


def test_the_peak_of_memory_is_that_of_the_child():
    with Children() as children:
        small, large = (
            children.start(partial(send_result, work=work))
            for work in (lambda: None, lambda: len(b"x" * 300_000_000))
        )
        sent = set()
        while len(sent) < 2:
            sent |= {child.pid for child in children.wait()}
        assert children.end(large).peak_mb - children.end(small).peak_mb > 250
