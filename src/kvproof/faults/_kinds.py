"""What a kind of fault of the catalogue says of itself."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from kvproof.contract.stages import Stage
from kvproof.faults._base import Planting
from kvproof.faults._carriers import SEEN_BY, Carrier
from kvproof.faults._places import Place, PlantingSite


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogueFault:
    """A kind of fault, on any subject that lets it be planted."""

    name: str
    breaks: str  #: the contract, in words
    classes: tuple[str, ...]  #: of public cache bugs, those that it stands for
    stages: frozenset[Stage]  #: at one of which it must first show; elsewhere modules alone can show it
    carrier: Carrier
    layers: Callable[
        [PlantingSite], Iterable[int | None]
    ]  #: where it can be planted; none for no layer of its own
    plant: Callable[[Place], Planting]
    keeps: bool = False  #: acts on what a layer's cache keeps
    mixes: bool = False  #: puts one token's, or request's, content in another's place in a layer
    late: bool = False  #: needs a prompt that fills a window

    @property
    def seen_by(self) -> tuple[str, ...]:
        """The scenarios of the catalogue each of which must see it, where the subject has them."""
        return ("window crossing",) if self.late else SEEN_BY[self.carrier]
