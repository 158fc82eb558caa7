"""The reference system, end to end: everything that `kvproof milestone` shows, as one report.

Five things must hold, and each can be switched off to see that the gate notices.
"""

import dataclasses
from collections.abc import Callable, Iterator

import torch

from kvproof._engine.audit import audit
from kvproof._generation.replay import replay
from kvproof._generation.requests import first_difference, generate
from kvproof._numerics.digests import weights_digest
from kvproof._reference_system.refusals import try_refusals
from kvproof._system.machine import use_one_thread
from kvproof.contract.ledger import Run
from kvproof.contract.milestone import (
    SWITCHES,
    CacheMemory,
    CacheTraceRow,
    CheckpointInfo,
    GateItem,
    Milestone,
    Refusal,
    RunPair,
)
from kvproof.contract.report import Report
from kvproof.contract.results import FaultResult, Tolerance, Verdict, worst
from kvproof.errors import UsageError
from kvproof.faults import wrong_layer, wrong_position
from kvproof.policies import Greedy, Policy, Sample, Stops
from kvproof.reference import (
    PATTERNS,
    VOCABULARY,
    Checkpoint,
    entropy_floor,
    largest_probability_error,
)
from kvproof.reference.corpus import BOS_ID, EOS_ID, SEQUENCES
from kvproof.scenarios import interleaved_requests, token_by_token
from kvproof.subjects import ReferenceSubject

TOLERANCE = Tolerance(
    dtype="float32",
    absolute=1e-5,
    relative=0.0,
    source="declared for this checkpoint on a CPU (spec R12); a regression boundary, not a universal constant",
)
NOTES = (
    "The traces test execution and random-state control. They do not measure language quality.",
    "The tolerance is a regression boundary for this checkpoint, dtype and device.",
)


def milestone(
    checkpoint: Checkpoint,
    *,
    source: str = "trained",
    without: tuple[str, ...] = (),
    on_stage: Callable[[str], None] = lambda name: None,
) -> Report:
    """Run the reference system on a checkpoint and return its report, the acceptance gate included.

    ``without`` names parts to switch off (see `SWITCHES`); the gate must then fail. ``on_stage`` is told
    what is being run. One thread is used while it runs: on tensors this small, more only wait for each other.
    """
    for name in without:
        if name not in SWITCHES:
            raise UsageError(f"cannot switch off {name!r}; choose from {', '.join(SWITCHES)}")
    with use_one_thread():
        return _milestone(checkpoint, source, without, on_stage)


def _milestone(
    checkpoint: Checkpoint, source: str, without: tuple[str, ...], on_stage: Callable[[str], None]
) -> Report:
    digest_before = checkpoint.digest
    subject = ReferenceSubject(checkpoint)
    scenarios = [*map(token_by_token, SEQUENCES), interleaved_requests(SEQUENCES[0], SEQUENCES[2])]
    faults = [f for f in (wrong_position(), wrong_layer()) if f.name not in without]
    report = audit(
        subject,
        scenarios,
        faults=faults,
        tolerance=TOLERANCE,
        reference="literal",
        certificate=True,
        spread=True,
        on_scenario=on_stage,
    )
    on_stage("cache trace, memory and refusals")
    trace = cache_trace(subject, assert_shapes="shape-assertions" not in without)
    isolated = requests_isolated(subject)
    refusals = try_refusals(subject)
    memory = cache_memory(subject)
    runs = tuple(_run_pairs(subject, without, on_stage))
    info = CheckpointInfo(
        source=source,
        seed=checkpoint.seed,
        num_parameters=sum(p.numel() for p in checkpoint.decoder.parameters()),
        loss=checkpoint.loss,
        entropy_floor=entropy_floor(),
        largest_probability_error=largest_probability_error(checkpoint.decoder),
        digest_before=digest_before,
        digest_after=weights_digest(checkpoint.decoder),
        tie=_tie(runs),
    )
    gate = (
        _gate_prefixes(report, info),
        _gate_shapes(trace, refusals, isolated),
        _gate_failures(report.faults),
        _gate_policies(runs),
        _gate_stops(runs),
    )
    result = Milestone(
        checkpoint=info,
        vocabulary=VOCABULARY,
        patterns=PATTERNS,
        switched_off=without,
        cache_trace=trace,
        memory=memory,
        requests_isolated=isolated,
        refusals=refusals,
        runs=runs,
        gate=gate,
        notes=NOTES,
    )
    return dataclasses.replace(report, milestone=result, summary=_summary(report, result))


