"""Folders with tiny models and tokenizers, as people have them on disk."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from kvproof.subjects._transformers import random_model

#: The tiny tokenizer's words; each one's id is its place, so that prompts can be read.
WORDS = ("<unk>", "the", "cached", "path", "agrees", "with", "every", "prefix", "here")


def saved_model(folder: Path, model_type: str = "llama") -> Path:
    """Write a tiny random model, as `save_pretrained` does."""
    random_model(model_type, seed=0, dtype=torch.float32, attention="eager").model.save_pretrained(folder)
    return folder


def saved_tokenizer(folder: Path, words: tuple[str, ...] = WORDS) -> Path:
    """Write a tokenizer that splits at spaces beside a model."""
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>").save_pretrained(folder)
    return folder


def copied(folder: Path, to: Path) -> Path:
    """Return a copy that a test may spoil."""
    return Path(shutil.copytree(folder, to))


def with_config(folder: Path, **values: object) -> Path:
    """Change entries of a folder's config.json."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **values}))
    return folder


def with_weights(folder: Path, **changed: torch.Tensor | None) -> Path:
    """Replace weights by name, or leave out those that are None; ``__`` stands for a dot."""
    weights = load_file(folder / "model.safetensors")
    for name, value in changed.items():
        key = name.replace("__", ".")
        weights.pop(key)
        if value is not None:
            weights[key] = value
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def cached_on_hub(cache: Path, name: str, folder: Path) -> None:
    """Lay a folder down in a hub cache, as a download does."""
    revision = "0" * 40
    repository = cache / f"models--{name.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(revision)
    copied(folder, repository / "snapshots" / revision)
