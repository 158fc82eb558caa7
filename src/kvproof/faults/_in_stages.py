"""Faults for decoders that show their stages: values changed by taps alone, on a cold cache too."""

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor

from kvproof._numerics.taps import token_axis
from kvproof.contract.stages import IN_LAYER, OVER_SLOTS, Site, Stage
from kvproof.errors import UsageError
from kvproof.faults._base import Fault, Planting
from kvproof.faults._in_calls import hide_newest
from kvproof.faults._places import Place


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
        """Return the value with which the decoder continues."""


def _changing(stage: Stage, change: Callable[[Tensor], Tensor]) -> Callable[[Place], Planting]:
    """Return what plants a change of each value at a stage of the place's layer."""

    def make(place: Place) -> Planting:
        at = Site(stage, place.layer)
        return Planting(lambda: lambda site, value: change(value) if site == at else value)

    return make


def wrong_position() -> Fault:
    """Give every token position 0, which only the first token should have."""
    return Fault(
        name="wrong-position",
        breaks="every position is reset to 0",
        stages=frozenset({Stage.POSITION}),
        make=_changing(Stage.POSITION, torch.zeros_like),
    )


def position_off_by_one() -> Fault:
    """Give every token after the first one the position before its own."""
    return Fault(
        name="position-off-by-one",
        breaks="each position after the first lags by one",
        stages=frozenset({Stage.POSITION}),
        make=_changing(Stage.POSITION, lambda positions: (positions - 1).clamp(min=0)),
    )


class _WrongLayer(_FaultTap):
    def __init__(self, layer: int, source: int) -> None:
        super().__init__()
        self.layer, self.source = layer, source
        self.seen: dict[Stage, Tensor] = {}

    def change(self, site: Site, value: Tensor) -> Tensor:
        if site.stage in OVER_SLOTS and site.layer == self.source:
            self.seen[site.stage] = value
        if site.stage in OVER_SLOTS and site.layer == self.layer:
            # The new entries are the layer's own; the earlier ones are those of the source.
            return torch.cat([self.seen[site.stage][:, :, : self.start], value[:, :, self.start :]], dim=2)
        return value


def wrong_layer(layer: int = 1, source: int = 0) -> Fault:
    """Let ``layer`` read the cache of an earlier layer, ``source``."""
    if not 0 <= source < layer:
        raise UsageError(f"the source layer must lie before layer {layer}, not be {source}")
    return Fault(
        name="wrong-layer",
        breaks=f"layer {layer} reads layer {source}'s cache",
        stages=frozenset({Stage.CACHE_K}),
        make=lambda place: Planting(lambda: _WrongLayer(layer, source)),
        place=Place(layer=layer),
    )


class _MaskOffByOne(_FaultTap):
    def __init__(self, layer: int) -> None:
        super().__init__()
        self.layer = layer

    def change(self, site: Site, value: Tensor) -> Tensor:
        return hide_newest(value) if self.start and site == Site(Stage.ATTN_WEIGHTS, self.layer) else value


def mask_off_by_one(layer: int = 0) -> Fault:
    """Hide the newest cache entry from the new token."""
    return Fault(
        name="mask-off-by-one",
        breaks=f"layer {layer}'s mask hides the newest entry",
        stages=frozenset({Stage.ATTN_WEIGHTS}),
        make=lambda place: Planting(lambda: _MaskOffByOne(layer)),
        place=Place(layer=layer),
    )


class _Disturbance(_FaultTap):
    """Changes one token's value at some sites: one component of a float value, or an integer by one."""

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
    """Add ``amount`` to one component of one token's value at one stage."""
    if (stage in IN_LAYER) != (layer is not None):
        raise UsageError(f"stage {stage.value} {'needs a' if layer is None else 'has no'} layer")
    if stage in (Stage.TOKEN, Stage.CACHE_LEN, Stage.MODULE, Stage.POLICY):
        raise UsageError(f"stage {stage.value} cannot be disturbed by an amount")
    site = Site(stage, layer)
    return Fault(
        name=f"disturbed-{stage.value}",
        breaks=f"{site} of position {position} is off by {amount:g} in one component",
        stages=frozenset({stage}),
        make=lambda place: Planting(lambda: _Disturbance({site: amount}, position)),
        place=Place(layer=layer, position=position),
    )


def cancelling_pair(layer: int = 1, position: int = 1, amount: float = 0.5) -> Fault:
    """Add ``amount`` to the MLP's output and take it off the residual again: the logits do not change."""
    changes = {Site(Stage.MLP_OUT, layer): amount, Site(Stage.MLP_RESIDUAL, layer): -amount}
    return Fault(
        name="cancelling-pair",
        breaks=f"layer {layer}'s MLP output is wrong and its residual hides it",
        stages=frozenset({Stage.MLP_OUT}),
        make=lambda place: Planting(lambda: _Disturbance(changes, position)),
        place=Place(layer=layer, position=position),
    )
