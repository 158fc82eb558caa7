"""Faults in values, planted with taps alone: for decoders that show the stage at which they act.

What they do to a cache they do to what attention reads of it, at every call again.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor

from kvproof._numerics.taps import token_axis
from kvproof.contract.stages import IN_LAYER, OVER_SLOTS, Site, Stage
from kvproof.errors import UsageError
from kvproof.faults._base import Fault, Planting


class _FaultTap(ABC):
    """Follows the calls of one session and changes values in `change`.

    ``start`` is the position of the call's first new token, as the session gave it.
    """

    def __init__(self) -> None:
        self.start = 0

    def __call__(self, site: Site, value: Tensor, /) -> Tensor:
        if site.stage is Stage.POSITION:
            self.start = int(value[0, 0])
        return self.change(site, value)

    @abstractmethod
    def change(self, site: Site, value: Tensor) -> Tensor:
        """Return what the decoder goes on with."""


class _Change(_FaultTap):
    """Applies a function at chosen sites."""

    def __init__(self, sites: frozenset[Site], function: Callable[[Tensor, int], Tensor]) -> None:
        super().__init__()
        self.sites = sites
        self.function = function

    def change(self, site: Site, value: Tensor) -> Tensor:
        return self.function(value, self.start) if site in self.sites else value


def _changing(*sites: Site, by: Callable[[Tensor, int], Tensor]) -> Callable[[], Planting]:
    """Return a planting in which ``by(value, start)`` replaces the value at each of ``sites``."""
    return lambda: Planting(lambda: _Change(frozenset(sites), by))


def _cache_sites(layer: int) -> tuple[Site, Site]:
    return Site(Stage.CACHE_K, layer), Site(Stage.CACHE_V, layer)


def wrong_position() -> Fault:
    """Give every token position 0 (seed fault; the first token is right by accident)."""
    return Fault(
        name="wrong-position",
        breaks="every position is reset to 0",
        first_stage=Stage.POSITION,
        plant=_changing(Site(Stage.POSITION), by=lambda value, start: torch.zeros_like(value)),
    )


def position_off_by_one() -> Fault:
    """Give every token after the first the position before its own."""
    return Fault(
        name="position-off-by-one",
        breaks="each position after the first lags by one",
        first_stage=Stage.POSITION,
        plant=_changing(Site(Stage.POSITION), by=lambda value, start: (value - 1).clamp(min=0)),
    )


class _OtherLayer(_FaultTap):
    def __init__(self, layer: int, source: int) -> None:
        super().__init__()
        self.layer, self.source = layer, source
        self.seen: dict[Stage, Tensor] = {}

    def change(self, site: Site, value: Tensor) -> Tensor:
        if site.stage in OVER_SLOTS and site.layer == self.source:
            self.seen[site.stage] = value
        if site.stage in OVER_SLOTS and site.layer == self.layer:
            # The layer's own new entries are there; what it kept from before is another layer's.
            return torch.cat([self.seen[site.stage][:, :, : self.start], value[:, :, self.start :]], dim=2)
        return value


def wrong_layer(layer: int = 1, source: int = 0) -> Fault:
    """Feed ``layer`` the cache that an earlier layer, ``source``, kept (seed fault)."""
    if not 0 <= source < layer:
        raise UsageError(f"the source layer must lie before layer {layer}, not be {source}")
    return Fault(
        name="wrong-layer",
        breaks=f"layer {layer} reads layer {source}'s cache",
        first_stage=Stage.CACHE_K,
        plant=lambda: Planting(lambda: _OtherLayer(layer, source)),
    )


def duplicate_append(layer: int = 0, position: int = 1) -> Fault:
    """Append one token's keys and values twice."""

    def twice(value: Tensor, start: int) -> Tensor:
        if value.shape[2] <= position:
            return value
        return torch.cat([value[:, :, : position + 1], value[:, :, position:]], dim=2)

    return Fault(
        name="duplicate-append",
        breaks=f"layer {layer} appends position {position} twice",
        first_stage=Stage.CACHE_LEN,
        plant=_changing(*_cache_sites(layer), by=twice),
    )


