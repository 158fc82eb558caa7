"""Generation: applies a policy outside the model, records every step, and interleaves several requests."""

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Literal

import safetensors.torch
import torch
from torch import Tensor

from kvproof._engine.verdict_rules import judge_margin
from kvproof._generation.choosing import NUM_TOP, Choice, choose, new_generator, ranked, state_of
from kvproof._numerics.digests import row_digest
from kvproof._numerics.gaps import gap_of_rows
from kvproof._system.files import LineFile, is_regular, write_whole
from kvproof._system.machine import delay_interrupt, environment
from kvproof.contract.ledger import (
    LEDGER_MINOR,
    LEDGER_VERSION,
    End,
    Entry,
    Header,
    Run,
    Source,
    Step,
    StopReason,
    ledger_line,
)
from kvproof.contract.results import Divergence, Tolerance
from kvproof.contract.stages import LIKELY_CONTRACT, Stage
from kvproof.errors import ContextError, UsageError
from kvproof.policies import Greedy, Policy, Sample, Stops
from kvproof.subjects import Subject, as_subject
from kvproof.subjects._cache_values import NO_END
from kvproof.subjects._checks import check_ids

PathName = Literal["cached", "uncached"]
#: The maximum number of kept tokens that a step records, besides the chosen one.
NUM_SHOWN = 32
#: The default maximum number of tokens that a request returns.
DEFAULT_TOKENS = 128
_GREEDY = Greedy()


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where a request came from, for its record."""

    source: Source | None = None
    prompt_text: str | None = None
    chat: bool = False


def generate(
    decoder: object,
    prompt: Sequence[int] | str,
    policy: Policy = _GREEDY,
    stops: Stops | None = None,
    *,
    path: PathName = "cached",
    margins: bool = True,
    chat: bool = False,
    ledger: Path | None = None,
    full_logits: bool = False,
    keep_partial: bool = False,
    on_step: "Callable[[Request], None]" = lambda request: None,
) -> Run:
    """Generate from a prompt until a stop rule ends the request; return the record.

    ``decoder`` is any argument that `audit` accepts. ``prompt`` is token ids or a text; with ``chat`` the text
    goes through the tokenizer's chat template. ``stops`` defaults to the decoder's own end tokens and
    `DEFAULT_TOKENS` tokens. Tokens are chosen from the rows of ``path``. With ``margins``, every step computes
    its row on both paths, so that each choice has a measured error and a margin verdict. Without it, a step uses
    one path, which is several times faster. ``ledger`` is written line by line; with ``full_logits``, all rows
    are written next to it as safetensors at the end. With ``keep_partial``, Ctrl-C returns the record so far,
    marked as interrupted. ``on_step`` is called after each step.

    If no stop rule ends a request, it runs until the context refuses the next token; its record then says so and
    has no stop reason. Raises `UsageError` for a prompt or policy that does not fit the decoder, `SubjectError`
    if the decoder raises, and `OutputError` if the ledger cannot be written; lines already written stay valid.
    """
    subject = as_subject(decoder)
    if full_logits and ledger is None:
        raise UsageError("full_logits stand beside a ledger: give one")
    origin = Origin()
    if isinstance(prompt, str):
        origin = Origin(prompt_text=prompt, chat=chat)
        prompt = subject.encode(prompt, chat=chat)
    stops = stops or default_stops(subject)
    request = Request(
        subject, prompt, policy, stops, path, margins=margins, origin=origin, file=ledger, full_logits=full_logits
    )
    try:
        serve([request], on_step=on_step)
    except KeyboardInterrupt:
        if not keep_partial:
            raise
    return request.run()


def default_stops(subject: Subject, max_tokens: int = DEFAULT_TOKENS) -> Stops:
    """Return the stop rules of a request that specifies none."""
    return Stops(eos_id=subject.eos_ids or None, max_tokens=max_tokens)


def serve(
    waiting: "Iterable[Request]",
    *,
    batch: int = 1,
    on_step: "Callable[[Request], None]" = lambda request: None,
    on_end: "Callable[[Request], None]" = lambda request: None,
) -> None:
    """Run requests until all have ended: at most ``batch`` at a time, one step of each in turn.

    A waiting request starts as soon as another ends. Each owns its cache and its generator and is fed separately,
    so its result does not depend on other requests. Ctrl-C ends the running requests, marks them as interrupted,
    and raises `KeyboardInterrupt`.
    """
    if batch < 1:
        raise UsageError(f"batch must be at least 1, not {batch}")
    queue, active = iter(waiting), list[Request]()
    try:
        while True:
            while len(active) < batch and (joining := next(queue, None)) is not None:
                active.append(joining)
            if not active:
                return
            for request in tuple(active):
                request.step()
                on_step(request)
                if request.end is not None:
                    active.remove(request)
                    on_end(request)
    except KeyboardInterrupt:
        for request in active:
            request.interrupt()
            on_end(request)
        raise
    finally:
        for request in active:
            request.close()


class Request:
    """One generation in progress: its own session, ids, position, generator, stopping state and record."""

    def __init__(
        self,
        subject: Subject,
        prompt: Sequence[int],
        policy: Policy,
        stops: Stops,
        path: PathName = "cached",
        *,
        margins: bool = True,
        origin: Origin = Origin(),
        file: Path | None = None,
        full_logits: bool = False,
    ) -> None:
        """Start a request; raise `UsageError` if the prompt, the policy or a stop rule does not fit."""
        check_request(subject, prompt, policy, stops)
        if full_logits and file is not None and rows_file(file) == file:
            raise UsageError(f"the rows of {file} would stand in that very file: name the ledger otherwise")
        if full_logits and file is not None and not is_regular(file):
            raise UsageError(
                f"{file} is not a regular file, so no rows can stand beside it: leave out --full-logits"
            )
        self.subject = subject
        self.policy = policy
        self.stops = stops
        self.path = path
        self.margins = margins
        self.prompt = tuple(prompt)
        self.pending = self.prompt
        #: All ids so far: the prompt's and the returned ones.
        self.ids = list(self.prompt)
        self.session = subject.session() if margins or path == "cached" else None
        self.generator = new_generator(policy)
        self.steps: list[Step] = []
        self.end: End | None = None
        self.rows: list[Tensor] | None = [] if full_logits else None
        self.header = self._header(origin)
        self._file, self._lines = file, None if file is None else LineFile(file)
        self._write(self.header)

    def step(self) -> None:
        """Consume the pending tokens, choose one token, and check whether the request ends."""
        try:
            row, other = self._rows()
        except ContextError as refusal:
            self._finish(None, str(refusal))
            return
        step = self._record(row, other)
        with delay_interrupt():
            self.steps.append(step)
            self.ids.append(step.chosen)
            if self.rows is not None:
                self.rows.append(row.detach().cpu().clone())
            self._write(step)
        self.pending = (step.chosen,)
        text = self.text() if self.stops.stop_texts else None
        reason = stop_reason(self.stops, self.steps, self.subject.info.context_len, text)
        if reason is not None:
            self._finish(reason, None)

    def interrupt(self) -> None:
        """End the request and mark it as interrupted, unless it has already ended."""
        if self.end is None:
            self._finish(StopReason.INTERRUPTED, None)

    def text(self) -> str | None:
        """Return the text of the tokens returned so far; None without a tokenizer."""
        return returned_text(self.subject, self.prompt, self.ids[len(self.prompt) :])

    def run(self) -> Run:
        """Return the record so far."""
        return Run(header=self.header, steps=tuple(self.steps), end=self.end)

    def close(self) -> None:
        """Close the unfinished ledger; an ended request has already closed it."""
        if self._lines is not None:
            self._lines.close()

    def _rows(self) -> tuple[Tensor, Tensor | None]:
        """Return the new row of the path that chooses, and the other path's row if margins are measured."""
        cached = None if self.session is None else self.session.extend([self.pending])[0, -1]
        if self.path == "cached" and not self.margins:
            assert cached is not None
            return cached, None
        uncached = self.subject.rows(self.ids, keep=range(len(self.ids) - 1, len(self.ids)))[0]
        if self.path == "uncached":
            return uncached, cached
        assert cached is not None
        return cached, uncached

    def _header(self, origin: Origin) -> Header:
        info = self.subject.info
        return Header(
            ledger_version=LEDGER_VERSION,
            ledger_minor=LEDGER_MINOR,
            subject=info.name,
            subject_digest=info.digest,
            subject_seed=self.subject.seed,
            source=origin.source,
            tokenizer_digest=self.subject.tokenizer_digest,
            transformers=transformers_version(),
            dtype=info.dtype,
            path=self.path,
            margins=self.margins,
            full_logits=self.rows is not None,
            environment=environment(),
            policy=self.policy,
            stops=self.stops,
            prompt=self.prompt,
            prompt_tokens=self.subject.decode(self.prompt),
            prompt_text=origin.prompt_text,
            chat=origin.chat,
        )

    def _record(self, row: Tensor, other: Tensor | None) -> Step:
        before = state_of(self.generator)
        choice = choose(self.policy, row, self.generator, self.ids)
        ranks = isinstance(self.policy, Greedy) and self.policy.repetition_penalty is None
        top = choice.ids if ranks else ranked(row, NUM_TOP)
        error = None if other is None else gap_of_rows(row, other).size
        first = row[top[:2]]  # without the other path's row, only the margin is known
        margin, verdict = (
            judge_margin(first, first, 0.0) if other is None else judge_margin(row, other, error or 0.0)
        )
        return Step(
            step=len(self.steps),
            consumed=self.pending,
            consumed_tokens=self.subject.decode(self.pending),
            position=len(self.ids) - 1,
            cache_len=0 if self.session is None else len(self.session),
            logits_digest=row_digest(row),
            top_logits=entries(self.subject, top, row),
            probabilities=shown_entries(self.subject, choice),
            num_kept=len(choice.ids),
            probabilities_digest=choice.digest(),
            draw=choice.draw,
            chosen=choice.chosen,
            chosen_token=self.subject.token(choice.chosen),
            generator_before=before,
            generator_after=state_of(self.generator),
            margin=margin,
            error=error,
            margin_verdict=None if other is None else verdict,
        )

    def _finish(self, reason: StopReason | None, problem: str | None) -> None:
        text = ended_text(self.subject, self.prompt, self.ids[len(self.prompt) :], self.stops, reason)
        end = End(stop_reason=reason, problem=problem, tokens=self.subject.decode(self.ids), text=text)
        with delay_interrupt():
            self.end = end
            self._write(end)
        self.close()
        if self.rows is not None and self._file is not None:
            logits = torch.stack(self.rows) if self.rows else torch.empty(0)
            write_whole(rows_file(self._file), safetensors.torch.save({"logits": logits}))

    def _write(self, line: Header | Step | End) -> None:
        if self._lines is not None:
            self._lines.write(ledger_line(line))


