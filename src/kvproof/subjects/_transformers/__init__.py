"""The adapter for causal language models of the transformers library."""

from kvproof.subjects._transformers._load import load_folder, random_model
from kvproof.subjects._transformers._model import TransformersSession, TransformersSubject
from kvproof.subjects._transformers._tiny import known_types, tiny_config, tiny_model

__all__ = [
    "TransformersSession",
    "TransformersSubject",
    "known_types",
    "load_folder",
    "random_model",
    "tiny_config",
    "tiny_model",
]
