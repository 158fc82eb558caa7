"""Faults in what a cache keeps between calls, and in how it is cropped, reordered, shared and reset."""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from kvproof.contract.stages import Stage
from kvproof.faults import _carriers as carriers
from kvproof.faults._base import Planting
from kvproof.faults._carriers import Carrier
from kvproof.faults._kinds import CatalogueFault
from kvproof.faults._places import Place, PlantingSite, appending_layers, newest, sample_layers
from kvproof.faults._plantings import (
    EditOnce,
    KeepsTail,
    Layers,
    Leaking,
    NotUpdated,
    SkipReorder,
    SurvivesReset,
)
from kvproof.subjects import Session

_ENTRIES = frozenset({Stage.CACHE_K, Stage.CACHE_V})
_LENGTH = frozenset({Stage.CACHE_LEN})
_MODULE = frozenset({Stage.MODULE})


def _kept(
    name: str,
    breaks: str,
    classes: tuple[str, ...],
    stages: frozenset[Stage],
    change: Callable[[dict[str, Tensor], Place], dict[str, Tensor]],
    layers: Callable[[PlantingSite], Iterable[int | None]] = lambda ground: ground.layers("k", "v"),
    carrier: Carrier = carriers.steps,
    *,
    mixes: bool = False,
) -> CatalogueFault:
    """Return a fault that replaces what one layer keeps, after the prompt."""
    return CatalogueFault(
        name=name,
        breaks=breaks,
        classes=classes,
        stages=stages,
        carrier=carrier,
        layers=layers,
        plant=lambda place: EditOnce(place.position, lambda all_layers, _: _replace(all_layers, place, change)),
        keeps=True,
        mixes=mixes,
    )


def _replace(
    layers: Layers, place: Place, change: Callable[[dict[str, Tensor], Place], dict[str, Tensor]]
) -> None:
    own = layers[place.number]
    own.update(change(own, place))


def _both(change: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Tensor], Place], dict[str, Tensor]]:
    """Return the change of keys and values alike."""
    return lambda own, place: {name: change(own[name]) for name in ("k", "v")}


def _appended(
    name: str, breaks: str, classes: tuple[str, ...], change: Callable[[Tensor], Tensor]
) -> CatalogueFault:
    """Return a fault in how many entries the layers keep after the prompt."""

    def change_all(layers: Layers, place: Place) -> None:
        for number in appending_layers(place.ground):
            layers[number].update({tensor: change(layers[number][tensor]) for tensor in ("k", "v")})

    return CatalogueFault(
        name=name,
        breaks=breaks,
        classes=classes,
        stages=_LENGTH,
        carrier=carriers.steps,
        layers=lambda ground: [None] if appending_layers(ground) else [],
        plant=lambda place: EditOnce(place.position, lambda layers, _: change_all(layers, place)),
        keeps=True,
    )


def length_faults() -> Iterable[CatalogueFault]:
    """Yield the faults in how many entries are kept."""
    append = ("append-integrity",)
    yield _appended(
        "duplicate-append",
        "the newest entry is appended twice",
        append,
        lambda value: torch.cat([value, value[:, :, -1:]], dim=2),
    )
    yield _appended(
        "missing-append",
        "the newest entry is never appended",
        append,
        lambda value: value[:, :, :-1],
    )
    yield _appended(
        "first-token-missing",
        "the first token is never written",
        append,
        lambda value: value[:, :, 1:],
    )
    yield _appended(
        "one-slot-gap",
        "a counter runs ahead: one slot is left empty and later entries stand one further",
        (*append, "off-by-one-position"),
        lambda value: torch.cat([value, torch.zeros_like(value[:, :, :1])], dim=2),
    )


