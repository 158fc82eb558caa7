"""Deliberate faults: the cached path broken in one place, to prove that the audit can fail.

`catalogue` returns every fault that can be planted in any subject, as far as its abilities reach. `find` returns
one of them by name, and `Fault.at` pins it to a layer and a position. The functions `wrong_position`,
`wrong_layer`, `position_off_by_one`, `mask_off_by_one`, `disturbed`, and `cancelling_pair` return faults for
decoders that show their stages, as the reference system's does.
"""

from kvproof.errors import UsageError
from kvproof.faults import _in_caches, _in_calls, smallest
from kvproof.faults._base import Fault, Planting, choose_place, choose_sequences, plant
from kvproof.faults._carriers import NUM_STEPS, Carrier, block
from kvproof.faults._in_rows import fits_one_row, in_last_row
from kvproof.faults._in_stages import (
    cancelling_pair,
    disturbed,
    mask_off_by_one,
    position_off_by_one,
    wrong_layer,
    wrong_position,
)
from kvproof.faults._places import Place, PlantingSite, probe


def catalogue() -> tuple[Fault, ...]:
    """Return every fault of the catalogue.

    Faults in calls come first: they change tokens, positions, masks, and values. Then come faults in caches,
    which change contents between calls, and faults in operations on caches. All of them act on a warm cache
    alone, as the bugs of caches do.
    """
    return (
        *_in_calls.input_faults(),
        *_in_calls.mask_faults(),
        *_in_calls.value_faults(),
        *_in_caches.length_faults(),
        *_in_caches.entry_faults(),
        *_in_caches.foreign_entry_faults(),
        *_in_caches.state_faults(),
        *_in_caches.operation_faults(),
    )


def find(name: str) -> Fault:
    """Return the fault of the catalogue that has this name; `kvproof faults` lists them."""
    by_name = {fault.name: fault for fault in catalogue()}
    if name not in by_name:
        raise UsageError(f"no fault {name!r} in the catalogue; choose from {', '.join(by_name)}")
    return by_name[name]


__all__ = [
    "NUM_STEPS",
    "Carrier",
    "Fault",
    "Place",
    "Planting",
    "PlantingSite",
    "block",
    "cancelling_pair",
    "catalogue",
    "choose_place",
    "choose_sequences",
    "disturbed",
    "find",
    "fits_one_row",
    "in_last_row",
    "mask_off_by_one",
    "plant",
    "position_off_by_one",
    "probe",
    "smallest",
    "wrong_layer",
    "wrong_position",
]
