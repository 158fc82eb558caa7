"""From a folder, or a type's name, to a subject: safetensors only, no remote code, no network."""

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM

from kvproof._errors import UsageError
from kvproof.subjects._transformers._model import TransformersSubject
from kvproof.subjects._transformers._tiny import tiny_model


def load_folder(folder: Path, *, dtype: torch.dtype, attention: str) -> "TransformersSubject":
    """Load a local folder: safetensors only, no remote code, no network.

    Raises `UsageError` naming the folder and what is wrong with it.
    """
    if not (folder / "config.json").is_file():
        raise UsageError(f"{folder} holds no config.json: it is not a transformers model")
    if not any(folder.glob("*.safetensors")):
        kind = (
            "pickled weights, which can run code when they are read"
            if any(folder.glob("*.bin"))
            else "no weights"
        )
        raise UsageError(f"{folder} holds {kind}; kvproof reads safetensors alone")
    options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    try:
        config = AutoConfig.from_pretrained(folder, **options)
        model = AutoModelForCausalLM.from_pretrained(
            folder, config=config, use_safetensors=True, dtype=dtype, attn_implementation=attention, **options
        )
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise UsageError(f"{folder} cannot be loaded: {str(error).strip().splitlines()[0]}") from error
    return TransformersSubject(model, name=folder.name)


def random_model(model_type: str, *, seed: int, dtype: torch.dtype, attention: str) -> "TransformersSubject":
    """Build a tiny random model of any causal type that the library knows."""
    model = tiny_model(model_type, seed=seed, attention=attention).to(dtype)
    return TransformersSubject(model, name=f"random:{model_type}", seed=seed)
