"""Replay: derives every line of a ledger again on both paths, and reports the first that fails."""

from collections.abc import Iterator, Sequence

from torch import Tensor

from kvproof._engine.verdict_rules import judge_margin
from kvproof._generation.choosing import NUM_TOP, Choice, choose, generator_at, new_generator, ranked, state_of
from kvproof._generation.comparing import THIS_GENERATION, judged
from kvproof._generation.requests import (
    ended_text,
    returned_text,
    shown_entries,
    stop_reason,
    transformers_version,
)
from kvproof._numerics.digests import row_digest
from kvproof._numerics.gaps import gap_of_rows, largest
from kvproof._numerics.tolerances import ROUNDING_FACTOR, declared_tolerance
from kvproof._system.machine import environment
from kvproof.contract.ledger import End, Entry, Header, LineProblem, ReplayResult, Run, Step, StopReason
from kvproof.contract.results import Tolerance
from kvproof.contract.text import printable
from kvproof.errors import LedgerError, SessionError, SubjectError, UsageError
from kvproof.policies import Sample
from kvproof.subjects import Subject, as_subject
from kvproof.subjects._checks import check_context, check_ids


def replay(
    run: Run,
    decoder: object,
    tolerance: Tolerance | None = None,
    *,
    from_step: int = 0,
    rows: Tensor | None = None,
) -> ReplayResult:
    """Derive each line of a run again on both paths, up to the first that fails.

    ``decoder`` is any argument that `audit` accepts. If the same versions on the same machine made the record,
    logits must agree to the last bit. Otherwise they must agree within ``tolerance`` (by default the declared
    tolerance of the subject's dtype) or within the error measured here. If the other path's logits exceed the
    declared tolerance, an audit of these tokens decides whether the cause is rounding; an explicit ``tolerance``
    is final. Steps before ``from_step`` are consumed as recorded and not derived. ``rows`` (step, vocab) are the
    recorded logits, if they were saved.

    Raises `UsageError` if the subject is not the recorded one, or cannot have consumed the recorded prompt.
    """
    subject = as_subject(decoder)
    _check_header(run.header, subject)
    if not 0 <= from_step <= max(0, len(run.steps) - 1):
        raise UsageError(f"there is no step {from_step} to start from: the ledger's are 0..{len(run.steps) - 1}")
    elsewhere = _elsewhere(run.header)
    replayed = _Replay(run, subject, tolerance, exact=not elsewhere, from_step=from_step, rows=rows)
    problem = next(iter(replayed.problems()), None)
    return ReplayResult(
        num_lines=1 + len(run.steps) - from_step + (run.end is not None),
        problem=problem,
        bit_identical=replayed.bit_identical,
        same_environment=not elsewhere,
        elsewhere=elsewhere,
    )