def entry_faults() -> Iterable[CatalogueFault]:
    """Yield the faults in keys and values."""
    yield _kept(
        "stale-slot",
        "the newest slot still holds what the one before it holds",
        ("append-integrity", "buffer-isolation"),
        _ENTRIES,
        _both(lambda value: newest(value, value[:, :, -2:-1])),
        lambda ground: ground.layers("k", "v"),
        mixes=True,
    )
    yield _kept(
        "swapped-kv",
        "keys are stored as values",
        ("wrong-tensor-or-layer",),
        _ENTRIES,
        lambda own, place: {"k": own["v"], "v": own["k"]},
        lambda ground: [n for n in ground.layers("k", "v") if ground.kept[n]["k"] == ground.kept[n]["v"]],
    )
    yield _kept(
        "neighbours-row",
        "a batch row keeps its neighbour's entries",
        ("buffer-isolation",),
        _ENTRIES,
        _both(lambda value: torch.cat([value[1:2], value[1:]])),
        carrier=carriers.batch,
        mixes=True,
    )
    yield _kept(
        "lower-dtype",
        "keys and values are kept in a lower dtype",
        ("quantised-cache",),
        _ENTRIES,
        _both(lambda value: value.to(torch.float8_e5m2).to(value.dtype)),
    )
    yield _kept(
        "few-bits",
        "keys and values are kept in 4 bits",
        ("quantised-cache",),
        _ENTRIES,
        _both(_in_four_bits),
    )


def foreign_entry_faults() -> Iterable[CatalogueFault]:
    """Yield the faults in which entries are another layer's, prompt's or position's."""
    yield CatalogueFault(
        name="another-layers-cache",
        breaks="a layer keeps an earlier layer's entries",
        classes=("wrong-tensor-or-layer",),
        stages=_ENTRIES,
        carrier=carriers.steps,
        layers=lambda ground: sample_layers(
            [n for n in range(len(ground.kept)) if _earlier(ground, n) is not None]
        ),
        plant=lambda place: EditOnce(place.position, lambda layers, _: _from_earlier(layers, place)),
        keeps=True,
    )
    yield CatalogueFault(
        name="another-prefix",
        breaks="a layer's entries are those of another prompt of the same length",
        classes=("prefix-reuse-identity",),
        stages=_ENTRIES,
        carrier=carriers.steps,
        layers=lambda ground: ground.layers("k", "v"),
        plant=lambda place: EditOnce(
            place.position, lambda layers, session: _other_prefix(layers, session, place)
        ),
        keeps=True,
        mixes=True,
    )
    yield CatalogueFault(
        name="key-not-rotated",
        breaks="the newest key is stored as if it stood at position 0",
        classes=("wrong-position", "rope-length-dependence"),
        stages=_ENTRIES,
        carrier=carriers.steps,
        layers=lambda ground: ground.layers("k", "v")[:1] if ground.kept and "k" in ground.kept[0] else [],
        plant=lambda place: EditOnce(
            place.position, lambda layers, session: _not_rotated(layers, session, place)
        ),
        keeps=True,
    )


def _in_four_bits(value: Tensor) -> Tensor:
    unit = (value.abs().amax(dim=-1, keepdim=True) / 7).clamp(min=torch.finfo(value.dtype).tiny)
    return (value / unit).round() * unit


def _earlier(ground: PlantingSite, layer: int) -> int | None:
    """Return the nearest earlier layer that keeps keys and values of the same shapes."""
    own = ground.kept[layer]
    if "k" not in own or "v" not in own:
        return None
    same = (n for n in reversed(range(layer)) if all(ground.kept[n].get(x) == own[x] for x in ("k", "v")))
    return next(same, None)


def _from_earlier(layers: Layers, place: Place) -> None:
    earlier = _earlier(place.ground, place.number)
    assert earlier is not None
    layers[place.number].update({name: layers[earlier][name] for name in ("k", "v")})


def _fresh(session: Session, ids: Sequence[int], layer: int) -> dict[str, Tensor]:
    """Return what a layer keeps of a prompt in a session of its own."""
    fresh = session.subject.session()
    fresh.extend([ids])
    return dict(fresh.cache_tensors()[layer])


def _other_prefix(layers: Layers, session: Session, place: Place) -> None:
    other = _fresh(session, place.ground.other[: len(session)], place.number)
    layers[place.number].update({name: other[name] for name in ("k", "v")})


