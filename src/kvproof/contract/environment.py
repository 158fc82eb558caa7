"""What a record was made on, as data."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """What the report was made on."""

    kvproof: str
    python: str
    torch: str
    platform: str
    processor: str
    num_threads: int
    created: str  #: UTC, ISO 8601
