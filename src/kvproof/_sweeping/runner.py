"""Defines a runner: it runs each job once and says how the job ended."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

from kvproof.contract.sweep_table import Ending, Job
from kvproof.contract.text import one_line
from kvproof.errors import UsageError

#: Runs one job and returns its result as text. `UsageError` refuses the job; any other exception is a crash.
Work = Callable[[Job], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOutcome:
    """How one job ended."""

    job: Job
    ending: Ending
    text: str | None  #: what the work returned, if it finished
    reason: str | None  #: why it did not finish, on one line
    wall_s: float
    peak_mb: float  #: peak resident memory of the process that ran it, in 10^6 bytes


class Runner(ABC):
    """Runs jobs that do not depend on each other."""

    @abstractmethod
    def run(self, jobs: Sequence[Job], work: Work) -> Generator[JobOutcome, None, None]:
        """Yield one outcome for each job, in the order in which the jobs end.

        An exception or crash of a job becomes its outcome and does not affect other jobs. Closing the generator,
        or a `KeyboardInterrupt`, ends the running jobs and yields nothing for them.
        """


def attempt(work: Work, job: Job) -> tuple[Ending, str | None, str | None]:
    """Run one job in this process; return how it ended, and its text or the reason why there is none."""
    try:
        return Ending.FINISHED, work(job), None
    except UsageError as error:
        return Ending.REFUSED, None, one_line(str(error))
    except (Exception, SystemExit) as error:
        return Ending.CRASHED, None, one_line(f"{type(error).__name__}: {error}")
