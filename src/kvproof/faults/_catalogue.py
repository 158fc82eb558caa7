"""The catalogue: every deliberate fault, where a subject lets it be planted, and the stage it must first show at.

Tokens, positions and masks are changed as the decoder is given them; what a cache keeps is changed between
calls; operations are carried out wrongly. All of them act on a warm cache alone, as the faults of caches do.
"""

from kvproof.faults import _in_caches, _in_calls
from kvproof.faults._kinds import CatalogueFault


def catalogue() -> tuple[CatalogueFault, ...]:
    """Return every fault, those in what a call is given first."""
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