def rows_file(ledger: Path) -> Path:
    """Return the path of the file with all rows of a ledger: ``logits`` (step, vocab), in the subject's dtype."""
    return ledger.with_suffix(".safetensors")


def transformers_version() -> str | None:
    """Return the version of transformers if it is loaded, or None."""
    return version("transformers") if "transformers" in sys.modules else None


def check_request(subject: Subject, prompt: Sequence[int], policy: Policy, stops: Stops) -> None:
    """Raise `UsageError`, or `TokenError` for ids, if a request does not fit the subject."""
    info = subject.info
    check_ids(prompt, info)
    if len(prompt) > info.context_len:
        raise UsageError(
            f"the prompt has {len(prompt)} tokens, more than the context of {info.context_len} that "
            f"{info.name} accepts"
        )
    ends = (stops.max_tokens, *stops.eos_ids, *stops.stop_ids, *stops.stop_texts)
    if info.context_len >= NO_END and all(end is None for end in ends):
        raise UsageError(f"{info.name} has no last position, so nothing ends the request: give max_tokens")
    if isinstance(policy, Sample) and policy.top_k is not None and policy.top_k > info.vocab_size:
        raise UsageError(f"top_k {policy.top_k} is larger than the vocabulary of {info.vocab_size} tokens")
    for name, ids in (("eos_id", stops.eos_ids), ("stop token", stops.stop_ids)):
        for token_id in ids:
            if not 0 <= token_id < info.vocab_size:
                raise UsageError(f"{name} {token_id} is outside the vocabulary")
    if stops.stop_texts and subject.text(prompt) is None:
        raise UsageError(f"{info.name} has no tokenizer: a stop text is looked for in text")


