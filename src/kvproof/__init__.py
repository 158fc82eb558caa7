"""kvproof: does a decoder's cached path compute the same logits as its uncached path?

The names below load on first use; importing the package imports no torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvproof._assert import MismatchError as MismatchError
    from kvproof._assert import assert_match as assert_match
    from kvproof._engine.audit import audit as audit
    from kvproof._engine.localise import localise as localise
    from kvproof._generation.replay import replay as replay
    from kvproof._generation.requests import generate as generate
    from kvproof._reference_system.milestone import cache_memory as cache_memory
    from kvproof._reference_system.milestone import milestone as milestone
    from kvproof.contract.ledger import Run as Run
    from kvproof.contract.ledger import StopReason as StopReason
    from kvproof.contract.report import Report as Report
    from kvproof.contract.results import Tolerance as Tolerance
    from kvproof.contract.results import Verdict as Verdict
    from kvproof.errors import KvproofError as KvproofError
    from kvproof.errors import UsageError as UsageError
    from kvproof.policies import Greedy as Greedy
    from kvproof.policies import Sample as Sample
    from kvproof.policies import Stops as Stops
    from kvproof.subjects import CacheWays as CacheWays
    from kvproof.subjects import CallableSubject as CallableSubject
    from kvproof.subjects import ModuleSubject as ModuleSubject
    from kvproof.subjects import ReferenceSubject as ReferenceSubject
    from kvproof.subjects import Session as Session
    from kvproof.subjects import Subject as Subject

_HOME = {
    "CacheWays": "kvproof.subjects",
    "CallableSubject": "kvproof.subjects",
    "Greedy": "kvproof.policies",
    "KvproofError": "kvproof.errors",
    "MismatchError": "kvproof._assert",
    "ModuleSubject": "kvproof.subjects",
    "ReferenceSubject": "kvproof.subjects",
    "Report": "kvproof.contract.report",
    "Run": "kvproof.contract.ledger",
    "Sample": "kvproof.policies",
    "Session": "kvproof.subjects",
    "StopReason": "kvproof.contract.ledger",
    "Stops": "kvproof.policies",
    "Subject": "kvproof.subjects",
    "Tolerance": "kvproof.contract.results",
    "UsageError": "kvproof.errors",
    "Verdict": "kvproof.contract.results",
    "assert_match": "kvproof._assert",
    "audit": "kvproof._engine.audit",
    "cache_memory": "kvproof._reference_system.milestone",
    "generate": "kvproof._generation.requests",
    "localise": "kvproof._engine.localise",
    "milestone": "kvproof._reference_system.milestone",
    "replay": "kvproof._generation.replay",
}
_SUBMODULES = ("conformance", "contract", "errors", "faults", "policies", "reference", "scenarios", "subjects")

__all__ = [
    *_HOME,
    *_SUBMODULES,
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    if name in _SUBMODULES:
        return importlib.import_module(f"kvproof.{name}")
    raise AttributeError(f"module 'kvproof' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
