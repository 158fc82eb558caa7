"""How files of other versions are read: reports, ledgers and tables alike.

A version is a major and a minor number. The minor one rises when a member is added, with `codec.added_in`; the
major one when a member changes its meaning or goes away, and then an upgrade turns the older file into the newer
form, step by step.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from kvproof.contract.codec import CodecError, from_plain

T = TypeVar("T")

#: Turns plain JSON of one major version into that of the next.
Upgrade = Callable[[dict[str, Any]], dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Version:
    """The version of a contract, and how older major versions are brought up to it."""

    what: str  #: the kind of file, for messages
    major: int
    minor: int
    upgrades: Mapping[int, Upgrade]  #: from each older major version to the next

    def check(self, major: object, minor: object) -> bool:
        """Return whether a file of this version may hold members that this kvproof does not know.

        Raises `CodecError` naming the version if it cannot be read.
        """
        oldest = min((*self.upgrades, self.major))
        readable = f"{oldest} to {self.major}" if oldest < self.major else f"{self.major}"
        if type(major) is not int or not oldest <= major:
            raise CodecError(f"has {self.what} version {major!r}; this kvproof reads {readable}")
        if major > self.major:
            raise CodecError(
                f"has {self.what} version {major}, written by a newer kvproof; this one reads {readable}: "
                "upgrade kvproof"
            )
        if type(minor) is not int or minor < 0:
            raise CodecError(f"has {self.what} version {major} and minor version {minor!r}, which is no number")
        return major == self.major and minor > self.minor

    def read(
        self,
        kind: type[T],
        plain: dict[str, Any],
        *,
        major: object,
        minor: object,
        on_note: Callable[[str], None],
    ) -> T:
        """Return what a file of a version holds, as the present one writes it.

        ``on_note`` is told which members a newer minor version has that this kvproof does not know. Raises
        `CodecError` naming what does not fit.
        """
        is_newer = self.check(major, minor)
        assert isinstance(major, int)
        for step in range(major, self.major):
            plain = self.upgrades[step](plain)
        unknown: list[str] | None = [] if is_newer else None
        try:
            value = from_plain(kind, plain, unknown=unknown)
        except CodecError as error:
            raise CodecError(f"{error}{self.newer(minor)}" if is_newer else str(error)) from error
        if unknown:
            on_note(f"ignored {', '.join(unknown)}{self.newer(minor)}")
        return value

    def newer(self, minor: object) -> str:
        """Say that a file is of a newer minor version."""
        return (
            f": it was written by a newer kvproof ({self.what} version {self.major}.{minor}; this one knows "
            f"{self.major}.{self.minor})"
        )