def missing_append(layer: int = 0, position: int = 1) -> Fault:
    """Lose one token's keys and values."""

    def without(value: Tensor, start: int) -> Tensor:
        return torch.cat([value[:, :, :position], value[:, :, position + 1 :]], dim=2)

    return Fault(
        name="missing-append",
        breaks=f"layer {layer} never appends position {position}",
        first_stage=Stage.CACHE_LEN,
        plant=_changing(*_cache_sites(layer), by=without),
    )


class _Swapped(_FaultTap):
    """Keeps its own copy of what was appended, because each cache tensor is seen without the other."""

    def __init__(self, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.kept: dict[Stage, Tensor] = {}

    def change(self, site: Site, value: Tensor) -> Tensor:
        if site.layer != self.layer:
            return value
        if site.stage in (Stage.NEW_K, Stage.NEW_V):
            old = self.kept.get(site.stage, value[:, :, :0])
            self.kept[site.stage] = torch.cat([old[:, :, : self.start], value], dim=2)
        if site.stage is Stage.CACHE_K:
            return self.kept[Stage.NEW_V]
        return self.kept[Stage.NEW_K] if site.stage is Stage.CACHE_V else value


def swapped_keys_and_values(layer: int = 0) -> Fault:
    """Store keys as values and values as keys."""
    return Fault(
        name="swapped-kv",
        breaks=f"layer {layer} stores keys as values",
        first_stage=Stage.CACHE_K,
        plant=lambda: Planting(lambda: _Swapped(layer)),
    )


def stale_slot(layer: int = 0, slot: int = 1, source: int = 0) -> Fault:
    """Let one slot hold what another slot holds."""

    def stale(value: Tensor, start: int) -> Tensor:
        if value.shape[2] <= slot:
            return value
        value = value.clone()
        value[:, :, slot] = value[:, :, source]
        return value

    return Fault(
        name="stale-slot",
        breaks=f"layer {layer}'s slot {slot} still holds what slot {source} holds",
        first_stage=Stage.CACHE_K,
        plant=_changing(*_cache_sites(layer), by=stale),
    )


def heads_out_of_order(layer: int = 0) -> Fault:
    """Give each head its neighbour's new key, as a wrong axis order does."""
    return Fault(
        name="heads-out-of-order",
        breaks=f"layer {layer}'s new keys stand in the wrong head",
        first_stage=Stage.NEW_K,
        plant=_changing(Site(Stage.NEW_K, layer), by=lambda value, start: value.roll(1, dims=1)),
    )


def mask_off_by_one(layer: int = 0) -> Fault:
    """Hide the newest cache entry from the new token."""

    def hide(weights: Tensor, start: int) -> Tensor:
        if start == 0:
            return weights
        weights = weights.clone()
        weights[..., -1] = 0
        return weights / weights.sum(dim=-1, keepdim=True)

    return Fault(
        name="mask-off-by-one",
        breaks=f"layer {layer}'s mask hides the newest entry",
        first_stage=Stage.ATTN_WEIGHTS,
        plant=_changing(Site(Stage.ATTN_WEIGHTS, layer), by=hide),
    )


def lower_dtype(layer: int = 0, dtype: torch.dtype = torch.bfloat16) -> Fault:
    """Keep a layer's keys and values in a lower dtype."""
    return Fault(
        name="lower-dtype",
        breaks=f"layer {layer} keeps its cache in {str(dtype).removeprefix('torch.')}",
        first_stage=Stage.CACHE_K,
        plant=_changing(*_cache_sites(layer), by=lambda value, start: value.to(dtype).to(value.dtype)),
    )


class _LastTokenAgain(_FaultTap):
    def __init__(self, position: int) -> None:
        super().__init__()
        self.position = position
        self.last: Tensor | None = None
        self.calls = 0

    def change(self, site: Site, value: Tensor) -> Tensor:
        if site.stage is not Stage.TOKEN:
            return value
        last, self.last = self.last, value[:, -1:]
        self.calls += value.shape[1]
        if last is not None and self.calls == self.position + 1 and value.shape[1] == 1:
            return last
        return value


def token_fed_twice(position: int = 1) -> Fault:
    """Feed the token before ``position`` again instead of the one that is due."""
    return Fault(
        name="token-fed-twice",
        breaks=f"position {position} is given the token before it",
        first_stage=Stage.TOKEN,
        plant=lambda: Planting(lambda: _LastTokenAgain(position)),
    )


class _Shared(_FaultTap):
    """Every session writes to, and reads from, the planting's one store."""

    def __init__(self, layer: int, store: dict[Stage, tuple["_Shared", Tensor]]) -> None:
        super().__init__()
        self.layer, self.store = layer, store

    def change(self, site: Site, value: Tensor) -> Tensor:
        if site.layer != self.layer or site.stage not in OVER_SLOTS:
            return value
        owner, other = self.store.get(site.stage, (self, value))
        self.store[site.stage] = (self, value)
        if owner is self:
            return value
        kept = min(self.start, other.shape[2])
        return torch.cat([other[:, :, :kept], value[:, :, kept:]], dim=2)


def shared_between_requests(layer: int = 0) -> Fault:
    """Let a layer read what another request wrote last."""

    def plant() -> Planting:
        store: dict[Stage, tuple[_Shared, Tensor]] = {}
        return Planting(lambda: _Shared(layer, store))

    return Fault(
        name="shared-between-requests",
        breaks=f"layer {layer}'s cache is shared by all requests",
        first_stage=Stage.CACHE_K,
        plant=plant,
    )


class _Disturbed(_FaultTap):
    """Changes one token's value at a site: one component of a float value, the index of an integer."""

    def __init__(self, changes: dict[Site, float], position: int) -> None:
        super().__init__()
        self.changes = changes
        self.position = position

    def change(self, site: Site, value: Tensor) -> Tensor:
        if site.stage is Stage.TOKEN or site not in self.changes:
            return value
        axis = token_axis(site.stage)
        row = self.position if axis is None else self.position - self.start
        if not 0 <= row < value.shape[2 if axis is None else axis]:
            return value
        value = value.clone()
        if not value.is_floating_point():
            value[..., row] = value[..., row] - 1 if self.position else value[..., row] + 1
        else:
            value[..., row, 0] += self.changes[site]
        return value


def disturbed(stage: Stage, layer: int | None = None, position: int = 1, amount: float = 0.5) -> Fault:
    """Change one component of one token's value at one stage by ``amount``."""
    if (stage in IN_LAYER) != (layer is not None):
        raise UsageError(f"stage {stage.value} {'needs a' if layer is None else 'has no'} layer")
    if stage in (Stage.TOKEN, Stage.CACHE_LEN, Stage.MODULE, Stage.POLICY):
        raise UsageError(f"stage {stage.value} cannot be disturbed by an amount")
    site = Site(stage, layer)
    return Fault(
        name=f"disturbed-{stage.value}",
        breaks=f"{site} of position {position} is off by {amount:g} in one component",
        first_stage=stage,
        plant=lambda: Planting(lambda: _Disturbed({site: amount}, position)),
    )


def cancelling_pair(layer: int = 1, position: int = 1, amount: float = 0.5) -> Fault:
    """Disturb the MLP's output and take the same amount off the residual: the logits do not change."""
    changes = {Site(Stage.MLP_OUT, layer): amount, Site(Stage.MLP_RESIDUAL, layer): -amount}
    return Fault(
        name="cancelling-pair",
        breaks=f"layer {layer}'s MLP output is wrong and its residual hides it",
        first_stage=Stage.MLP_OUT,
        plant=lambda: Planting(lambda: _Disturbed(changes, position)),
    )
