"""From what a person types to a subject: a folder, or ``random:TYPE``."""

from pathlib import Path

import torch

from kvproof._errors import UsageError
from kvproof.subjects._base import Subject


def load_target(target: str, *, dtype: str, seed: int, attention: str) -> Subject:
    """Return the subject that ``target`` names, computing in ``dtype``.

    Raises `UsageError` for a target that is not there, or needs a library that is not installed.
    """
    wanted = getattr(torch, dtype)
    kind, _, rest = target.partition(":")
    if kind != "random" and not Path(target).is_dir():
        raise UsageError(f"no such model: {target!r} is neither a folder nor random:TYPE")
    try:
        from kvproof.subjects import _transformers as adapter
    except ImportError as error:
        raise UsageError(
            f"{target} needs the transformers library: pip install 'kvproof[transformers]' ({error})"
        ) from error
    if kind == "random":
        return adapter.random_model(rest, seed=seed, dtype=wanted, attention=attention)
    return adapter.load_folder(Path(target), dtype=wanted, attention=attention)
