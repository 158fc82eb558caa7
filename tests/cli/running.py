"""Runs the command line in this process, from its arguments to its exit status."""

import io
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass

import pytest

from kvproof.cli import main


@dataclass(frozen=True)
class Outcome:
    """How a command ended and what it printed."""

    status: int
    out: str
    err: str

    def refused(self, *words: object) -> bool:
        """Whether the command was refused as wrong usage, in one line that holds all of ``words``."""
        return (
            (self.status, self.out) == (2, "")
            and self.err.startswith("kvproof: ")
            and self.err.count("\n") == 1
            and all(str(word) in self.err for word in words)
        )


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def run(*arguments: object, terminal: bool = False) -> Outcome:
    """Run ``kvproof`` with these arguments; with ``terminal``, both its streams are terminals."""
    stream = Terminal if terminal else io.StringIO
    out, err = stream(), stream()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setattr(sys, "argv", ["kvproof", *map(str, arguments)])
        with pytest.raises(SystemExit) as left:
            main()
    assert isinstance(left.value.code, int)
    return Outcome(left.value.code, out.getvalue(), err.getvalue())
