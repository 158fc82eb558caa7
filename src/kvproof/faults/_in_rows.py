"""Faults in one row of a batch alone: the last one, which a check of the first row would miss."""

import dataclasses

import torch
from torch import Tensor

from kvproof._numerics.taps import Tap
from kvproof.contract.stages import Site, Stage
from kvproof.faults import _carriers as carriers
from kvproof.faults._base import Fault, Planting
from kvproof.faults._plantings import Layers, copies
from kvproof.subjects import Session


def fits_one_row(fault: Fault) -> bool:
    """Return whether a fault can break one row of a batch alone: all rows of a cache have as many entries."""
    return fault.program in (carriers.steps, carriers.batch) and Stage.CACHE_LEN not in fault.stages


def in_last_row(fault: Fault, num_rows: int) -> Fault:
    """Return a fault that acts in the last of so many batch rows alone."""
    make, place = fault.make, dataclasses.replace(fault.place, batch_row=num_rows - 1)
    return dataclasses.replace(
        fault,
        make=lambda place: _InLastRow(make(place), edits=fault.edits_cache),
        program=carriers.rows_of(num_rows),
        place=place,
    )


class _InLastRow(Planting):
    """Takes another planting's changes in the last batch row, and none in the rows before it."""

    def __init__(self, planting: Planting, *, edits: bool) -> None:
        super().__init__(lambda: _LastRowTap(planting()))
        self.planting, self.edits = planting, edits

    def after_call(self, session: Session) -> None:
        """Let the other planting act, and put the earlier rows back."""
        if not self.edits:
            return
        before = [copies(session, layer) for layer in range(len(session.cache_tensors()))]
        self.planting.after_call(session)

        def put_back(layers: Layers) -> None:
            for own, old in zip(layers, before, strict=True):
                own.update({name: _join(old[name], value) for name, value in own.items() if name in old})

        session.edit(put_back)


class _LastRowTap:
    def __init__(self, tap: Tap) -> None:
        self.tap = tap
        self.num_rows = 1

    def __call__(self, site: Site, value: Tensor, /) -> Tensor:
        if site.stage is Stage.TOKEN:
            self.num_rows = value.shape[0]
        changed = self.tap(site, value)
        if changed is value:
            return value
        if value.shape[0] == 1:  # one value for all rows, as of positions
            value, changed = (v.expand(self.num_rows, *v.shape[1:]) for v in (value, changed))
        return _join(value, changed)


def _join(value: Tensor, changed: Tensor) -> Tensor:
    """Return ``value`` with its last row replaced."""
    return torch.cat([value[:-1], changed[-1:].to(value.dtype)])
