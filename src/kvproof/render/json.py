"""The report's own form: strict JSON."""

import json
from pathlib import Path
from typing import Any

from kvproof.contract.codec import CodecError, from_plain, strict_loads, to_plain
from kvproof.contract.report import SCHEMA_VERSION, Report
from kvproof.errors import ReportError


def render(report: Report) -> str:
    """Return the report as JSON, with a line end; non-finite numbers are strings."""
    return json.dumps(to_plain(report), indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def parse(text: str, name: str) -> Report:
    """Return the report that ``text`` holds; raise `ReportError` naming the file and what does not fit."""
    try:
        plain: Any = strict_loads(text)
    except CodecError as error:
        raise ReportError(f"{name}: {error}") from error
    version = plain.get("schema_version") if isinstance(plain, dict) else None
    if version != SCHEMA_VERSION:
        raise ReportError(f"{name} has schema version {version!r}; this kvproof reads {SCHEMA_VERSION}")
    try:
        return from_plain(Report, plain)
    except CodecError as error:
        raise ReportError(f"{name}: {error}") from error


def read(file: Path) -> Report:
    """Return a saved report; raise `ReportError` naming the file and what is wrong with it."""
    try:
        text = file.read_text("utf-8")
    except FileNotFoundError as error:
        raise ReportError(f"no such report: {file}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ReportError(f"cannot read {file}: {error}") from error
    return parse(text, str(file))