def cache_trace(subject: ReferenceSubject, *, assert_shapes: bool = True) -> tuple[CacheTraceRow, ...]:
    """Return every layer's K and V shapes after every consumed token of every pattern."""
    config = subject.decoder.config
    rows = []
    for sequence in SEQUENCES:
        session = subject.session()
        for position, token in enumerate(sequence):
            session.extend([[token]])
            expected = (1, config.num_heads, position + 1, config.head_dim)
            for layer, tensors in enumerate(session.cache_tensors()):
                shapes = [tuple(tensors[name].shape) for name in ("k", "v")]
                rows.append(
                    CacheTraceRow(
                        tokens=subject.decode(session.ids[0]),
                        position=position,
                        layer=layer,
                        k_shape=shapes[0],
                        v_shape=shapes[1],
                        expected_shape=expected,
                        asserted=assert_shapes,
                        holds=assert_shapes and shapes == [expected, expected],
                    )
                )
    return tuple(rows)


def requests_isolated(subject: ReferenceSubject) -> bool:
    """Return whether two interleaved requests give bit-identical rows to each alone."""
    alone = []
    for sequence in (SEQUENCES[0], SEQUENCES[2]):
        session = subject.session()
        alone.append([session.extend([[token]]) for token in sequence])
    sessions = [subject.session(), subject.session()]
    for position in range(len(SEQUENCES[0])):
        for session, sequence, rows in zip(sessions, (SEQUENCES[0], SEQUENCES[2]), alone, strict=True):
            if not torch.equal(session.extend([[sequence[position]]]), rows[position]):
                return False
    return True


def cache_memory(subject: ReferenceSubject) -> CacheMemory:
    """Return the cache's bytes, derived from the configuration and measured after a whole pattern."""
    config = subject.decoder.config
    session = subject.session()
    session.extend([SEQUENCES[0]])
    tensors = [t for layer in session.cache_tensors() for t in layer.values()]
    element = tensors[0].element_size()
    per_token_and_layer = 2 * config.num_heads * config.head_dim * element
    per_token = per_token_and_layer * config.num_layers
    return CacheMemory(
        bytes_per_element=element,
        bytes_per_token_and_layer=per_token_and_layer,
        bytes_per_token=per_token,
        bytes_per_layer=per_token_and_layer * config.context_len,
        bytes_per_request=per_token * len(session),
        bytes_full_context=per_token * config.context_len,
        num_tokens_measured=len(session),
        measured_bytes=sum(t.numel() * t.element_size() for t in tensors),
    )


def _run_pairs(
    subject: ReferenceSubject, without: tuple[str, ...], on_stage: Callable[[str], None]
) -> Iterator[RunPair]:
    """Run each policy both ways; the third run has no end token, so that it fills the context."""
    ends = Stops(eos_id=None if "eos-stop" in without else EOS_ID, context="context-stop" not in without)
    fills = Stops(eos_id=None, context="context-stop" not in without)
    seed = None if "seed" in without else 41
    plan: tuple[tuple[str, Policy, Stops, str | None, str], ...] = (
        ("greedy", Greedy(), ends, "<bos> A B D <eos>", "eos"),
        ("seeded", Sample(temperature=1.0, top_k=3, seed=seed), ends, "<bos> Y X Y <eos>", "eos"),
        ("greedy, no end token", Greedy(), fills, None, "context"),
    )
    for name, policy, stops, trace, stop in plan:
        on_stage(f"policy {name}")
        cached = generate(subject, (BOS_ID,), policy, stops, path="cached")
        uncached = generate(subject, (BOS_ID,), policy, stops, path="uncached")
        problem = _not_reproducible(subject, policy, cached, uncached)
        yield RunPair(
            name=name,
            cached=cached,
            uncached=uncached,
            equal=(cached.returned, cached.end) == (uncached.returned, uncached.end),
            difference=first_difference(cached, uncached, TOLERANCE),
            reproduced=problem is None,
            problem=problem,
            expected_trace=trace,
            expected_stop=stop,
        )


def _not_reproducible(subject: ReferenceSubject, policy: Policy, cached: Run, uncached: Run) -> str | None:
    """Return why a run cannot be repeated from its record, or None if it can."""
    if isinstance(policy, Sample) and policy.seed is None:
        return "the policy has no seed, so nothing on record says where its generator started"
    for run in (cached, uncached):
        problem = replay(run, subject, TOLERANCE).problem
        if problem is not None:
            return f"the {run.header.path} record does not replay: {problem}"
    return None


