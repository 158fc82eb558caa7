"""The adapter for causal language models of the transformers library."""

from kvproof.subjects._transformers.adapter import ADAPTER
from kvproof.subjects._transformers.load import load_folder, random_model
from kvproof.subjects._transformers.model import TransformersSession, TransformersSubject
from kvproof.subjects._transformers.quiet import quiet
from kvproof.subjects._transformers.tiny import known_types, tiny_config, tiny_model

__all__ = [
    "ADAPTER",
    "TransformersSession",
    "TransformersSubject",
    "known_types",
    "load_folder",
    "quiet",
    "random_model",
    "tiny_config",
    "tiny_model",
]
