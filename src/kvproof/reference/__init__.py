"""The reference system's decoder: small enough to check by hand, but a complete decoder.

See `decoder` for the model, `cache` for what incremental decoding keeps, `corpus` for the four patterns that it
learns, `training` for the recipe and `checkpoint` for the frozen result. Nothing here depends on the rest of
kvproof: the adapter is in `kvproof.subjects`.
"""

from kvproof.reference.cache import Append, DecoderCache, LayerCache
from kvproof.reference.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from kvproof.reference.corpus import PATTERNS, VOCABULARY, decode, encode
from kvproof.reference.decoder import Decoder, DecoderConfig
from kvproof.reference.training import RECIPE, Recipe, entropy_floor, largest_probability_error, train

__all__ = [
    "PATTERNS",
    "RECIPE",
    "VOCABULARY",
    "Append",
    "Checkpoint",
    "Decoder",
    "DecoderCache",
    "DecoderConfig",
    "LayerCache",
    "Recipe",
    "decode",
    "encode",
    "entropy_floor",
    "largest_probability_error",
    "load_checkpoint",
    "save_checkpoint",
    "train",
]
