"""Work in forked processes: the same results, and no process left behind, however it ends."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from contextlib import suppress
from multiprocessing import active_children

import pytest
import torch

import kvproof
from kvproof import UsageError
from kvproof._system.forked import in_processes
from kvproof._system.machine import threads
from kvproof.errors import ContextError, KvproofError, SubjectError
from kvproof.reference import Checkpoint
from kvproof.scenarios import token_by_token
from kvproof.subjects import ReferenceSubject

needs_fork = pytest.mark.skipif(sys.platform != "linux", reason="only Linux forks")


@pytest.mark.parametrize("jobs", [1, pytest.param(2, marks=needs_fork), pytest.param(9, marks=needs_fork)])
def test_results_come_in_order_and_nothing_is_left(jobs: int):
    assert list(in_processes(lambda number: number * number, 5, jobs)) == [0, 1, 4, 9, 16]
    assert not active_children()


@needs_fork
def test_others_compute_with_one_thread_each_and_learn_for_themselves():
    learned = []

    def work(number: int) -> tuple[int, int, float]:
        learned.append(number)
        return os.getpid(), torch.get_num_threads(), float((torch.ones(400, 400) @ torch.ones(400, 400)).sum())

    with threads(2):
        float((torch.ones(400, 400) @ torch.ones(400, 400)).sum())  # the parent's threads have worked before
        results = list(in_processes(work, 4, 2))
        assert torch.get_num_threads() == 2
    assert os.getpid() not in {pid for pid, _, _ in results}
    assert {(num, total) for _, num, total in results} == {(1, 400.0**3)}
    assert not learned


@needs_fork
def test_what_is_raised_is_raised_in_its_turn_and_ends_the_others():
    def work(number: int) -> int:
        if number == 1:
            raise ContextError("position 9 is past the context")
        if number > 1:
            time.sleep(60)
        return number

    results, start = in_processes(work, 4, 3), time.monotonic()
    assert next(results) == 0
    with pytest.raises(ContextError, match="position 9 is past the context"):
        next(results)
    assert not active_children()
    assert time.monotonic() - start < 30


@needs_fork
def test_the_cause_of_what_is_raised_comes_along_as_a_note():
    def work(number: int) -> int:
        try:
            return [1, 2][number + 1]
        except IndexError as error:
            raise SubjectError("the decoder raised IndexError") from error

    results = in_processes(work, 2, 2)
    assert next(results) == 2
    with pytest.raises(SubjectError, match="the decoder raised IndexError") as raised:
        next(results)
    assert str(raised.value) == "the decoder raised IndexError"
    (note,) = raised.value.__notes__
    assert "in a forked process:" in note
    assert "return [1, 2][number + 1]" in note
    assert "IndexError: list index out of range" in note


@needs_fork
def test_a_result_that_cannot_be_sent_is_an_error_that_says_so():
    class Unsendable(Exception):
        pass

    def work(number: int) -> object:
        if number == 2:
            raise Unsendable("no")
        return (lambda: 1) if number else 0

    results = in_processes(work, 2, 2)
    assert next(results) == 0
    with pytest.raises(
        KvproofError, match=r"what a forked process computed cannot be sent to this one: .*lambda"
    ):
        next(results)
    with pytest.raises(
        KvproofError, match=r"what a forked process raised cannot be sent to this one: .*Unsendable"
    ):
        list(in_processes(lambda number: work(number + 2), 2, 2))
    assert not active_children()


@needs_fork
def test_an_iteration_that_is_given_up_ends_them():
    def work(number: int) -> int:
        if number:
            time.sleep(60)
        return number

    results = in_processes(work, 3, 2)
    assert next(results) == 0
    assert active_children()
    results.close()
    assert not active_children()


@needs_fork
def test_a_process_that_dies_is_an_error_that_says_how():
    def work(number: int) -> int:
        os.kill(os.getpid(), signal.SIGKILL)
        return number

    with pytest.raises(KvproofError, match=r"died \(signal 9.*one process \(--jobs 1\)"):
        list(in_processes(work, 3, 2))
    assert not active_children()


@pytest.mark.parametrize("jobs", [0, -1])
def test_a_number_that_makes_no_sense_is_refused(jobs: int, checkpoint: Checkpoint):
    with pytest.raises(UsageError, match=f"jobs must be at least 1, not {jobs}"):
        kvproof.audit(ReferenceSubject(checkpoint), [token_by_token((0, 1))], jobs=jobs)


def test_where_nothing_can_be_forked_more_than_one_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    assert list(in_processes(str, 2, 1)) == ["0", "1"]
    with pytest.raises(UsageError, match="jobs must be 1, not 2: processes are forked on Linux alone"):
        list(in_processes(str, 2, 2))


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
        from kvproof._system.forked import in_processes

        {before}

        def work(number):
            os.write(1, f"{{os.getpid()}}\\n".encode())  # print may write a line in two parts
            time.sleep(600)

        list(in_processes(work, 2, 2))
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
            while any(map(_lives, pids)) and time.monotonic() < deadline:
                time.sleep(0.1)
            assert not any(map(_lives, pids))
        finally:
            with suppress(ProcessLookupError):
                os.killpg(parent.pid, signal.SIGKILL)  # what did not end would be waited for


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
