"""What every runner does: run each job once and say how it ended."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

from kvproof.contract.sweep_table import Ending, Job
from kvproof.contract.text import printable
from kvproof.errors import UsageError

#: Runs one job and returns its result as text. `UsageError` refuses the job; anything else is a crash.
Work = Callable[[Job], str]

_LONGEST_REASON = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How one job ended."""

    job: Job
    ending: Ending
    text: str | None  #: what the work returned, if it finished
    reason: str | None  #: why it did not, in one line
    wall_s: float
    peak_mb: float  #: of the resident memory of the process that ran it, in 10^6 bytes


class Runner(ABC):
    """Runs jobs that do not depend on each other."""

    @abstractmethod
    def run(self, jobs: Sequence[Job], work: Work) -> Generator[Outcome, None, None]:
        """Yield one outcome for each job, in the order in which they end.

        What a job raises, or dies of, becomes its outcome and hurts no other. Closing the generator, or a
        `KeyboardInterrupt`, ends what is still running and yields nothing for it.
        """


def attempt(work: Work, job: Job) -> tuple[Ending, str | None, str | None]:
    """Run one job in this process; return how it ended, its text and the reason why there is none."""
    try:
        return Ending.FINISHED, work(job), None
    except UsageError as error:
        return Ending.REFUSED, None, one_line(str(error))
    except (Exception, SystemExit) as error:
        return Ending.CRASHED, None, one_line(f"{type(error).__name__}: {error}")


def one_line(message: str) -> str:
    """Return a message on one line, printable and of bounded length."""
    text = printable(" ".join(message.split()))
    return text if len(text) <= _LONGEST_REASON else f"{text[:_LONGEST_REASON]}..."
