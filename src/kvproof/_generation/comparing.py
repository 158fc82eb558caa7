"""Compares cached with uncached generation: where they diverge, and whether rounding or a bug is the cause."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvproof._engine.audit import audit
from kvproof._generation.requests import Origin, Request, serve
from kvproof.contract.ledger import Run, Step
from kvproof.contract.report import Report
from kvproof.contract.results import Verdict
from kvproof.contract.text import printable
from kvproof.policies import Greedy, Policy, Stops
from kvproof.scenarios import Extend, Scenario
from kvproof.subjects import Subject

#: The name of the scenario that repeats a generation's calls.
THIS_GENERATION = "this generation"


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Two runs of one request; ``step`` is the first one that differs, or None if none does."""

    cached: Run
    uncached: Run
    step: int | None
    verdict: Verdict
    sentence: str


def compare(
    subject: Subject,
    prompt: Sequence[int],
    policy: Policy,
    stops: Stops,
    *,
    origin: Origin = Origin(),  # noqa: B008 - it is frozen
    file: Path | None = None,
    full_logits: bool = False,
    on_step: Callable[[Request], None] = lambda request: None,
) -> Comparison:
    """Generate from both paths in alternation, and explain the first step at which they choose differently.

    An audit of the tokens up to that step, in the declared dtype and in float64, decides whether the cause is
    rounding. ``file`` and ``full_logits`` record the cached run; ``on_step`` is called after each of its steps.
    """
    cached = Request(subject, prompt, policy, stops, "cached", origin=origin, file=file, full_logits=full_logits)
    uncached = Request(subject, prompt, policy, stops, "uncached", margins=False, origin=origin)
    serve([cached, uncached], batch=2, on_step=lambda done: on_step(done) if done is cached else None)
    return explained(subject, cached.run(), uncached.run())


def explained(subject: Subject, cached: Run, uncached: Run) -> Comparison:
    """Return where two runs of one request diverge, and why."""
    pairs = zip(cached.steps, uncached.steps, strict=False)
    parting = next(((one, other) for one, other in pairs if one.chosen != other.chosen), None)
    if parting is None:
        sentence = f"cached and uncached choose the same {len(cached.steps)} tokens"
        return Comparison(cached=cached, uncached=uncached, step=None, verdict=Verdict.MATCH, sentence=sentence)
    one, other = parting
    report = judged(subject, cached.header.prompt, cached.returned[: one.step])
    return Comparison(
        cached=cached,
        uncached=uncached,
        step=one.step,
        verdict=report.verdict,
        sentence=f"the texts part at step {one.step}: cached {printable(one.chosen_token)}, uncached "
        f"{printable(other.chosen_token)}. {_why(cached.header.policy, one, report)}",
    )


def judged(subject: Subject, prompt: Sequence[int], returned: Sequence[int]) -> Report:
    """Return an audit of a generation's own calls: the prompt in one call, then token by token."""
    calls = (tuple(prompt), *((token,) for token in returned))
    program = Scenario(
        name=THIS_GENERATION,
        exposes="what the texts hang on",
        operations=tuple(Extend(ids=(call,), last_only=True) for call in calls),
    )
    return audit(subject, [program], all_values=False, certificate=False)


def _why(policy: Policy, step: Step, report: Report) -> str:
    if report.verdict is Verdict.DIVERGED:
        return f"bug: {report.summary}"
    if not report.verdict.passes:
        return f"{report.verdict.value}: {report.summary}"
    error = step.error or 0.0
    if isinstance(policy, Greedy) and policy.repetition_penalty is None:
        found = f"margin {step.margin:.2g} within twice the measured error {error:.2g}"
    else:
        found = f"the rows differ by {error:.2g}, and the choice fell on the other side of a border"
    return f"rounding: {found}; float64 agrees at every step before"