def _tie(runs: tuple[RunPair, ...]) -> str:
    step = runs[0].cached.steps[1]
    first, second = step.top_logits[:2]
    return (
        f"After A the corpus has B and C equally often, so which one greedy takes depends on the last digits of "
        f"training. Here {first.token} stands {step.margin:.1e} above {second.token}, where the two paths "
        f"differ by {step.error:.1e}: the choice is {step.margin_verdict}."
    )


def _gate_prefixes(report: Report, info: CheckpointInfo) -> GateItem:
    rows = [row for s in report.scenarios if s.name == "token-by-token" for row in s.rows]
    largest = max(row.gap for row in rows)
    matching = sum(row.verdict is Verdict.MATCH for row in rows)
    num_values = sum(s.num_values_compared for s in report.scenarios)
    frozen = info.digest_before == info.digest_after
    clean = worst([s.verdict for s in report.scenarios]) is Verdict.MATCH
    detail = (
        f"{matching} of {len(rows)}, largest gap {largest:.4e} of {TOLERANCE.absolute:g} allowed; "
        f"{num_values} values on the way {'agree' if clean else 'do not all agree'}; "
        f"weights {'unchanged' if frozen else 'CHANGED during the run'}"
    )
    passed = matching == len(rows) == 16 and clean and frozen
    return GateItem(name="all 16 prefixes match over the whole vocabulary", passed=passed, detail=detail)


def _gate_shapes(trace: tuple[CacheTraceRow, ...], refusals: tuple[Refusal, ...], isolated: bool) -> GateItem:
    asserted, held = sum(row.asserted for row in trace), sum(row.holds for row in trace)
    refused = sum(r.refused and r.unchanged for r in refusals)
    detail = (
        f"{asserted} of {len(trace)} asserted, {held} hold; {refused} of {len(refusals)} broken calls refused "
        f"with the session unchanged; requests {'isolated' if isolated else 'NOT isolated'}"
    )
    passed = asserted == held == len(trace) and refused == len(refusals) and isolated
    return GateItem(name="every cache's axes and length hold after each token", passed=passed, detail=detail)


def _gate_failures(results: tuple[FaultResult, ...]) -> GateItem:
    by_name = {result.name: result for result in results}
    parts, passed = [], True
    for name in ("wrong-position", "wrong-layer"):
        result = by_name.get(name)
        rejected = (
            result is not None and result.caught and bool(result.num_rows_beyond) and bool(result.right_stage)
        )
        passed &= rejected
        gap = (
            "not run: a check that rejects nothing is weak" if result is None else f"gap {result.largest_gap:.3g}"
        )
        parts.append(f"{name} {gap}{'' if rejected or result is None else ', NOT rejected'}")
    return GateItem(name="both deliberate failures are rejected", passed=passed, detail="; ".join(parts))


def _gate_policies(runs: tuple[RunPair, ...]) -> GateItem:
    parts, passed = [], True
    for pair in runs:
        trace = pair.cached.end.tokens if pair.cached.end else ""
        as_checked = pair.expected_trace in (None, trace)
        passed &= pair.equal and pair.reproduced and as_checked
        if pair.problem is not None:
            parts.append(f"{pair.name}: {pair.problem}")
        elif pair.difference is not None:
            parts.append(f"{pair.name}: {pair.difference.sentence}; {pair.difference.contract}")
        elif not pair.equal:
            parts.append(f"{pair.name}: cached and uncached runs end differently")
        elif not as_checked:
            parts.append(f"{pair.name}: {trace}, and the checked trace is {pair.expected_trace}")
        else:
            parts.append(f"{pair.name} {trace}")
    return GateItem(
        name="both policies are reproducible from their record", passed=passed, detail="; ".join(parts)
    )


def _gate_stops(runs: tuple[RunPair, ...]) -> GateItem:
    parts, passed = [], True
    for pair in runs:
        for run in (pair.cached, pair.uncached):
            reason = run.end.stop_reason if run.end else None
            passed &= reason is not None and reason.value == pair.expected_stop
        reason = pair.cached.end.stop_reason if pair.cached.end else None
        wrong = "" if reason and reason.value == pair.expected_stop else f", not {pair.expected_stop}"
        parts.append(f"{pair.name}: {reason.value if reason else 'none recorded'}{wrong}")
    return GateItem(name="every run records why it stopped", passed=passed, detail="; ".join(parts))


def _summary(report: Report, result: Milestone) -> str:
    failed = [item.name for item in result.gate if not item.passed]
    if failed:
        return f"The gate fails: {len(failed)} of {len(result.gate)} lines do not hold. {report.summary}"
    return f"The gate holds. {report.summary}"
