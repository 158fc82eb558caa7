"""Forks processes that each run a function, limits and kills them, and reports why each one died.

Children share what the parent has computed and imported. The parent's threads do not exist in them: a child that
uses a thread pool that the parent has used waits forever, so it must compute with one thread.
"""

import math
import os
import pickle
import signal
import sys
import tempfile
import threading
import traceback
import warnings
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from time import monotonic, sleep
from typing import IO, Any, NoReturn, TypeAlias

from kvproof._system.machine import delay_interrupt, peak_mb
from kvproof.contract.text import one_line
from kvproof.errors import KvproofError

Channel: TypeAlias = "Connection[Any, Any]"

_PARENT_CHECK_S = 1.0
#: The maximum length of one wait, because a signal that another thread receives does not end it.
_SIGNAL_CHECK_S = 1.0
_GRACE_S = 10.0  #: how long after its limit a child's own alarm kills it if the parent has not
_TAIL_BYTES = 4096  #: how much of a child's output is searched for its last line
_SIGNAL_NAMES = {number.value: number.name for number in signal.Signals}


@dataclass(slots=True, kw_only=True, eq=False)
class Child:
    """A process that has been started and not been reaped."""

    pid: int
    channel: Channel  #: the parent's end
    output: IO[bytes] | None  #: where its standard output and error go, if not to the parent's
    start: float

    def send(self, value: object) -> None:
        """Send a value, pickled; a child that has died misses it, which the next `receive` reports."""
        with suppress(OSError):
            self.channel.send(value)

    def receive(self) -> Any:
        """Return the next value that the child has sent; raise `EOFError` if it has died or sent nothing."""
        try:
            if self.channel.poll():
                return self.channel.recv()
        except OSError as error:  # it died while it was sending
            raise EOFError from error
        raise EOFError


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    """How a child ended."""

    cause: str  #: on one line: the time limit, or a signal or an exit status with the last line of its output
    signal: int | None
    is_timeout: bool
    wall_s: float
    peak_mb: float  #: peak resident memory, in 10^6 bytes


