"""Loads the subject for a target, through the adapter that the registry finds for it."""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from kvproof.errors import SubjectError, UsageError
from kvproof.scenarios import Ability
from kvproof.subjects._base import Subject, wrap_errors
from kvproof.subjects._registry import AdapterEntry, find_entry, find_scheme, list_forms


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """How a target is loaded, and what loading it may do."""

    dtype: str | None = None  #: the declared dtype, by torch's name; None for the adapter's default
    seed: int = 0  #: of a random model's weights
    attention: str = "eager"
    device: str = "cpu"
    trust_remote_code: bool = False  #: run code that comes with the model
    network: bool = False  #: download a model that is not in the local hub cache
    config: Path | None = None  #: instead of a target: a random model of this configuration


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A target, taken apart."""

    text: str  #: as it was typed
    scheme: str | None  #: the word before the colon, if an adapter has that scheme
    rest: str  #: what follows the scheme, or all of the text


class Adapter(ABC):
    """What an engine's module offers as ``ADAPTER``, besides its `Subject`."""

    @abstractmethod
    def load(self, target: Target, options: LoadOptions) -> Subject:
        """Return the subject that a target names; raise `UsageError` for one that cannot be loaded."""

    def adopt(self, decoder: object, name: str | None) -> Subject | None:
        """Return a subject for one of the engine's own objects, or None for any other object."""
        return None

    def list_targets(self) -> tuple[str, ...]:
        """Return every target that can be loaded without any file, for a sweep of all of them."""
        return ()


def load_target(target: str | None, options: LoadOptions) -> Subject:
    """Return the subject that ``target`` names, or that ``options.config`` describes.

    ``target`` is any form that the registry lists, such as a folder or ``random:TYPE``.

    Raises `UsageError` for a target that does not exist, cannot be loaded or cannot be audited, for a device or
    dtype that does not exist, and if the engine's library is missing or is an untested release.
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
        raise UsageError(f"{label} cannot be audited: {str(error).splitlines()[0]}") from error
    if options.dtype in (None, subject.info.dtype):
        return subject
    if Ability.CAST not in subject.info.abilities:
        raise UsageError(f"{label} computes in {subject.info.dtype} and cannot be cast to {options.dtype}")
    return subject.cast(torch_dtype(options.dtype))


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


def torch_dtype(name: str | None) -> torch.dtype:
    """Return a floating-point dtype by its name, float32 for None; raise `UsageError` for any other name."""
    dtype = torch.float32 if name is None else getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise UsageError(
            f"no such floating-point dtype: {name!r}; torch knows float32, bfloat16, float16, float64"
        )
    return dtype


def _check(label: str, options: LoadOptions, entry: AdapterEntry) -> None:
    """Raise `UsageError` for options that are wrong whatever the target holds."""
    torch_dtype(options.dtype)
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
