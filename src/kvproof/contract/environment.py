"""Describes the software and hardware that a record was made with."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """The software and hardware that a record was made with."""

    kvproof: str
    python: str
    torch: str
    platform: str
    processor: str
    num_threads: int
    created: str  #: UTC, ISO 8601
