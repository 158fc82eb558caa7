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
    """Return what this process runs on."""
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
def threads(num_threads: int) -> Iterator[None]:
    """Run with so many torch threads, and put the old number back."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def one_thread() -> AbstractContextManager[None]:
    """Run with one torch thread, and put the old number back."""
    return threads(1)


@contextmanager
def undivided() -> Iterator[None]:
    """Hold Ctrl-C back until the block is done; outside the main thread, which it reaches, do nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    late: list[tuple[int, object]] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: late.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before if before is not None else signal.SIG_DFL)
    if late and callable(before):
        before(late[0][0], None)


@contextmanager
def interrupts_held() -> Iterator[None]:
    """Let Ctrl-C wait, so that no child is started or reaped without being known as such.

    A child that is forked meanwhile never feels it.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def own_peak_mb() -> float:
    """Return this process's peak of resident memory so far, in 10^6 bytes."""
    return peak_mb(resource.getrusage(resource.RUSAGE_SELF))


def peak_mb(usage: resource.struct_rusage) -> float:
    """Return the peak of resident memory that the system reports of a process, in 10^6 bytes."""
    return round(usage.ru_maxrss * _UNIT / 1e6, 1)
