"""The adapter for causal language models of the transformers library."""

from kvproof.subjects._transformers.load import (
    config_model,
    load_folder,
    load_gguf,
    load_hub,
    random_model,
)
from kvproof.subjects._transformers.model import TransformersSession, TransformersSubject
from kvproof.subjects._transformers.quiet import quiet
from kvproof.subjects._transformers.tiny import known_types, tiny_config, tiny_model

__all__ = [
    "TransformersSession",
    "TransformersSubject",
    "config_model",
    "known_types",
    "load_folder",
    "load_gguf",
    "load_hub",
    "quiet",
    "random_model",
    "tiny_config",
    "tiny_model",
]
