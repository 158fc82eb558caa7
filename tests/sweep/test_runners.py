"""Runners: every job ends in one outcome, whatever it does, and affects no other job."""

import faulthandler
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.processes import is_running, list_children

from kvproof._sweeping import JobOutcome, ProcessRunner, Runner, SerialRunner
from kvproof.contract.sweep_table import Ending, Job
from kvproof.errors import KvproofError, UsageError

from .samples import job

RUNNERS: dict[str, Callable[[], Runner]] = {
    "serial": SerialRunner,
    "one process at a time": lambda: ProcessRunner(num_jobs=1, limit_s=60),
    "three processes at a time": lambda: ProcessRunner(num_jobs=3, limit_s=60),
}
JOBS = tuple(job(name) for name in ("a", "b", "c", "d", "e"))


@pytest.fixture(params=RUNNERS.values(), ids=RUNNERS.keys())
def runner(request: pytest.FixtureRequest) -> Runner:
    return request.param()


def ended(runner: Runner, work: Callable[[Job], str], jobs: tuple[Job, ...] = JOBS) -> dict[str, JobOutcome]:
    """Run jobs and return each target's outcome, of which there is one."""
    outcomes = list(runner.run(jobs, work))
    assert sorted(o.job.target for o in outcomes) == sorted(j.target for j in jobs)
    return {outcome.job.target: outcome for outcome in outcomes}


def waits_for(condition: Callable[[], bool]) -> bool:
    """Whether something comes true within ten seconds."""
    end = time.monotonic() + 10
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return condition()


def segfault() -> None:
    faulthandler.disable()  # pytest's would print over the test's own output
    os.kill(os.getpid(), signal.SIGSEGV)


def test_every_job_ends_with_what_its_work_returned(runner: Runner):
    outcomes = ended(runner, lambda job: f"{job.target}: ü\n" * 3)
    for target, outcome in outcomes.items():
        assert (outcome.ending, outcome.text, outcome.reason) == (Ending.FINISHED, f"{target}: ü\n" * 3, None)
        assert outcome.wall_s >= 0
        assert 1 < outcome.peak_mb < 1e6


def test_no_job_gives_no_outcome(runner: Runner):
    assert ended(runner, lambda job: "", ()) == {}


def test_a_result_larger_than_any_pipe_arrives_whole(runner: Runner):
    text = "0123456789" * 200_000
    assert all(outcome.text == text for outcome in ended(runner, lambda job: text, JOBS[:2]).values())


