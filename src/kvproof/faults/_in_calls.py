"""Faults in calls: wrong tokens, positions, and masks, and wrong values on the way to the logits."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from kvproof.contract.stages import Site, Stage
from kvproof.errors import UsageError
from kvproof.faults import _carriers as carriers
from kvproof.faults._base import Fault, Planting
from kvproof.faults._carriers import Carrier
from kvproof.faults._places import Place, PlantingSite, sample_layers
from kvproof.faults._plantings import InCalls, StalePositions, TokenAgain

#: Where a wrong mask first shows: attention's weights, or the mix that it makes with them if they are not shown.
_READ = frozenset({Stage.ATTN_WEIGHTS, Stage.ATTN_MIX})


def _whole(*stages: Stage) -> Callable[[PlantingSite], list[None]]:
    """Return the one place of a fault outside the layers, for subjects that show the stages there."""
    return lambda site: [None] if all(Site(stage) in site.shown for stage in stages) else []


def _input_fault(
    name: str,
    breaks: str,
    classes: tuple[str, ...],
    stage: Stage,
    program: Carrier,
    change: Callable[[Tensor], Tensor],
) -> Fault:
    return Fault(
        name=name,
        breaks=breaks,
        classes=classes,
        stages=frozenset({stage}),
        program=program,
        layers=_whole(stage),
        make=lambda place: InCalls(stage, place, change),
    )


def input_faults() -> Iterable[Fault]:
    """Yield the faults in tokens and positions."""
    position = Stage.POSITION
    yield Fault(
        name="token-fed-twice",
        breaks="the previous token is fed again instead of the next one",
        classes=("append-integrity", "stopping-bookkeeping"),
        stages=frozenset({Stage.TOKEN}),
        program=carriers.steps,
        layers=_whole(Stage.TOKEN),
        make=TokenAgain,
    )
    yield _input_fault(
        "position-from-zero",
        "each call counts positions from 0",
        ("wrong-position", "path-parity"),
        position,
        carriers.steps,
        lambda value: value - value[:, :1],
    )
    yield _input_fault(
        "position-lags",
        "positions lag by one",
        ("off-by-one-position",),
        position,
        carriers.steps,
        lambda value: value - 1,
    )
    yield _input_fault(
        "position-skips-block",
        "positions are counted after the block instead of before it",
        ("wrong-position",),
        position,
        carriers.block,
        lambda value: value + value.shape[1],
    )
    yield Fault(
        name="position-counts-padding",
        breaks="positions count the padding on the left",
        classes=("left-padding",),
        stages=frozenset({position}),
        program=carriers.padded,
        layers=_whole(position, Stage.MASK),
        make=lambda place: InCalls(position, place, _longest_positions),
    )
    yield Fault(
        name="position-survives-crop",
        breaks="positions are counted as if no tokens had been taken back",
        classes=("rollback-crop", "wrong-position"),
        stages=frozenset({position}),
        program=carriers.rollback,
        layers=_whole(position),
        make=lambda place: StalePositions(),
    )


def _longest_positions(positions: Tensor) -> Tensor:
    """Return the positions of the longest row for every row."""
    return positions.amax(dim=0, keepdim=True).expand_as(positions)


def _mask_fault(
    name: str,
    breaks: str,
    classes: tuple[str, ...],
    program: Carrier,
    change: Callable[[Tensor], Tensor],
    layers: Callable[[PlantingSite], Iterable[int | None]] | None = None,
    *,
    fills_window: bool = False,
) -> Fault:
    return Fault(
        name=name,
        breaks=breaks,
        classes=classes,
        stages=_READ,
        program=program,
        layers=layers or (lambda site: site.layers_showing(Stage.MASK)),
        make=lambda place: InCalls(Stage.MASK, place, lambda mask: change(mask.clone())),
        fills_window=fills_window,
    )


def mask_faults() -> Iterable[Fault]:
    """Yield the faults in masks."""
    yield _mask_fault(
        "mask-hides-newest",
        "the mask hides the newest entry from the newest token",
        ("mask-alignment",),
        carriers.steps,
        _hide_newest_from_newest,
    )
    yield _mask_fault(
        "mask-not-causal",
        "with a cache there is no causal mask: the tokens of a block read later tokens",
        ("mask-alignment", "path-parity"),
        carriers.block,
        lambda mask: torch.zeros_like(mask) if mask.is_floating_point() else torch.ones_like(mask),
        lambda site: [n for n in site.layers_showing(Stage.MASK) if n not in site.windowed],
    )
    yield _mask_fault(
        "bias-from-the-wrong-end",
        "a distance bias counts slots from the wrong end",
        ("bias-geometry",),
        carriers.steps,
        _add_reversed_bias,
    )
    windowed = lambda site: [n for n in site.layers_showing(Stage.MASK) if n in site.windowed]  # noqa: E731
    yield _mask_fault(
        "window-too-short",
        "the window hides its oldest entry",
        ("window-eviction",),
        carriers.steps,
        lambda mask: _change_edge(mask, visible=False),
        windowed,
        fills_window=True,
    )
    yield _mask_fault(
        "window-too-long",
        "the window shows one entry too many",
        ("window-eviction",),
        carriers.block,
        lambda mask: _change_edge(mask, visible=True),
        windowed,
        fills_window=True,
    )
    yield _padding_fault("padding-shown", "the mask forgets the padding on the left", torch.ones_like)
    yield _padding_fault(
        "padding-misaligned",
        "the mask of padding is off by one column",
        lambda mask: mask.roll(-1, dims=-1),
    )
    yield Fault(
        name="weights-hide-newest",
        breaks="attention gives the newest entry no weight",
        classes=("mask-alignment",),
        stages=_READ,
        program=carriers.steps,
        layers=lambda site: [] if site.layers_showing(Stage.MASK) else site.layers_showing(Stage.ATTN_WEIGHTS),
        make=lambda place: InCalls(Stage.ATTN_WEIGHTS, place, hide_newest),
    )


def _padding_fault(name: str, breaks: str, change: Callable[[Tensor], Tensor]) -> Fault:
    """Return a fault in the padding mask that the caller passes."""
    return Fault(
        name=name,
        breaks=breaks,
        classes=("left-padding", "mask-alignment"),
        stages=_READ,
        program=carriers.padded,
        layers=_whole(Stage.MASK),
        make=lambda place: InCalls(Stage.MASK, place, change),
    )


def _hide_newest_from_newest(mask: Tensor) -> Tensor:
    mask[..., -1, -1] = torch.finfo(mask.dtype).min if mask.is_floating_point() else False
    return mask


def _add_reversed_bias(mask: Tensor) -> Tensor:
    slope = torch.arange(mask.shape[-1], device=mask.device) * 0.1
    if mask.is_floating_point():
        return mask + slope.to(mask.dtype)
    least = torch.finfo(torch.float64).min
    return torch.where(mask, slope.to(torch.float64), torch.full_like(slope, least, dtype=torch.float64))


def _visible(mask: Tensor) -> Tensor:
    return mask > torch.finfo(mask.dtype).min / 2 if mask.is_floating_point() else mask


def _change_edge(mask: Tensor, *, visible: bool) -> Tensor:
    """Show each token the entry before its oldest one, or hide its oldest one."""
    first = _visible(mask).to(torch.int).argmax(dim=-1, keepdim=True)
    place = (first - 1).clamp(min=0) if visible else first
    if mask.is_floating_point():
        return mask.scatter(-1, place, 0.0 if visible else torch.finfo(mask.dtype).min)
    return mask.scatter(-1, place, visible)


def hide_newest(weights: Tensor) -> Tensor:
    """Return attention's weights without the newest entry's."""
    weights = weights.clone()
    weights[..., -1] = 0
    return weights / weights.sum(dim=-1, keepdim=True)


def value_faults() -> Iterable[Fault]:
    """Yield the faults in values that a call computes."""
    yield Fault(
        name="heads-out-of-order",
        breaks="each head takes its neighbour's new key",
        classes=("wrong-tensor-or-layer",),
        stages=frozenset({Stage.NEW_K}),
        program=carriers.steps,
        layers=lambda site: site.layers_showing(Stage.NEW_K),
        make=lambda place: InCalls(Stage.NEW_K, place, lambda keys: keys.roll(1, dims=1)),
    )
    yield Fault(
        name="rotation-changes",
        breaks="later calls use another rotary table than the one that rotated the entries",
        classes=("rope-length-dependence",),
        stages=frozenset({Stage.MODULE}),
        program=carriers.steps,
        layers=lambda site: [None] if _rotary(site) is not None else [],
        make=lambda place: _scaling(_rotary(place.known_site), place, 0.9),
    )
    yield Fault(
        name="stage-skipped",
        breaks="single-token steps skip a layer's feed-forward part",
        classes=("path-parity",),
        stages=frozenset({Stage.MODULE, Stage.MLP_OUT}),
        program=carriers.steps,
        layers=lambda site: sample_layers(sorted(_last_parts(site))),
        make=lambda place: _scaling(_last_parts(place.known_site).get(place.known_layer), place, 0.0),
    )


def _scaling(at: Site | None, place: Place, factor: float) -> Planting:
    if at is None:
        raise UsageError(f"layer {place.layer} has no place for this fault")
    return InCalls(at, place, lambda value: value * factor)


def _rotary(planting_site: PlantingSite) -> Site | None:
    modules = (site for site in planting_site.shown if site.module is not None and site.layer is None)
    return next((site for site in modules if "rotary" in str(site.module)), None)


def _last_parts(planting_site: PlantingSite) -> dict[int, Site]:
    """Return, for each layer, the last of its direct parts that is neither a norm nor a dropout."""
    last: dict[int, Site] = {}
    for site in planting_site.shown:
        if site.layer is None:
            continue
        part = str(site.module or "").partition(f".{site.layer}.")[2]
        is_part = part != "" and "." not in part and " " not in part
        is_quiet = any(word in part.lower() for word in ("norm", "drop", "ln_"))
        if site.stage is Stage.MLP_OUT or (site.stage is Stage.MODULE and is_part and not is_quiet):
            last[site.layer] = site
    return last
