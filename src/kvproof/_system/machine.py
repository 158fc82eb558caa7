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
    """Delay Ctrl-C until the block is done. Does nothing outside the main thread, the only one it interrupts."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    late: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: late.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before if before is not None else signal.SIG_DFL)
    if late and callable(before):
        before(late[0], None)


def peak_mb(usage: resource.struct_rusage | None = None) -> float:
    """Return the peak resident memory of a process, by default of this one so far, in 10^6 bytes."""
    usage = usage or resource.getrusage(resource.RUSAGE_SELF)
    return round(usage.ru_maxrss * _UNIT / 1e6, 1)
