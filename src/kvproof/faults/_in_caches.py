"""Faults in caches: wrong contents between calls, and wrong crops, reorders, forks, and resets."""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from kvproof.contract.stages import Stage
from kvproof.faults import _carriers as carriers
from kvproof.faults._base import Fault, Planting
from kvproof.faults._carriers import Carrier
from kvproof.faults._places import Place, PlantingSite, replace_newest, sample_layers
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


def _content_fault(
    name: str,
    breaks: str,
    classes: tuple[str, ...],
    stages: frozenset[Stage],
    change: Callable[[dict[str, Tensor], Place], dict[str, Tensor]],
    layers: Callable[[PlantingSite], Iterable[int | None]] = lambda site: site.layers_keeping("k", "v"),
    program: Carrier = carriers.steps,
    *,
    misplaces: bool = False,
) -> Fault:
    """Return a fault that replaces tensors of one layer."""
    return Fault(
        name=name,
        breaks=breaks,
        classes=classes,
        stages=stages,
        program=program,
        layers=layers,
        make=lambda place: EditOnce(place, lambda all_layers, _: _replace(all_layers, place, change)),
        edits_cache=True,
        misplaces=misplaces,
    )


def _replace(
    layers: Layers, place: Place, change: Callable[[dict[str, Tensor], Place], dict[str, Tensor]]
) -> None:
    own = layers[place.known_layer]
    own.update(change(own, place))


def _in_keys_and_values(
    change: Callable[[Tensor], Tensor],
) -> Callable[[dict[str, Tensor], Place], dict[str, Tensor]]:
    """Return the change that treats keys and values alike."""
    return lambda own, place: {name: change(own[name]) for name in ("k", "v")}


def _length_fault(name: str, breaks: str, classes: tuple[str, ...], change: Callable[[Tensor], Tensor]) -> Fault:
    """Return a fault in the number of entries."""

    def change_all(layers: Layers, place: Place) -> None:
        for number in place.appending_layers:
            layers[number].update({tensor: change(layers[number][tensor]) for tensor in ("k", "v")})

    return Fault(
        name=name,
        breaks=breaks,
        classes=classes,
        stages=_LENGTH,
        program=carriers.steps,
        layers=lambda site: [None] if site.appending_layers else [],
        make=lambda place: EditOnce(place, lambda layers, _: change_all(layers, place)),
        edits_cache=True,
    )


def length_faults() -> Iterable[Fault]:
    """Yield the faults in the number of entries."""
    append = ("append-integrity",)
    yield _length_fault(
        "duplicate-append",
        "the newest entry is appended twice",
        append,
        lambda value: torch.cat([value, value[:, :, -1:]], dim=2),
    )
    yield _length_fault(
        "missing-append",
        "the newest entry is never appended",
        append,
        lambda value: value[:, :, :-1],
    )
    yield _length_fault(
        "first-token-missing",
        "the first token is never written",
        append,
        lambda value: value[:, :, 1:],
    )
    yield _length_fault(
        "one-slot-gap",
        "a counter runs ahead: one slot stays empty, and later entries are one slot too far",
        (*append, "off-by-one-position"),
        lambda value: torch.cat([value, torch.zeros_like(value[:, :, :1])], dim=2),
    )