def entries(subject: Subject, ids: Tensor, values: Tensor) -> tuple[Entry, ...]:
    """Return the entries of a row (vocab,) for ``ids``, with the text of each token."""
    pairs = zip(ids.tolist(), values[ids].tolist(), strict=True)
    return tuple(Entry(id=i, token=subject.token(i), value=value) for i, value in pairs)


def shown_entries(subject: Subject, choice: Choice) -> tuple[Entry, ...]:
    """Return the `NUM_SHOWN` most likely kept tokens, and the chosen one, in the policy's order."""
    places = set(ranked(choice.probabilities, NUM_SHOWN).tolist()) | {choice.draw or 0}
    kept = [(int(choice.ids[i]), float(choice.probabilities[i])) for i in sorted(places)]
    return tuple(Entry(id=i, token=subject.token(i), value=value) for i, value in kept)


def returned_text(subject: Subject, prompt: Sequence[int], returned: Sequence[int]) -> str | None:
    """Return the text that the returned tokens add to the prompt's text; None without a tokenizer.

    Some tokenizers drop a space at the start of a text, so if possible the whole text is decoded together.
    """
    before = subject.text(prompt)
    whole = subject.text((*prompt, *returned))
    if before is None or whole is None:
        return None
    return whole[len(before) :] if whole.startswith(before) else subject.text(returned)


