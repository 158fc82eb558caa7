"""The interface that a decoder implements (`Subject`, `Session`), and one adapter for each kind of decoder.

The names below load on first use, so that the list of targets can be read without torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvproof._numerics.taps import Tap as Tap
    from kvproof.contract.results import SubjectInfo as SubjectInfo
    from kvproof.contract.stages import Site as Site
    from kvproof.contract.stages import Stage as Stage
    from kvproof.subjects._base import Generated as Generated
    from kvproof.subjects._base import GeneratedCall as GeneratedCall
    from kvproof.subjects._base import Opening as Opening
    from kvproof.subjects._base import Session as Session
    from kvproof.subjects._base import Subject as Subject
    from kvproof.subjects._base import limits_of as limits_of
    from kvproof.subjects._cache_values import CacheOps as CacheOps
    from kvproof.subjects._callables import CallableSubject as CallableSubject
    from kvproof.subjects._factory import as_subject as as_subject
    from kvproof.subjects._module import ModuleSubject as ModuleSubject
    from kvproof.subjects._reference import ReferenceSubject as ReferenceSubject
    from kvproof.subjects._token_ids import TokenIds as TokenIds

_HOME = {
    "CacheOps": "kvproof.subjects._cache_values",
    "CallableSubject": "kvproof.subjects._callables",
    "Generated": "kvproof.subjects._base",
    "GeneratedCall": "kvproof.subjects._base",
    "ModuleSubject": "kvproof.subjects._module",
    "Opening": "kvproof.subjects._base",
    "ReferenceSubject": "kvproof.subjects._reference",
    "Session": "kvproof.subjects._base",
    "Site": "kvproof.contract.stages",
    "Stage": "kvproof.contract.stages",
    "Subject": "kvproof.subjects._base",
    "SubjectInfo": "kvproof.contract.results",
    "Tap": "kvproof._numerics.taps",
    "TokenIds": "kvproof.subjects._token_ids",
    "as_subject": "kvproof.subjects._factory",
    "limits_of": "kvproof.subjects._base",
}

__all__ = [*_HOME]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'kvproof.subjects' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_HOME[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
