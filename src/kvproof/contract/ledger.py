"""The ledger: the replayable record of one generation, as frozen data and as JSON lines.

A file has a header line, one line for each step, and an end line. Each step can be repeated from its own line,
which holds the generator's state before the draw, and the lines before it, which hold every consumed token.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, TypeVar

from kvproof.contract.codec import CodecError, added_in, strict_loads, to_plain
from kvproof.contract.environment import Environment
from kvproof.contract.versions import Version, VersionReader
from kvproof.errors import LedgerError
from kvproof.policies import Policy, Stops

T = TypeVar("T")

#: The major number rises when a member changes its meaning or is removed, the minor one when a member is added.
LEDGER_VERSION, LEDGER_MINOR = 2, 1


class StopReason(StrEnum):
    """Why a request ended."""

    EOS = "eos"  #: the declared end token was returned
    STOP_TOKEN = "stop_token"  #: another declared token was returned
    STOP_TEXT = "stop_text"  #: the text of the returned tokens contains a declared text
    CONTEXT = "context"  #: the last position was consumed, so its token cannot be fed back
    MAX_TOKENS = "max_tokens"  #: the requested number of tokens was returned
    INTERRUPTED = "interrupted"  #: Ctrl-C: no stop rule applied


class MarginVerdict(StrEnum):
    """Whether rounding could have changed the choice of the most likely token at this step."""

    SAFE = "safe"  #: the margin exceeds twice the measured error: no rounding can flip it
    EXPLAINED_FLIP = "explained flip"  #: the margin is within that: rounding flips, or may flip, the choice
    UNEXPLAINED_FLIP = "unexplained flip"  #: the margin exceeds that, and yet the paths choose differently: a bug
    TIE = "tie"  #: the two largest logits are equal; the tie rule decides


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One vocabulary entry and its logit or probability."""

    id: int
    token: str
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where the model was loaded from, so that it can be loaded again."""

    target: str | None
    config: str | None  #: configuration file of a random model, if there is no target
    attention: Literal["eager", "sdpa"]  #: other names can make the library download code
    device: str
    trust_remote_code: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """The inputs of a generation."""

    kind: Literal["header"] = "header"
    ledger_version: int
    ledger_minor: int = added_in(1, default=0)
    subject: str
    subject_digest: str
    subject_seed: int | None  #: the seed that recreates the subject, if there is one
    source: Source | None  #: None if kvproof did not load the subject
    tokenizer_digest: str | None  #: None without a tokenizer
    transformers: str | None  #: the library's version, if it was used
    dtype: str
    path: Literal["cached", "uncached"]  #: the path whose logits chose the tokens
    margins: bool  #: whether every row was computed on both paths, so that its error is known
    full_logits: bool  #: whether a file beside this one holds all rows
    environment: Environment
    policy: Policy
    stops: Stops
    prompt: tuple[int, ...]
    prompt_tokens: str
    prompt_text: str | None  #: the text that was encoded, if the prompt was a text
    chat: bool  #: whether the text went through the tokenizer's chat template


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One returned token, and everything that determines it."""

    kind: Literal["step"] = "step"
    step: int
    consumed: tuple[int, ...]  #: the ids fed in this step: the prompt at step 0, then one
    consumed_tokens: str
    position: int  #: absolute position of the last consumed token
    cache_len: int  #: number of tokens in the cache after the call
    logits_digest: str  #: SHA-256 of the row's bytes
    top_logits: tuple[Entry, ...]  #: the largest logits before any transformation, largest first
    probabilities: tuple[Entry, ...]  #: the most likely candidates and the chosen one, in the policy's order
    num_kept: int  #: number of candidates that the policy kept
    probabilities_digest: str | None  #: SHA-256 of all candidates and their probabilities; None in version 1
    draw: int | None  #: index of the drawn candidate; None for a policy that draws nothing
    chosen: int
    chosen_token: str
    generator_before: str | None  #: base64; None for a policy that draws nothing
    generator_after: str | None
    margin: float  #: largest minus second largest logit
    error: float | None  #: gap between the cached and the uncached row; None if only one was computed
    margin_verdict: MarginVerdict | None  #: None if ``error`` is None


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """How a generation ended."""

    kind: Literal["end"] = "end"
    stop_reason: StopReason | None
    problem: str | None  #: the error that ended the request, if no stop rule did
    tokens: str  #: all tokens, including the prompt
    text: str | None  #: the returned tokens up to the end token or stop text; None without a tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A complete generation. ``end`` is None if the record is cut off."""

    header: Header
    steps: tuple[Step, ...]
    end: End | None

    @property
    def returned(self) -> tuple[int, ...]:
        """The ids of the returned tokens."""
        return tuple(step.chosen for step in self.steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerFile:
    """A ledger that was read from a file; ``damage`` says what is wrong with its end."""

    run: Run
    damage: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LineProblem:
    """A line that does not follow from the lines before it and the model."""

    line: int  #: counts from 1; the header is line 1
    member: str
    recorded: str
    derived: str

    def __str__(self) -> str:
        return f"line {self.line}: {self.member} is {self.recorded}, and {self.derived} follows"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayResult:
    """Whether a record can be reproduced. ``bit_identical``: every row of logits is equal to the last bit."""

    num_lines: int
    problem: LineProblem | None
    bit_identical: bool
    same_environment: bool
    elsewhere: tuple[str, ...]  #: how the machine and versions of the record differ from these, in words


def ledger_lines(run: Run) -> Iterator[str]:
    """Yield the run's JSON lines, without line ends."""
    for line in (run.header, *run.steps, *((run.end,) if run.end else ())):
        yield ledger_line(line)


def ledger_line(line: Header | Step | End) -> str:
    """Return one JSON line, without a line end."""
    return json.dumps(to_plain(line), ensure_ascii=False, allow_nan=False)


def parse_ledger(text: str, name: str, on_note: Callable[[str], None] = lambda note: None) -> LedgerFile:
    """Return the ledger that ``text`` holds, as the current version writes it.

    A truncated end is reported as damage. Anything else that does not fit raises `LedgerError` naming the file,
    the line and the path. Calls ``on_note`` if keys of a newer minor version were ignored.
    """
    lines = text.split("\n")
    complete, tail = lines[:-1], lines[-1]
    if not complete:
        raise LedgerError(f"{name} has no complete line: it is not a ledger, or its first line was cut off")
    reader, header = _read_header(complete[0], name)
    steps: list[Step] = []
    end: End | None = None
    for number, line in enumerate(complete[1:], start=2):
        if end is not None:
            raise LedgerError(f"{name} line {number}: there is a line after the end")
        record = _read_line(line, f"{name} line {number}", reader)
        if isinstance(record, Step):
            steps.append(record)
        else:
            end = record
    if reader.note is not None:
        on_note(f"{name} {reader.note}")
    damage = None
    if tail:
        damage = f"line {len(lines)} is cut off: {len(tail)} characters without a line end"
    elif end is None:
        damage = f"the record stops after line {len(complete)}: there is no end"
    return LedgerFile(run=Run(header=header, steps=tuple(steps), end=end), damage=damage)


def _read_header(line: str, name: str) -> tuple[VersionReader, Header]:
    """Return the header, and the reader for the lines after it."""
    place = f"{name} line 1"
    plain = _read_json(line, place)
    if not isinstance(plain, dict) or plain.get("kind") != "header":
        raise LedgerError(f"{place} is not the header of a kvproof ledger")
    try:
        reader = VERSION.reader(plain)
    except CodecError as error:
        raise LedgerError(f"{name} {error}") from error
    return reader, _read(Header, plain, place, reader)


def _read_line(line: str, place: str, reader: VersionReader) -> Step | End:
    plain = _read_json(line, place)
    kind = plain.get("kind") if isinstance(plain, dict) else None
    if not isinstance(plain, dict) or kind not in ("step", "end"):
        raise LedgerError(f"{place} is neither a step nor an end: its kind is {kind!r}")
    return _read(Step, plain, place, reader) if kind == "step" else _read(End, plain, place, reader)


def _read(kind: type[T], plain: dict[str, object], place: str, reader: VersionReader) -> T:
    try:
        return reader.read(kind, plain)
    except CodecError as error:
        raise LedgerError(f"{place}: {error}") from error


def _read_json(line: str, place: str) -> object:
    try:
        plain: object = strict_loads(line)
    except CodecError as error:
        raise LedgerError(f"{place}: {error}") from error
    return plain


#: The members that version 1 lacks, with the values that held when it was written.
_SINCE_1: dict[str, dict[str, object]] = {
    "header": {
        "source": None,
        "tokenizer_digest": None,
        "transformers": None,
        "margins": True,
        "full_logits": False,
        "prompt_text": None,
        "chat": False,
    },
    "policy greedy": {"repetition_penalty": None},
    "policy sample": {"top_p": None, "min_p": None, "typical_p": None, "repetition_penalty": None},
    "stops": {"stop_ids": [], "stop_texts": []},
    "step": {"probabilities_digest": None},
    "end": {"text": None},
}


def _from_version_1(plain: dict[str, object]) -> dict[str, object]:
    """Return a line of version 1 in the form of version 2; the reader reports what does not fit."""
    kind = str(plain["kind"])
    plain = {**_SINCE_1[kind], **plain}
    policy, stops, kept = plain.get("policy"), plain.get("stops"), plain.get("probabilities")
    if isinstance(policy, dict):
        plain["policy"] = {**_SINCE_1.get(f"policy {policy.get('kind')}", {}), **policy}
    if isinstance(stops, dict):
        plain["stops"] = {**_SINCE_1["stops"], **stops}
    if kind == "step" and isinstance(kept, list):
        plain["num_kept"] = len(kept)
    return plain


VERSION = Version(what="ledger", major=LEDGER_VERSION, minor=LEDGER_MINOR, upgrades={1: _from_version_1})
