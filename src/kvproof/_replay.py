"""Replay: every line of a ledger re-derived through both paths, and the first that fails named."""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from kvproof._compare import gap_between, judge_margin
from kvproof._digest import row_digest
from kvproof._errors import LedgerError, SessionError, UsageError
from kvproof._generate import (
    NUM_TOP,
    choose,
    generator_at,
    new_generator,
    ranked,
    state_of,
    stop_reason,
)
from kvproof._ledger import End, Entry, Header, Run, Step
from kvproof._machine import environment
from kvproof._numerics import declared_tolerance
from kvproof._report import Tolerance
from kvproof._text import printable
from kvproof.policies import Sample
from kvproof.subjects import Subject
from kvproof.subjects._base import check_context, check_ids


@dataclass(frozen=True, slots=True, kw_only=True)
class LineProblem:
    """What a line records, and what follows from the lines before it and the model."""

    line: int  #: counts from 1, as an editor does; the header is line 1
    member: str
    recorded: str
    derived: str

    def __str__(self) -> str:
        return f"line {self.line}: {self.member} is {self.recorded}, and {self.derived} follows"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayResult:
    """Whether a record holds. ``bit_identical`` tells whether every logits row came out to the last bit."""

    num_lines: int
    problem: LineProblem | None
    bit_identical: bool
    same_environment: bool


def replay(run: Run, subject: Subject, tolerance: Tolerance | None = None) -> ReplayResult:
    """Re-derive each line of a run through both paths, up to the first that fails.

    Logits must agree within ``tolerance`` (the declared one of the subject's dtype by default), and to the
    last bit where the record was made by the same versions on the same machine. Raises `UsageError` if the
    subject is not the one recorded, or cannot have consumed the recorded prompt.
    """
    _check_header(run.header, subject)
    here = environment()
    there = run.header.environment
    same = all(
        getattr(here, name) == getattr(there, name)
        for name in ("kvproof", "torch", "platform", "processor", "num_threads")
    )
    replayed = _Replay(run, subject, tolerance, exact=same)
    problem = next(iter(replayed.problems()), None)
    return ReplayResult(
        num_lines=1 + len(run.steps) + (run.end is not None),
        problem=problem,
        bit_identical=replayed.bit_identical,
        same_environment=same,
    )


def _check_header(header: Header, subject: Subject) -> None:
    if header.subject_digest != subject.info.digest:
        raise UsageError(
            f"the ledger was made by a model with digest {printable(header.subject_digest)[:16]}…, and "
            f"this one has {subject.info.digest[:16]}…: give the recorded model's checkpoint"
        )
    if header.dtype != subject.info.dtype:
        raise UsageError(
            f"the ledger was made in {printable(header.dtype)}, and this model computes in {subject.info.dtype}"
        )
    try:
        check_ids(header.prompt, subject.info)
        check_context(0, len(header.prompt), subject.info)
    except SessionError as error:
        raise LedgerError(f"the header's prompt cannot be consumed: {error}") from error


