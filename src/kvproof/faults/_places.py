"""Where faults are planted: what a subject shows in a call and keeps after it, and one place in it."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from kvproof._numerics.taps import Recorder
from kvproof.contract.stages import Site, Stage
from kvproof.errors import UsageError
from kvproof.scenarios import Ability
from kvproof.subjects import Subject

#: With more layers than this, only the first, the middle, and the last one are broken.
_MAX_LAYERS = 4

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlantingSite:
    """What a subject showed in a single-token step on a warm cache, and what its layers kept after it."""

    sequence: tuple[int, ...]
    other: tuple[int, ...]  #: a second sequence of the same length
    shown: dict[Site, Shape]  #: the shape of every value, in the order of computation
    kept: tuple[dict[str, Shape], ...]  #: by layer; empty where tensors cannot be replaced
    windowed: frozenset[int]  #: the layers that kept fewer entries than the session consumed tokens

    def layers_keeping(self, *names: str) -> list[int]:
        """Return the layers to break among those that keep anything, and tensors of all these names."""
        return sample_layers(
            [i for i, tensors in enumerate(self.kept) if tensors and all(name in tensors for name in names)]
        )

    def layers_showing(self, stage: Stage) -> list[int]:
        """Return the layers to break among those that show a stage."""
        return sample_layers(
            sorted({site.layer for site in self.shown if site.stage is stage and site.layer is not None})
        )

    @property
    def appending_layers(self) -> list[int]:
        """The layers that append an entry for every token."""
        layers = (n for n, tensors in enumerate(self.kept) if "k" in tensors and "v" in tensors)
        return [layer for layer in layers if layer not in self.windowed]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a fault is planted. Members that are None are chosen when the fault meets a subject."""

    layer: int | None = None  #: None also for a fault outside the layers, or in all of them
    position: int | None = None  #: how many tokens the cache holds when the fault first acts
    batch_row: int | None = None  #: the only one that is broken; None for all of them
    site: PlantingSite | None = None

    @property
    def known_layer(self) -> int:
        """The layer, for a fault that needs one."""
        if self.layer is None:
            raise UsageError("this fault needs a layer: name one with `at(layer=...)`")
        return self.layer

    @property
    def known_position(self) -> int:
        """The position, for a fault that needs one."""
        if self.position is None:
            raise UsageError("this fault needs a position: name one with `at(position=...)`")
        return self.position

    @property
    def known_site(self) -> PlantingSite:
        """The site, for a fault that depends on what the subject shows or keeps."""
        if self.site is None:
            raise UsageError("this fault depends on the subject: choose its place with `choose_place`")
        return self.site

    @property
    def appending_layers(self) -> list[int]:
        """The layer if one is named, or else every layer that appends an entry for every token."""
        return self.known_site.appending_layers if self.layer is None else [self.layer]


def sample_layers(layers: Sequence[int]) -> list[int]:
    """Return all layers if there are few, or else the first, the middle, and the last one."""
    if len(layers) <= _MAX_LAYERS:
        return list(layers)
    return [layers[0], layers[len(layers) // 2], layers[-1]]


def probe(subject: Subject, sequence: tuple[int, ...], other: tuple[int, ...]) -> PlantingSite:
    """Feed a sequence to a session and note what its last step shows and keeps."""
    recorder = Recorder()
    session = subject.session(tap=recorder)
    if len(sequence) > 1:
        session.extend([sequence[:-1]])
    recorder.take()
    session.extend([sequence[-1:]])
    shown = {site: tuple(value.shape) for site, value in recorder.take().items()}
    kept: tuple[dict[str, Shape], ...] = ()
    if Ability.EDIT in subject.info.abilities:
        tensors = session.cache_tensors()
        kept = tuple({name: tuple(value.shape) for name, value in layer.items()} for layer in tensors)
    windowed = {i for i, layer in enumerate(kept) if _num_slots(layer) < len(sequence)}
    return PlantingSite(sequence=sequence, other=other, shown=shown, kept=kept, windowed=frozenset(windowed))


def _num_slots(layer: dict[str, Shape]) -> int:
    return layer["k"][2] if len(layer.get("k", ())) == 4 else 2**62


def replace_newest(value: Tensor, change: Tensor) -> Tensor:
    """Return a cache tensor with its newest slot replaced."""
    value = value.clone()
    value[:, :, -1:] = change
    return value
