"""A pool of processes: the same results, and no process left behind, however it ends."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from contextlib import suppress

import pytest
import torch
from tests.processes import is_running, list_children

import kvproof
from kvproof import UsageError
from kvproof._system.machine import use_threads
from kvproof._system.pool import map_in_processes
from kvproof.errors import ContextError, KvproofError, SubjectError
from kvproof.reference import Checkpoint
from kvproof.scenarios import token_by_token
from kvproof.subjects import ReferenceSubject

needs_fork = pytest.mark.skipif(sys.platform != "linux", reason="only Linux forks")


@pytest.fixture
def others() -> set[int]:
    """Return the children that this process has already, such as the browser of another test."""
    return list_children()


@pytest.mark.parametrize("jobs", [1, pytest.param(2, marks=needs_fork), pytest.param(9, marks=needs_fork)])
def test_results_come_in_order_and_nothing_is_left(jobs: int, others: set[int]):
    assert list(map_in_processes(lambda number: number * number, 5, jobs)) == [0, 1, 4, 9, 16]
    assert list_children() <= others


@needs_fork
def test_others_compute_with_one_thread_each_and_learn_for_themselves():
    learned = []

    def work(number: int) -> tuple[int, int, float]:
        learned.append(number)
        return os.getpid(), torch.get_num_threads(), float((torch.ones(400, 400) @ torch.ones(400, 400)).sum())

    with use_threads(2):
        float((torch.ones(400, 400) @ torch.ones(400, 400)).sum())  # the parent's threads have worked before
        results = list(map_in_processes(work, 4, 2))
        assert torch.get_num_threads() == 2
    assert os.getpid() not in {pid for pid, _, _ in results}
    assert {(num, total) for _, num, total in results} == {(1, 400.0**3)}
    assert not learned


@needs_fork
def test_what_is_raised_is_raised_in_its_turn_and_ends_the_others(others: set[int]):
    def work(number: int) -> int:
        if number == 1:
            raise ContextError("position 9 is past the context")
        if number > 1:
            time.sleep(60)
        return number

    results, start = map_in_processes(work, 4, 3), time.monotonic()
    assert next(results) == 0
    with pytest.raises(ContextError, match="position 9 is past the context"):
        next(results)
    assert list_children() <= others
    assert time.monotonic() - start < 30


@needs_fork
def test_the_cause_of_what_is_raised_comes_along_as_a_note():
    def work(number: int) -> int:
        try:
            return [1, 2][number + 1]
        except IndexError as error:
            raise SubjectError("the decoder raised IndexError") from error

    results = map_in_processes(work, 2, 2)
    assert next(results) == 2
    with pytest.raises(SubjectError, match="the decoder raised IndexError") as raised:
        next(results)
    assert str(raised.value) == "the decoder raised IndexError"
    (note,) = raised.value.__notes__
    assert "in a child process:" in note
    assert "return [1, 2][number + 1]" in note
    assert "IndexError: list index out of range" in note


@needs_fork
def test_a_result_that_cannot_be_sent_is_an_error_that_says_so(others: set[int]):
    class Unsendable(Exception):
        pass

    def work(number: int) -> object:
        if number == 2:
            raise Unsendable("no")
        return (lambda: 1) if number else 0

    results = map_in_processes(work, 2, 2)
    assert next(results) == 0
    with pytest.raises(KvproofError, match=r"what a child process returned cannot be pickled: .*lambda"):
        next(results)
    with pytest.raises(KvproofError, match=r"what a child process raised cannot be pickled: .*Unsendable"):
        list(map_in_processes(lambda number: work(number + 2), 2, 2))
    assert list_children() <= others


@needs_fork
def test_an_iteration_that_is_given_up_ends_them(others: set[int]):
    def work(number: int) -> int:
        if number:
            time.sleep(60)
        return number

    results = map_in_processes(work, 3, 2)
    assert next(results) == 0
    assert list_children() - others
    results.close()
    assert list_children() <= others


@needs_fork
def test_a_process_that_dies_is_an_error_that_says_how(others: set[int]):
    def work(number: int) -> int:
        os.kill(os.getpid(), signal.SIGKILL)
        return number

    with pytest.raises(KvproofError, match=r"^a child process died \(killed by SIGKILL\); one process"):
        list(map_in_processes(work, 3, 2))
    assert list_children() <= others


@pytest.mark.parametrize("jobs", [0, -1])
def test_a_number_that_makes_no_sense_is_refused(jobs: int, checkpoint: Checkpoint):
    with pytest.raises(UsageError, match=f"jobs must be at least 1, not {jobs}"):
        kvproof.audit(ReferenceSubject(checkpoint), [token_by_token((0, 1))], jobs=jobs)


def test_where_nothing_can_be_forked_more_than_one_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    assert list(map_in_processes(str, 2, 1)) == ["0", "1"]
    with pytest.raises(UsageError, match="jobs must be 1, not 2: kvproof forks only on Linux"):
        list(map_in_processes(str, 2, 2))


#: Ctrl-C is then taken by another thread, and ends no call that the first one waits in.
ELSEWHERE = "threading.Thread(target=time.sleep, args=(600,), daemon=True).start(); \
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})"


@needs_fork
@pytest.mark.parametrize(
    ("number", "before"),
    [
        pytest.param(signal.SIGINT, "", id="Ctrl-C"),
        pytest.param(signal.SIGINT, ELSEWHERE, id="Ctrl-C that another thread takes"),
        pytest.param(signal.SIGKILL, "", id="killed"),
    ],
)
def test_a_parent_that_ends_takes_its_processes_with_it(number: signal.Signals, before: str):
    """Ctrl-C is seen by the parent alone; one that is killed is missed by its processes."""
    script = f"""
        import os, signal, sys, threading, time
        from kvproof._system.pool import map_in_processes

        {before}

        def work(number):
            os.write(1, f"{{os.getpid()}}\\n".encode())  # print may write a line in two parts
            time.sleep(600)

        list(map_in_processes(work, 2, 2))
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", textwrap.dedent(script)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, process_group=0
    ) as parent:
        assert parent.stdout is not None
        assert parent.stderr is not None
        try:
            pids = [int(parent.stdout.readline() or parent.stderr.read()) for _ in range(2)]
            os.killpg(parent.pid, number) if number == signal.SIGINT else parent.send_signal(number)
            parent.wait(60)
            deadline = time.monotonic() + 30
            while any(map(is_running, pids)) and time.monotonic() < deadline:
                time.sleep(0.1)
            assert not any(map(is_running, pids))
        finally:
            with suppress(ProcessLookupError):
                os.killpg(parent.pid, signal.SIGKILL)  # what did not end would be waited for
