"""Writes and reads a report as strict JSON."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvproof.contract.codec import CodecError, strict_loads, to_plain
from kvproof.contract.report import VERSION, Report
from kvproof.errors import ReportError


def render(report: Report) -> str:
    """Return the report as JSON that ends in a newline; non-finite numbers are strings."""
    return json.dumps(to_plain(report), indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def parse(text: str, name: str, on_note: Callable[[str], None] = lambda note: None) -> Report:
    """Return the report that ``text`` holds, as the current version writes it.

    Calls ``on_note`` if keys of a newer minor version were ignored. Raises `ReportError` naming the file and the
    path of what does not fit.
    """
    try:
        plain: Any = strict_loads(text)
    except CodecError as error:
        raise ReportError(f"{name}: {error}") from error
    if not isinstance(plain, dict):
        raise ReportError(f"{name} is not a report: a report is a JSON object")
    try:
        reader = VERSION.reader(plain)
    except CodecError as error:
        raise ReportError(f"{name} {error}") from error
    try:
        report = reader.read(Report, plain)
    except CodecError as error:
        raise ReportError(f"{name}: {error}") from error
    if reader.note is not None:
        on_note(f"{name} {reader.note}")
    return report


def read(file: Path, on_note: Callable[[str], None] = lambda note: None) -> Report:
    """Return a saved report; raise `ReportError` naming the file and the problem. See `parse` for ``on_note``."""
    try:
        text = file.read_text("utf-8")
    except FileNotFoundError as error:
        raise ReportError(f"no such report: {file}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ReportError(f"cannot read {file}: {error}") from error
    return parse(text, str(file), on_note)
