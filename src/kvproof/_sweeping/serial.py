"""Runs jobs one after another in this process."""

from collections.abc import Generator, Sequence
from time import perf_counter

from kvproof._sweeping.runner import Outcome, Runner, Work, attempt
from kvproof._system.machine import own_peak_mb
from kvproof.contract.sweep_table import Job


class SerialRunner(Runner):
    """Runs each job here: nothing is isolated and nothing can be cut off, but a debugger sees it all."""

    def run(self, jobs: Sequence[Job], work: Work) -> Generator[Outcome, None, None]:
        """Yield an outcome for each job, in order; the peak of memory is this process's so far."""
        for job in jobs:
            start = perf_counter()
            ending, text, reason = attempt(work, job)
            yield Outcome(
                job=job,
                ending=ending,
                text=text,
                reason=reason,
                wall_s=perf_counter() - start,
                peak_mb=own_peak_mb(),
            )
