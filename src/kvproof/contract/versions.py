"""Reads files of other versions: reports, ledgers and sweep tables alike.

A version has a major and a minor number. The minor number rises when a member is added (with `codec.added_in`).
The major number rises when a member changes its meaning or is removed. An upgrade then turns the plain JSON of
one version into that of the next.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from kvproof.contract.codec import CodecError, from_plain
from kvproof.contract.text import printable

T = TypeVar("T")

#: Turns an object of one major version into an object of the next.
Upgrade = Callable[[dict[str, Any]], dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Version:
    """The version that kvproof writes, and how to upgrade older major versions to it."""

    what: str  #: the first part of the members that hold it, as in ``schema_version`` and ``schema_minor``
    major: int
    minor: int
    upgrades: Mapping[int, Upgrade]  #: by the major version that each one upgrades

    def reader(self, plain: Mapping[str, Any]) -> "VersionReader":
        """Return a reader for the file whose version ``plain`` names.

        Raises `CodecError` if this kvproof cannot read that version. The text starts with a verb, so that it can
        follow the name of the file.
        """
        major, minor = plain.get(f"{self.what}_version"), plain.get(f"{self.what}_minor", 0)
        oldest = min((*self.upgrades, self.major))
        readable = f"{oldest} to {self.major}" if oldest < self.major else f"{self.major}"
        if type(major) is not int or major < oldest:
            raise CodecError(f"has {self.what} version {major!r}; this kvproof reads {readable}")
        if major > self.major:
            raise CodecError(
                f"has {self.what} version {major}, written by a newer kvproof; this one reads {readable}: "
                "upgrade kvproof"
            )
        if type(minor) is not int or minor < 0:
            raise CodecError(f"has {self.what} minor version {minor!r}, which must be an integer of at least 0")
        return VersionReader(self, major, minor)


class VersionReader:
    """Reads the values of one file. They are returned in the form that the current version writes."""

    def __init__(self, version: Version, major: int, minor: int) -> None:
        self.version = version
        self.major = major
        self.is_newer = major == version.major and minor > version.minor
        self.origin = (
            f"written by a newer kvproof ({version.what} version {major}.{minor}; this one reads up to "
            f"{version.major}.{version.minor})"
        )
        self._unknown: dict[str, None] = {}  #: paths without indices, in the order found

    def read(self, kind: type[T], plain: dict[str, Any]) -> T:
        """Return the ``kind`` that ``plain`` holds; raise `CodecError` naming the path of what does not fit."""
        for major in range(self.major, self.version.major):
            plain = self.version.upgrades[major](plain)
        current = {
            f"{self.version.what}_version": self.version.major,
            f"{self.version.what}_minor": self.version.minor,
        }
        if current.keys() & plain.keys():
            plain = {**plain, **current}
        if not self.is_newer:
            return from_plain(kind, plain)
        unknown: list[str] = []
        try:
            value = from_plain(kind, plain, unknown=unknown)
        except CodecError as error:
            raise CodecError(f"{error}; the file was {self.origin}") from error
        self._unknown |= dict.fromkeys(re.sub(r"\[\d+\]", "[]", path) for path in unknown)
        return value

    @property
    def note(self) -> str | None:
        """What was ignored in a file of a newer minor version, if anything; it can follow the file's name."""
        if not self._unknown:
            return None
        return f"was {self.origin}; ignored unknown keys: {printable(', '.join(self._unknown))}"
