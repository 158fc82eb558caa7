"""Where an exception comes from, in code that is neither kvproof's nor torch's."""

import os
import traceback
from pathlib import Path

import torch

_NOT_THE_CALLERS = (Path(__file__).parents[1], Path(torch.__file__).parent)


def place_of(error: BaseException) -> str | None:
    """Return ``file:line in function`` of the innermost frame of an exception, or of what caused it.

    Frames of kvproof and torch do not count; None if there are no others.
    """
    cause: BaseException | None = error
    place = None
    while cause is not None:
        for frame in traceback.extract_tb(cause.__traceback__):
            file = Path(frame.filename)
            if not frame.filename.startswith("<") and not any(
                file.is_relative_to(own) for own in _NOT_THE_CALLERS
            ):
                place = f"{_shorten(file)}:{frame.lineno} in {frame.name}"
        cause = cause.__cause__
    return place


def _shorten(file: Path) -> str:
    """Return a path relative to the current folder, if it is inside."""
    return os.path.relpath(file) if file.is_relative_to(Path.cwd()) else str(file)