def entry_faults() -> Iterable[Fault]:
    """Yield the faults in keys and values."""
    yield _content_fault(
        "stale-slot",
        "the newest slot holds the same entry as the slot before it",
        ("append-integrity", "buffer-isolation"),
        _ENTRIES,
        _in_keys_and_values(lambda value: replace_newest(value, value[:, :, -2:-1])),
        lambda site: site.layers_keeping("k", "v"),
        misplaces=True,
    )
    yield _content_fault(
        "swapped-kv",
        "keys are stored as values",
        ("wrong-tensor-or-layer",),
        _ENTRIES,
        lambda own, place: {"k": own["v"], "v": own["k"]},
        lambda site: [n for n in site.layers_keeping("k", "v") if site.kept[n]["k"] == site.kept[n]["v"]],
    )
    yield _content_fault(
        "neighbours-row",
        "a batch row keeps its neighbour's entries",
        ("buffer-isolation",),
        _ENTRIES,
        _in_keys_and_values(lambda value: torch.cat([value[:-1], value[-2:-1]])),
        program=carriers.batch,
        misplaces=True,
    )
    yield _content_fault(
        "lower-dtype",
        "keys and values are kept in a lower dtype",
        ("quantised-cache",),
        _ENTRIES,
        _in_keys_and_values(lambda value: value.to(torch.float8_e5m2).to(value.dtype)),
    )
    yield _content_fault(
        "few-bits",
        "keys and values are kept in 4 bits",
        ("quantised-cache",),
        _ENTRIES,
        _in_keys_and_values(_in_four_bits),
    )


def foreign_entry_faults() -> Iterable[Fault]:
    """Yield the faults in which entries belong to another layer, prompt, or position."""
    yield Fault(
        name="another-layers-cache",
        breaks="a layer keeps an earlier layer's entries",
        classes=("wrong-tensor-or-layer",),
        stages=_ENTRIES,
        program=carriers.steps,
        layers=lambda site: sample_layers([n for n in range(len(site.kept)) if _earlier(site, n) is not None]),
        make=lambda place: EditOnce(place, lambda layers, _: _from_earlier(layers, place)),
        edits_cache=True,
    )
    yield Fault(
        name="another-prefix",
        breaks="a layer's entries are those of another prompt of the same length",
        classes=("prefix-reuse-identity",),
        stages=_ENTRIES,
        program=carriers.steps,
        layers=lambda site: site.layers_keeping("k", "v"),
        make=lambda place: EditOnce(place, lambda layers, session: _other_prefix(layers, session, place)),
        edits_cache=True,
        misplaces=True,
    )
    yield Fault(
        name="key-not-rotated",
        breaks="the newest key is stored as if it were at position 0",
        classes=("wrong-position", "rope-length-dependence"),
        stages=_ENTRIES,
        program=carriers.steps,
        layers=lambda site: site.layers_keeping("k", "v")[:1] if site.kept and "k" in site.kept[0] else [],
        make=lambda place: EditOnce(place, lambda layers, session: _not_rotated(layers, session, place)),
        edits_cache=True,
    )


def _in_four_bits(value: Tensor) -> Tensor:
    unit = (value.abs().amax(dim=-1, keepdim=True) / 7).clamp(min=torch.finfo(value.dtype).tiny)
    return (value / unit).round() * unit


def _earlier(site: PlantingSite, layer: int) -> int | None:
    """Return the nearest earlier layer that keeps keys and values of the same shapes."""
    own = site.kept[layer]
    if "k" not in own or "v" not in own:
        return None
    same = (n for n in reversed(range(layer)) if all(site.kept[n].get(x) == own[x] for x in ("k", "v")))
    return next(same, None)


def _from_earlier(layers: Layers, place: Place) -> None:
    earlier = _earlier(place.known_site, place.known_layer)
    assert earlier is not None
    layers[place.known_layer].update({name: layers[earlier][name] for name in ("k", "v")})


def _fresh(session: Session, ids: Sequence[int], layer: int) -> dict[str, Tensor]:
    """Return what a layer of a new session keeps of a prompt."""
    fresh = session.subject.session()
    fresh.extend([ids])
    return dict(fresh.cache_tensors()[layer])


def _other_prefix(layers: Layers, session: Session, place: Place) -> None:
    other = _fresh(session, place.known_site.other[: len(session)], place.known_layer)
    layers[place.known_layer].update({name: other[name] for name in ("k", "v")})