def _not_rotated(layers: Layers, session: Session, place: Place) -> None:
    """Put the newest entry as a fresh session keeps it; latent attention may rotate a part of either tensor."""
    alone = _fresh(session, session.ids[0][-1:], place.number)
    own = layers[place.number]
    own.update({name: newest(own[name], alone[name]) for name in ("k", "v")})


def _not_updated(name: str, what: str, tensor: str) -> CatalogueFault:
    return CatalogueFault(
        name=name,
        breaks=f"a step leaves {what} as it was",
        classes=("recurrent-state",),
        stages=_MODULE,
        carrier=carriers.steps,
        layers=lambda ground: ground.layers(tensor),
        plant=lambda place: NotUpdated(place.number, tensor),
        keeps=True,
        mixes=True,
    )


def state_faults() -> Iterable[CatalogueFault]:
    """Yield the faults in recurrent states."""
    recurrent = ("recurrent-state",)
    yield _not_updated("state-not-updated", "the recurrent state", "state")
    yield _not_updated("conv-not-updated", "the convolution's inputs", "conv")
    yield _kept(
        "state-restarts",
        "the recurrent state starts again from zero",
        recurrent,
        _MODULE,
        lambda own, place: {"state": torch.zeros_like(own["state"])},
        lambda ground: ground.layers("state"),
        carriers.block,
    )
    yield _kept(
        "conv-off-by-one",
        "the convolution's inputs are kept one place off",
        recurrent,
        _MODULE,
        lambda own, place: {"conv": own["conv"].roll(1, dims=-1)},
        lambda ground: ground.layers("conv"),
    )
    yield _kept(
        "conv-after-activation",
        "the convolution's newest input is kept after the activation instead of before",
        recurrent,
        _MODULE,
        lambda own, place: {"conv": _activated(own["conv"])},
        lambda ground: ground.layers("conv"),
    )


def _activated(inputs: Tensor) -> Tensor:
    return torch.cat([inputs[..., :-1], torch.nn.functional.silu(inputs[..., -1:])], dim=-1)


def _carried_out(
    name: str,
    breaks: str,
    classes: tuple[str, ...],
    carrier: Carrier,
    plant: Callable[[Place], Planting],
    *,
    stages: frozenset[Stage] = _ENTRIES | _MODULE | _LENGTH,
    layers: Callable[[PlantingSite], Iterable[int | None]] = PlantingSite.keeping,
) -> CatalogueFault:
    """Return a fault in an operation on what is kept."""
    return CatalogueFault(
        name=name,
        breaks=breaks,
        classes=classes,
        stages=stages,
        carrier=carrier,
        layers=layers,
        plant=plant,
        keeps=True,
        mixes=layers is PlantingSite.keeping,
    )


def operation_faults() -> Iterable[CatalogueFault]:
    """Yield the faults in how operations are carried out."""
    yield _carried_out(
        "rows-not-reordered",
        "a layer's rows stay where they are when rows are reordered",
        ("beam-reorder",),
        carriers.beams,
        SkipReorder,
    )
    yield _carried_out(
        "tail-survives-crop",
        "the layers keep the entries of tokens that were taken back",
        ("rollback-crop",),
        carriers.rollback,
        KeepsTail,
        stages=_LENGTH,
        layers=lambda ground: [None] if appending_layers(ground) else [],
    )
    yield _carried_out(
        "cache-survives-reset",
        "the layers keep what they held before a reset",
        ("buffer-isolation",),
        carriers.reuse,
        SurvivesReset,
        stages=_LENGTH | _MODULE,
        layers=lambda ground: [None] if appending_layers(ground) or ground.layers("state") else [],
    )
    yield _carried_out(
        "prefix-by-reference",
        "a shared prompt is handed out by reference: one branch writes into the other's layer",
        ("prefix-reuse-identity", "buffer-isolation"),
        carriers.branches,
        Leaking,
    )
    yield _carried_out(
        "shared-between-requests",
        "requests share a layer's cache",
        ("buffer-isolation",),
        carriers.requests,
        Leaking,
    )
