"""A decoder that is broken as real ones are: on its cached path alone."""

from dataclasses import replace

from kvproof._numerics.taps import Tap
from kvproof.faults import wrong_layer
from kvproof.subjects import ReferenceSubject
from kvproof.subjects._base import Opening


class Failing(ReferenceSubject):
    """The reference decoder, whose sessions let layer 1 read layer 0's cache."""

    def _session(self, opening: Opening):
        broken = wrong_layer().plant()()
        return super()._session(replace(opening, tap=both(broken, opening.tap)))

    def _cast(self, dtype):
        return Failing(super()._cast(dtype).checkpoint)


def both(first: Tap, second: Tap) -> Tap:
    return lambda site, value: second(site, first(site, value))
