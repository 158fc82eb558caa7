"""Loads a model of transformers as a subject, from safetensors or GGUF and never from pickles.

kvproof uses the network, and runs code that comes with a model, only if the caller allows it.
"""

import functools
import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.models.auto import modeling_auto

from kvproof._numerics.dtypes import dtype_of
from kvproof.errors import UsageError
from kvproof.subjects._adapter import LoadOptions
from kvproof.subjects._transformers.model import TransformersSubject
from kvproof.subjects._transformers.quiet import as_usage_errors
from kvproof.subjects._transformers.tiny import randomise, tiny_model
from kvproof.subjects._transformers.tokenizer import Tokenizer

#: Files to download from the hub. Code that comes with a model is added only if the caller trusts it.
_FETCHED = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")
#: Files to skip: the same weights in other formats.
_NOT_FETCHED = ("*/*", "consolidated*")

_NAMES_SHOWN = 3


def load_folder(folder: Path, options: LoadOptions, *, name: str | None = None) -> "TransformersSubject":
    """Load a local folder: only safetensors, no network, and its own code only if the caller trusts it.

    Raises `UsageError`, which names the folder and the problem.
    """
    if not (folder / "config.json").is_file():
        raise UsageError(f"{name or folder} holds no config.json: it is not a transformers model")
    if not any(folder.glob("*.safetensors")):
        kind = (
            "pickled weights, which can run code when they are read"
            if any(folder.glob("*.bin"))
            else "no weights"
        )
        raise UsageError(f"{name or folder} holds {kind}; kvproof reads safetensors alone")
    source = {"pretrained_model_name_or_path": folder, "local_files_only": True}
    return _load(name or folder.resolve().name, source, options)


def load_hub(name: str, options: LoadOptions) -> "TransformersSubject":
    """Load ``org/name`` from the local hub cache; ``options.network`` allows downloading what is missing.

    Raises `UsageError` if it is not in the cache or cannot be downloaded, and as `load_folder` does.
    """
    code = ("*.py",) if options.trust_remote_code else ()
    try:
        with as_usage_errors(f"{name} cannot be downloaded"):
            folder = huggingface_hub.snapshot_download(
                name,
                local_files_only=not options.network,
                allow_patterns=[*_FETCHED, *code],
                ignore_patterns=list(_NOT_FETCHED),
            )
    except UsageError as error:
        if options.network:
            raise
        raise UsageError(
            f"{name} is neither a folder nor in the local hub cache; --download fetches it from the hub"
        ) from error
    return load_folder(Path(folder), options, name=name)


def load_gguf(file: Path, options: LoadOptions) -> "TransformersSubject":
    """Load a GGUF file with the library's own loader, which dequantises it. This takes many seconds.

    Raises `UsageError` if a library is missing, and as `load_folder` does.
    """
    missing = [library for library in ("gguf", "accelerate") if find_spec(library) is None]
    if missing:
        raise UsageError(f"{file} needs {' and '.join(missing)}: pip install 'kvproof[gguf]'")
    source = {
        "pretrained_model_name_or_path": file.parent,
        "gguf_file": file.name,
        "local_files_only": True,
    }
    read = _GgufReading()
    with read.once():
        return _load(file.name, source, replace(options, trust_remote_code=False), reading=read.once)


class _GgufReading:
    """Reads a GGUF file once for everything that the library needs, because each read takes seconds."""

    def __init__(self) -> None:
        self._readers: dict[str, Any] = {}

    @contextmanager
    def once(self) -> Iterator[None]:
        """Give the library the same reader and the same table of names each time it asks.

        The mapped file is exposed as a plain array, because lists in a GGUF file are sliced value by value, which
        is slow with a memmap.
        """
        gguf, memmap = import_module("gguf"), np.memmap
        reader, names = gguf.GGUFReader, functools.cache(gguf.get_tensor_name_map)

        def plain(*args: Any, **options: Any) -> Any:
            return memmap(*args, **options).view(np.ndarray)

        def read(path: str | Path) -> Any:
            if str(path) not in self._readers:
                self._readers[str(path)] = reader(path)
            return self._readers[str(path)]

        with ExitStack() as stack:
            for home, name, value in (
                (np, "memmap", plain),
                (gguf, "GGUFReader", read),
                (gguf, "get_tensor_name_map", names),
            ):
                stack.callback(setattr, home, name, getattr(home, name))
                setattr(home, name, value)
            yield


