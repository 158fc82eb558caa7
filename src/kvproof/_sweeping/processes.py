"""Runs each job in a forked process of its own, several at a time, each with a time limit.

The children share what the parent has imported. So the parent must not compute before it forks: threads that
a parallel operation leaves behind do not exist in a child, which would wait for them for ever. A child has its
own process group, so that Ctrl-C reaches the parent alone, which then ends the children.
"""

import json
import os
import selectors
import signal
import sys
import tempfile
import traceback
import warnings
from collections.abc import Generator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import IO, NoReturn

from kvproof._sweeping.runner import Outcome, Runner, Work, attempt, one_line
from kvproof._system.machine import interrupts_held, peak_mb
from kvproof.contract.codec import CodecError, from_plain, strict_loads, to_plain
from kvproof.contract.sweep_table import Ending, Job
from kvproof.errors import KvproofError, UsageError

_GRACE_S = 10.0  #: after its limit, a child whose parent is gone ends itself
_TAIL_BYTES = 4096  #: how much of what a child printed is searched for why it died
_CUTS = (signal.SIGKILL, signal.SIGALRM)


class ProcessRunner(Runner):
    """Runs up to ``num_jobs`` jobs at a time, each for ``limit_s`` seconds at most."""

    def __init__(self, *, num_jobs: int, limit_s: float) -> None:
        if num_jobs < 1 or not 0 < limit_s < 1e9:
            raise UsageError(f"cannot run {num_jobs} processes at a time, each for {limit_s} seconds at most")
        self.num_jobs = num_jobs
        self.limit_s = limit_s

    def run(self, jobs: Sequence[Job], work: Work) -> Generator[Outcome, None, None]:
        """Yield outcomes as they come: ``crashed`` names the signal or exit status, ``timed-out`` the limit.

        Raises `KvproofError` where the system starts no further process.
        """
        waiting = list(reversed(jobs))
        running: list[_Child] = []
        try:
            with selectors.DefaultSelector() as selector:
                while waiting or running:
                    while waiting and len(running) < self.num_jobs:
                        with interrupts_held():
                            running.append(_start(waiting.pop(), work, self.limit_s))
                        selector.register(running[-1].pipe, selectors.EVENT_READ, running[-1])
                    for child in self._ended(selector, running):
                        selector.unregister(child.pipe)
                        with interrupts_held():
                            running.remove(child)
                            outcome = self._outcome(child)
                        yield outcome
        finally:
            with interrupts_held():
                for child in running:
                    _kill(child)
                    child.printed.close()

    def _ended(self, selector: selectors.BaseSelector, running: list["_Child"]) -> list["_Child"]:
        """Wait for something to happen; return the children that closed their pipe or ran out of time."""
        wait_s = max(0.0, min(child.start for child in running) + self.limit_s - monotonic())
        ended = [key.data for key, _ in selector.select(wait_s) if _read(key.data)]
        late = monotonic() - self.limit_s
        return ended + [child for child in running if child not in ended and child.start <= late]

    def _outcome(self, child: "_Child") -> Outcome:
        """Reap a child and say how it ended; one that was interrupted interrupts the parent."""
        wall_s = monotonic() - child.start
        status, peak = _kill(child)  # one that has ended does not feel this
        message = _Message(ending=Ending.CRASHED, text=None, reason=_cause(status, child.printed))
        if wall_s >= self.limit_s and os.WIFSIGNALED(status) and os.WTERMSIG(status) in _CUTS:
            reason = f"cut off after {self.limit_s:g} s"
            message = _Message(ending=Ending.TIMED_OUT, text=None, reason=reason)
        with suppress(CodecError, UnicodeDecodeError):  # what a child that died half-way has sent
            message = from_plain(_Message, strict_loads(child.received.decode()))
        child.printed.close()
        if message.text is None and os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGINT:
            raise KeyboardInterrupt  # it is no end that another run would come to
        return Outcome(
            job=child.job,
            ending=message.ending,
            text=message.text,
            reason=message.reason,
            wall_s=wall_s,
            peak_mb=peak,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Message:
    """What a child sends through its pipe, as JSON."""

    ending: Ending
    text: str | None
    reason: str | None


@dataclass(slots=True, kw_only=True, eq=False)
class _Child:
    """A process that has been started and not been reaped."""

    job: Job
    pid: int
    pipe: int  #: the end to read from
    printed: IO[bytes]  #: where its standard output and error go
    start: float
    received: bytearray = field(default_factory=bytearray)


def _start(job: Job, work: Work, limit_s: float) -> _Child:
    """Fork a process that runs one job."""
    with ExitStack() as undo:
        try:
            printed = undo.enter_context(tempfile.TemporaryFile())
            reading, writing = os.pipe()
            undo.callback(os.close, reading)
            with os.fdopen(writing, "wb") as pipe, warnings.catch_warnings():
                # Newer Pythons warn of forking beside other threads, such as a library's that were never used.
                warnings.simplefilter("ignore", DeprecationWarning)
                pid = os.fork()
                if pid == 0:
                    _be_child(job, work, limit_s, pipe, printed)
        except OSError as error:
            raise KvproofError(f"cannot start a process for {job}: {error.strerror}") from error
        with suppress(OSError):  # both sides do it, so that neither can be too late
            os.setpgid(pid, pid)
        os.set_blocking(reading, False)
        undo.pop_all()
    return _Child(job=job, pid=pid, pipe=reading, printed=printed, start=monotonic())


def _be_child(job: Job, work: Work, limit_s: float, pipe: IO[bytes], printed: IO[bytes]) -> NoReturn:
    """Run one job, send its message and end, never returning into what the parent was doing."""
    status = 1
    try:
        with suppress(OSError):
            os.setpgid(0, 0)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGALRM})
        signal.setitimer(signal.ITIMER_REAL, limit_s + _GRACE_S)
        with suppress(OSError):  # where memory runs out, Linux then ends a child rather than the parent
            Path("/proc/self/oom_score_adj").write_text("1000")
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(printed.fileno(), 1)
        os.dup2(printed.fileno(), 2)
        sys.stdout = sys.stderr = open(2, "w", buffering=1, errors="backslashreplace")  # noqa: SIM115
        ending, text, reason = attempt(work, job)
        message = _Message(ending=ending, text=text, reason=reason)
        pipe.write(json.dumps(to_plain(message)).encode())
        pipe.flush()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def _read(child: _Child) -> bool:
    """Take what the child has sent so far; return whether that is all that it will send."""
    with suppress(BlockingIOError):
        while piece := os.read(child.pipe, 1 << 16):
            child.received += piece
        return True
    return False


def _kill(child: _Child) -> tuple[int, float]:
    """End a child and what it started; return its status as `os.wait4` gives it and its peak of memory."""
    with suppress(ProcessLookupError, PermissionError):  # some systems refuse where all have ended already
        os.killpg(child.pid, signal.SIGKILL)
    _, status, usage = os.wait4(child.pid, 0)
    _read(child)
    os.close(child.pipe)
    return status, peak_mb(usage)


def _cause(status: int, printed: IO[bytes]) -> str:
    """Say what a child that sent no result died of, with the last line that it printed."""
    if os.WIFSIGNALED(status):
        cause = f"killed by {signal.Signals(os.WTERMSIG(status)).name}"
    else:
        cause = f"ended with exit status {os.WEXITSTATUS(status)} and no result"
    printed.seek(max(0, printed.seek(0, os.SEEK_END) - _TAIL_BYTES))
    lines = [line for line in printed.read().decode("utf-8", "replace").splitlines() if line.strip()]
    return one_line(f"{cause}: {lines[-1].strip()}" if lines else cause)