def _not_rotated(layers: Layers, session: Session, place: Place) -> None:
    """Replace the newest entry, key and value: latent attention may rotate a part of either tensor."""
    alone = _fresh(session, session.ids[0][-1:], place.known_layer)
    own = layers[place.known_layer]
    own.update({name: replace_newest(own[name], alone[name]) for name in ("k", "v")})


def _update_fault(name: str, what: str, tensor: str) -> Fault:
    return Fault(
        name=name,
        breaks=f"a step does not update {what}",
        classes=("recurrent-state",),
        stages=_MODULE,
        program=carriers.steps,
        layers=lambda site: site.layers_keeping(tensor),
        make=lambda place: NotUpdated(place, tensor),
        edits_cache=True,
        misplaces=True,
    )


def state_faults() -> Iterable[Fault]:
    """Yield the faults in recurrent states."""
    recurrent = ("recurrent-state",)
    yield _update_fault("state-not-updated", "the recurrent state", "state")
    yield _update_fault("conv-not-updated", "the convolution's inputs", "conv")
    yield _content_fault(
        "state-restarts",
        "the recurrent state restarts from zero",
        recurrent,
        _MODULE,
        lambda own, place: {"state": torch.zeros_like(own["state"])},
        lambda site: site.layers_keeping("state"),
        carriers.block,
    )
    yield _content_fault(
        "conv-off-by-one",
        "the convolution's inputs are kept one place off",
        recurrent,
        _MODULE,
        lambda own, place: {"conv": own["conv"].roll(1, dims=-1)},
        lambda site: site.layers_keeping("conv"),
    )
    yield _content_fault(
        "conv-after-activation",
        "the convolution's newest input is stored after the activation instead of before it",
        recurrent,
        _MODULE,
        lambda own, place: {"conv": _activated(own["conv"])},
        lambda site: site.layers_keeping("conv"),
    )


def _activated(inputs: Tensor) -> Tensor:
    return torch.cat([inputs[..., :-1], torch.nn.functional.silu(inputs[..., -1:])], dim=-1)


def _any_layer(site: PlantingSite) -> Iterable[int | None]:
    return site.layers_keeping()


def _operation_fault(
    name: str,
    breaks: str,
    classes: tuple[str, ...],
    program: Carrier,
    make: Callable[[Place], Planting],
    *,
    stages: frozenset[Stage] = _ENTRIES | _MODULE | _LENGTH,
    layers: Callable[[PlantingSite], Iterable[int | None]] = _any_layer,
) -> Fault:
    """Return a fault in an operation on a cache."""
    return Fault(
        name=name,
        breaks=breaks,
        classes=classes,
        stages=stages,
        program=program,
        layers=layers,
        make=make,
        edits_cache=True,
        misplaces=layers is _any_layer,
    )


def operation_faults() -> Iterable[Fault]:
    """Yield the faults in operations on a cache."""
    yield _operation_fault(
        "rows-not-reordered",
        "a layer's rows stay in place when rows are reordered",
        ("beam-reorder",),
        carriers.beams,
        SkipReorder,
    )
    yield _operation_fault(
        "tail-survives-crop",
        "the layers keep the entries of tokens that were taken back",
        ("rollback-crop",),
        carriers.rollback,
        KeepsTail,
        stages=_LENGTH,
        layers=lambda site: [None] if site.appending_layers else [],
    )
    yield _operation_fault(
        "cache-survives-reset",
        "the layers keep their contents across a reset",
        ("buffer-isolation",),
        carriers.reuse,
        SurvivesReset,
        stages=_LENGTH | _MODULE,
        layers=lambda site: [None] if site.appending_layers or site.layers_keeping("state") else [],
    )
    yield _operation_fault(
        "prefix-by-reference",
        "a shared prompt is passed by reference: one branch writes into the other's layer",
        ("prefix-reuse-identity", "buffer-isolation"),
        carriers.branches,
        Leaking,
    )
    yield _operation_fault(
        "shared-between-requests",
        "requests share a layer's cache",
        ("buffer-isolation",),
        carriers.requests,
        Leaking,
    )
