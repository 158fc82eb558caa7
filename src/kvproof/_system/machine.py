"""Describes the machine and process that a record is made on."""

import os
import platform
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.metadata import version

import torch

from kvproof.contract.environment import Environment


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
