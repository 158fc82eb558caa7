"""Describes the machine and process that a record is made on."""

import os
import platform
import resource
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import UTC, datetime
from importlib.metadata import version

import torch

from kvproof.contract.environment import Environment

#: ``ru_maxrss`` is counted in bytes on macOS and in KiB elsewhere.
_UNIT = 1 if sys.platform == "darwin" else 1024


def environment() -> Environment:
    """Return the software and hardware that this process runs on."""
    return Environment(
        kvproof=version("kvproof"),
        python=platform.python_version(),
        torch=torch.__version__,
        platform=platform.platform(terse=True),
        processor=f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}, {os.cpu_count()} cores",
        num_threads=torch.get_num_threads(),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
    )


@contextmanager
def use_threads(num_threads: int) -> Iterator[None]:
    """Run the block with this many torch threads, then restore the previous number."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def use_one_thread() -> AbstractContextManager[None]:
    """Run the block with one torch thread, then restore the previous number."""
    return use_threads(1)


@contextmanager
def delay_interrupt() -> Iterator[None]:
    """Delay Ctrl-C and SIGTERM until the block is done. They interrupt only the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    late: list[int] = []
    # A SIGTERM that nobody handles ends the process at once, and one that is ignored stays so.
    numbers = [n for n in (signal.SIGINT, signal.SIGTERM) if n is signal.SIGINT or callable(signal.getsignal(n))]
    before = {number: signal.signal(number, lambda number, frame: late.append(number)) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
    handler = before[signal.Signals(late[0])] if late else None
    if callable(handler):
        handler(late[0], None)


def peak_mb(usage: resource.struct_rusage | None = None) -> float:
    """Return the peak resident memory of a process, by default of this one so far, in 10^6 bytes."""
    usage = usage or resource.getrusage(resource.RUSAGE_SELF)
    return round(usage.ru_maxrss * _UNIT / 1e6, 1)
