"""Deliberate faults: the cached path broken in one place, to prove that the audit can fail.

The `catalogue` plants on any subject, as far as its abilities reach. The functions beside it plant one fault
each in decoders that show their stages: the reference system's deliberate failures are two of them.
"""

from kvproof.faults import smallest
from kvproof.faults._base import Fault, Planting, plant
from kvproof.faults._catalogue import catalogue
from kvproof.faults._in_stages import (
    cancelling_pair,
    disturbed,
    duplicate_append,
    heads_out_of_order,
    lower_dtype,
    mask_off_by_one,
    missing_append,
    position_off_by_one,
    shared_between_requests,
    stale_slot,
    swapped_keys_and_values,
    token_fed_twice,
    wrong_layer,
    wrong_position,
)
from kvproof.faults._kinds import CatalogueFault
from kvproof.faults._places import Place, PlantingSite, probe

__all__ = [
    "CatalogueFault",
    "Fault",
    "Place",
    "Planting",
    "PlantingSite",
    "cancelling_pair",
    "catalogue",
    "disturbed",
    "duplicate_append",
    "heads_out_of_order",
    "lower_dtype",
    "mask_off_by_one",
    "missing_append",
    "plant",
    "position_off_by_one",
    "probe",
    "shared_between_requests",
    "smallest",
    "stale_slot",
    "swapped_keys_and_values",
    "token_fed_twice",
    "wrong_layer",
    "wrong_position",
]
