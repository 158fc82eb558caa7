"""Positions as a model counts them itself if its forward receives none.

Most types count from 0. Types derived from RoBERTa count from the padding index + 1 and leave tokens with that
index at the padding index, so they have that many fewer positions than they declare.
"""

from typing import Any

import torch
from torch import Tensor, nn


def padding_position(model: nn.Module) -> int | None:
    """Return the position that means padding, which is below every token's position, or None."""
    table = _table(model)
    return None if table is None else table.padding_idx


def context_len(model: nn.Module, config: Any) -> int:
    """Return how many positions the model accepts; models without positions accept any number."""
    for name in ("max_position_embeddings", "n_positions", "max_seq_len", "context_length"):
        value = getattr(config, name, None)
        if isinstance(value, int) and value > 0:
            padding = padding_position(model)
            return value if padding is None else value - padding - 1
    return 2**20


def positions(mask: Tensor, tokens: Tensor, padding: int | None) -> Tensor:
    """Return each token's position, of the shape of both: (batch, column).

    ``mask`` is 1 where a column holds a token of the row, and 0 where it holds left padding.
    """
    if padding is None:
        return (mask.cumsum(-1) - 1).clamp(min=0)
    counted = mask * (tokens != padding)
    return torch.where(counted.bool(), counted.cumsum(-1) + padding, padding)


def _table(model: nn.Module) -> nn.Embedding | None:
    """Return the table of learned positions if one of them means padding, or None."""
    for name, module in model.named_modules():
        if not isinstance(module, nn.Embedding) or not name.endswith("position_embeddings"):
            continue
        if module.padding_idx is not None:
            return module
    return None
