"""The report's own form: strict JSON."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvproof.contract.codec import CodecError, strict_loads, to_plain
from kvproof.contract.report import VERSION, Report
from kvproof.errors import ReportError


def render(report: Report) -> str:
    """Return the report as JSON, with a line end; non-finite numbers are strings."""
    return json.dumps(to_plain(report), indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def parse(text: str, name: str, on_note: Callable[[str], None] = lambda note: None) -> Report:
    """Return the report that ``text`` holds; raise `ReportError` naming the file and what does not fit.

    ``on_note`` is told what a newer minor version holds that this kvproof does not know, and ignores.
    """
    try:
        plain: Any = strict_loads(text)
    except CodecError as error:
        raise ReportError(f"{name}: {error}") from error
    if not isinstance(plain, dict):
        raise ReportError(f"{name} is not a report: a report is a JSON object")
    major, minor = plain.get("schema_version"), plain.get("schema_minor", 0)
    try:
        VERSION.check(major, minor)
    except CodecError as error:
        raise ReportError(f"{name} {error}") from error
    try:
        return VERSION.read(
            Report, plain, major=major, minor=minor, on_note=lambda note: on_note(f"{name}: {note}")
        )
    except CodecError as error:
        raise ReportError(f"{name}: {error}") from error


def read(file: Path, on_note: Callable[[str], None] = lambda note: None) -> Report:
    """Return a saved report; raise `ReportError` naming the file and what is wrong with it."""
    try:
        text = file.read_text("utf-8")
    except FileNotFoundError as error:
        raise ReportError(f"no such report: {file}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ReportError(f"cannot read {file}: {error}") from error
    return parse(text, str(file), on_note)