def ended_text(
    subject: Subject, prompt: Sequence[int], returned: Sequence[int], stops: Stops, reason: StopReason | None
) -> str | None:
    """Return the text of an ended request, up to the token or text that ended it."""
    if reason in (StopReason.EOS, StopReason.STOP_TOKEN):
        returned = returned[:-1]
    text = returned_text(subject, prompt, returned)
    return text if text is None else before_stop(text, stops.stop_texts)


def before_stop(text: str, stop_texts: Sequence[str]) -> str:
    """Return the part of a text before the first stop text."""
    places = [place for stop in stop_texts if (place := text.find(stop)) >= 0]
    return text[: min(places, default=len(text))]


def stop_reason(
    stops: Stops, steps: Sequence[Step], context_len: int, text: str | None = None
) -> StopReason | None:
    """Return why a request ends after its newest step, or None if it continues; ``text`` is its output so far."""
    newest = steps[-1]
    if newest.chosen in stops.eos_ids:
        return StopReason.EOS
    if newest.chosen in stops.stop_ids:
        return StopReason.STOP_TOKEN
    if text is not None and any(stop in text for stop in stops.stop_texts):
        return StopReason.STOP_TEXT
    if stops.context and newest.position + 1 == context_len:
        return StopReason.CONTEXT
    if len(steps) == stops.max_tokens:
        return StopReason.MAX_TOKENS
    return None


def first_difference(cached: Run, uncached: Run, tolerance: Tolerance) -> Divergence | None:
    """Return where two runs of one policy diverge, and whether the logits or the policy are the cause.

    Up to that step both consumed the same tokens, so the step's measured error is the gap of the logits.
    """
    for step, other in zip(cached.steps, uncached.steps, strict=False):
        if step.chosen == other.chosen:
            continue
        assert step.error is not None
        scale = max(abs(entry.value) for entry in step.top_logits)
        allowed = tolerance.allowed(scale)
        stage = Stage.POLICY if step.error <= allowed else Stage.LOGITS
        known = "the logits match and" if stage is Stage.POLICY else f"the logits differ by {step.error:.3g} and"
        ids = (*cached.header.prompt, *(s.chosen for s in cached.steps[: step.step]))
        return Divergence(
            scenario=f"{cached.header.policy.kind} generation",
            ids=ids,
            tokens=" ".join((cached.header.prompt_tokens, *(s.chosen_token for s in cached.steps[: step.step]))),
            position=step.position,
            batch_row=0,
            stage=stage,
            layer=None,
            head=None,
            slot=None,
            expected=float(other.chosen),
            actual=float(step.chosen),
            gap=step.error,
            allowed=allowed,
            origin=None,
            contract=LIKELY_CONTRACT[stage],
            logits_differ=stage is Stage.LOGITS,
            sentence=f"after position {step.position} {known} the cached run chooses {step.chosen_token} where "
            f"the uncached run chooses {other.chosen_token}",
            confirmed=False,
            introduced=(),
        )
    return None
