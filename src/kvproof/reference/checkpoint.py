"""Checkpoints: safetensors with configuration, corpus, seed and digest in the metadata.

Loading runs no code from the file. A file that is truncated, altered, from another source or of another
configuration is refused before a decoder is created.
"""

import hashlib
import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from kvproof._numerics.digests import weights_digest
from kvproof._system.files import write_whole
from kvproof.contract.text import printable
from kvproof.errors import CheckpointError
from kvproof.reference.corpus import PATTERNS, VOCABULARY
from kvproof.reference.decoder import Decoder, DecoderConfig

FORMAT = "kvproof-reference-1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A frozen decoder, with the seed of its training and its final loss (nats)."""

    decoder: Decoder
    seed: int
    loss: float

    @property
    def digest(self) -> str:
        """The digest of the current weights."""
        return weights_digest(self.decoder)


def save_checkpoint(checkpoint: Checkpoint, path: Path) -> None:
    """Write the checkpoint; an existing file is replaced completely or not at all. Raises `OutputError`."""
    decoder = checkpoint.decoder
    metadata = {
        "format": FORMAT,
        "config": json.dumps(asdict(decoder.config), sort_keys=True),
        "vocabulary": json.dumps(VOCABULARY),
        "patterns": json.dumps(PATTERNS),
        "seed": str(checkpoint.seed),
        "loss": repr(checkpoint.loss),
        "digest": checkpoint.digest,
    }
    metadata["metadata_digest"] = _metadata_digest(metadata)
    write_whole(path, save(dict(decoder.state_dict()), metadata))


def load_checkpoint(path: Path, config: DecoderConfig | None = None) -> Checkpoint:
    """Read and verify a checkpoint; ``config`` is the configuration that it must have.

    Raises `CheckpointError` naming the file and the problem.
    """
    metadata, tensors = _read(path)
    stored, seed, loss = _checked_metadata(path, metadata)
    expected = config or DecoderConfig()
    if stored != asdict(expected):
        raise CheckpointError(f"{path} holds a decoder of configuration {stored}, not {asdict(expected)}")
    decoder = Decoder(expected)
    _check_weights(path, tensors, decoder.state_dict())
    decoder.load_state_dict(tensors)
    checkpoint = Checkpoint(decoder=decoder.eval().requires_grad_(False), seed=seed, loss=loss)
    if checkpoint.digest != metadata["digest"]:
        raise CheckpointError(
            f"{path} was altered: its weights have digest {checkpoint.digest[:16]}…, "
            f"and it records {printable(metadata['digest'])[:16]}…"
        )
    return checkpoint


def _check_weights(path: Path, tensors: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Raise unless the file holds exactly these weights, of these shapes and dtypes, all finite."""
    for name in sorted(tensors.keys() ^ expected.keys()):
        raise CheckpointError(f"{path} {'lacks' if name in expected else 'has an unknown'} weight {name!r}")
    for name, tensor in tensors.items():
        wanted = expected[name]
        if tensor.shape != wanted.shape or tensor.dtype != wanted.dtype:
            raise CheckpointError(
                f"{path}: weight {name!r} is {tensor.dtype} of shape {tuple(tensor.shape)}, "
                f"not {wanted.dtype} of shape {tuple(wanted.shape)}"
            )
        if not tensor.isfinite().all():
            raise CheckpointError(f"{path}: weight {name!r} holds a value that is not finite")


def _read(path: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    try:
        with safe_open(path, framework="pt") as file:
            return dict(file.metadata() or {}), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except FileNotFoundError as error:
        raise CheckpointError(f"no such checkpoint: {path}") from error
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is not a complete safetensors file: {error}") from error


def _checked_metadata(path: Path, metadata: dict[str, str]) -> tuple[dict[str, Any], int, float]:
    """Return the stored configuration, seed and loss, after checking format, corpus and metadata digest."""
    if metadata.get("format") != FORMAT:
        raise CheckpointError(
            f"{path} is not a checkpoint of the reference decoder: its metadata has format "
            f"{metadata.get('format')!r}, not {FORMAT!r}"
        )
    if metadata.get("metadata_digest") != _metadata_digest(metadata):
        raise CheckpointError(f"{path} was altered: its metadata does not have the digest that it records")
    try:
        config: dict[str, Any] = json.loads(metadata["config"])
        seed, loss = int(metadata["seed"]), float(metadata["loss"])
        corpus = json.loads(metadata["patterns"]), json.loads(metadata["vocabulary"])
        metadata["digest"]
    except KeyError as error:
        raise CheckpointError(f"{path} lacks {error} in its metadata") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} has metadata that cannot be read: {error}") from error
    if seed < 0:
        raise CheckpointError(f"{path} records a seed of {seed}")
    if not math.isfinite(loss):
        raise CheckpointError(f"{path} records a loss of {loss}")
    if corpus != (list(PATTERNS), list(VOCABULARY)):
        raise CheckpointError(f"{path} was trained on patterns {corpus[0]} over {corpus[1]}, not on this corpus")
    return config, seed, loss


def _metadata_digest(metadata: dict[str, str]) -> str:
    entries = sorted((key, value) for key, value in metadata.items() if key != "metadata_digest")
    return hashlib.sha256(json.dumps(entries).encode()).hexdigest()
