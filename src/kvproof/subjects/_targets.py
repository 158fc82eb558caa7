"""From what a person types to a subject: a folder, or ``random:TYPE``."""

from pathlib import Path
from typing import Any

import torch

from kvproof._errors import SubjectError, UsageError
from kvproof.subjects._base import Subject, at_the_seam


def load_target(target: str, *, dtype: str, seed: int, attention: str) -> Subject:
    """Return the subject that ``target`` names, computing in ``dtype``.

    Raises `UsageError` for a target that is not there, or needs a library that is not installed.
    """
    wanted = getattr(torch, dtype)
    if target.partition(":")[0] != "random" and not Path(target).is_dir():
        raise UsageError(f"no such model: {target!r} is neither a folder nor random:TYPE")
    try:
        from kvproof.subjects import _transformers as adapter
    except ImportError as error:
        raise UsageError(
            f"{target} needs the transformers library: pip install 'kvproof[transformers]' ({error})"
        ) from error
    try:
        return at_the_seam(lambda: _built(adapter, target, dtype=wanted, seed=seed, attention=attention))
    except SubjectError as error:
        raise UsageError(f"{target} cannot be audited: {str(error).splitlines()[0]}") from error


def _built(adapter: Any, target: str, *, dtype: torch.dtype, seed: int, attention: str) -> Subject:
    kind, _, rest = target.partition(":")
    if kind == "random":
        subject: Subject = adapter.random_model(rest, seed=seed, dtype=dtype, attention=attention)
        return subject
    loaded: Subject = adapter.load_folder(Path(target), dtype=dtype, attention=attention)
    return loaded