class _Replay:
    """Walks a run line by line; each check yields what is wrong with a line."""

    def __init__(self, run: Run, subject: Subject, tolerance: Tolerance | None, *, exact: bool) -> None:
        self.run = run
        self.subject = subject
        self.policy = run.header.policy
        self.session = subject.session()
        self.tolerance = tolerance
        self.exact = exact
        self.bit_identical = True
        self.line = 1

    def problems(self) -> Iterator[LineProblem]:
        """Yield every problem, in order of line."""
        generator = new_generator(self.policy)
        state = state_of(generator)
        if isinstance(self.policy, Sample) and self.policy.seed is None and self.run.steps:
            state = self.run.steps[0].generator_before  # entropy started it: there is nothing to hold it to
        pending = self.run.header.prompt
        yield from self._same("prompt_tokens", self.run.header.prompt_tokens, self.subject.decode(pending))
        for index, step in enumerate(self.run.steps):
            self.line += 1
            if index and stop_reason(
                self.run.header.stops, list(self.run.steps[:index]), self.subject.info.context_len
            ):
                yield self._problem("step", step.step, "the end")
                return
            yield from self._same("step", step.step, index)
            yield from self._same("consumed", step.consumed, pending)
            yield from self._same("consumed_tokens", step.consumed_tokens, self.subject.decode(pending))
            if step.generator_before != state:
                wanted: object = state
                if index == 0 and isinstance(self.policy, Sample):
                    wanted = f"the state that seed {self.policy.seed} starts from"
                yield self._problem("generator_before", step.generator_before, wanted)
            yield from self._step(step)
            state, pending = step.generator_after, (step.chosen,)
        if self.run.end is not None:
            self.line += 1
            yield from self._end(self.run.end)

    def _step(self, step: Step) -> Iterator[LineProblem]:
        """Check a step whose consumed tokens and generator state were checked already."""
        try:
            cached = self.session.extend([step.consumed])[0, -1]
        except SessionError as refusal:
            yield self._problem("consumed", step.consumed, str(refusal))
            return
        uncached = self.subject.rows(self.session.ids[0])[-1]
        row, other = (cached, uncached) if self.run.header.path == "cached" else (uncached, cached)
        yield from self._same("position", step.position, len(self.session) - 1)
        yield from self._same("cache_len", step.cache_len, len(self.session))
        yield from self._logits(step, row, "logits")
        yield from self._logits(step, other, "logits of the other path")
        yield from self._choice(step, row)
        error = gap_between(row, other).size
        margin, verdict = judge_margin(row, other, error)
        allowed = 0.0 if self.exact else self._allowed(row)
        yield from self._close("margin", step.margin, margin, 2 * allowed)
        yield from self._close("error", step.error, error, allowed)
        if self.exact:
            yield from self._same("margin_verdict", step.margin_verdict.value, verdict.value)

    def _logits(self, step: Step, row: Tensor, member: str) -> Iterator[LineProblem]:
        identical = row_digest(row) == step.logits_digest
        if member == "logits":
            self.bit_identical &= identical
            if self.exact and not identical:
                yield self._problem("logits_digest", step.logits_digest, row_digest(row))
            if self.exact:
                yield from self._same("ids of top_logits", _ids(step.top_logits), _top(row, step))
        yield from self._same(
            "number of top_logits", len({e.id for e in step.top_logits}), min(NUM_TOP, len(row))
        )
        values = [entry.value for entry in step.top_logits]
        yield from self._same("order of top_logits", values, sorted(values, reverse=True))
        for entry in step.top_logits:
            if not 0 <= entry.id < len(row):
                yield self._problem("top_logits", f"id {entry.id}", f"an id below {len(row)}")
                return
            name = printable(entry.token)
            yield from self._same("token", entry.token, self.subject.token(entry.id))
            allowed = 0.0 if self.exact and member == "logits" else self._allowed(row)
            yield from self._close(f"{member} of {name}", entry.value, float(row[entry.id]), allowed)

    def _choice(self, step: Step, row: Tensor) -> Iterator[LineProblem]:
        if isinstance(self.policy, Sample) and step.generator_before is None:
            yield self._problem("generator_before", None, "the state of a generator")
            return
        try:
            generator = generator_at(step.generator_before) if step.generator_before is not None else None
        except UsageError as error:
            yield self._problem("generator_before", "unusable", str(error))
            return
        kept, draw = choose(self.policy, row, generator)
        yield from self._same("ids of probabilities", _ids(step.probabilities), tuple(i for i, _ in kept))
        # Softmax changes no probability by more than half the largest change of a logit.
        allowed = 0.0 if self.exact else self._allowed(row)
        for entry, (_, p) in zip(step.probabilities, kept, strict=False):
            yield from self._close(f"probability of {printable(entry.token)}", entry.value, p, allowed)
            yield from self._same("token", entry.token, self.subject.token(entry.id))
        yield from self._same("draw", step.draw, draw)
        yield from self._same("chosen", step.chosen, kept[draw or 0][0])
        yield from self._same("chosen_token", step.chosen_token, self.subject.token(step.chosen))
        yield from self._same("generator_after", step.generator_after, state_of(generator))

    def _end(self, end: End) -> Iterator[LineProblem]:
        if not self.run.steps:
            yield self._problem("end", "after no step", "a first step")
            return
        info = self.subject.info
        reason = stop_reason(self.run.header.stops, list(self.run.steps), info.context_len)
        yield from self._same("stop_reason", end.stop_reason, reason)
        refusal = None
        if reason is None:
            try:
                check_context(len(self.session), 1, info)
                yield self._problem("end", f"after step {len(self.run.steps) - 1}", "another step")
            except SessionError as error:
                refusal = str(error)
        yield from self._same("problem", end.problem, refusal)
        ids = (*self.run.header.prompt, *self.run.returned)
        yield from self._same("tokens", end.tokens, self.subject.decode(ids))

    def _allowed(self, row: Tensor) -> float:
        tolerance = self.tolerance or declared_tolerance(row.dtype)
        return tolerance.allowed(float(row.abs().max()))

    def _same(self, member: str, recorded: object, derived: object) -> Iterator[LineProblem]:
        if recorded != derived:
            yield self._problem(member, recorded, derived)

    def _close(self, member: str, recorded: float, derived: float, allowed: float) -> Iterator[LineProblem]:
        if not abs(recorded - derived) <= allowed:
            yield self._problem(member, recorded, derived)

    def _problem(self, member: str, recorded: object, derived: object) -> LineProblem:
        return LineProblem(line=self.line, member=member, recorded=_short(recorded), derived=_short(derived))


def _ids(entries: tuple[Entry, ...]) -> tuple[int, ...]:
    return tuple(entry.id for entry in entries)


def _top(row: Tensor, step: Step) -> tuple[int, ...]:
    return tuple(ranked(row)[: len(step.top_logits)])


def _short(value: object) -> str:
    text = printable(value) if isinstance(value, str) else repr(value)
    return text if len(text) <= 60 else f"{text[:24]}…{text[-24:]}"
