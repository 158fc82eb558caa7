"""What pages show, and whether it is what comes out.

A page is read from top to bottom, in a folder of its own, as a reader would follow it:

- ``console``: commands behind ``$``, each with the output that is shown; ``...`` skips any lines, and at the end
  of a line the rest of it. ``$?`` is the exit status of the last command.
- ``python`` and ``toml`` whose first line is ``# name.ext``: a file. Any other ``python`` is run; all of a page
  share their names, and a ``text`` after one is what it prints.
- ``diff``: an edit of the file that it names.
- ``sh``: what cannot be run here, such as an installation. What it names is checked to be there.

Numbers are compared as numbers: what follows from weights and tokens agrees to its last digit, or to a hundredth.
A figure of rounding differs from one processor to the next, and has no digits to hold it to: a small gap or noise
stays below what is allowed where the page's table says that, and below what rounding may come to. A quotient by
such a figure, which is beyond a million, stays large; where a change is first seen agrees in its size.
"""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from decimal import Decimal
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from tests.cli.running import run as run_kvproof

from kvproof import Verdict

ROOT = Path(__file__).parents[2]
NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[+-]?\d+)?")
BLOCK = re.compile(r"^```([^\n`]*)\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)
#: What rounding may come to on these pages, in the declared dtype and in float64; what is wrong is over 0.1.
ROUNDING, FLOAT64_ROUNDING = Decimal("0.01"), Decimal("1e-9")
#: A figure below this may be of rounding.
SMALL = Decimal("0.001")
#: What stands before a figure of rounding: the name of its column, or words.
MEASURED = re.compile(r'(float64 )?(?:gap|noise)(?:" value=")?\W*$')
#: The columns of an audit's table, and what its last one may say.
OF_AN_AUDIT = ["scenario", "rows", "gap", "allowed", "noise", "float64 gap", "verdict"]
VERDICTS = frozenset(verdict.value for verdict in Verdict)
#: A test run inside another one leaves alone what is the outer one's.
ALONE = [f"-pno:{plugin}" for plugin in ("cacheprovider", "faulthandler", "xdist", "_cov", "pytest_cov")]
FILE = re.compile(r"# ([\w.-]+\.(?:py|toml))\n")


def blocks(text: str) -> list[tuple[str, str]]:
    """Return a page's blocks, each with its language."""
    return BLOCK.findall(text)


def agree(shown: str, printed: str, before: str = "") -> bool:
    """Return whether a shown number is the printed one, or what another machine may have printed.

    What stands ``before`` it says whether it is of rounding.
    """
    if shown == printed or (shown.isdigit() and printed.isdigit()):
        return shown == printed
    a, b = Decimal(shown), Decimal(printed)
    measured = MEASURED.search(before)
    if measured and abs(a) < SMALL:
        return abs(a) < _bound(measured) > abs(b)
    if abs(a) > 1_000_000:
        return a * b > 0 and abs(b) > 100_000
    if before.endswith("seen from "):
        return bool(a and b) and Decimal("0.1") <= a / b <= 10
    last = Decimal(1).scaleb(int(a.as_tuple().exponent))
    return abs(a - b) <= max(last, abs(a) / 100)


def _bound(measured: re.Match[str]) -> Decimal:
    return FLOAT64_ROUNDING if measured[1] else ROUNDING


def same_line(shown: str, printed: str, columns: list[str] | None = None) -> bool:
    """Return whether two lines agree in their words and in each number; a table's row comes with its columns."""
    if columns is not None:
        return _same_row(shown, printed, columns)
    if shown.endswith(" ..."):
        shown = shown.removesuffix("...")
        words = NUMBER.split(shown)
        found = re.match("".join(f"{re.escape(word)}({NUMBER.pattern})" for word in words[:-1]), printed)
        if found is None or not printed[found.end() :].startswith(words[-1]):
            return False
        printed = printed[: found.end()] + words[-1]
    shown, printed = shown.rstrip(), printed.rstrip()
    words = NUMBER.split(shown)
    numbers = zip(NUMBER.findall(shown), NUMBER.findall(printed), words, strict=False)
    return words == NUMBER.split(printed) and all(agree(a, b, before) for a, b, before in numbers)


def _same_row(shown: str, printed: str, columns: list[str]) -> bool:
    """Return whether two rows of a table agree, with no gap of a match beyond what is allowed."""
    ours, theirs = cells(shown), cells(printed)
    if len(ours) != len(theirs):
        return False
    for row in (dict(zip(columns, ours, strict=True)), dict(zip(columns, theirs, strict=True))):
        if row["verdict"] == "match" and "allowed" in row and Decimal(row["gap"]) > Decimal(row["allowed"]):
            return False
    passes = ours[columns.index("verdict")] in ("match", "rounding")
    for column, a, b in zip(columns, ours, theirs, strict=True):
        is_number = NUMBER.fullmatch(a) is not None and NUMBER.fullmatch(b) is not None
        before = column if passes or column == "noise" else ""
        if not (agree(a, b, before) if is_number else same_line(a, b)):
            return False
    return True


def cells(line: str) -> list[str]:
    """Return what stands in a table's line, cell by cell."""
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def with_columns(lines: list[str]) -> Iterator[tuple[str, list[str] | None]]:
    """Yield each line that is shown, with its columns where it is a row of a table of verdicts.

    A page may show a few rows of an audit's table and skip its head.
    """
    columns = OF_AN_AUDIT
    for line in lines:
        row = cells(line) if line.startswith("| ") else []
        yield line, columns if len(row) == len(columns) and row[-1] in VERDICTS else None
        if row and row[-1] == "verdict":
            columns = row


def assert_shown(shown: str, printed: str) -> None:
    """Hold what is shown against what was printed: all of it, but for what ``...`` lines skip."""
    lines, at = printed.strip("\n").split("\n"), 0
    parts: list[list[tuple[str, list[str] | None]]] = [[]]
    for line, columns in with_columns(shown.strip("\n").split("\n")):
        if line == "...":
            parts.append([])
        else:
            parts[-1].append((line, columns))
    for number, wanted in enumerate(parts):
        starts = [i for i in range(at, len(lines) - len(wanted) + 1) if _stands(wanted, lines, i)]
        if number == 0 and wanted:
            starts = [i for i in starts if i == 0]
        if number == len(parts) - 1 and wanted:
            starts = [i for i in starts if i + len(wanted) == len(lines)]
        part = "\n".join(line for line, _ in wanted)
        assert starts, f"not printed:\n{part}\n\nprinted:\n{printed}"
        at = starts[0] + len(wanted)


def _stands(wanted: list[tuple[str, list[str] | None]], lines: list[str], at: int) -> bool:
    return all(same_line(a, b, columns) for (a, columns), b in zip(wanted, lines[at:], strict=False))


def commands(session: str) -> Iterator[tuple[str, str]]:
    """Yield each command of a console block and the output that is shown."""
    for part in re.split(r"^\$ ", session, flags=re.MULTILINE)[1:]:
        command, _, shown = part.partition("\n")
        yield command, shown


@dataclass
class Reader:
    """Someone who follows a page in a folder, which is the current one."""

    folder: Path
    status: int = 0
    names: dict[str, Any] = field(default_factory=lambda: {"__name__": "page"})

    def follow(self, text: str) -> None:
        """Do what each block of a page says, and hold what it shows against what comes out."""
        printed = ""
        for language, block in blocks(text):
            named = FILE.match(block)
            if language == "console":
                for command, shown in commands(block):
                    assert_shown(shown, self.run(command))
            elif language in ("python", "toml") and named:
                (self.folder / named[1]).write_text(block, "utf-8")
            elif language == "python":
                printed = self.execute(block)
            elif language == "text":
                assert_shown(block, printed)
            elif language == "diff":
                self.edit(block)
            else:
                assert language == "sh" or language.startswith("{"), f"what is a block in {language!r}?"

    def run(self, command: str) -> str:
        """Run a command and return what it prints; kvproof's own, and tests, in this process."""
        command = command.replace("$?", str(self.status))
        words = shlex.split(command)
        if words[0] == "kvproof":
            outcome = run_kvproof(*words[1:])
            self.status = outcome.status
            return outcome.out + outcome.err
        if words[0] == "pytest":
            out = StringIO()
            with redirect_stdout(out):
                self.status = int(pytest.main([*words[1:], *ALONE]))
            return out.getvalue()
        result = subprocess.run(
            ["bash", "-c", command], cwd=self.folder, env=environment(), capture_output=True, text=True
        )
        assert "Traceback" not in result.stderr, result.stderr
        self.status = result.returncode
        return result.stdout

    def execute(self, code: str) -> str:
        """Run a block of Python and return what it prints."""
        out = StringIO()
        with redirect_stdout(out), redirect_stderr(StringIO()):
            exec(compile(code, "page", "exec"), self.names)
        return out.getvalue()

    def edit(self, diff: str) -> None:
        """Change a file as a diff of one place says."""
        head, *lines = diff.rstrip("\n").split("\n")
        file = self.folder / head.removeprefix("--- ")
        old = "".join(f"{line[1:]}\n" for line in lines[1:] if line[0] in " -")
        new = "".join(f"{line[1:]}\n" for line in lines[1:] if line[0] in " +")
        text = file.read_text("utf-8")
        assert text.count(old) == 1, f"{file.name} does not hold, once:\n{old}"
        file.write_text(text.replace(old, new), "utf-8")
        sys.modules.pop(file.stem, None)  # a new process would read it anew


def environment() -> dict[str, str]:
    """Return what commands run under: this environment's programs, one thread, no coverage."""
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith("COVERAGE")},
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
    }
