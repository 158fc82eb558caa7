"""Faults in what a call is given and computes: tokens, positions, masks, and values on the way."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from kvproof.contract.stages import Site, Stage
from kvproof.faults import _carriers as carriers
from kvproof.faults._base import Planting
from kvproof.faults._carriers import Carrier
from kvproof.faults._kinds import CatalogueFault
from kvproof.faults._places import PlantingSite, sample_layers
from kvproof.faults._plantings import (
    InCalls,
    StalePositions,
)

#: Where attention has read wrongly: its probabilities, or what it made of them where those are not shown.
_READ = frozenset({Stage.ATTN_WEIGHTS, Stage.ATTN_MIX})


def _whole(*stages: Stage) -> Callable[[PlantingSite], list[None]]:
    """Return a fault's one place, outside the layers, on subjects that show the stage there."""
    return lambda ground: [None] if all(Site(stage) in ground.shown for stage in stages) else []


def _fed(
    name: str,
    breaks: str,
    classes: tuple[str, ...],
    stage: Stage,
    carrier: Carrier,
    change: Callable[[Tensor, int], Tensor],
) -> CatalogueFault:
    return CatalogueFault(
        name=name,
        breaks=breaks,
        classes=classes,
        stages=frozenset({stage}),
        carrier=carrier,
        layers=_whole(stage),
        plant=lambda place: InCalls(stage, layer=None, change=lambda site, value, start: change(value, start)),
    )


def input_faults() -> Iterable[CatalogueFault]:
    """Yield the faults in tokens and positions."""
    position = Stage.POSITION
    yield CatalogueFault(
        name="token-fed-twice",
        breaks="the token before is consumed again instead of the one that is due",
        classes=("append-integrity", "stopping-bookkeeping"),
        stages=frozenset({Stage.TOKEN}),
        carrier=carriers.steps,
        layers=_whole(Stage.TOKEN),
        plant=lambda place: InCalls(
            Stage.TOKEN,
            layer=None,
            change=lambda site, value, start: torch.full_like(value, place.ground.sequence[start - 1]),
        ),
    )
    yield _fed(
        "position-from-zero",
        "each call counts positions from 0",
        ("wrong-position", "path-parity"),
        position,
        carriers.steps,
        lambda value, start: value - value[:, :1],
    )
    yield _fed(
        "position-lags",
        "positions lag by one",
        ("off-by-one-position",),
        position,
        carriers.steps,
        lambda value, start: value - 1,
    )
    yield _fed(
        "position-skips-block",
        "positions are counted after the block instead of before it",
        ("wrong-position",),
        position,
        carriers.block,
        lambda value, start: value + value.shape[1],
    )
    yield CatalogueFault(
        name="position-counts-padding",
        breaks="positions count the padding on the left",
        classes=("left-padding",),
        stages=frozenset({position}),
        carrier=carriers.padded,
        layers=_whole(position, Stage.MASK),
        plant=lambda place: InCalls(position, layer=None, change=lambda site, value, start: _columns(value)),
    )
    yield CatalogueFault(
        name="position-survives-crop",
        breaks="positions go on where they stood before tokens were taken back",
        classes=("rollback-crop", "wrong-position"),
        stages=frozenset({position}),
        carrier=carriers.rollback,
        layers=_whole(position),
        plant=lambda place: StalePositions(),
    )


def _columns(positions: Tensor) -> Tensor:
    """Return the positions of the longest row for every row."""
    return positions.amax(dim=0, keepdim=True).expand_as(positions)


def _masked(
    name: str,
    breaks: str,
    classes: tuple[str, ...],
    carrier: Carrier,
    change: Callable[[Tensor], Tensor],
    layers: Callable[[PlantingSite], Iterable[int | None]] | None = None,
    *,
    late: bool = False,
) -> CatalogueFault:
    return CatalogueFault(
        name=name,
        breaks=breaks,
        classes=classes,
        stages=_READ,
        carrier=carrier,
        layers=layers or (lambda ground: ground.showing(Stage.MASK)),
        plant=lambda place: InCalls(
            Stage.MASK, layer=place.layer, change=lambda site, value, start: change(value.clone())
        ),
        late=late,
    )


def mask_faults() -> Iterable[CatalogueFault]:
    """Yield the faults in what may be read."""
    yield _masked(
        "mask-hides-newest",
        "the mask hides the newest entry from the newest token",
        ("mask-alignment",),
        carriers.steps,
        _without_newest,
    )
    yield _masked(
        "mask-not-causal",
        "no causal mask where a cache exists: a block's tokens read those after them",
        ("mask-alignment", "path-parity"),
        carriers.block,
        lambda mask: torch.zeros_like(mask) if mask.is_floating_point() else torch.ones_like(mask),
        lambda ground: [n for n in ground.showing(Stage.MASK) if n not in ground.windowed],
    )
    yield _masked(
        "bias-from-the-wrong-end",
        "a distance bias counts slots from the wrong end",
        ("bias-geometry",),
        carriers.steps,
        _biased,
    )
    windowed = lambda ground: [n for n in ground.showing(Stage.MASK) if n in ground.windowed]  # noqa: E731
    yield _masked(
        "window-too-short",
        "the window hides its oldest entry",
        ("window-eviction",),
        carriers.steps,
        lambda mask: _at_the_edge(mask, visible=False),
        windowed,
        late=True,
    )
    yield _masked(
        "window-too-long",
        "the window shows one entry too many",
        ("window-eviction",),
        carriers.block,
        lambda mask: _at_the_edge(mask, visible=True),
        windowed,
        late=True,
    )
    yield _padding("padding-shown", "the mask forgets the padding on the left", torch.ones_like)
    yield _padding(
        "padding-misaligned",
        "the mask of padding is off by one column",
        lambda mask: mask.roll(-1, dims=-1),
    )
    yield CatalogueFault(
        name="weights-hide-newest",
        breaks="attention gives the newest entry no weight",
        classes=("mask-alignment",),
        stages=_READ,
        carrier=carriers.steps,
        layers=lambda ground: [] if ground.showing(Stage.MASK) else ground.showing(Stage.ATTN_WEIGHTS),
        plant=lambda place: InCalls(
            Stage.ATTN_WEIGHTS, layer=place.layer, change=lambda site, value, start: _hidden_newest(value)
        ),
    )


