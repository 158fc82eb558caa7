"""The smallest change that a check can see: one entry of one layer's cache, scaled."""

import torch
from torch import Tensor

from kvproof.faults import _carriers as carriers
from kvproof.faults._base import Planting
from kvproof.faults._places import Place, PlantingSite
from kvproof.faults._plantings import EditOnce, Layers
from kvproof.scenarios import Scenario
from kvproof.subjects import Session


def entry(ground: PlantingSite) -> tuple[int, str] | None:
    """Return the first layer that keeps keys, or a state, and the tensor's name; None where none does."""
    for tensor in ("k", "state"):
        for layer, tensors in enumerate(ground.kept):
            if tensor in tensors:
                return layer, tensor
    return None


def program(place: Place) -> Scenario:
    """Return the program in which the entry is changed after the prompt."""
    return carriers.steps(place.ground.sequence, place.ground.other, place.position)


def planting(place: Place, tensor: str, change: float) -> Planting:
    """Scale the newest key, or the first row of a state, by 1 + ``change``."""

    def scale(layers: Layers, session: Session) -> None:
        layers[place.number][tensor] = _scaled(layers[place.number][tensor], tensor, change)

    return EditOnce(place.position, scale)


def _scaled(value: Tensor, tensor: str, change: float) -> Tensor:
    if tensor == "k":
        return torch.cat([value[:, :, :-1], value[:, :, -1:] * (1 + change)], dim=2)
    return torch.cat([value[:, :1] * (1 + change), value[:, 1:]], dim=1)
