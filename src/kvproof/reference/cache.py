"""What incremental decoding keeps: for each layer, the keys and values of every consumed token.

Caches are values. An append creates a new one and does not change the old one, so a call that fails halfway
changes nothing, and a fork is an assignment. One call to the decoder is one `Append`: every layer appends
exactly once, in order, and `Append.finish` raises if a layer did not.
"""

from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Float
from torch import Tensor

from kvproof.errors import CacheError


@dataclass(frozen=True, slots=True)
class LayerCache:
    """The keys and values of one layer of one request; the sequence axis is axis 2."""

    request: str
    layer: int
    keys: Float[Tensor, "batch head slot head_dim"]
    values: Float[Tensor, "batch head slot head_dim"]

    def __len__(self) -> int:
        return self.keys.shape[2]

    @property
    def num_bytes(self) -> int:
        """The size of both tensors' elements, in bytes."""
        return sum(t.numel() * t.element_size() for t in (self.keys, self.values))


@dataclass(frozen=True, slots=True)
class DecoderCache:
    """The caches of all layers for one request.

    ``num_consumed`` is the number of tokens that the request has consumed; every layer must hold that many.
    Without ``counts_entries``, as in most decoders, nothing checks this.
    """

    request: str
    layers: tuple[LayerCache, ...]
    num_consumed: int
    counts_entries: bool = True

    @classmethod
    def empty(
        cls, request: str, *, num_layers: int, batch: int, num_heads: int, head_dim: int, dtype: torch.dtype
    ) -> "DecoderCache":
        """Return the cache of a request that has consumed nothing."""
        nothing = torch.empty(batch, num_heads, 0, head_dim, dtype=dtype)
        return cls(request, tuple(LayerCache(request, i, nothing, nothing) for i in range(num_layers)), 0)

    def check(self) -> None:
        """Raise `CacheError` unless each layer holds its own entries of this request, one per token."""
        for index, layer in enumerate(self.layers):
            if layer.request != self.request:
                raise CacheError(
                    f"layer {index}'s cache belongs to request {layer.request!r}, not to {self.request!r}: "
                    "each request owns its caches"
                )
            if layer.layer != index:
                raise CacheError(
                    f"layer {index} was given layer {layer.layer}'s cache: each layer owns its cache"
                )
            if self.counts_entries and len(layer) != self.num_consumed:
                raise CacheError(
                    f"layer {index} holds {len(layer)} entries where {self.num_consumed} tokens were "
                    "consumed: an append is missing or was made twice"
                )

    def crop(self, length: int) -> "DecoderCache":
        """Return the cache of the first ``length`` tokens."""
        layers = (
            LayerCache(c.request, c.layer, c.keys[:, :, :length], c.values[:, :, :length]) for c in self.layers
        )
        return replace(self, layers=tuple(layers), num_consumed=length)

    def reorder(self, rows: list[int]) -> "DecoderCache":
        """Return a cache whose batch row i is the old row ``rows[i]``."""
        layers = (LayerCache(c.request, c.layer, c.keys[rows], c.values[rows]) for c in self.layers)
        return replace(self, layers=tuple(layers))

    def owned_by(self, request: str) -> "DecoderCache":
        """Return the same entries, owned by another request. Tensors are shared and never written to."""
        layers = (LayerCache(request, c.layer, c.keys, c.values) for c in self.layers)
        return replace(self, request=request, layers=tuple(layers))

    @property
    def num_bytes(self) -> int:
        """The size of all layers' keys and values, in bytes."""
        return sum(layer.num_bytes for layer in self.layers)


@dataclass(slots=True)
class Append:
    """The appends of one decoder call: each layer appends ``num_new`` entries once, in order."""

    cache: DecoderCache
    num_new: int
    done: list[LayerCache] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.cache.check()

    def __call__(
        self,
        layer: int,
        keys: Tensor,
        values: Tensor,
    ) -> tuple[Float[Tensor, "batch head slot head_dim"], Float[Tensor, "batch head slot head_dim"]]:
        """Append a layer's new keys and values, (batch, head, new, head_dim) each; return all of the layer's.

        Raises `CacheError` naming the layer for a call out of order, a wrong shape, or a wrong dtype.
        """
        self._check_turn(layer)
        old = self.cache.layers[layer]
        for name, new, kept in (("keys", keys, old.keys), ("values", values, old.values)):
            self._check_axes(layer, name, new, kept)
        grown = LayerCache(
            old.request, layer, torch.cat([old.keys, keys], dim=2), torch.cat([old.values, values], dim=2)
        )
        self.done.append(grown)
        return grown.keys, grown.values

    def finish(self) -> DecoderCache:
        """Return the grown cache; raise `CacheError` unless every layer appended."""
        if len(self.done) != len(self.cache.layers):
            raise CacheError(f"layer {len(self.done)} did not append: every layer appends each token once")
        num_consumed = self.cache.num_consumed + self.num_new
        grown = replace(self.cache, layers=tuple(self.done), num_consumed=num_consumed)
        grown.check()
        return grown

    def _check_turn(self, layer: int) -> None:
        if layer < len(self.done):
            raise CacheError(f"layer {layer} appended twice in one call: each token is appended exactly once")
        if layer != len(self.done) or layer >= len(self.cache.layers):
            raise CacheError(
                f"layer {layer} appended where layer {len(self.done)} of {len(self.cache.layers)} was due"
            )

    def _check_axes(self, layer: int, name: str, new: Tensor, kept: Tensor) -> None:
        batch, num_heads, _, head_dim = kept.shape
        expected = (batch, num_heads, self.num_new, head_dim)
        if tuple(new.shape) != expected:
            raise CacheError(
                f"layer {layer}'s new {name} have shape {tuple(new.shape)}, not {expected} "
                "(batch, head, new, head_dim)"
            )
        if new.dtype != kept.dtype:
            raise CacheError(f"layer {layer}'s new {name} are {new.dtype}, and the cache holds {kept.dtype}")
