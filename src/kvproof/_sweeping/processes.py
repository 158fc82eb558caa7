"""Runs each job in a forked process of its own, several at a time, each with a time limit.

The children share what the parent has imported. The parent must not compute before it forks: see `Children`.
"""

import signal
from collections.abc import Generator, Sequence
from functools import partial

from kvproof._sweeping.runner import JobOutcome, Runner, Work, attempt
from kvproof._system.children import Channel, Child, Children
from kvproof.contract.sweep_table import Ending, Job
from kvproof.errors import UsageError


class ProcessRunner(Runner):
    """Runs up to ``num_jobs`` jobs at a time, each for at most ``limit_s`` seconds."""

    def __init__(self, *, num_jobs: int, limit_s: float) -> None:
        if num_jobs < 1 or not 0 < limit_s < 1e9:
            raise UsageError(f"cannot run {num_jobs} processes at a time for at most {limit_s} seconds each")
        self.num_jobs = num_jobs
        self.limit_s = limit_s

    def run(self, jobs: Sequence[Job], work: Work) -> Generator[JobOutcome, None, None]:
        """Yield outcomes as jobs end. The reason for ``crashed`` names the signal or the exit status.

        Raises `KvproofError` if the system cannot start another process.
        """
        waiting = list(reversed(jobs))
        running: dict[Child, Job] = {}
        with Children(own_group=True, capture_output=True, limit_s=self.limit_s) as children:
            while waiting or running:
                while waiting and len(running) < self.num_jobs:
                    job = waiting.pop()
                    running[children.start(partial(_send_attempt, work, job))] = job
                for child in children.wait():
                    yield _end_job(running.pop(child), child, children)


def _send_attempt(work: Work, job: Job, channel: Channel) -> None:
    channel.send(attempt(work, job))


def _end_job(job: Job, child: Child, children: Children) -> JobOutcome:
    """End the child of a job and return the job's outcome; a child that was interrupted interrupts the parent."""
    try:
        message = child.receive()
    except EOFError:
        message = None
    end = children.end(child)
    if message is None and end.signal == signal.SIGINT:
        raise KeyboardInterrupt  # the job did not fail: the user interrupted it
    died = Ending.TIMED_OUT if end.is_timeout else Ending.CRASHED
    ending, text, reason = message or (died, None, end.cause)
    return JobOutcome(job=job, ending=ending, text=text, reason=reason, wall_s=end.wall_s, peak_mb=end.peak_mb)