def _padding(name: str, breaks: str, change: Callable[[Tensor], Tensor]) -> CatalogueFault:
    """Return a fault in the caller's mask of padding."""
    return CatalogueFault(
        name=name,
        breaks=breaks,
        classes=("left-padding", "mask-alignment"),
        stages=_READ,
        carrier=carriers.padded,
        layers=_whole(Stage.MASK),
        plant=lambda place: InCalls(Stage.MASK, layer=None, change=lambda site, value, start: change(value)),
    )


def _without_newest(mask: Tensor) -> Tensor:
    mask[..., -1, -1] = torch.finfo(mask.dtype).min if mask.is_floating_point() else False
    return mask


def _biased(mask: Tensor) -> Tensor:
    slope = torch.arange(mask.shape[-1], device=mask.device) * 0.1
    if mask.is_floating_point():
        return mask + slope.to(mask.dtype)
    least = torch.finfo(torch.float64).min
    return torch.where(mask, slope.to(torch.float64), torch.full_like(slope, least, dtype=torch.float64))


def _visible(mask: Tensor) -> Tensor:
    return mask > torch.finfo(mask.dtype).min / 2 if mask.is_floating_point() else mask


def _at_the_edge(mask: Tensor, *, visible: bool) -> Tensor:
    """Show each token the entry before its oldest, or hide that."""
    first = _visible(mask).to(torch.int).argmax(dim=-1, keepdim=True)
    place = (first - 1).clamp(min=0) if visible else first
    if mask.is_floating_point():
        return mask.scatter(-1, place, 0.0 if visible else torch.finfo(mask.dtype).min)
    return mask.scatter(-1, place, visible)


def _hidden_newest(weights: Tensor) -> Tensor:
    weights = weights.clone()
    weights[..., -1] = 0
    return weights / weights.sum(dim=-1, keepdim=True)


def value_faults() -> Iterable[CatalogueFault]:
    """Yield the faults in values that a call computes."""
    yield CatalogueFault(
        name="heads-out-of-order",
        breaks="each head takes its neighbour's new key",
        classes=("wrong-tensor-or-layer",),
        stages=frozenset({Stage.NEW_K}),
        carrier=carriers.steps,
        layers=lambda ground: ground.showing(Stage.NEW_K),
        plant=lambda place: InCalls(
            Stage.NEW_K, layer=place.layer, change=lambda site, value, start: value.roll(1, dims=1)
        ),
    )
    yield CatalogueFault(
        name="rotation-changes",
        breaks="the rotary table of later calls is another one than the entries were rotated with",
        classes=("rope-length-dependence",),
        stages=frozenset({Stage.MODULE}),
        carrier=carriers.steps,
        layers=lambda ground: [None] if _rotary(ground) is not None else [],
        plant=lambda place: _scaling(_rotary(place.ground), 0.9),
    )
    yield CatalogueFault(
        name="stage-skipped",
        breaks="a layer's feed-forward part is skipped while stepping",
        classes=("path-parity",),
        stages=frozenset({Stage.MODULE, Stage.MLP_OUT}),
        carrier=carriers.steps,
        layers=lambda ground: sample_layers(sorted(_last_parts(ground))),
        plant=lambda place: _scaling(_last_parts(place.ground)[place.number], 0.0),
    )


def _scaling(at: Site | None, factor: float) -> Planting:
    assert at is not None
    return InCalls(
        at.stage, layer=at.layer, change=lambda site, value, start: value * factor if site == at else value
    )


def _rotary(ground: PlantingSite) -> Site | None:
    modules = (site for site in ground.shown if site.module is not None and site.layer is None)
    return next((site for site in modules if "rotary" in str(site.module)), None)


def _last_parts(ground: PlantingSite) -> dict[int, Site]:
    """Return, for each layer, the last of its own parts that is no norm and no dropout."""
    found: dict[int, Site] = {}
    for site in ground.shown:
        if site.layer is None:
            continue
        own = str(site.module or "").partition(f".{site.layer}.")[2]
        is_part = own != "" and "." not in own and " " not in own
        is_quiet = any(word in own.lower() for word in ("norm", "drop", "ln_"))
        if site.stage is Stage.MLP_OUT or (site.stage is Stage.MODULE and is_part and not is_quiet):
            found[site.layer] = site
    return found
