"""Runs the rest of a command in a child process, because code of the user's can end the process that it runs in.

Without a supervisor, a decoder that calls ``os._exit(0)`` makes a gate pass with nothing checked. The child says
itself that it is done and with which exit status; a child that ends without saying so was ended by the decoder.
Nothing heavy is imported here: the fork comes before torch, and before any thread.
"""

import atexit
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from time import monotonic, sleep
from types import FrameType
from typing import IO, NoReturn

from kvproof._system.call_limit import limit_calls
from kvproof._system.user_frames import describe_dump, describe_stack
from kvproof.errors import UsageError

_PARENT_CHECK_S = 1.0
#: Two interrupts within this time, in seconds, are one: the child receives it, and its parent passes it on.
_SAME_INTERRUPT_S = 0.5
_SIGNAL_NAMES = {number.value: number.name for number in signal.Signals}
_SHOW_CURSOR = "\x1b[?25h"  #: a progress bar hides it, and was not asked to end
_DONE, _LEFT = b"done ", b"left "  #: what the child says: its exit status, or who called ``os._exit``


@dataclass(slots=True)
class _Channel:
    """The end of the pipe through which a supervised child says how it ends."""

    handle: int | None = None
    leave: Callable[[int], NoReturn] | None = None  #: ``os._exit`` as it was


_CHANNEL = _Channel()


def supervise(what: str, limit_s: float | None) -> int | None:
    """Fork: return None in the child, which continues the command, and its exit status in the parent.

    ``what`` names the user's code in messages. No call of the decoder may take longer than ``limit_s`` seconds.
    Signals for the parent are passed on, and the child does not outlive it. Where the process cannot be forked
    with its streams, or is a supervised child already, this returns None and the command goes on as it is.

    Raises `UsageError` in the parent if the child ended without saying that it was done.
    """
    if _CHANNEL.handle is not None or not _can_supervise():
        return None
    with tempfile.TemporaryFile() as stack:
        receiver, sender = os.pipe()
        for stream in (sys.stdout, sys.stderr):
            with suppress(AttributeError, ValueError, OSError):  # it is closed, or nobody reads it
                stream.flush()
        parent, pid = os.getpid(), os.fork()
        if pid == 0:
            os.close(receiver)
            _run_as_child(parent, sender, limit_s, stack)
            return None
        os.close(sender)
        try:
            with _pass_signals_on(pid):
                _, wait_status = os.waitpid(pid, 0)
            said = _read_all(receiver)
        finally:
            os.close(receiver)
        stack.seek(0)
        return _status_of(what, limit_s, said, wait_status, stack.read().decode("utf-8", "replace"))


def finish(status: int) -> None:
    """Say in a supervised child that the command is done, and end it there; otherwise do nothing.

    The child is a copy of whatever called the command line, a test runner for one, and must not go on as that.
    """
    if _CHANNEL.handle is None or _CHANNEL.leave is None:
        return
    with suppress(OSError):
        os.write(_CHANNEL.handle, _DONE + b"%d" % status)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, ValueError, OSError):  # it is closed, or nobody reads it
            stream.flush()
    _CHANNEL.leave(status)


def interrupt_once() -> "Callable[[int, FrameType | None], None]":
    """Return a signal handler that raises `KeyboardInterrupt`, once for signals that arrive together."""
    last = -_SAME_INTERRUPT_S

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal last
        before, last = last, monotonic()
        if last - before >= _SAME_INTERRUPT_S:
            raise KeyboardInterrupt

    return interrupt


def _can_supervise() -> bool:
    """Return whether a child can write to this process's streams: one in memory would be copied, and lost."""
    if not hasattr(os, "fork") or threading.current_thread() is not threading.main_thread():
        return False
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.fileno()
        except (OSError, ValueError):
            return False
    return True


def _run_as_child(parent: int, sender: int, limit_s: float | None, stack: IO[bytes]) -> None:
    """Prepare the child: how it says that it is done, and when it ends."""
    own, leave = os.getpid(), os._exit
    _CHANNEL.handle, _CHANNEL.leave = sender, leave

    def exit_and_tell(status: int) -> NoReturn:
        """Say where the decoder ends the process. Processes that it forks end as they like."""
        if os.getpid() == own:
            with suppress(OSError):
                os.write(sender, _LEFT + describe_stack(sys._getframe(1)).encode("utf-8", "replace")[:2000])
        leave(status)

    def exit_with_parent() -> None:
        while os.getppid() == parent:
            sleep(_PARENT_CHECK_S)
        leave(1)

    os._exit = exit_and_tell  # the module's own name, which every caller looks up
    threading.Thread(target=exit_with_parent, daemon=True).start()
    if limit_s is not None:
        limit_calls(limit_s, os.fdopen(os.dup(stack.fileno()), "wb", buffering=0))


@contextmanager
def _pass_signals_on(pid: int) -> Iterator[None]:
    """Pass interrupts on to a process. A terminal's Ctrl-C reaches both, and the process counts it once."""

    def pass_on(number: int, frame: FrameType | None) -> None:
        with suppress(ProcessLookupError):
            os.kill(pid, number)

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, pass_on)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _read_all(handle: int) -> bytes:
    """Return what has been written to a pipe, without waiting for more: a grandchild may hold its other end."""
    os.set_blocking(handle, False)
    data = b""
    with suppress(BlockingIOError):
        while part := os.read(handle, 65536):
            data += part
    return data


def _status_of(what: str, limit_s: float | None, said: bytes, wait_status: int, stack: str) -> int:
    """Return the child's exit status; raise `UsageError` if it gave none, or if a call took too long."""
    if said.startswith(_DONE) and not stack:
        # Code that runs when the process ends can say more; the first word counts.
        return int(said.removeprefix(_DONE).split(_LEFT)[0])
    if sys.stderr is not None and sys.stderr.isatty():
        sys.stderr.write(_SHOW_CURSOR)
    if stack:
        where = describe_dump(stack)
        problem = f"{what}: a call did not return within {limit_s:g} s (--timeout)"
        raise UsageError(f"{problem}; it is in {where}" if where else problem)
    if said.startswith(_LEFT):
        where = said.removeprefix(_LEFT).decode("utf-8", "replace")
        raise UsageError(f"{what} ended the process with os._exit, so nothing is proved: {where}")
    if os.WIFSIGNALED(wait_status):
        cause = _SIGNAL_NAMES.get(os.WTERMSIG(wait_status), f"signal {os.WTERMSIG(wait_status)}")
        raise UsageError(f"{what}: the process that ran it was killed by {cause}, so nothing is proved")
    status = os.WEXITSTATUS(wait_status)
    raise UsageError(f"{what} ended the process with exit status {status}, so nothing is proved")
