"""The smallest change that a check can see: one entry of one layer's cache, scaled."""

import torch
from torch import Tensor

from kvproof.faults import _carriers as carriers
from kvproof.faults._base import Planting
from kvproof.faults._places import Place, PlantingSite
from kvproof.faults._plantings import EditOnce, Layers
from kvproof.scenarios import Scenario
from kvproof.subjects import Session


def entry(site: PlantingSite) -> tuple[int, str] | None:
    """Return the first layer that keeps keys, or else a state, and the tensor's name; None if no layer does."""
    for tensor in ("k", "state"):
        for layer, tensors in enumerate(site.kept):
            if tensor in tensors:
                return layer, tensor
    return None


def program(place: Place) -> Scenario:
    """Return the program in which the entry is changed after the prompt."""
    site = place.known_site
    return carriers.steps(site.sequence, site.other, place.known_position)


def planting(place: Place, tensor: str, change: float) -> Planting:
    """Scale the newest key, or the first row of a state, by 1 + ``change``."""

    def scale(layers: Layers, session: Session) -> None:
        own = layers[place.known_layer]
        own[tensor] = _scale(own[tensor], tensor, change)

    return EditOnce(place, scale)


def _scale(value: Tensor, tensor: str, change: float) -> Tensor:
    if tensor == "k":
        return torch.cat([value[:, :, :-1], value[:, :, -1:] * (1 + change)], dim=2)
    return torch.cat([value[:, :1] * (1 + change), value[:, 1:]], dim=1)
