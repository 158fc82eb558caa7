"""From what a person types to a subject: a folder, a name on the hub, a GGUF file, a type, a configuration."""

import importlib.metadata
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kvproof.errors import SubjectError, UsageError
from kvproof.scenarios import Ability
from kvproof.subjects._base import Subject, wrap_errors
from kvproof.subjects._factory import factory_of, subject_from

#: The versions of transformers that the adapter was run on: from the first, below the second.
TRANSFORMERS_VERSIONS = ("4.57.6", "6")

_HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """How a target is loaded, and what loading it may do."""

    dtype: str | None = None  #: the declared dtype, by torch's name; None for float32, or a factory's own
    seed: int = 0  #: of a random model's weights
    attention: str = "eager"
    device: str = "cpu"
    trust_remote_code: bool = False  #: run code that comes with the model
    network: bool = False  #: fetch a model that is not in the local hub cache
    config: Path | None = None  #: instead of a target: a random model of this configuration


def load_target(target: str | None, options: LoadOptions) -> Subject:
    """Return the subject that ``target`` names, or that ``options.config`` describes.

    ``target`` is a folder with a transformers model, a GGUF file, ``org/name`` on the hub, ``random:TYPE``, or
    ``package.module:factory`` or ``file.py:factory``, a function that returns a decoder.

    Raises `UsageError` for a target that is not there, cannot be loaded or cannot be audited, for a device or
    dtype that does not exist, and for a library that is not installed or was not run in that version.
    """
    factory = None if target is None or Path(target).exists() else factory_of(target)
    if target is not None and factory is not None:
        return _made(target, factory, options)
    build = _builder(target, options)
    label = target or str(options.config)
    adapter = _adapter(label)
    try:
        return wrap_errors(lambda: build(adapter))
    except SubjectError as error:
        raise UsageError(f"{label} cannot be audited: {str(error).splitlines()[0]}") from error


def _made(target: str, factory: tuple[str, str], options: LoadOptions) -> Subject:
    """Return what a factory makes, in the dtype that was asked for."""
    if options.config is not None:
        raise UsageError("give a TARGET or --config FILE, and not both")
    if (options.attention, options.device) != ("eager", "cpu"):
        raise UsageError(f"--attention and --device do not go with {target}: its factory decides")
    subject = subject_from(target, *factory)
    if options.dtype in (None, subject.info.dtype):
        return subject
    if Ability.CAST not in subject.info.abilities:
        raise UsageError(f"{target} computes in {subject.info.dtype} and cannot be cast to {options.dtype}")
    return subject.cast(_dtype(options.dtype))


def _builder(target: str | None, options: LoadOptions) -> Callable[[Any], Subject]:
    """Return what builds the subject, given the adapter; refuse what can be refused without a library."""
    if (target is None) == (options.config is None):
        raise UsageError("give a TARGET or --config FILE, and not both")
    common = {
        "dtype": _dtype(options.dtype or "float32"),
        "attention": options.attention,
        "device": _device(options.device),
    }
    trusting = {**common, "trust_remote_code": options.trust_remote_code}
    if target is None:
        return lambda adapter: adapter.config_model(options.config, seed=options.seed, **trusting)
    kind, _, rest = target.partition(":")
    path = Path(target)
    if kind == "random":
        return lambda adapter: adapter.random_model(rest, seed=options.seed, **common)
    if path.is_dir():
        return lambda adapter: adapter.load_folder(path, **trusting)
    if path.suffix == ".gguf" and path.is_file():
        return lambda adapter: adapter.load_gguf(path, **common)
    if path.is_file():
        raise UsageError(f"{target} is a file, and no .gguf: give the folder that holds the model")
    if path.suffix != ".gguf" and _HUB_NAME.fullmatch(target):
        return lambda adapter: adapter.load_hub(target, network=options.network, **trusting)
    raise UsageError(
        f"no such model: {target!r} is neither a folder, a .gguf file, org/name on the hub, random:TYPE nor "
        "module:factory"
    )


def pretrained_source(
    target: str | None, dtype: str, attention: str, trust_remote_code: bool
) -> dict[str, Any] | None:
    """Return the arguments with which ``from_pretrained`` gives a target's model; None for a random model."""
    if target is None or target.startswith("random:"):
        return None
    path = Path(target)
    source: dict[str, Any] = {"pretrained_model_name_or_path": target}
    if path.is_file():
        source = {"pretrained_model_name_or_path": str(path.resolve().parent), "gguf_file": path.name}
    elif path.is_dir():
        source = {"pretrained_model_name_or_path": str(path.resolve())}
    trusting = {"trust_remote_code": True} if trust_remote_code else {}
    return {**source, "dtype": dtype, "attn_implementation": attention, **trusting}


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise UsageError(
            f"no such floating-point dtype: {name!r}; torch knows float32, bfloat16, float16, float64"
        )
    return dtype


def _device(name: str) -> str:
    """Return the name of a device that is there; raise `UsageError` for any other."""
    accelerator = torch.accelerator.current_accelerator()
    here = ["cpu"]
    if accelerator is not None:
        here += [f"{accelerator.type}:{i}" for i in range(torch.accelerator.device_count())]
    if name in here or (len(here) > 1 and accelerator is not None and name == accelerator.type):
        return name
    raise UsageError(f"no such device: {name!r}; this machine has {', '.join(here)}")


def _adapter(label: str) -> Any:
    """Return the transformers adapter; raise `UsageError` where its library is missing or of another version."""
    how = "pip install 'kvproof[transformers]'"
    first, end = TRANSFORMERS_VERSIONS
    try:
        found = importlib.metadata.version("transformers")
        if not _numbers(first) <= _numbers(found) < _numbers(end):
            raise UsageError(
                f"transformers {found} is installed, and kvproof knows {first} up to, not including, {end}: {how}"
            )
        from kvproof.subjects import _transformers as adapter
    except ImportError as error:  # also where there is no such distribution
        raise UsageError(f"{label} needs the transformers library: {how} ({error})") from error
    return adapter


def _numbers(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version: what orders releases, and counts a preview as its release."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in found[0].split(".")) if found else ()