def _elsewhere(header: Header) -> tuple[str, ...]:
    """Return the differences between here and where the record was made that can change the last bits."""
    here, there = environment(), header.environment
    names = ("kvproof", "torch", "platform", "processor", "num_threads")
    pairs = [(name, getattr(there, name), getattr(here, name)) for name in names]
    if header.transformers is not None:
        pairs.append(("transformers", header.transformers, transformers_version()))
    return tuple(
        f"{name.replace('_', ' ')} {printable(str(old))}, here {new}" for name, old, new in pairs if old != new
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
    known, here = header.tokenizer_digest, subject.tokenizer_digest
    if header.ledger_version > 1 and known != here:
        raise UsageError(
            f"the ledger was made with {_tokenizer(known)}, and this model has {_tokenizer(here)}: "
            "give the recorded model with its tokenizer"
        )
    try:
        check_ids(header.prompt, subject.info)
        check_context(0, len(header.prompt), subject.info)
    except SessionError as error:
        raise LedgerError(f"the header's prompt cannot be consumed: {error}") from error


def _tokenizer(digest: str | None) -> str:
    return "no tokenizer" if digest is None else f"a tokenizer with digest {printable(digest)[:16]}…"


class _Replay:
    """Goes through a run line by line; each check yields the problems of a line."""

    def __init__(
        self,
        run: Run,
        subject: Subject,
        tolerance: Tolerance | None,
        *,
        exact: bool,
        from_step: int,
        rows: Tensor | None,
    ) -> None:
        self.run = run
        self.subject = subject
        self.policy = run.header.policy
        self.session = subject.session()
        self.tolerance = tolerance
        self.exact = exact
        self.from_step = from_step
        self.rows = rows
        self.bit_identical = True
        self.line = 1
        self.error = 0.0  #: the largest error measured here so far
        self.beyond: dict[int, LineProblem] = {}  #: by step: paths differ beyond the declared tolerance

    def problems(self) -> Iterator[LineProblem]:
        """Yield every problem in order of line, including those that only an audit can decide."""
        for problem in self._lines():
            yield from self._audited()
            yield problem
        yield from self._audited()

    def _audited(self) -> Iterator[LineProblem]:
        """Yield the first line at which the paths differ by more than an audit explains as rounding."""
        if not self.beyond:
            return
        report = judged(self.subject, self.run.header.prompt, self.run.returned[: max(self.beyond)])
        rows = next(s.rows for s in report.scenarios if s.name == THIS_GENERATION)
        beyond, self.beyond = self.beyond, {}
        if not report.verdict.passes:
            wrong = (index for index in beyond if index < len(rows) and not rows[index].verdict.passes)
            yield beyond[next(wrong, min(beyond))]

    def _lines(self) -> Iterator[LineProblem]:
        generator = new_generator(self.policy)
        state = state_of(generator)
        if self.run.steps and (self.from_step or (isinstance(self.policy, Sample) and self.policy.seed is None)):
            # Entropy, or steps that are not derived, determined this state, so it cannot be checked.
            state = self.run.steps[self.from_step].generator_before
        pending = self.run.header.prompt
        yield from self._same("prompt_tokens", self.run.header.prompt_tokens, self.subject.decode(pending))
        yield from self._prompt_text()
        for index, step in enumerate(self.run.steps):
            self.line += 1
            if index < self.from_step:
                yield from self._skip(step, pending)
                pending = (step.chosen,)
                continue
            if index and self._reason(index) is not None:
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
            yield from self._step(step, index)
            state, pending = step.generator_after, (step.chosen,)
        if self.run.end is not None:
            self.line += 1
            yield from self._end(self.run.end)

    def _prompt_text(self) -> Iterator[LineProblem]:
        header = self.run.header
        if header.prompt_text is None:
            return
        try:
            ids = self.subject.encode(header.prompt_text, chat=header.chat)
        except UsageError as error:
            yield self._problem("prompt_text", header.prompt_text, str(error))
            return
        yield from self._same("prompt", header.prompt, ids)

    def _reason(self, num_steps: int) -> StopReason | None:
        """Return the stop rule that ends the request after its first ``num_steps`` steps, or None."""
        stops, texts = self.run.header.stops, None
        if stops.stop_texts:
            texts = returned_text(self.subject, self.run.header.prompt, self.run.returned[:num_steps])
        return stop_reason(stops, self.run.steps[:num_steps], self.subject.info.context_len, texts)

    def _skip(self, step: Step, pending: tuple[int, ...]) -> Iterator[LineProblem]:
        """Consume a step's tokens as the run did, so that later rows are equal to the last bit."""
        yield from self._same("consumed", step.consumed, pending)
        try:
            self.session.extend([pending])
        except SessionError as refusal:
            yield self._problem("consumed", step.consumed, str(refusal))

    def _step(self, step: Step, index: int) -> Iterator[LineProblem]:
        """Check a step whose consumed tokens and generator state are already checked."""
        try:
            cached = self.session.extend([step.consumed])[0, -1]
        except SessionError as refusal:
            yield self._problem("consumed", step.consumed, str(refusal))
            return
        ids, header = self.session.ids[0], self.run.header
        uncached = self.subject.rows(ids, keep=range(len(ids) - 1, len(ids)))[0]
        row, other = (cached, uncached) if header.path == "cached" else (uncached, cached)
        error = gap_of_rows(row, other).size
        self.error = largest((self.error, error))
        yield from self._same("position", step.position, len(ids) - 1)
        kept_cache = header.margins or header.path == "cached"
        yield from self._same("cache_len", step.cache_len, len(ids) if kept_cache else 0)
        yield from self._logits(step, row)
        yield from self._row(index, step, row)
        yield from self._other(step, index, row, other, error)
        yield from self._choice(step, row, ids)
        margin, verdict = judge_margin(row, other, error)
        allowed = 0.0 if self.exact else self._allowed(row)
        yield from self._close("margin", step.margin, margin, 2 * allowed)
        measured = step.error is not None and step.margin_verdict is not None
        yield from self._same("margins measured", measured, header.margins)
        if step.error is not None and step.margin_verdict is not None:
            yield from self._close("error", step.error, error, allowed)
            if self.exact:
                yield from self._same("margin_verdict", step.margin_verdict.value, verdict.value)

    def _logits(self, step: Step, row: Tensor) -> Iterator[LineProblem]:
        identical = row_digest(row) == step.logits_digest
        self.bit_identical &= identical
        if self.exact and not identical:
            yield self._problem("logits_digest", step.logits_digest, row_digest(row))
        if self.exact:
            top = tuple(ranked(row, NUM_TOP).tolist()[: len(step.top_logits)])
            yield from self._same("ids of top_logits", _ids(step.top_logits), top)
        num_ids = len({e.id for e in step.top_logits})
        yield from self._same("number of top_logits", num_ids, min(NUM_TOP, len(row)))
        values = [entry.value for entry in step.top_logits]
        yield from self._same("order of top_logits", values, sorted(values, reverse=True))
        allowed = 0.0 if self.exact else self._allowed(row)
        for entry in step.top_logits:
            if not 0 <= entry.id < len(row):
                yield self._problem("top_logits", f"id {entry.id}", f"an id below {len(row)}")
                return
            name = printable(entry.token)
            yield from self._same("token", entry.token, self.subject.token(entry.id))
            yield from self._close(f"logits of {name}", entry.value, float(row[entry.id]), allowed)

    def _row(self, index: int, step: Step, row: Tensor) -> Iterator[LineProblem]:
        """Check the complete recorded row, if it was saved, against its digest and the derived row."""
        if self.rows is None:
            return
        if index >= len(self.rows):
            yield self._problem("full_logits", "cut off", f"a row of step {index}")
            return
        recorded = self.rows[index]
        if recorded.shape != row.shape or recorded.dtype != row.dtype:
            found = f"{tuple(recorded.shape)} {recorded.dtype}"
            yield self._problem("full_logits", found, f"{tuple(row.shape)} {row.dtype}")
            return
        yield from self._same("digest of full_logits", row_digest(recorded), step.logits_digest)
        if not self.exact:
            gap = gap_of_rows(row.cpu(), recorded)
            yield from self._close("gap of full_logits", gap.size, 0.0, self._allowed(row))

    def _other(self, step: Step, index: int, row: Tensor, other: Tensor, error: float) -> Iterator[LineProblem]:
        """Compare the recorded logits with those of the path that did not choose the tokens."""
        tolerance = self.tolerance or declared_tolerance(row.dtype)
        allowed = tolerance.allowed(float(other.abs().max()))
        for entry in step.top_logits:
            if 0 <= entry.id < len(other) and not abs(entry.value - float(other[entry.id])) <= allowed:
                member = f"logits of the other path of {printable(entry.token)}"
                problem = self._problem(member, entry.value, float(other[entry.id]))
                if self.tolerance is not None:
                    yield problem
                else:
                    self.beyond[index] = problem
                return

    def _choice(self, step: Step, row: Tensor, ids: Sequence[int]) -> Iterator[LineProblem]:
        if isinstance(self.policy, Sample) and step.generator_before is None:
            yield self._problem("generator_before", None, "the state of a generator")
            return
        try:
            generator = generator_at(step.generator_before) if step.generator_before is not None else None
            choice = choose(self.policy, row, generator, ids)
        except UsageError as error:
            yield self._problem("generator_before", "unusable", str(error))
            return
        except SubjectError as error:
            yield self._problem("chosen", step.chosen, str(error))
            return
        yield from self._kept(step, row, choice)
        yield from self._same("draw", step.draw, choice.draw)
        yield from self._same("chosen", step.chosen, choice.chosen)
        yield from self._same("chosen_token", step.chosen_token, self.subject.token(step.chosen))
        yield from self._same("generator_after", step.generator_after, state_of(generator))

    def _kept(self, step: Step, row: Tensor, choice: Choice) -> Iterator[LineProblem]:
        shown = shown_entries(self.subject, choice)
        yield from self._same("ids of probabilities", _ids(step.probabilities), _ids(shown))
        yield from self._same("num_kept", step.num_kept, len(choice.ids))
        # A change of the logits changes a softmax probability by at most half the largest logit change.
        allowed = 0.0 if self.exact else self._allowed(row)
        for entry, derived in zip(step.probabilities, shown, strict=False):
            name = f"probability of {printable(entry.token)}"
            yield from self._close(name, entry.value, derived.value, allowed)
            yield from self._same("token", entry.token, derived.token)
        if self.exact and step.probabilities_digest is not None:
            yield from self._same("probabilities_digest", step.probabilities_digest, choice.digest())

    def _end(self, end: End) -> Iterator[LineProblem]:
        interrupted = end.stop_reason is StopReason.INTERRUPTED
        if not self.run.steps and not interrupted:
            yield self._problem("end", "after no step", "a first step")
            return
        reason = self._reason(len(self.run.steps)) if self.run.steps else None
        if reason is None and interrupted:
            reason = StopReason.INTERRUPTED  # Ctrl-C can arrive at any step
        yield from self._same("stop_reason", end.stop_reason, reason)
        refusal = None
        if reason is None:
            try:
                check_context(len(self.session), 1, self.subject.info)
                yield self._problem("end", f"after step {len(self.run.steps) - 1}", "another step")
            except SessionError as error:
                refusal = str(error)
        yield from self._same("problem", end.problem, refusal)
        header, returned = self.run.header, self.run.returned
        yield from self._same("tokens", end.tokens, self.subject.decode((*header.prompt, *returned)))
        if header.ledger_version > 1:
            text = ended_text(self.subject, header.prompt, returned, header.stops, reason)
            yield from self._same("text", end.text, text)

    def _allowed(self, row: Tensor) -> float:
        """Return how far a value computed elsewhere may be from this row's, given the rounding measured here."""
        tolerance = self.tolerance or declared_tolerance(row.dtype)
        return largest((tolerance.allowed(float(row.abs().max())), ROUNDING_FACTOR.value * self.error))

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


def _short(value: object) -> str:
    text = printable(value) if isinstance(value, str) else repr(value)
    return text if len(text) <= 60 else f"{text[:24]}…{text[-24:]}"
