"""Positions as a model itself counts them, where its forward is given none.

Most types count from 0. Those that descend from RoBERTa count from the padding index + 1, leave tokens of that
index at the padding index, and have so many positions fewer than they declare.
"""

from typing import Any

import torch
from torch import Tensor, nn


def padding_position(model: nn.Module) -> int | None:
    """Return the position that stands for padding and before which no token's lies, or None."""
    table = _table(model)
    return None if table is None else table.padding_idx


def context_len(model: nn.Module, config: Any) -> int:
    """Return how many positions the model accepts; models without positions take any number."""
    for name in ("max_position_embeddings", "n_positions", "max_seq_len", "context_length"):
        value = getattr(config, name, None)
        if isinstance(value, int) and value > 0:
            padding = padding_position(model)
            return value if padding is None else value - padding - 1
    return 2**20


def positions(mask: Tensor, tokens: Tensor, padding: int | None) -> Tensor:
    """Return each token's position, of the shape of both: (batch, column).

    ``mask`` is 1 where a column holds a token of its row's, 0 where it holds padding on the left.
    """
    if padding is None:
        return (mask.cumsum(-1) - 1).clamp(min=0)
    counted = mask * (tokens != padding)
    return torch.where(counted.bool(), counted.cumsum(-1) + padding, padding)


def _table(model: nn.Module) -> nn.Embedding | None:
    """Return the table of learned positions in which one stands for padding."""
    for name, module in model.named_modules():
        if not isinstance(module, nn.Embedding) or not name.endswith("position_embeddings"):
            continue
        if module.padding_idx is not None:
            return module
    return None
