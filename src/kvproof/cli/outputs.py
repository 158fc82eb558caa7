"""What a command prints and writes; a closed pipe or a full disk raises `OutputError` and loses nothing else."""

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvproof.cli.options import EXIT_OUTPUT
from kvproof.errors import OutputError

if TYPE_CHECKING:
    from kvproof.contract.report import Report
    from kvproof.reference import Checkpoint
    from kvproof.render.terminal import Look


def write_outputs(outputs: list[Callable[[], None]], status: int) -> int:
    """Run every output; one that fails does not lose the others, is told once, and shows in the exit status."""
    told = set[str]()
    for write in outputs:
        try:
            write()
        except OutputError as error:
            if str(error) not in told:
                complain(str(error))
            told.add(str(error))
            status = status or EXIT_OUTPUT
    return status


def write_report(report: "Report", folder: Path) -> None:
    """Write a report as JSON, for tools, and as a page, for people."""
    from kvproof._system.files import write_whole
    from kvproof.render import html, json

    write_whole(folder / "report.json", json.render(report).encode())
    write_whole(folder / "report.html", html.render(report).encode())


def save_checkpoint(weights: "Checkpoint", path: Path) -> None:
    """Write a checkpoint as safetensors."""
    from kvproof.reference import save_checkpoint as save

    save(weights, path)


def print_report(report: "Report", *, as_json: bool, quiet: bool) -> None:
    """Print a report as JSON, as one sentence, or for a person."""
    if as_json:
        from kvproof.render.json import render as as_text

        text = as_text(report)
    elif quiet:
        text = f"{report.summary}\n"
    else:
        from kvproof.render.terminal import render

        width, look = _terminal()
        text = render(report, width=width, look=look)
    print_text(text)


def print_text(text: str) -> None:
    """Print text as it is; a closed pipe or a full disk raises `OutputError`."""
    try:
        click.echo(text, nl=False, color=True)
        if sys.stdout is None:
            raise OutputError("cannot write to standard output: it is closed")
    except OSError as error:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - the interpreter flushes it when it exits
        raise OutputError(f"cannot write to standard output: {error.strerror}") from error


def _terminal() -> "tuple[int, Look]":
    import shutil

    from kvproof.render.terminal import Look

    forced = bool(os.environ.get("FORCE_COLOR"))
    if (sys.stdout is None or not sys.stdout.isatty()) and not forced:
        return 100, Look.PLAIN
    width = max(80, shutil.get_terminal_size((100, 24)).columns)
    if os.environ.get("TERM") == "dumb" and not forced:
        return width, Look.PLAIN
    return width, Look.MONO if os.environ.get("NO_COLOR") else Look.COLOUR


def write_milestone(report: "Report", weights: "Checkpoint", folder: Path) -> None:
    """Write the milestone's ledgers, checkpoint and report into a folder."""
    from kvproof._system.files import write_whole
    from kvproof.contract.ledger import ledger_lines

    assert report.milestone is not None
    make_folder(folder)
    for pair in report.milestone.runs[:2]:
        lines = "".join(f"{line}\n" for line in ledger_lines(pair.cached))
        write_whole(folder / f"{pair.name}.jsonl", lines.encode())
    save_checkpoint(weights, folder / "checkpoint.safetensors")
    write_report(report, folder)


def complain(message: str) -> None:
    """Say what is wrong on standard error; where that is closed or full, the exit status says it alone."""
    with suppress(OSError):
        click.echo(f"kvproof: {message}", err=True)


def make_folder(folder: Path) -> Path:
    """Make a folder for reports; raise `OutputError` where that cannot be."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"cannot make the report folder {folder}: {error.strerror}") from error
    return folder
