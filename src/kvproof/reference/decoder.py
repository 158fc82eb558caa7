"""A causal decoder: pre-norm blocks, learned absolute positions, readout tied to the token embedding.

Both paths use the same forward. Without a cache, attention reads the keys and values of the given tokens. With
one, the new keys and values are first appended to it, and attention reads all of them. That single difference,
between ``keys`` and ``append(keys)``, is all that a KV cache is.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from kvproof._numerics.taps import Tap, untouched
from kvproof.contract.stages import Site, Stage
from kvproof.reference.cache import Append


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """The sizes of a decoder. The defaults are those of the reference system."""

    num_layers: int = 2
    num_heads: int = 2
    head_dim: int = 2
    mlp_width: int = 32
    context_len: int = 4
    vocab_size: int = 8

    @property
    def width(self) -> int:
        """The width of the residual stream."""
        return self.num_heads * self.head_dim


class Attention(nn.Module):
    """Causal multi-head attention over the new tokens and, with a cache, everything before them."""

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.num_heads = config.num_heads
        self.head_dim = config.head_dim
        self.query = nn.Linear(config.width, config.width)
        self.key = nn.Linear(config.width, config.width)
        self.value = nn.Linear(config.width, config.width)
        self.output = nn.Linear(config.width, config.width)

    def forward(
        self, x: Float[Tensor, "batch new width"], append: Append | None, tap: Tap
    ) -> Float[Tensor, "batch new width"]:
        """Return what each new token reads from the tokens up to and including itself."""
        queries = tap(Site(Stage.NEW_Q, self.layer), self.split_heads(self.query(x)))
        keys = tap(Site(Stage.NEW_K, self.layer), self.split_heads(self.key(x)))
        values = tap(Site(Stage.NEW_V, self.layer), self.split_heads(self.value(x)))
        if append is not None:
            keys, values = append(self.layer, keys, values)
        keys = tap(Site(Stage.CACHE_K, self.layer), keys)
        values = tap(Site(Stage.CACHE_V, self.layer), values)

        scores = queries @ keys.transpose(-1, -2) / math.sqrt(self.head_dim)
        weights = tap(Site(Stage.ATTN_WEIGHTS, self.layer), causal(scores).softmax(dim=-1))
        mixed = self.output(merge_heads(weights @ values))
        return tap(Site(Stage.ATTN_OUT, self.layer), mixed)

    def split_heads(self, x: Float[Tensor, "batch new width"]) -> Float[Tensor, "batch head new head_dim"]:
        """Split the width into heads and put the head axis before the sequence axis."""
        return x.reshape(*x.shape[:2], self.num_heads, self.head_dim).transpose(1, 2)


def merge_heads(x: Float[Tensor, "batch head new head_dim"]) -> Float[Tensor, "batch new width"]:
    """Undo `Attention.split_heads`."""
    return x.transpose(1, 2).flatten(-2)


def causal(scores: Float[Tensor, "batch head new slot"]) -> Float[Tensor, "batch head new slot"]:
    """Mask the slots after each new token. The new tokens have the last slots, in order."""
    num_new, num_slots = scores.shape[-2:]
    if num_new == 1:  # nothing follows the newest token
        return scores
    visible = torch.ones(num_new, num_slots, dtype=torch.bool, device=scores.device).tril(num_slots - num_new)
    return scores.masked_fill(~visible, -math.inf)


class Block(nn.Module):
    """One layer: attention, then an MLP, each on the normalised residual stream and added back to it."""

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.attention_norm = nn.LayerNorm(config.width)
        self.attention = Attention(config, layer)
        self.mlp_norm = nn.LayerNorm(config.width)
        self.mlp = nn.Sequential(
            nn.Linear(config.width, config.mlp_width), nn.GELU(), nn.Linear(config.mlp_width, config.width)
        )

    def forward(
        self, x: Float[Tensor, "batch new width"], append: Append | None, tap: Tap
    ) -> Float[Tensor, "batch new width"]:
        """Return the residual stream after this layer."""
        normed = tap(Site(Stage.ATTN_NORM, self.layer), self.attention_norm(x))
        x = tap(Site(Stage.ATTN_RESIDUAL, self.layer), x + self.attention(normed, append, tap))
        transformed = tap(Site(Stage.MLP_OUT, self.layer), self.mlp(self.mlp_norm(x)))
        return tap(Site(Stage.MLP_RESIDUAL, self.layer), x + transformed)


class Decoder(nn.Module):
    """The whole model: ids and positions in, one row of logits for each new token out."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.token_embedding = nn.Embedding(config.vocab_size, config.width)
        self.position_embedding = nn.Embedding(config.context_len, config.width)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.num_layers))
        self.final_norm = nn.LayerNorm(config.width)

    def forward(
        self,
        ids: Int[Tensor, "batch new"],
        positions: Int[Tensor, "batch new"],
        append: Append | None = None,
        tap: Tap = untouched,
    ) -> Float[Tensor, "batch new vocab"]:
        """Return the logits that follow each new token.

        Without ``append``, the new tokens are a complete prefix and attend only to each other. With it, they
        continue the prefix whose keys and values are in the append's cache.
        """
        ids = tap(Site(Stage.TOKEN), ids)
        positions = tap(Site(Stage.POSITION), positions)
        x = tap(Site(Stage.EMBEDDING), self.token_embedding(ids) + self.position_embedding(positions))
        for block in self.blocks:
            x = block(x, append, tap)
        x = tap(Site(Stage.FINAL_NORM), self.final_norm(x))
        return tap(Site(Stage.LOGITS), x @ self.token_embedding.weight.T)
