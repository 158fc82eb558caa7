"""Work that does not hang together, in forked processes that share what this one has computed.

Small calls use one core whatever number of threads they are given: on SmolLM2-135M a decoding step takes as
long with two threads as with one, while two processes take as many steps each as one does alone.
"""

import os
import pickle
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from time import sleep
from typing import Any, TypeAlias, TypeVar, cast

import torch

from kvproof._system.machine import interrupts_held
from kvproof.errors import KvproofError, UsageError

R = TypeVar("R")
Pipe: TypeAlias = "Connection[Any, Any]"

_PARENT_CHECK_S = 1.0
#: A signal that another thread takes, or that comes just before waiting, ends no waiting: it is felt after this.
_SIGNAL_CHECK_S = 1.0


def in_processes(work: Callable[[int], R], num: int, jobs: int = 1) -> Iterator[R]:
    """Yield ``work(0)`` to ``work(num - 1)``, in this order, computed by ``jobs`` processes at a time.

    One process is this one, and computes each result when it is asked for. More are forked, with one torch
    thread each, when the first is asked for: they start from what this process knows then, and what they learn
    stays theirs but for the result, which must be picklable. What ``work`` raises is raised here in its turn,
    with its traceback as a note. Ending the iteration ends them, at once if it is ended early.

    Raises `UsageError` where the system cannot fork or what this process holds must not be forked, and
    `KvproofError` when a process dies.
    """
    check_jobs(jobs)
    if jobs == 1 or num < 2:
        yield from map(work, range(num))
        return
    crew = _Crew(work)
    try:
        crew.fork(min(jobs, num))
        yield from crew.results(num)
    finally:
        crew.end()


def check_jobs(jobs: int) -> None:
    """Raise `UsageError` unless so many processes can be run at a time here."""
    if jobs < 1:
        raise UsageError(f"jobs must be at least 1, not {jobs}")
    if jobs > 1 and not can_fork():
        raise UsageError(
            f"jobs must be 1, not {jobs}: processes are forked on Linux alone, and not once CUDA runs"
        )


def default_jobs(*, may_fork: bool) -> int:
    """Return as many processes as torch has threads, where the system can fork and its caller may; else 1."""
    return torch.get_num_threads() if may_fork and can_fork() else 1


def can_fork() -> bool:
    """Return whether this process may be forked and go on computing: other systems' libraries break then."""
    return sys.platform == "linux" and not torch.cuda.is_initialized()  # type: ignore[no-untyped-call]


class _Crew:
    """Forked processes, each with a pipe of its own: one that is ended, whatever it does, hurts no other."""

    def __init__(self, work: Callable[[int], Any]) -> None:
        self.work = work
        self.children: dict[Pipe, BaseProcess] = {}

    def fork(self, num: int) -> None:
        """Start so many processes."""
        context = get_context("fork")
        with warnings.catch_warnings():
            # Newer Pythons warn of forking beside other threads, such as the one that draws a progress bar.
            warnings.simplefilter("ignore", DeprecationWarning)
            for _ in range(num):
                with interrupts_held():  # Ctrl-C reaches this process alone
                    ours, theirs = context.Pipe()
                    child = context.Process(target=_serve, args=(self.work, theirs, os.getpid()), daemon=True)
                    child.start()
                    theirs.close()
                    self.children[ours] = child

    def results(self, num: int) -> Iterator[Any]:
        """Hand out the numbers, each to the first process that is free; yield the results in order."""
        waiting, found = iter(range(num)), dict[int, tuple[bool, Any]]()
        for pipe in self.children:
            pipe.send(next(waiting))
        for number in range(num):
            while number not in found:
                for ready in wait(list(self.children), _SIGNAL_CHECK_S):
                    pipe = cast("Pipe", ready)
                    try:
                        done, *result = pipe.recv()
                        found[done] = tuple(result)
                        following = next(waiting, None)
                        if following is not None:
                            pipe.send(following)
                    except (EOFError, OSError) as error:
                        raise KvproofError(self._cause(pipe)) from error
            is_raised, result = found.pop(number)
            if is_raised:
                raise result
            yield result

    def end(self) -> None:
        """End what still runs."""
        for pipe, child in self.children.items():
            child.kill()
            child.join()
            child.close()
            pipe.close()

    def _cause(self, pipe: Pipe) -> str:
        """Say what a process died of."""
        child = self.children[pipe]
        child.join()
        code = child.exitcode or 0
        how = f"signal {-code}" if code < 0 else f"exit status {code}"
        return (
            f"a process that worked for this one died ({how}); with one process (--jobs 1) it takes less memory"
        )


def _serve(work: Callable[[int], Any], pipe: Pipe, parent: int) -> None:
    """Be a forked process: no thread of the parent's pools exists in it."""
    torch.set_num_threads(1)
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    with suppress(EOFError):
        while True:
            number = pipe.recv()
            try:
                result = (number, False, work(number))
            except Exception as error:
                error.add_note(f"in a forked process:\n{traceback.format_exc()}")  # its cause is lost on the way
                result = (number, True, error)
            try:
                pipe.send(result)
            except (pickle.PicklingError, AttributeError, TypeError) as error:
                what = "raised" if result[1] else "computed"
                problem = f"what a forked process {what} cannot be sent to this one: {error}"
                pipe.send((number, True, KvproofError(problem)))


def _end_with(parent: int) -> None:
    """End this process when its parent is gone, however that ended."""
    while os.getppid() == parent:
        sleep(_PARENT_CHECK_S)
    os._exit(1)
