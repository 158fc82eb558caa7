"""Stores the finished groups of a sweep on disk, so that an interrupted sweep can be resumed."""

import dataclasses
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TypeVar

from kvproof.contract.codec import CodecError, added_in, from_plain, strict_loads, to_plain
from kvproof.contract.sweep_table import VERSION, Conditions, Group, Job
from kvproof.errors import OutputError, UsageError

T = TypeVar("T")

#: The command-line option of a condition.
_OPTIONS = {"length": "--length", "seed": "--seed", "only": "--scenario", "without": "--skip"}


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreHeader:
    """The first line of ``cells.jsonl``."""

    schema_version: int
    schema_minor: int = added_in(1, default=0)
    conditions: Conditions


class Store:
    """The file of finished groups: one header line, then one line for each group, the newest last."""

    def __init__(self, file: IO[bytes], path: Path, groups: dict[Job, Group]) -> None:
        self.file = file
        self.path = path
        self.groups = groups

    def append(self, record: StoreHeader | Group) -> None:
        """Write one line to disk before returning; raise `OutputError` if that fails."""
        line = json.dumps(to_plain(record), allow_nan=False).encode() + b"\n"
        try:
            # One unbuffered call: a signal arrives before or after it, so no partial line is left in a buffer.
            num_bytes = self.file.write(line)
            os.fsync(self.file.fileno())
        except OSError as error:
            raise OutputError(f"cannot write {self.path}: {error.strerror}") from error
        if num_bytes != len(line):
            raise OutputError(f"cannot write {self.path}: only {num_bytes} of {len(line)} bytes were written")


@contextmanager
def open_store(
    folder: Path, conditions: Conditions, *, fresh: bool, on_note: Callable[[str], None]
) -> Iterator[Store]:
    """Open the folder's file of groups, create both if they are missing, and lock out other sweeps.

    A half-written last line is removed and reported to ``on_note``. Raises `UsageError` and `OutputError` as
    `sweep` does.
    """
    path = folder / "cells.jsonl"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = path.open("a+b", buffering=0)
    except OSError as error:
        raise OutputError(f"cannot keep a sweep in {folder}: {error.strerror}") from error
    with file:
        _lock(file, folder)
        file.seek(0)
        text = b"" if fresh else file.read()
        complete = text[: text.rfind(b"\n") + 1]
        groups = _parse_groups(complete, path, conditions) if complete else {}
        if len(complete) < len(text):
            on_note(f"{path} ends in a half-written line; that target will be run again")
        file.truncate(len(complete))
        store = Store(file, path, groups)
        if not complete:
            header = StoreHeader(schema_version=VERSION.major, schema_minor=VERSION.minor, conditions=conditions)
            store.append(header)
        yield store


def _lock(file: IO[bytes], folder: Path) -> None:
    """Refuse a folder that another sweep writes to. Only this process holds the lock, not its children."""
    try:
        import fcntl
    except ImportError:  # a system without such locks
        return
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError) as error:
        raise UsageError(f"another sweep is writing to {folder}; give each sweep its own --out") from error
    except OSError:  # a file system without locks
        return


def _parse_groups(text: bytes, path: Path, conditions: Conditions) -> dict[Job, Group]:
    """Return the newest group of each job; raise `UsageError` if the lines belong to a different sweep."""
    first, *rest = text.decode("utf-8", "replace").splitlines()
    header = _parse_header(first, path)
    for member in dataclasses.fields(Conditions):
        stored, current = getattr(header.conditions, member.name), getattr(conditions, member.name)
        if stored != current:
            name = _OPTIONS.get(member.name, member.name)
            raise UsageError(
                f"{path} holds a sweep with {name} {_format_value(stored)}, but this one has "
                f"{_format_value(current)}: give another --out, or use --fresh to start again"
            )
    groups = [_parse_line(Group, line, path, number) for number, line in enumerate(rest, 2)]
    return {group.job: group for group in groups}


def _parse_header(text: str, path: Path) -> StoreHeader:
    """Return the header. The version is checked first, because the keys of another version may differ."""
    plain = None
    with suppress(CodecError):  # `_parse_line` refuses what is not JSON
        plain = strict_loads(text)
    if isinstance(plain, dict) and "schema_version" in plain:
        try:
            VERSION.reader(plain)
        except CodecError as error:
            raise UsageError(f"{path} {error}; use --fresh to start again") from error
    return _parse_line(StoreHeader, text, path, 1)


def _parse_line(kind: type[T], text: str, path: Path, number: int) -> T:
    try:
        return from_plain(kind, strict_loads(text))
    except CodecError as error:
        raise UsageError(f"{path}, line {number}: {error}; use --fresh to start again") from error


def _format_value(value: object) -> str:
    text = ", ".join(map(str, value)) if isinstance(value, tuple) else value
    return "none" if text is None or text == "" else str(text)
