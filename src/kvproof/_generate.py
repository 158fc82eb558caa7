"""Generation: a policy applied outside the model, one request at a time, every step on record."""

import base64
import math
from typing import Literal

import torch
from torch import Tensor

from kvproof._compare import gap_between, judge_margin
from kvproof._digest import row_digest
from kvproof._errors import ContextError, SubjectError, UsageError
from kvproof._ledger import (
    LEDGER_VERSION,
    End,
    Entry,
    Header,
    Run,
    Step,
    StopReason,
)
from kvproof._machine import environment
from kvproof._report import Divergence, Tolerance
from kvproof._stages import LIKELY_CONTRACT, Stage
from kvproof.policies import Greedy, Policy, Sample, Stops
from kvproof.subjects import Subject

Path = Literal["cached", "uncached"]
#: How many of a row's largest logits a step records.
NUM_TOP = 8


def generate(subject: Subject, prompt: tuple[int, ...], policy: Policy, stops: Stops, *, path: Path) -> Run:
    """Generate from a prompt's ids until a stop rule ends the request; return the record.

    Tokens are chosen from the rows of ``path``. Every step computes the row both ways, so that each choice
    has its measured error and margin. A request that no stop rule ends runs until the context refuses the
    next token; its record says so and has no stop reason.
    """
    request = Request(subject, prompt, policy, stops, path)
    while request.end is None:
        request.step()
    return request.run()


class Request:
    """One generation in progress: its own session, ids, position, generator and stopping state."""

    def __init__(
        self, subject: Subject, prompt: tuple[int, ...], policy: Policy, stops: Stops, path: Path
    ) -> None:
        if isinstance(policy, Sample) and policy.top_k > subject.info.vocab_size:
            raise UsageError(
                f"top_k {policy.top_k} is larger than the vocabulary of {subject.info.vocab_size} tokens"
            )
        if stops.eos_id is not None and not 0 <= stops.eos_id < subject.info.vocab_size:
            raise UsageError(f"eos_id {stops.eos_id} is outside the vocabulary")
        self.subject = subject
        self.policy = policy
        self.stops = stops
        self.path: Path = path
        self.prompt = prompt
        self.pending = prompt
        self.session = subject.session()
        self.generator = new_generator(policy)
        self.steps: list[Step] = []
        self.end: End | None = None

    def step(self) -> None:
        """Consume what is pending, choose one token, and see whether the request ends."""
        try:
            cached = self.session.extend([self.pending])[0, -1]
        except ContextError as refusal:
            if not self.steps:
                raise
            self._finish(None, str(refusal))
            return
        uncached = self.subject.rows(self.session.ids[0])[-1]
        self.steps.append(self._record(cached, uncached))
        self.pending = (self.steps[-1].chosen,)
        reason = stop_reason(self.stops, self.steps, self.subject.info.context_len)
        if reason is not None:
            self._finish(reason, None)

    def run(self) -> Run:
        """Return the record so far."""
        header = Header(
            ledger_version=LEDGER_VERSION,
            subject=self.subject.info.name,
            subject_digest=self.subject.info.digest,
            subject_seed=self.subject.seed,
            dtype=self.subject.info.dtype,
            path=self.path,
            environment=environment(),
            policy=self.policy,
            stops=self.stops,
            prompt=self.prompt,
            prompt_tokens=self.subject.decode(self.prompt),
        )
        return Run(header=header, steps=tuple(self.steps), end=self.end)

    def _record(self, cached: Tensor, uncached: Tensor) -> Step:
        row, other = (cached, uncached) if self.path == "cached" else (uncached, cached)
        before = state_of(self.generator)
        kept, draw = choose(self.policy, row, self.generator)
        chosen = kept[draw or 0][0]
        error = gap_between(row, other).size
        margin, verdict = judge_margin(row, other, error)
        return Step(
            step=len(self.steps),
            consumed=self.pending,
            consumed_tokens=self.subject.decode(self.pending),
            position=len(self.session) - 1,
            cache_len=len(self.session),
            logits_digest=row_digest(row),
            top_logits=self._entries([(i, float(row[i])) for i in ranked(row)[:NUM_TOP]]),
            probabilities=self._entries(kept),
            draw=draw,
            chosen=chosen,
            chosen_token=self.subject.token(chosen),
            generator_before=before,
            generator_after=state_of(self.generator),
            margin=margin,
            error=error,
            margin_verdict=verdict,
        )

    def _entries(self, pairs: list[tuple[int, float]]) -> tuple[Entry, ...]:
        return tuple(Entry(id=i, token=self.subject.token(i), value=value) for i, value in pairs)

    def _finish(self, reason: StopReason | None, problem: str | None) -> None:
        ids = (*self.prompt, *(step.chosen for step in self.steps))
        self.end = End(stop_reason=reason, problem=problem, tokens=self.subject.decode(ids))


