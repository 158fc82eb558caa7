"""Limits how long one call of the decoder may take. A process that exceeds it dumps its stack and ends.

The limit holds even for a call that never returns to Python: `faulthandler` watches from a thread of its own.
"""

import faulthandler
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO


@dataclass(slots=True)
class _Watch:
    """The limit of this process, in seconds, and where the stack goes; no limit without a file."""

    limit_s: float = 0.0
    stack: IO[bytes] | None = None
    depth: int = 0


_WATCH = _Watch()


def limit_calls(limit_s: float, stack: IO[bytes]) -> None:
    """Limit each call that `limited` surrounds from now on, in this process and in those that it forks."""
    _WATCH.limit_s, _WATCH.stack = limit_s, stack


@contextmanager
def limited() -> Iterator[None]:
    """End the process if the block takes longer than the limit; blocks inside it share its time."""
    if _WATCH.stack is None:
        yield
        return
    if not _WATCH.depth:
        faulthandler.dump_traceback_later(_WATCH.limit_s, exit=True, file=_WATCH.stack.fileno())
    _WATCH.depth += 1
    try:
        yield
    finally:
        _WATCH.depth -= 1
        if not _WATCH.depth:
            faulthandler.cancel_dump_traceback_later()
