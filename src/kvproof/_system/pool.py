"""Computes independent results in forked processes that share what this process has computed.

Small calls use one core regardless of the number of threads: on SmolLM2-135M a decoding step takes as long with
two threads as with one, while two processes run twice as many steps in the same time as one.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import torch

from kvproof._system.children import Channel, Child, Children, send_result, take_result
from kvproof.errors import KvproofError, UsageError

R = TypeVar("R")


def map_in_processes(work: Callable[[int], R], num: int, jobs: int = 1) -> Iterator[R]:
    """Yield ``work(0)`` to ``work(num - 1)``, in this order, computed by ``jobs`` processes at a time.

    With one job, this process computes each result on request. With more, the first request forks processes with
    one torch thread each. They start from this process's state at that time, and send back only their results,
    which must be picklable. An exception in ``work`` is raised here when its result is due, with its traceback as
    a note. Ending the iteration early kills the processes at once.

    Raises `UsageError` if the system cannot fork or this process's state must not be forked, and `KvproofError`
    if a process dies.
    """
    check_jobs(jobs)
    if jobs == 1 or num < 2:
        yield from map(work, range(num))
        return
    numbers, results = iter(range(num)), dict[int, Any]()
    busy: dict[Child, int] = {}

    def send_next(child: Child) -> None:
        if (number := next(numbers, None)) is not None:
            busy[child] = number
            child.send(number)

    with Children() as children:
        for _ in range(min(jobs, num)):
            send_next(children.start(partial(_serve, work)))
        for number in range(num):
            while number not in results:
                for child in children.wait():
                    try:
                        results[busy[child]] = child.receive()
                    except EOFError:
                        cause = children.end(child).cause
                        raise KvproofError(
                            f"a child process died ({cause}); one process (--jobs 1) needs less memory"
                        ) from None
                    send_next(child)
            yield take_result(results.pop(number))


def check_jobs(jobs: int) -> None:
    """Raise `UsageError` unless this system can run that many processes at a time."""
    if jobs < 1:
        raise UsageError(f"jobs must be at least 1, not {jobs}")
    if jobs > 1 and not can_fork():
        raise UsageError(f"jobs must be 1, not {jobs}: kvproof forks only on Linux, and only before CUDA starts")


def default_jobs(*, may_fork: bool) -> int:
    """Return the number of torch's threads if the system can fork and the caller may, and 1 otherwise."""
    return torch.get_num_threads() if may_fork and can_fork() else 1


def can_fork() -> bool:
    """Return whether a fork of this process can keep computing. On systems besides Linux, libraries break."""
    return sys.platform == "linux" and not torch.cuda.is_initialized()  # type: ignore[no-untyped-call]


def _serve(work: Callable[[int], Any], channel: Channel) -> None:
    """Send the result for each number that the parent sends, until the parent closes the channel."""
    torch.set_num_threads(1)  # the threads of the parent's pools do not exist in this process
    with suppress(EOFError):
        while True:
            number = channel.recv()
            send_result(channel, partial(work, number))