def first_difference(cached: Run, uncached: Run, tolerance: Tolerance) -> Divergence | None:
    """Return where two runs of one policy part, and whether the logits or the policy parted them.

    Up to there both consumed the same tokens, so the step's measured error is the gap of the logits.
    """
    for step, other in zip(cached.steps, uncached.steps, strict=False):
        if step.chosen == other.chosen:
            continue
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


def ranked(row: Tensor) -> list[int]:
    """Return all ids, the largest logit first and the lowest id first among equal ones."""
    return [int(i) for i in row.argsort(descending=True, stable=True)]


def choose(
    policy: Policy, row: Tensor, generator: torch.Generator | None
) -> tuple[list[tuple[int, float]], int | None]:
    """Return the ids that the policy keeps with their probabilities, and the index that was drawn.

    Greedy keeps the most likely ids in order of rank, draws nothing, and takes the first. `Sample` keeps
    ``top_k`` in order of id and draws an index from ``generator``, whose state moves on. Raises `SubjectError`
    for a row in which nothing can be chosen: one that holds NaN or infinity, or nothing finite. Entries of minus
    infinity, as masked vocabulary entries are, have probability 0.
    """
    row = row.to(torch.float32)
    if bool(row.isnan().any()) or not math.isfinite(float(row.max())):
        raise SubjectError("the logits hold NaN, infinity or nothing finite, so no token can be chosen from them")
    if isinstance(policy, Greedy):
        probabilities = row.softmax(dim=-1)
        return [(i, float(probabilities[i])) for i in ranked(row)[:NUM_TOP]], None
    kept = sorted(ranked(row)[: policy.top_k])
    scaled = (row - row.max()) / policy.temperature  # softmax does not feel the shift, and overflow does
    probabilities = scaled[kept].softmax(dim=-1)
    draw = int(torch.multinomial(probabilities, 1, generator=generator))
    return [(i, float(p)) for i, p in zip(kept, probabilities, strict=True)], draw


def stop_reason(stops: Stops, steps: list[Step], context_len: int) -> StopReason | None:
    """Return why a request ends after its newest step, or None if it goes on."""
    if steps[-1].chosen == stops.eos_id:
        return StopReason.EOS
    if stops.context and steps[-1].cache_len == context_len:
        return StopReason.CONTEXT
    if len(steps) == stops.max_tokens:
        return StopReason.MAX_TOKENS
    return None


def new_generator(policy: Policy) -> torch.Generator | None:
    """Return a request's own generator, for a policy that draws; unseeded ones start from entropy."""
    if isinstance(policy, Greedy):
        return None
    generator = torch.Generator()
    if policy.seed is None:
        generator.seed()
    else:
        generator.manual_seed(policy.seed)
    return generator


def state_of(generator: torch.Generator | None) -> str | None:
    """Return a generator's state in base64, or None without one."""
    if generator is None:
        return None
    return base64.b64encode(generator.get_state().numpy().tobytes()).decode("ascii")


def generator_at(state: str) -> torch.Generator:
    """Return a generator in a recorded state; raise `UsageError` for what is not one."""
    generator = torch.Generator()
    try:
        raw = base64.b64decode(state, validate=True)
        generator.set_state(torch.tensor(list(raw), dtype=torch.uint8))
    except (ValueError, RuntimeError) as error:
        raise UsageError(f"not a generator state: {error}") from error
    return generator
