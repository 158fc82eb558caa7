"""The ledger: the replayable record of one generation, as frozen data and as JSON lines.

A file holds one header, one line a step, and one end. Each step can be re-run from its own line: it holds
the generator's state before the draw, and every consumed token stands in the lines before it.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from kvproof.contract.codec import CodecError, from_plain, strict_loads, to_plain
from kvproof.contract.environment import Environment
from kvproof.errors import LedgerError
from kvproof.policies import Policy, Stops

#: Rises when a member comes, changes its meaning or goes away. Records of version 1 are read as well.
LEDGER_VERSION = 2


class StopReason(StrEnum):
    """Why a request ended."""

    EOS = "eos"  #: the declared end token was returned
    STOP_TOKEN = "stop_token"  #: another declared token was returned
    STOP_TEXT = "stop_text"  #: the text of the returned tokens holds a declared text
    CONTEXT = "context"  #: the last position is consumed; what it returned cannot be fed back
    MAX_TOKENS = "max_tokens"  #: as many tokens as asked for were returned
    INTERRUPTED = "interrupted"  #: Ctrl-C: no rule ended it, and any step may be its last


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
class Source:
    """Where the model was loaded from, so that it can be had again."""

    target: str | None
    config: str | None  #: instead of a target: the file of a random model's configuration
    attention: Literal["eager", "sdpa"]  #: others can name code that the library fetches
    device: str
    trust_remote_code: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """What a generation started from."""

    kind: Literal["header"] = "header"
    ledger_version: int
    subject: str
    subject_digest: str
    subject_seed: int | None  #: the seed that recreates the subject, where there is one
    source: Source | None  #: None for a subject that was not loaded by kvproof
    tokenizer_digest: str | None  #: None without a tokenizer
    transformers: str | None  #: the library's version, where it ran
    dtype: str
    path: Literal["cached", "uncached"]  #: whose rows tokens were chosen from
    margins: bool  #: whether every row was computed both ways, so that its error is known
    full_logits: bool  #: whether all rows stand in a file beside this one
    environment: Environment
    policy: Policy
    stops: Stops
    prompt: tuple[int, ...]
    prompt_tokens: str
    prompt_text: str | None  #: what was encoded, where it was a text
    chat: bool  #: whether the text went through the tokenizer's chat template


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
    probabilities: tuple[Entry, ...]  #: the most likely that the policy kept, and the chosen; in its own order
    num_kept: int  #: how many it kept
    probabilities_digest: str | None  #: SHA-256 of all kept ids and probabilities; None in version 1
    draw: int | None  #: index into what was kept, for a policy that draws
    chosen: int
    chosen_token: str
    generator_before: str | None  #: base64; None for a policy that draws nothing
    generator_after: str | None
    margin: float  #: largest minus second largest logit
    error: float | None  #: gap between the cached and the uncached row; None where one alone was computed
    margin_verdict: MarginVerdict | None  #: None likewise


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """How a generation ended."""

    kind: Literal["end"] = "end"
    stop_reason: StopReason | None
    problem: str | None  #: the refusal that ended a request which no stop rule did
    tokens: str  #: the whole trace, the prompt included
    text: str | None  #: of the returned tokens, up to the end token or stop text; None without a tokenizer


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
        yield ledger_line(line)


def ledger_line(line: Header | Step | End) -> str:
    """Return one JSON line, without a line end."""
    return json.dumps(to_plain(line), ensure_ascii=False, allow_nan=False)


def parse_ledger(text: str, name: str) -> LedgerFile:
    """Read a ledger. A cut-off tail is reported as damage; anything else that does not fit raises.

    Raises `LedgerError` naming the file, the line and the member.
    """
    lines = text.split("\n")
    complete, tail = lines[:-1], lines[-1]
    if not complete:
        raise LedgerError(f"{name} holds no complete line: not a ledger, or cut off in its first line")
    header, version = _read_header(complete[0], name)
    steps: list[Step] = []
    end: End | None = None
    for number, line in enumerate(complete[1:], start=2):
        if end is not None:
            raise LedgerError(f"{name} line {number}: there is a line after the end")
        record = _read_line(line, number, name, version)
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


def _read_header(line: str, name: str) -> tuple[Header, int]:
    """Return the header, and the version of the lines after it."""
    plain = _read_json(line, 1, name)
    if not isinstance(plain, dict) or plain.get("kind") != "header":
        raise LedgerError(f"{name} line 1 is not a kvproof ledger's header")
    version = plain.get("ledger_version")
    if version not in (1, LEDGER_VERSION) or not isinstance(version, int):
        raise LedgerError(f"{name} has ledger version {version!r}; this kvproof reads 1 to {LEDGER_VERSION}")
    try:
        return from_plain(Header, _brought_up(plain, version)), version
    except CodecError as error:
        raise LedgerError(f"{name} line 1: {error}") from error


def _read_line(line: str, number: int, name: str, version: int) -> Step | End:
    plain = _read_json(line, number, name)
    kind = plain.get("kind") if isinstance(plain, dict) else None
    if not isinstance(plain, dict) or kind not in ("step", "end"):
        raise LedgerError(f"{name} line {number} is neither a step nor an end: its kind is {kind!r}")
    plain = _brought_up(plain, version)
    try:
        return from_plain(Step, plain) if kind == "step" else from_plain(End, plain)
    except CodecError as error:
        raise LedgerError(f"{name} line {number}: {error}") from error


#: What members that version 1 lacks were when it was written.
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


def _brought_up(plain: dict[str, object], version: int) -> dict[str, object]:
    """Return a line of version 1 as the present version writes it; what does not fit is left for the reader."""
    if version == LEDGER_VERSION:
        return plain
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


def _read_json(line: str, number: int, name: str) -> object:
    try:
        plain: object = strict_loads(line)
    except CodecError as error:
        raise LedgerError(f"{name} line {number}: {error}") from error
    return plain
