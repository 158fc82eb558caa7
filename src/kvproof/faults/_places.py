"""What a subject offers to plant faults in: what its calls show, and what its layers keep."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from kvproof._numerics.taps import Recorder
from kvproof.contract.stages import Site, Stage
from kvproof.scenarios import Ability
from kvproof.subjects import Subject

#: Of more layers, the first, the middle one and the last are broken.
MAX_LAYERS = 4

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlantingSite:
    """What one single-token step on a warm cache showed and left behind."""

    subject: Subject
    sequence: tuple[int, ...]
    other: tuple[int, ...]
    shown: dict[Site, Shape]  #: every value, in the order in which they were computed
    kept: tuple[dict[str, Shape], ...]  #: by layer; empty where tensors cannot be replaced
    windowed: frozenset[int]  #: layers that kept fewer entries than tokens were consumed

    def layers(self, *names: str) -> list[int]:
        """Return the layers to break that keep tensors of all these names."""
        found = [i for i, tensors in enumerate(self.kept) if all(name in tensors for name in names)]
        return sample_layers(found)

    def keeping(self) -> list[int]:
        """Return the layers to break, of those that keep anything."""
        return sample_layers([i for i, tensors in enumerate(self.kept) if tensors])

    def showing(self, stage: Stage) -> list[int]:
        """Return the layers to break that show a stage."""
        return sample_layers(
            sorted({site.layer for site in self.shown if site.stage is stage and site.layer is not None})
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a fault is planted."""

    layer: int | None
    position: int  #: how many tokens the prompt holds
    ground: PlantingSite

    @property
    def number(self) -> int:
        """The layer, of a fault that has one."""
        assert self.layer is not None
        return self.layer


def sample_layers(layers: Sequence[int]) -> list[int]:
    """Return all of a few layers; of more, the first, the middle one and the last."""
    if len(layers) <= MAX_LAYERS:
        return list(layers)
    return [layers[0], layers[len(layers) // 2], layers[-1]]


def probe(subject: Subject, sequence: tuple[int, ...], other: tuple[int, ...]) -> PlantingSite:
    """Feed a sequence to a session and note what its last step shows and leaves behind."""
    recorder = Recorder()
    session = subject.session(tap=recorder)
    session.extend([sequence[:-1]])
    recorder.take()
    session.extend([sequence[-1:]])
    shown = {site: tuple(value.shape) for site, value in recorder.take().items()}
    kept: tuple[dict[str, Shape], ...] = ()
    if Ability.EDIT in subject.info.abilities:
        tensors = session.cache_tensors()
        kept = tuple({name: tuple(value.shape) for name, value in layer.items()} for layer in tensors)
    windowed = {i for i, layer in enumerate(kept) if _num_slots(layer) < len(sequence)}
    return PlantingSite(
        subject=subject, sequence=sequence, other=other, shown=shown, kept=kept, windowed=frozenset(windowed)
    )


def _num_slots(layer: dict[str, Shape]) -> int:
    return layer["k"][2] if len(layer.get("k", ())) == 4 else 2**62


def appending_layers(ground: PlantingSite) -> list[int]:
    """Return the layers whose entries grow with the tokens: faults in their number break all of them alike."""
    layers = (n for n, tensors in enumerate(ground.kept) if "k" in tensors and "v" in tensors)
    return [layer for layer in layers if layer not in ground.windowed]


def newest(value: Tensor, change: Tensor) -> Tensor:
    """Return a cache tensor with its newest slot replaced."""
    value = value.clone()
    value[:, :, -1:] = change
    return value
