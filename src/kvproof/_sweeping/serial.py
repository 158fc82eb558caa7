"""Runs jobs one after another in this process."""

from collections.abc import Generator, Sequence
from time import perf_counter

from kvproof._sweeping.runner import JobOutcome, Runner, Work, attempt
from kvproof._system.machine import peak_mb
from kvproof.contract.sweep_table import Job


class SerialRunner(Runner):
    """Runs each job in this process: no job is isolated or has a time limit, but a debugger sees everything."""

    def run(self, jobs: Sequence[Job], work: Work) -> Generator[JobOutcome, None, None]:
        """Yield an outcome for each job, in order. The memory peak is that of this process so far."""
        for job in jobs:
            start = perf_counter()
            ending, text, reason = attempt(work, job)
            wall_s = perf_counter() - start
            yield JobOutcome(job=job, ending=ending, text=text, reason=reason, wall_s=wall_s, peak_mb=peak_mb())