def test_a_usage_error_refuses_the_one_job(runner: Runner):
    def work(job: Job) -> str:
        if job.target == "b":
            raise UsageError("no such\x1b[2J model\nsecond line")
        return "ok"

    outcomes = ended(runner, work)
    assert outcomes["b"].ending is Ending.REFUSED
    assert outcomes["b"].reason == "no such\\x1b[2J model second line"
    assert [o.text for o in outcomes.values()].count("ok") == 4


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ValueError("what\n\n more"), "ValueError: what more"),
        (KeyError("x" * 9000), "KeyError: '" + "x" * 489 + "..."),
        (MemoryError(), "MemoryError:"),
        (SystemExit(7), "SystemExit: 7"),
        (RecursionError("deep"), "RecursionError: deep"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_the_work_raises_is_a_crash_of_the_one_job(runner: Runner, error: BaseException, reason: str):
    def work(job: Job) -> str:
        if job.target == "c":
            raise error
        return "ok"

    outcomes = ended(runner, work)
    assert (outcomes["c"].ending, outcomes["c"].text) == (Ending.CRASHED, None)
    assert outcomes["c"].reason == reason
    assert [o.text for o in outcomes.values()].count("ok") == 4


def test_closing_the_runner_starts_no_further_job(runner: Runner, tmp_path: Path):
    def work(job: Job) -> str:
        (tmp_path / job.target).touch()
        return ""

    outcomes = runner.run(JOBS, work)
    next(outcomes)
    outcomes.close()
    assert not (tmp_path / "e").exists()


def test_jobs_of_the_process_runner_run_in_their_own_processes():
    pids = {o.text for o in ended(ProcessRunner(num_jobs=2, limit_s=60), lambda job: str(os.getpid())).values()}
    assert len(pids) == len(JOBS)
    assert str(os.getpid()) not in pids


def test_as_many_run_at_a_time_as_were_asked_for_and_no_more(tmp_path: Path):
    def work(job: Job) -> str:
        mine = tmp_path / job.target
        mine.touch()
        if not waits_for(lambda: len(list(tmp_path.iterdir())) >= 2):
            return "alone"
        time.sleep(0.1)
        num_seen = len(list(tmp_path.iterdir()))
        mine.unlink()
        return str(num_seen)

    texts = [o.text for o in ended(ProcessRunner(num_jobs=2, limit_s=60), work, JOBS[:4]).values()]
    assert set(texts) <= {"1", "2"}
    assert "2" in texts


def test_a_job_that_hangs_is_cut_off_and_the_others_are_not():
    def work(job: Job) -> str:
        if job.target == "b":
            time.sleep(600)
        return "ok"

    outcomes = ended(ProcessRunner(num_jobs=2, limit_s=1), work)
    assert outcomes["b"].ending is Ending.TIMED_OUT
    assert outcomes["b"].reason == "cut off after 1 s"
    assert outcomes["b"].wall_s >= 1
    assert [o.text for o in outcomes.values()].count("ok") == 4


def test_a_job_that_ignores_signals_is_cut_off_with_what_it_started(tmp_path: Path):
    def work(job: Job) -> str:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM):
            signal.signal(number, signal.SIG_IGN)
        grandchild = os.fork()
        if grandchild == 0:
            time.sleep(600)
        (tmp_path / "pids").write_text(f"{os.getpid()} {grandchild}")
        time.sleep(600)
        return ""

    assert ended(ProcessRunner(num_jobs=1, limit_s=2), work, JOBS[:1])["a"].ending is Ending.TIMED_OUT
    for pid in map(int, (tmp_path / "pids").read_text().split()):
        assert waits_for(lambda pid=pid: not is_running(pid))


def test_a_job_that_is_interrupted_interrupts_the_run_and_has_no_outcome():
    def work(job: Job) -> str:
        if job.target == "b":
            os.kill(os.getpid(), signal.SIGINT)
        return "ok"

    outcomes = ProcessRunner(num_jobs=1, limit_s=60).run(JOBS, work)
    assert next(outcomes).job.target == "a"
    with pytest.raises(KeyboardInterrupt):
        next(outcomes)


@pytest.mark.parametrize(
    ("death", "reason"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "killed by SIGKILL"),
        (lambda: segfault(), "killed by SIGSEGV"),
        (lambda: os._exit(3), "ended with exit status 3 and no result"),
        (lambda: os._exit(0), "ended with exit status 0 and no result"),
    ],
    ids=["SIGKILL", "SIGSEGV", "exit 3", "exit 0"],
)
def test_a_job_whose_process_dies_is_a_crash_that_names_the_cause(death: Callable[[], None], reason: str):
    def work(job: Job) -> str:
        if job.target == "a":
            death()
        return "ok"

    outcomes = ended(ProcessRunner(num_jobs=2, limit_s=60), work)
    assert outcomes["a"].ending is Ending.CRASHED
    assert outcomes["a"].reason is not None
    assert outcomes["a"].reason.startswith(reason)
    assert [o.text for o in outcomes.values()].count("ok") == 4


def test_the_last_line_that_a_dying_process_printed_is_part_of_the_cause(capfd: pytest.CaptureFixture[str]):
    def work(job: Job) -> str:
        sys.stdout.write("before\n")
        os.write(2, b"terminate called: \xff\x1b[1m\n\n")
        os._exit(134)

    outcome = ended(ProcessRunner(num_jobs=1, limit_s=60), work, JOBS[:1])["a"]
    assert outcome.reason == "ended with exit status 134 and no result: terminate called: �\\x1b[1m"
    assert capfd.readouterr() == ("", "")


