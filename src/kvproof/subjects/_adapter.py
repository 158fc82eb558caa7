"""What the module of an engine offers the registry, and how a target is loaded."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path

from kvproof.subjects._base import Subject


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """How a target is loaded, and what loading it may do."""

    dtype: str | None = None  #: the declared dtype, by torch's name; None for the adapter's default
    seed: int = 0  #: of a random model's weights
    attention: str = "eager"
    device: str = "cpu"
    trust_remote_code: bool = False  #: run code that comes with the model
    network: bool = False  #: download a model that is not in the local hub cache
    ids: tuple[int, ...] | None = None  #: the only token ids that programs feed
    avoid_ids: tuple[int, ...] = ()  #: token ids that no program feeds
    config: Path | None = None  #: instead of a target: a random model of this configuration


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A target, taken apart."""

    text: str  #: as it was typed
    scheme: str | None  #: the word before the colon, if an adapter has that scheme
    rest: str  #: what follows the scheme, or all of the text


class Adapter(ABC):
    """What an engine's module offers as ``ADAPTER``, besides its `Subject`."""

    @abstractmethod
    def load(self, target: Target, options: LoadOptions) -> Subject:
        """Return the subject that a target names; raise `UsageError` for one that cannot be loaded."""

    def adopt(self, decoder: object, name: str | None) -> Subject | None:
        """Return a subject for one of the engine's own objects, or None for any other object."""
        return None

    def list_targets(self) -> tuple[str, ...]:
        """Return every target that can be loaded without any file, for a sweep of all of them."""
        return ()
