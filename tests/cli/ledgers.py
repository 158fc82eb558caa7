"""Reads, edits and judges ledgers for the tests of replay."""

import json
from collections.abc import Callable
from typing import Any

from .running import Outcome

Lines = list[dict[str, Any]]
Edit = Callable[[Any], Any]


def lines_of(text: str) -> Lines:
    return [json.loads(line) for line in text.splitlines()]


def text_of(lines: Lines) -> str:
    return "".join(f"{json.dumps(line)}\n" for line in lines)


def edited(text: str, line: int, path: tuple[str | int, ...], edit: Any) -> Lines:
    """Return the ledger's lines with one member changed; ``line`` counts from 1, ``edit`` may be a function."""
    lines = lines_of(text)
    place: Any = lines[line - 1]
    for key in path[:-1]:
        place = place[key]
    value = edit(place[path[-1]]) if callable(edit) else edit
    assert json.dumps(value) != json.dumps(place[path[-1]]), "the edit changes nothing"
    place[path[-1]] = value
    return lines


def found(outcome: Outcome, line: int, member: str) -> bool:
    """Whether exactly one problem was told, of this member in this line, and the command failed."""
    return (
        (outcome.status, outcome.out) == (1, "")
        and f": line {line}: {member} is " in outcome.err
        and outcome.err.count("\n") == 1
    )
