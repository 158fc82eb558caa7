"""What shrinking asks of a model that a file can build without kvproof.

The entry of an adapter in the registry names the module that has such models: its ``writable_model(request,
subject)`` returns the one that stands for an audited subject.
"""

import importlib
from abc import ABC, abstractmethod
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from kvproof._numerics.tolerances import STRUCTURAL_FLOOR
from kvproof.contract.report import AuditRequest
from kvproof.errors import UsageError
from kvproof.scenarios import Scenario
from kvproof.subjects import Subject
from kvproof.subjects._registry import ADAPTERS, find_entry


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The wrong row that a file shows."""

    program: Scenario
    place: tuple[
        int, int, int
    ]  #: the `Extend` that gives it, the batch row, and which of the new tokens it follows
    prefix: tuple[int, ...]
    cached: bool  #: False: from one pass over longer ids, with no cache
    single: bool  #: the file computes in float32, and not in float64
    limit: float  #: the part of the row's scale beyond which the file calls it wrong
    title: str
    sentence: str  #: what was found, in words


class WritableModel(ABC):
    """A model that a file can build, in float64 where it can be."""

    @property
    @abstractmethod
    def subject(self) -> Subject:
        """The model in float64; raises `KvproofError` if it cannot be built."""

    @property
    @abstractmethod
    def num_weights(self) -> int:
        """The number of weights; raises `KvproofError` if the model cannot be built."""

    @property
    @abstractmethod
    def key(self) -> str:
        """What tells this model from other ones."""

    @property
    def least_gap(self) -> float:
        """The smallest gap that is looked for, as a part of the row's scale: below it there is rounding."""
        return STRUCTURAL_FLOOR.value

    @property
    def size(self) -> tuple[int, ...]:
        """How much the model asks of the reader of a file, its weights first."""
        return (self.num_weights,)

    @abstractmethod
    def written_subject(self, *, single: bool) -> Subject:
        """Return the model as a file computes it, in float32 if ``single``."""

    @abstractmethod
    def write(self, found: Found) -> str:
        """Return a file that exits with 1 if the row is wrong and with 0 if it is right.

        Raises `UsageError` for a program that cannot be written out.
        """

    def simplify(self) -> Iterable["WritableModel"]:
        """Return models that could show the same finding and are simpler, the largest steps first."""
        return ()

    def silence(self) -> AbstractContextManager[None]:
        """Hide what the engine logs while many models are tried."""
        return nullcontext()


def check_writable(target: str | None) -> None:
    """Raise `UsageError` if findings on the target's models cannot be written out."""
    entry = find_entry(target)
    if entry is not None and entry.writer is None:
        able = [f"models of {entry.library}" for entry in ADAPTERS if entry.writer and entry.library]
        able += ["decoders that a function returns"]
        raise UsageError(f"{target} is not written out as a file: only {' and '.join(able)} are")


def writable_model(request: AuditRequest, subject: Subject) -> WritableModel:
    """Return what a file can build in place of the subject that was audited."""
    entry = find_entry(request.target)
    assert entry is not None
    assert entry.writer is not None
    model: WritableModel = importlib.import_module(entry.writer).writable_model(request, subject)
    return model
