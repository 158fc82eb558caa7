"""The seam: what kvproof asks of a decoder, and one adapter file for each kind of decoder."""

from kvproof.subjects._base import Session, Subject, limits_of
from kvproof.subjects._reference import ReferenceSubject

__all__ = ["ReferenceSubject", "Session", "Subject", "limits_of"]
