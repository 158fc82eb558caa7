"""Loads each kind of target that names a model of transformers."""

from pathlib import Path

from transformers import PreTrainedModel

from kvproof._numerics.dtypes import dtype_of
from kvproof.subjects._adapter import Adapter, LoadOptions, Target
from kvproof.subjects._base import Subject
from kvproof.subjects._transformers.load import (
    config_model,
    load_folder,
    load_gguf,
    load_hub,
    random_model,
)
from kvproof.subjects._transformers.model import TransformersSubject
from kvproof.subjects._transformers.tiny import known_types


class TransformersAdapter(Adapter):
    """Loads a folder, a GGUF file, a model from the hub, or a random model of a type or configuration."""

    def load(self, target: Target, options: LoadOptions) -> Subject:
        """Return the model that the target names, or that ``options.config`` describes."""
        path = Path(target.text)
        if options.config is not None:
            return config_model(options.config, options)
        if target.scheme == "random":
            return random_model(
                target.rest,
                seed=options.seed,
                dtype=dtype_of(options.dtype or "float32"),
                attention=options.attention,
                device=options.device,
            )
        if path.is_dir():
            return load_folder(path, options)
        return load_gguf(path, options) if path.is_file() else load_hub(target.text, options)

    def adopt(self, decoder: object, name: str | None) -> Subject | None:
        """Return a subject for a model object of the library."""
        if not isinstance(decoder, PreTrainedModel):
            return None
        return TransformersSubject(decoder, name=name or type(decoder).__name__)

    def list_targets(self) -> tuple[str, ...]:
        """Return the target of a random model for every causal type in the installed library."""
        return tuple(f"random:{name}" for name in known_types())


ADAPTER = TransformersAdapter()
