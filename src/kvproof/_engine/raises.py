"""What the cached path raised, and where, as text: a kept exception would keep frames, and they keep tensors."""

import linecache
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import torch
from torch import nn

from kvproof.contract.results import Raise
from kvproof.errors import MalformedRowError, SubjectError
from kvproof.subjects import Subject
from kvproof.subjects._taps import layer_of

#: A traceback holds at most this many frames, the innermost ones.
MAX_FRAMES = 40

_OWN = Path(__file__).parents[1]
#: The one decoder that ships with kvproof: its frames are a decoder's.
_OWN_DECODER = _OWN / "reference"
#: The files in which torch calls modules and wraps functions.
_TORCH_CALLS = tuple(
    Path(torch.__file__).parent / name
    for name in ("nn/modules/module.py", "utils/_contextlib.py", "overrides.py")
)


def describe_raise(
    error: SubjectError,
    subject: Subject,
    *,
    call: int,
    operation: str,
    consumed: Sequence[Sequence[int]],
    fed: Sequence[Sequence[int]],
) -> Raise | None:
    """Return what a decoder raised, or which malformed row it gave; None if an adapter refused the call."""
    cause = error.__cause__
    if cause is None and not isinstance(error, MalformedRowError):
        return None
    before, new = (tuple(map(tuple, rows)) for rows in (consumed, fed))
    return Raise(
        call=call,
        operation=operation,
        consumed=before,
        fed=new,
        consumed_text=_text_of(subject, before),
        fed_text=_text_of(subject, new),
        position=max(map(len, before)) if before and any(new) else None,
        layer=None if cause is None else _layer_of(cause.__traceback__, subject.root_module),
        error=_storable(str(error) if cause is None else _name_and_message(cause)),
        traceback=None if cause is None else _storable(_format(cause)),
    )


def _text_of(subject: Subject, rows: Sequence[Sequence[int]]) -> str:
    return " | ".join(subject.decode(row) for row in rows if row)


def _name_and_message(error: BaseException) -> str:
    message = str(error)
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def _format(error: BaseException) -> str:
    """Return a traceback as Python prints it, without the frames that are not the decoder's."""
    linecache.checkcache()
    described = traceback.TracebackException.from_exception(error)
    seen = set[int]()
    waiting: list[traceback.TracebackException | None] = [described]
    while waiting:
        each = waiting.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        kept = [frame for frame in each.stack if _is_of_decoder(frame.filename)]
        each.stack = traceback.StackSummary.from_list(kept[-MAX_FRAMES:])
        waiting += [each.__cause__, each.__context__]
    if not described.stack and described.__cause__ is None and described.__context__ is None:
        return "".join(described.format_exception_only())
    return "".join(described.format())


def _is_of_decoder(filename: str) -> bool:
    file = Path(filename)
    if file.is_relative_to(_OWN):
        return file.is_relative_to(_OWN_DECODER)
    return file not in _TORCH_CALLS


def _layer_of(frames: TracebackType | None, root: nn.Module | None) -> int | None:
    """Return the layer of the innermost module that was running, by its path in the decoder."""
    if root is None:
        return None
    names = {id(module): name for name, module in root.named_modules()}
    running = (id(frame.f_locals.get("self")) for frame, _ in traceback.walk_tb(frames))
    paths = [names[module] for module in running if module in names]
    return layer_of(paths[-1]) if paths else None


def _storable(text: str) -> str:
    """Return text that JSON can hold: without lone surrogates."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
