"""Digests: what tells two models or two rows of logits apart, to the last bit."""

import hashlib

import torch
from torch import Tensor, nn


def weights_digest(model: nn.Module) -> str:
    """Return the SHA-256, in hexadecimal, of every weight's name, dtype, shape and bytes, in order of name."""
    digest = hashlib.sha256()
    for name, weight in sorted(model.state_dict().items()):
        digest.update(f"{name} {weight.dtype} {tuple(weight.shape)}\n".encode())
        digest.update(_bytes_of(weight))
    return digest.hexdigest()


def row_digest(row: Tensor) -> str:
    """Return the SHA-256, in hexadecimal, of a row's bytes."""
    return hashlib.sha256(_bytes_of(row)).hexdigest()


def _bytes_of(tensor: Tensor) -> memoryview:
    data: memoryview = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data
    return data
