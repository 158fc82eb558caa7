"""What a caller can meet has a public address."""

import dataclasses
import importlib
import inspect
import types
import typing
from typing import Any

import pytest

import kvproof

DOORS = (
    "",
    ".contract",
    ".errors",
    ".scenarios",
    ".policies",
    ".subjects",
    ".faults",
    ".reference",
    ".conformance",
)
CALLS = ("audit", "assert_match", "localise", "generate", "replay", "milestone", "cache_memory")


def parts(kind: Any) -> set[type]:
    """Return every class of kvproof that stands in a type, at any depth, and in the members of those."""
    found: set[type] = set()
    waiting = [kind]
    while waiting:
        each = waiting.pop()
        if typing.get_origin(each) is not None or isinstance(each, types.UnionType):
            waiting += typing.get_args(each)
        elif inspect.isclass(each) and each.__module__.startswith("kvproof") and each not in found:
            found.add(each)
            waiting += typing.get_type_hints(each).values() if dataclasses.is_dataclass(each) else ()
    return found


def public() -> set[Any]:
    modules = [importlib.import_module(f"kvproof{door}") for door in DOORS]
    return {
        value for module in modules for name in dir(module) if inspect.isclass(value := getattr(module, name))
    }


#: Parts of parts of a report, documented on its page.
INSIDE = {"contract.milestone", "contract.results", "contract.sweep_table"}


@pytest.mark.parametrize("name", CALLS)
def test_what_a_public_call_returns_has_a_public_address(name: str):
    returned = typing.get_type_hints(getattr(kvproof, name)).get("return")
    private = parts(returned) - public()
    assert {kind for kind in private if kind.__module__.removeprefix("kvproof.") not in INSIDE} == set()


def test_every_exception_has_a_public_address():
    def below(kind: type) -> set[type]:
        return {kind, *(found for each in kind.__subclasses__() for found in below(each))}

    for module in ("_assert", "_engine.audit", "_generation.replay", "subjects._targets", "conformance"):
        importlib.import_module(f"kvproof.{module}")
    raised = below(kvproof.KvproofError) | {kvproof.MismatchError}
    assert raised <= public()
