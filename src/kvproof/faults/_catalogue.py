"""The catalogue: every deliberate fault, where a subject lets it be planted, and the stage it must first show at.

Tokens, positions and masks are changed as the decoder is given them; what a cache keeps is changed between
calls; operations are carried out wrongly. All of them act on a warm cache alone, as the faults of caches do.
"""

from kvproof.faults import _entries, _given
from kvproof.faults._kinds import CatalogueFault


def catalogue() -> tuple[CatalogueFault, ...]:
    """Return every fault, those in what a call is given first."""
    return (
        *_given.in_what_is_fed(),
        *_given.in_masks(),
        *_given.in_values(),
        *_entries.in_entries(),
        *_entries.in_states(),
        *_entries.in_operations(),
    )
