"""Models of transformers that a file can build: pretrained ones, and random ones that can be made smaller."""

import copy
from abc import abstractmethod
from collections.abc import Iterable
from contextlib import AbstractContextManager
from functools import cached_property

from kvproof._numerics.tolerances import TOP_RUNG
from kvproof._shrinking.models import (
    Pretrained,
    Recipe,
    num_parameters,
    plain_model,
    pretrained_source,
    recipe_of,
    size_of,
    smaller_recipes,
)
from kvproof._shrinking.standalone import standalone
from kvproof._shrinking.writable import Found, WritableModel
from kvproof.contract.report import AuditRequest
from kvproof.subjects import Subject
from kvproof.subjects._transformers import TransformersSubject, quiet


class _TransformersModel(WritableModel):
    """A model and what a file builds it from."""

    source: Recipe | Pretrained
    device: str

    @property
    @abstractmethod
    def subject(self) -> TransformersSubject: ...

    @property
    def num_weights(self) -> int:
        return int(self.subject.model.num_parameters())

    @property
    def key(self) -> str:
        return repr(self.source)

    def written_subject(self, *, single: bool) -> Subject:
        own = self.subject
        model = copy.deepcopy(own.model).float() if single else own.model
        return TransformersSubject(model, name=own.info.name, seed=own.seed, true_float64=False)

    def write(self, found: Found) -> str:
        return standalone(found, self.subject, self.source, self.device)

    def silence(self) -> AbstractContextManager[None]:
        return quiet()


class PretrainedModel(_TransformersModel):
    """A model whose weights lie in a folder, in a GGUF file or on the hub."""

    def __init__(self, subject: TransformersSubject, source: Pretrained, device: str) -> None:
        self._subject, self.source, self.device = subject, source, device

    @property
    def subject(self) -> TransformersSubject:
        """The model that was loaded, in float64."""
        return self._subject


class RandomModel(_TransformersModel):
    """A model of random weights, which is built when its subject is first needed."""

    source: Recipe

    def __init__(self, recipe: Recipe, name: str, device: str) -> None:
        self.source, self.name, self.device = recipe, name, device

    @cached_property
    def subject(self) -> TransformersSubject:
        """The model of the recipe, in float64."""
        return plain_model(self.source, name=self.name, device=self.device)

    @cached_property
    def num_weights(self) -> int:
        """The number of weights, counted without making them."""
        return num_parameters(self.source)

    @property
    def size(self) -> tuple[int, ...]:
        """The number of weights, then how large and how long the configuration is."""
        return size_of(self.source, self.num_weights)

    def simplify(self) -> Iterable[WritableModel]:
        """Return models with fewer layers, with smaller ones, and with more default values."""
        return (RandomModel(recipe, self.name, self.device) for recipe in smaller_recipes(self.source))


def writable_model(request: AuditRequest, subject: Subject) -> WritableModel:
    """Return what a file can build in place of the subject that was audited."""
    assert isinstance(subject, TransformersSubject)
    if subject.seed is not None:
        return RandomModel(recipe_of(subject, request.attention), subject.info.name, request.device)
    assert request.target is not None
    exact = subject.cast(TOP_RUNG)
    assert isinstance(exact, TransformersSubject)
    source = pretrained_source(request.target, request.dtype, request.attention, request.trust_remote_code)
    return PretrainedModel(exact, source, request.device)