def random_model(
    model_type: str, *, seed: int, dtype: torch.dtype, attention: str, device: str = "cpu"
) -> "TransformersSubject":
    """Build a tiny random model of a causal type that the library knows."""
    model = tiny_model(model_type, seed=seed, attention=attention).to(device, dtype)
    return TransformersSubject(model, name=f"random:{model_type}", seed=seed)


def config_model(file: Path, options: LoadOptions) -> "TransformersSubject":
    """Build a random model of exactly the configuration in ``file``, at the scale of `randomise`.

    The same seed gives the same weights. Raises `UsageError` if the file does not exist or holds no
    configuration of a causal model, and if the library cannot build the model.
    """
    trusted = options.trust_remote_code
    if not file.is_file():
        raise UsageError(f"no such configuration: {file}; give a model's config.json")
    source = {"pretrained_model_name_or_path": file, "local_files_only": True}
    config = _causal_config(str(file), source, trust_remote_code=trusted)
    with as_usage_errors(f"{file} cannot be built", config.to_dict()), torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(options.seed)
        model = AutoModelForCausalLM.from_config(
            config, attn_implementation=options.attention, dtype=torch.float32, trust_remote_code=trusted
        )
        model.float().eval().requires_grad_(False)
        randomise(model, options.seed)
        model = model.to(options.device, dtype_of(options.dtype or "float32"))
    return TransformersSubject(model, name=f"config:{file}", seed=options.seed)


def _load(
    name: str,
    source: dict[str, Any],
    options: LoadOptions,
    *,
    reading: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> "TransformersSubject":
    trusted = options.trust_remote_code
    config = _causal_config(name, source, trust_remote_code=trusted)
    with as_usage_errors(f"{name} cannot be loaded", config.to_dict()):
        model, found = AutoModelForCausalLM.from_pretrained(
            **source,
            config=config,
            dtype=dtype_of(options.dtype or "float32"),
            attn_implementation=options.attention,
            trust_remote_code=trusted,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # the library returns their names, and the code below refuses them
        )
        # The library would continue with random values for these and only log it.
        if found["missing_keys"]:
            raise UsageError(f"{name}: its weights lack {_list_names(sorted(found['missing_keys']))}")
        if found["mismatched_keys"]:
            shapes = [
                f"{key} is {tuple(there)}, not {tuple(due)}"
                for key, there, due in sorted(found["mismatched_keys"], key=lambda entry: str(entry[0]))
            ]
            raise UsageError(f"{name}: its weights do not fit its config.json: {_list_names(shapes)}")
        model = model.to(options.device)

    def load_tokenizer() -> Any:
        with reading():
            return AutoTokenizer.from_pretrained(**source, trust_remote_code=trusted)

    return TransformersSubject(model, name=name, tokenizer=Tokenizer(name, load_tokenizer))


def _causal_config(name: str, source: dict[str, Any], *, trust_remote_code: bool) -> Any:
    """Return the configuration of a causal model; raise `UsageError` for a model of another kind."""
    with as_usage_errors(
        f"{name} cannot be loaded", _read_members(Path(source["pretrained_model_name_or_path"]))
    ):
        config = AutoConfig.from_pretrained(**source, trust_remote_code=trust_remote_code)
    kind = str(config.model_type)
    brought = trust_remote_code and "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    if kind not in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and not brought:
        raise UsageError(
            f"{name} is a {kind!r} model, for which transformers has no causal-LM class: no cache to audit"
        )
    encoder = (
        kind in modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES
        and not getattr(config, "is_decoder", True)
        and not getattr(config, "is_encoder_decoder", False)
    )
    if encoder:
        raise UsageError(
            f"{name} is a {kind!r} encoder: it sees all tokens at once and has no cache to audit; as a decoder "
            'its config.json says "is_decoder": true'
        )
    return config


def _read_members(path: Path) -> dict[str, Any]:
    """Return what a config.json holds, for messages; nothing if it cannot be read."""
    try:
        members = json.loads((path / "config.json" if path.is_dir() else path).read_bytes())
    except (OSError, ValueError):
        return {}
    return members if isinstance(members, dict) else {}


def _list_names(names: list[str]) -> str:
    shown = ", ".join(names[:_NAMES_SHOWN])
    return shown if len(names) <= _NAMES_SHOWN else f"{shown} and {len(names) - _NAMES_SHOWN} more"