def test_what_a_job_prints_or_asks_does_not_reach_the_terminal(capfd: pytest.CaptureFixture[str]):
    def work(job: Job) -> str:
        sys.stdout.write("out\n")
        sys.stderr.write("err\n")
        os.write(1, b"out\n")
        return repr(os.read(0, 10))

    assert ended(ProcessRunner(num_jobs=1, limit_s=60), work, JOBS[:1])["a"].text == "b''"
    assert capfd.readouterr() == ("", "")


def test_a_job_that_runs_out_of_memory_hurts_itself_alone():
    def work(job: Job) -> str:
        if job.target == "b":
            import resource

            resource.setrlimit(resource.RLIMIT_AS, (1 << 32, 1 << 32))
            return "x" * (1 << 40)
        return "ok"

    outcomes = ended(ProcessRunner(num_jobs=2, limit_s=60), work)
    assert outcomes["b"].ending is Ending.CRASHED
    assert outcomes["b"].reason == "MemoryError:"
    assert [o.text for o in outcomes.values()].count("ok") == 4


def test_half_a_result_is_a_crash(tmp_path: Path):
    """The process dies while its result is on the way."""
    pid_file = tmp_path / "pid"

    def work(job: Job) -> str:
        if job.target == "a":
            assert waits_for(pid_file.exists)
            return "ok"
        (tmp_path / "new").write_text(str(os.getpid()))
        (tmp_path / "new").rename(pid_file)
        return "x" * (1 << 24)  # far more than a pipe holds, so that sending waits for the runner

    outcomes = ProcessRunner(num_jobs=2, limit_s=60).run(JOBS[:2], work)
    assert next(outcomes).text == "ok"
    time.sleep(0.3)  # the runner is not reading now
    os.kill(int(pid_file.read_text()), signal.SIGKILL)
    outcome = next(outcomes)
    assert (outcome.ending, outcome.text, outcome.reason) == (Ending.CRASHED, None, "killed by SIGKILL")


def test_closing_the_process_runner_ends_what_is_running(tmp_path: Path):
    def work(job: Job) -> str:
        if job.target != "a":
            (tmp_path / job.target).write_text(str(os.getpid()))
            time.sleep(600)
        assert waits_for(lambda: len(list(tmp_path.iterdir())) == 2)
        return ""

    outcomes = ProcessRunner(num_jobs=3, limit_s=600).run(JOBS[:3], work)
    assert next(outcomes).job.target == "a"
    outcomes.close()
    for file in tmp_path.iterdir():
        assert not is_running(int(file.read_text()))


def test_no_descriptor_and_no_process_is_left_behind():
    runner = ProcessRunner(num_jobs=2, limit_s=60)
    ended(runner, lambda job: "ok")
    before, others = sorted(os.listdir("/proc/self/fd")), list_children()  # another test's browser may be one
    for _ in range(3):
        ended(runner, lambda job: "ok")
        outcomes = runner.run(JOBS, lambda job: "ok")
        next(outcomes)
        outcomes.close()
    assert sorted(os.listdir("/proc/self/fd")) == before
    assert list_children() <= others


def test_a_system_that_starts_no_process_is_named(monkeypatch: pytest.MonkeyPatch):
    def fork() -> int:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", fork)
    with pytest.raises(KvproofError, match="cannot start a process: Resource temporarily unavailable"):
        list(ProcessRunner(num_jobs=1, limit_s=1).run(JOBS, lambda job: ""))


@pytest.mark.parametrize(("num_jobs", "limit_s"), [(0, 1.0), (1, 0.0), (1, float("nan")), (1, float("inf"))])
def test_numbers_that_make_no_sense_are_refused(num_jobs: int, limit_s: float):
    with pytest.raises(UsageError, match="cannot run"):
        ProcessRunner(num_jobs=num_jobs, limit_s=limit_s)
