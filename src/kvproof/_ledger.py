"""The ledger: the replayable record of one generation, as frozen data and as JSON lines.

A file holds one header, one line a step, and one end. Each step can be re-run from its own line: it holds
the generator's state before the draw, and every consumed token stands in the lines before it.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from kvproof._codec import CodecError, from_plain, strict_loads, to_plain
from kvproof._environment import Environment
from kvproof._errors import LedgerError
from kvproof.policies import Policy, Stops

#: Rises when a member changes its meaning or goes away.
LEDGER_VERSION = 1


class StopReason(StrEnum):
    """Why a request ended."""

    EOS = "eos"  #: the declared end token was returned
    CONTEXT = "context"  #: the last position is consumed; what it returned cannot be fed back
    MAX_TOKENS = "max_tokens"  #: as many tokens as asked for were returned


class MarginVerdict(StrEnum):
    """Whether rounding could have changed the choice of the most likely token at this step."""

    SAFE = "safe"  #: the margin exceeds twice the measured error: no rounding can flip it
    EXPLAINED_FLIP = "explained flip"  #: the margin lies within it: rounding flips, or may flip, the choice
    UNEXPLAINED_FLIP = "unexplained flip"  #: the paths choose differently beyond it: a bug
    TIE = "tie"  #: the two largest logits are equal; the tie rule decides


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One vocabulary entry and its logit or probability."""

    id: int
    token: str
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """What a generation started from."""

    kind: Literal["header"] = "header"
    ledger_version: int
    subject: str
    subject_digest: str
    subject_seed: int | None  #: the training seed that recreates the subject, where there is one
    dtype: str
    path: Literal["cached", "uncached"]
    environment: Environment
    policy: Policy
    stops: Stops
    prompt: tuple[int, ...]
    prompt_tokens: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One returned token and everything it follows from."""

    kind: Literal["step"] = "step"
    step: int
    consumed: tuple[int, ...]  #: the ids fed in this step: the prompt at step 0, then one
    consumed_tokens: str
    position: int  #: absolute position of the last of them
    cache_len: int  #: tokens whose keys and values the cache holds after the call
    logits_digest: str  #: SHA-256 of the row's bytes
    top_logits: tuple[Entry, ...]  #: the largest logits of the original row, largest first
    probabilities: tuple[Entry, ...]  #: what the policy kept, in its own order, transformed
    draw: int | None  #: index into ``probabilities``, for a policy that draws
    chosen: int
    chosen_token: str
    generator_before: str | None  #: base64; None for a policy that draws nothing
    generator_after: str | None
    margin: float  #: largest minus second largest logit
    error: float  #: gap between the cached and the uncached row at this step
    margin_verdict: MarginVerdict


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """How a generation ended."""

    kind: Literal["end"] = "end"
    stop_reason: StopReason | None
    problem: str | None  #: the refusal that ended a request which no stop rule did
    tokens: str  #: the whole trace, the prompt included


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One whole generation. ``end`` is None where the record was cut off."""

    header: Header
    steps: tuple[Step, ...]
    end: End | None

    @property
    def returned(self) -> tuple[int, ...]:
        """The ids of the returned tokens."""
        return tuple(step.chosen for step in self.steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerFile:
    """A ledger as it was read; ``damage`` tells what is wrong with its tail."""

    run: Run
    damage: str | None


def ledger_lines(run: Run) -> Iterator[str]:
    """Yield the run's JSON lines, without line ends."""
    for line in (run.header, *run.steps, *((run.end,) if run.end else ())):
        yield json.dumps(to_plain(line), ensure_ascii=False, allow_nan=False)


def parse_ledger(text: str, name: str) -> LedgerFile:
    """Read a ledger. A cut-off tail is reported as damage; anything else that does not fit raises.

    Raises `LedgerError` naming the file, the line and the member.
    """
    lines = text.split("\n")
    complete, tail = lines[:-1], lines[-1]
    if not complete:
        raise LedgerError(f"{name} holds no complete line: not a ledger, or cut off in its first line")
    header = _read_header(complete[0], name)
    steps: list[Step] = []
    end: End | None = None
    for number, line in enumerate(complete[1:], start=2):
        if end is not None:
            raise LedgerError(f"{name} line {number}: there is a line after the end")
        record = _read_line(line, number, name)
        if isinstance(record, Step):
            steps.append(record)
        else:
            end = record
    damage = None
    if tail:
        damage = f"line {len(lines)} is cut off: {len(tail)} characters without a line end"
    elif end is None:
        damage = f"the record stops after line {len(complete)}: there is no end"
    return LedgerFile(run=Run(header=header, steps=tuple(steps), end=end), damage=damage)


def _read_header(line: str, name: str) -> Header:
    plain = _read_json(line, 1, name)
    if not isinstance(plain, dict) or plain.get("kind") != "header":
        raise LedgerError(f"{name} line 1 is not a kvproof ledger's header")
    version = plain.get("ledger_version")
    if version != LEDGER_VERSION:
        raise LedgerError(f"{name} has ledger version {version!r}; this kvproof reads {LEDGER_VERSION}")
    try:
        return from_plain(Header, plain)
    except CodecError as error:
        raise LedgerError(f"{name} line 1: {error}") from error


def _read_line(line: str, number: int, name: str) -> Step | End:
    plain = _read_json(line, number, name)
    kind = plain.get("kind") if isinstance(plain, dict) else None
    if kind not in ("step", "end"):
        raise LedgerError(f"{name} line {number} is neither a step nor an end: its kind is {kind!r}")
    try:
        return from_plain(Step, plain) if kind == "step" else from_plain(End, plain)
    except CodecError as error:
        raise LedgerError(f"{name} line {number}: {error}") from error


def _read_json(line: str, number: int, name: str) -> object:
    try:
        plain: object = strict_loads(line)
    except CodecError as error:
        raise LedgerError(f"{name} line {number}: {error}") from error
    return plain
