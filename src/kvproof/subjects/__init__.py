"""The seam: what kvproof asks of a decoder, and one adapter file for each kind of decoder."""

from kvproof._numerics.taps import Tap
from kvproof.contract.results import SubjectInfo
from kvproof.contract.stages import Site, Stage
from kvproof.subjects._base import Opening, Session, Subject, limits_of
from kvproof.subjects._cache_values import CacheOps
from kvproof.subjects._callables import CallableSubject
from kvproof.subjects._factory import as_subject
from kvproof.subjects._module import ModuleSubject
from kvproof.subjects._reference import ReferenceSubject

__all__ = [
    "CacheOps",
    "CallableSubject",
    "ModuleSubject",
    "Opening",
    "ReferenceSubject",
    "Session",
    "Site",
    "Stage",
    "Subject",
    "SubjectInfo",
    "Tap",
    "as_subject",
    "limits_of",
]
