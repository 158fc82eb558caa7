"""The adapter for causal language models of the transformers library."""

from kvproof.subjects._transformers._load import (
    config_model,
    load_folder,
    load_gguf,
    load_hub,
    random_model,
)
from kvproof.subjects._transformers._model import TransformersSession, TransformersSubject
from kvproof.subjects._transformers._plain import (
    Recipe,
    num_parameters,
    plain_model,
    recipe_of,
    size_of,
    smaller_recipes,
)
from kvproof.subjects._transformers._quiet import quiet
from kvproof.subjects._transformers._standalone import Found, standalone
from kvproof.subjects._transformers._tiny import known_types, tiny_config, tiny_model

__all__ = [
    "Found",
    "Recipe",
    "TransformersSession",
    "TransformersSubject",
    "config_model",
    "known_types",
    "load_folder",
    "load_gguf",
    "load_hub",
    "num_parameters",
    "plain_model",
    "quiet",
    "random_model",
    "recipe_of",
    "size_of",
    "smaller_recipes",
    "standalone",
    "tiny_config",
    "tiny_model",
]