@dataclass(slots=True, kw_only=True, eq=False)
class Children:
    """Forked processes of one kind; leaving the ``with`` block kills those that still run.

    Ctrl-C reaches the parent alone, and no child outlives the parent by much. When memory runs out, Linux kills
    a child rather than the parent::

        with Children(own_group=True, capture_output=True, limit_s=60) as children:
            child = children.start(partial(send_result, work=work))
            children.wait()  # until it has sent its result, has died, or is out of time
            try:
                result = take_result(child.receive())
            except EOFError:
                problem = children.end(child).cause
    """

    own_group: bool = False  #: each child leads a process group and is killed with everything that it has started
    capture_output: bool = False  #: keep output off the terminal; its last line becomes part of `Exit.cause`
    limit_s: float = math.inf  #: `wait` returns a child that has run for longer
    _running: list[Child] = field(default_factory=list, init=False)

    def __enter__(self) -> "Children":
        return self

    def __exit__(self, *exception: object) -> None:
        with delay_interrupt():
            for child in list(self._running):
                self.end(child)

    def start(self, work: Callable[[Channel], None]) -> Child:
        """Fork a child that calls ``work`` with its end of a channel and then exits, whatever ``work`` raises.

        Raises `KvproofError` if the system cannot start another process.
        """
        with ExitStack() as undo, delay_interrupt(), warnings.catch_warnings():
            # Newer Pythons warn about forking while other threads run, such as the one that draws a progress bar.
            warnings.simplefilter("ignore", DeprecationWarning)
            try:
                output = undo.enter_context(tempfile.TemporaryFile()) if self.capture_output else None
                channel, far_end = Pipe()
                undo.callback(channel.close)
                with far_end:
                    _flush_output()  # or the child writes it again
                    parent, pid = os.getpid(), os.fork()
                    if pid == 0:
                        channel.close()
                        self._run_child(work, far_end, output, parent)
            except OSError as error:
                raise KvproofError(f"cannot start a process: {error.strerror}") from error
            if self.own_group:
                with suppress(OSError):  # parent and child both do this, so that neither is too late
                    os.setpgid(pid, pid)
            child = Child(pid=pid, channel=channel, output=output, start=monotonic())
            self._running.append(child)
            undo.pop_all()
        return child

    def wait(self) -> list[Child]:
        """Wait until children have sent something, have died, or are out of time, and return those."""
        while True:
            now = monotonic()
            times_left = [child.start + self.limit_s - now for child in self._running]
            channels = [child.channel for child in self._running]
            ready = wait(channels, max(0.0, min(_SIGNAL_CHECK_S, *times_left)))
            late = monotonic() - self.limit_s
            if due := [c for c in self._running if c.channel in ready or c.start <= late]:
                return due

    def end(self, child: Child) -> Exit:
        """Kill a child if it still runs, reap it, and say how it ended."""
        with delay_interrupt():
            wall_s = monotonic() - child.start
            with suppress(ProcessLookupError, PermissionError):  # some systems raise if all have already ended
                (os.killpg if self.own_group else os.kill)(child.pid, signal.SIGKILL)
            _, status, usage = os.wait4(child.pid, 0)
            self._running.remove(child)
            child.channel.close()
            number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
            is_timeout = wall_s >= self.limit_s and number in (signal.SIGKILL, signal.SIGALRM)
            if is_timeout:
                cause = f"cut off after {self.limit_s:g} s"
            elif number is not None:
                cause = f"killed by {_SIGNAL_NAMES.get(number, f'signal {number}')}"
            else:
                cause = f"ended with exit status {os.WEXITSTATUS(status)} and no result"
            if child.output is not None:
                line = "" if is_timeout else _last_line(child.output)
                cause = one_line(f"{cause}: {line}" if line else cause)
                child.output.close()
        return Exit(cause=cause, signal=number, is_timeout=is_timeout, wall_s=wall_s, peak_mb=peak_mb(usage))

    def _run_child(
        self, work: Callable[[Channel], None], channel: Channel, output: IO[bytes] | None, parent: int
    ) -> NoReturn:
        """Call the work in the child and exit, without ever returning to the parent's code."""
        status = 1
        try:
            # A child in its own group receives only interrupts that are sent to it.
            signal.signal(signal.SIGINT, signal.SIG_DFL if self.own_group else signal.SIG_IGN)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGALRM})
            if self.own_group:
                with suppress(OSError):
                    os.setpgid(0, 0)
            with suppress(OSError):
                Path("/proc/self/oom_score_adj").write_text("1000")
            if self.limit_s < math.inf:
                signal.signal(signal.SIGALRM, signal.SIG_DFL)
                signal.setitimer(signal.ITIMER_REAL, self.limit_s + _GRACE_S)
            threading.Thread(target=_exit_with_parent, args=(parent, self.own_group), daemon=True).start()
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            if output is not None:
                os.dup2(output.fileno(), 1)
                os.dup2(output.fileno(), 2)
                sys.stdout = sys.stderr = open(2, "w", buffering=1, errors="backslashreplace")  # noqa: SIM115
            work(channel)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            _flush_output()
            os._exit(status)


def send_result(channel: Channel, work: Callable[[], object]) -> None:
    """Call ``work`` in a child and send what `take_result` then returns or raises in the parent."""
    try:
        is_error, value = False, work()
    except Exception as error:
        error.add_note(f"in a child process:\n{traceback.format_exc()}")  # pickling loses its cause
        is_error, value = True, error
    try:
        data = pickle.dumps((is_error, value))
        if is_error:
            pickle.loads(data)  # noqa: S301 - some exceptions can be pickled but not unpickled
    except Exception as error:  # pickling runs the value's own code
        problem = f"what a child process {'raised' if is_error else 'returned'} cannot be pickled: {error}"
        data = pickle.dumps((True, KvproofError(problem)))
    channel.send_bytes(data)


def take_result(sent: tuple[bool, Any]) -> Any:
    """Return or raise in the parent what `send_result` sent and `Child.receive` received."""
    is_error, value = sent
    if is_error:
        raise value
    return value


def _exit_with_parent(parent: int, own_group: bool) -> None:
    """End this process, and the group that it leads, when its parent has died for any reason."""
    while os.getppid() == parent:
        sleep(_PARENT_CHECK_S)
    if own_group:
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def _flush_output() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, ValueError, OSError):  # it is missing or closed, or the disk is full
            stream.flush()


def _last_line(output: IO[bytes]) -> str:
    """Return the last line of a child's output that is not blank, or an empty string."""
    output.seek(max(0, output.seek(0, os.SEEK_END) - _TAIL_BYTES))
    lines = output.read().decode("utf-8", "replace").splitlines()
    return next((line for line in reversed(lines) if line.strip()), "")
