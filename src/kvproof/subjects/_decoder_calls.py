"""Calls of the decoder's own code: what it raises, what it returns, and how long it may take."""

from collections.abc import Callable
from typing import TypeVar

from torch import Tensor

from kvproof._system.call_limit import limited
from kvproof._system.user_frames import describe_exit
from kvproof.errors import KvproofError, MalformedRowError, SubjectError, UsageError

T = TypeVar("T")


def wrap_errors(call: Callable[[], T]) -> T:
    """Run an adapter's call; any error that is not kvproof's becomes a `SubjectError` that keeps its cause."""
    try:
        with limited():
            return call()
    except KvproofError:
        raise
    except SystemExit as error:  # it would end the audit, with the decoder's exit status for a verdict
        raise UsageError(f"the decoder called {describe_exit(error)}") from error
    except Exception as error:
        raise SubjectError(f"the decoder raised {type(error).__name__}: {error}") from error


def check_logits(logits: object, expected: tuple[int, ...]) -> None:
    """Raise `MalformedRowError` unless the decoder returned floating-point logits of the expected shape."""
    if not isinstance(logits, Tensor):
        raise MalformedRowError(f"the decoder gave a {type(logits).__name__}, not logits")
    shape = tuple(logits.shape)
    if not logits.is_floating_point():
        raise MalformedRowError(f"the decoder gave logits of {logits.dtype}, {shape}, not floating-point numbers")
    if shape != expected:
        raise MalformedRowError(f"the decoder gave logits of shape {shape}, not {expected}")
