"""The smallest change that a check can see: one entry of one layer's cache, scaled, or one whole step."""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from kvproof.faults import _carriers as carriers
from kvproof.faults import _in_calls
from kvproof.faults._base import Fault, Planting
from kvproof.faults._places import Place, PlantingSite
from kvproof.faults._plantings import EditOnce, Layers
from kvproof.scenarios import Scenario
from kvproof.subjects import Session

#: What is scaled: the newest entry of the first two, and of a recurrent state its first row.
TENSORS = ("k", "v", "state")
#: The faults that are one whole step: no smaller one exists. Of each kind the first that has a place is planted.
_STEPS = {"position": ("position-lags",), "mask": ("mask-hides-newest", "weights-hide-newest")}


def entries(site: PlantingSite) -> list[tuple[int, str]]:
    """Return each of the tensors that a subject keeps, with the first layer that keeps it."""
    layers = ((next((n for n, own in enumerate(site.kept) if name in own), None), name) for name in TENSORS)
    return [(layer, name) for layer, name in layers if layer is not None]


def whole_steps(site: PlantingSite, position: int) -> Iterator[tuple[str, Fault]]:
    """Yield what is off by one whole step, a position or a mask, with the fault that makes it so."""
    by_name = {fault.name: fault for fault in (*_in_calls.input_faults(), *_in_calls.mask_faults())}
    for what, names in _STEPS.items():
        for fault in map(by_name.__getitem__, names):
            layers = [] if fault.layers is None else list(fault.layers(site))
            if layers:
                yield what, replace(fault, place=Place(layer=layers[0], position=position, site=site))
                break


def programs(place: Place, num_rows: int) -> Iterator[tuple[Place, Scenario]]:
    """Yield programs in which the entry is changed after the prompt, until they step over so many rows.

    The first one starts at the place. Others take the second sequence, and then shorter prompts.
    """
    site, rows = place.known_site, 0
    for position in range(place.known_position, 0, -1):
        for sequence in (site.sequence, site.other):
            if rows >= num_rows:
                return
            yield replace(place, position=position), carriers.steps_to_end(sequence, (), position)
            rows += len(sequence) - position


def planting(place: Place, tensor: str, change: float) -> Planting:
    """Scale the newest key or value, or the first row of a state, by 1 + ``change``."""

    def scale(layers: Layers, session: Session) -> None:
        own = layers[place.known_layer]
        own[tensor] = _scale(own[tensor], tensor, change)

    return EditOnce(place, scale)


def _scale(value: Tensor, tensor: str, change: float) -> Tensor:
    if tensor == "state":
        return torch.cat([value[:, :1] * (1 + change), value[:, 1:]], dim=1)
    return torch.cat([value[:, :, :-1], value[:, :, -1:] * (1 + change)], dim=2)
