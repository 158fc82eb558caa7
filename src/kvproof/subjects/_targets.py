"""Loads the subject for a target, through the adapter that the registry finds for it."""

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch

from kvproof._numerics.dtypes import dtype_of
from kvproof._system.user_frames import describe_traceback
from kvproof.errors import SubjectError, UsageError
from kvproof.scenarios import Ability
from kvproof.subjects._adapter import LoadOptions, Target
from kvproof.subjects._base import Subject
from kvproof.subjects._decoder_calls import wrap_errors
from kvproof.subjects._registry import AdapterEntry, find_entry, find_scheme, list_forms


def load_target(target: str | None, options: LoadOptions) -> Subject:
    """Return the subject that ``target`` names, or that ``options.config`` describes.

    ``target`` is any form that the registry lists, such as a folder or ``random:TYPE``.

    Raises `UsageError` for a target that does not exist, cannot be loaded or cannot be audited, for a device,
    dtype or token id that does not exist, and if the engine's library is missing or is an untested release.
    """
    if (target is None) == (options.config is None):
        raise UsageError("give a TARGET or --config FILE, and not both")
    label = str(options.config) if target is None else target
    entry = find_entry(target)
    if entry is None:
        if Path(label).is_file():
            raise UsageError(f"{label} is a file that kvproof cannot load: give the folder that holds the model")
        raise UsageError(f"no such model: {label!r} is neither {list_forms()}")
    _check(label, options, entry)
    adapter = entry.load_adapter(label)
    scheme = None if target is None else find_scheme(target)
    parts = Target(text=label, scheme=scheme, rest=label if scheme is None else label.partition(":")[2])
    try:
        subject = wrap_errors(lambda: adapter.load(parts, options))
    except SubjectError as error:
        where = "" if error.__cause__ is None else describe_traceback(error.__cause__.__traceback__)
        problem = f"{label} cannot be audited: {str(error).splitlines()[0]}"
        raise UsageError(f"{problem} ({where})" if where else problem) from error
    if options.ids is not None or options.avoid_ids:
        subject = subject.with_ids(options.ids, options.avoid_ids)
    if options.dtype in (None, subject.info.dtype):
        return subject
    if Ability.CAST not in subject.info.abilities:
        raise UsageError(f"{label} computes in {subject.info.dtype} and cannot be cast to {options.dtype}")
    return subject.cast(dtype_of(options.dtype))


def fit_options(target: str | None, options: LoadOptions) -> LoadOptions:
    """Return the options without those that the target's adapter does not support."""
    entry, default = find_entry(target), LoadOptions()
    taken = frozenset() if entry is None else entry.options
    return replace(
        options,
        attention=options.attention if "attention" in taken else default.attention,
        device=options.device if "device" in taken else default.device,
    )


def preload(targets: Iterable[str]) -> None:
    """Import the adapters of targets, so that forked processes share them. Errors are left to `load_target`."""
    for entry in {find_entry(target) for target in targets}:
        if entry is not None:
            with suppress(ImportError):
                entry.import_adapter()


def _check(label: str, options: LoadOptions, entry: AdapterEntry) -> None:
    """Raise `UsageError` for options that are wrong whatever the target holds."""
    if options.dtype is not None:
        dtype_of(options.dtype)
    if fit_options(None if options.config else label, options) != options:
        raise UsageError(f"--attention and --device do not go with {label}, which decides both itself")
    if "device" in entry.options:
        _check_device(options.device)


def _check_device(name: str) -> None:
    """Raise `UsageError` for a device that this machine does not have."""
    accelerator = torch.accelerator.current_accelerator()
    here = ["cpu"]
    if accelerator is not None:
        here += [f"{accelerator.type}:{i}" for i in range(torch.accelerator.device_count())]
    if name in here or (len(here) > 1 and accelerator is not None and name == accelerator.type):
        return
    raise UsageError(f"no such device: {name!r}; this machine has {', '.join(here)}")
