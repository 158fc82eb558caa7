"""What a caller can meet has a public address."""

import importlib
import inspect
import types
import typing
from collections.abc import Iterator
from typing import Any

import pytest

import kvproof

DOORS = (
    "",
    ".cli",
    ".conformance",
    ".contract",
    ".errors",
    ".faults",
    ".policies",
    ".pytest_plugin",
    ".reference",
    ".scenarios",
    ".strategies",
    ".subjects",
)
#: Types that a caller never holds, each with the reason.
INSIDE = {"Origin": "what the command line tells a request of where its prompt and model came from"}


def names_of(door: str) -> dict[str, Any]:
    """Return what is public at a door: what it lists, or else what it defines."""
    module = importlib.import_module(f"kvproof{door}")
    names = getattr(module, "__all__", None)
    if names is None:
        return {
            name: value
            for name, value in vars(module).items()
            if not name.startswith("_") and getattr(value, "__module__", None) == module.__name__
        }
    return {name: getattr(module, name) for name in names}


PUBLIC = {f"kvproof{door}.{name}": value for door in DOORS for name, value in names_of(door).items()}


def classes_in(kind: Any) -> Iterator[type]:
    """Yield kvproof's classes in a type, at any depth."""
    if isinstance(kind, list):  # the arguments of a callable
        for part in kind:
            yield from classes_in(part)
    elif typing.get_origin(kind) is not None or isinstance(kind, types.UnionType):
        for part in typing.get_args(kind):
            yield from classes_in(part)
    elif inspect.isclass(kind) and kind.__module__.split(".")[0] == "kvproof":
        yield kind


def hints_of(value: Any) -> Iterator[Any]:
    """Yield the types that a public function or class takes, holds and returns."""
    if inspect.isclass(value):
        yield from typing.get_type_hints(value).values()
        for name, member in vars(value).items():
            if name.startswith("_") and name not in ("__init__", "__call__"):
                continue
            inner = getattr(member, "fget", None) or getattr(member, "__func__", member)
            if inspect.isfunction(inner):
                yield from hints_of(inner)
    elif inspect.isfunction(value):
        names = {
            name.rsplit(".", 1)[1]: each for name, each in PUBLIC.items()
        }  # imported for type checkers alone
        yield from typing.get_type_hints(value, localns=names).values()


def reached() -> dict[type, str]:
    """Return every class that a caller can meet, and where."""
    met: dict[type, str] = {}
    waiting = list(PUBLIC.items())
    while waiting:
        address, value = waiting.pop()
        for kind in {found for hint in hints_of(value) for found in classes_in(hint)}:
            if kind not in met:
                met[kind] = address
                waiting.append((f"{kind.__module__}.{kind.__qualname__}", kind))
    return met


def test_every_type_that_a_caller_can_meet_has_a_public_address():
    public = {value for value in PUBLIC.values() if inspect.isclass(value)}
    private = {kind: address for kind, address in reached().items() if kind not in public}
    assert {kind.__name__ for kind in private} == set(INSIDE), private


@pytest.mark.parametrize("name", ["RowResult", "Step", "Localisation", "LineProblem", "Stage", "GateItem"])
def test_the_walk_reaches_parts_of_parts(name: str):
    (kind,) = (kind for kind in reached() if kind.__name__ == name)
    assert PUBLIC[f"kvproof.contract.{name}"] is kind


def test_every_exception_has_a_public_address():
    def below(kind: type) -> set[type]:
        return {kind, *(found for each in kind.__subclasses__() for found in below(each))}

    for module in ("_assert", "_engine.audit", "_generation.replay", "subjects._targets", "conformance"):
        importlib.import_module(f"kvproof.{module}")
    raised = below(kvproof.KvproofError) | {kvproof.MismatchError}
    assert raised <= {value for value in PUBLIC.values() if inspect.isclass(value)}
