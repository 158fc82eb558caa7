"""A report built by hand: one of each contract dataclass, with numbers that are easy to recognise.

The vocabulary's first token is one that a renderer might take for its own markup.
"""

import dataclasses
import math
from typing import Any

from kvproof.contract.environment import Environment
from kvproof.contract.ledger import End, Entry, Header, MarginVerdict, Run, Source, Step, StopReason
from kvproof.contract.milestone import (
    CacheMemory,
    CacheTraceRow,
    CheckpointInfo,
    GateItem,
    Milestone,
    Refusal,
    RunPair,
)
from kvproof.contract.report import VERSION, AuditRequest, Report
from kvproof.contract.results import (
    Certificate,
    ChoiceEvidence,
    ChoiceFlip,
    Constant,
    ConsumedToken,
    Divergence,
    ErrorRatio,
    Evidence,
    ExactEvidence,
    FaultResult,
    FourWays,
    KeptSlot,
    NotPlanted,
    Outcome,
    Raise,
    Reach,
    RowResult,
    ScenarioResult,
    SmallestChange,
    SmallestStep,
    Spread,
    SpreadSite,
    SubjectInfo,
    Tolerance,
    TruthEvidence,
    Verdict,
)
from kvproof.contract.stages import Stage
from kvproof.policies import Greedy, Policy, Sample, Stops
from kvproof.scenarios import Ability

VOCABULARY = ("[red]<script>", "<eos>", "A")
ENVIRONMENT = Environment(
    kvproof="0.1.0",
    python="3.11.0",
    torch="2.6.0",
    platform="Linux",
    processor="x86_64, AVX2, 2 cores",
    num_threads=1,
    created="2025-01-01T00:00:00+00:00",
)
DIVERGENCE = Divergence(
    scenario="token-by-token",
    ids=(0, 2),
    tokens="[red]<script> A",
    position=1,
    batch_row=0,
    stage=Stage.CACHE_K,
    layer=0,
    head=1,
    slot=0,
    expected=-2.5,
    actual=0.25,
    gap=2.75,
    allowed=1e-9,
    origin="layer 1's key of position 0",
    contract="wrong layer's cache: each layer must read and append to its own",
    logits_differ=True,
    sentence="consuming A at position 1, the first value that differs is cache_k of layer 0, head 1, slot 0: "
    "0.25 where the uncached path has -2.5; the slot holds layer 1's key of position 0",
    confirmed=True,
    introduced=("cache_k of layer 0",),
    site="cache_k of layer 0",
)


RAISED = Raise(
    call=1,
    operation="extend",
    consumed=((0,),),
    fed=((2, 0),),
    consumed_text="[red]<script>",
    fed_text="A [red]<script>",
    position=1,
    layer=0,
    error="ValueError: <script>alert(1)</script>",
    traceback=(
        'Traceback (most recent call last):\n  File "decoder.py", line 7, in forward\n    raise ValueError(x)\n'
        "ValueError: <script>alert(1)</script>\n"
    ),
)
TRUTH = TruthEvidence(uncached_error=1e-6, cached_error=2e-6, uncached_rms=5e-7, cached_rms=1e-6)
ERRORS = ErrorRatio(
    num_rows=12, uncached_rms=5e-7, cached_rms=1e-6, ratio=2.0, lowest=1.25, median=1.5, sampled_ratio=1.75
)
CHOICES = ChoiceEvidence(
    gap=1e-6,
    uncached_error=1e-6,
    cached_error=1e-6,
    sampled_error=None,
    flip=ChoiceFlip(position=1, number=0, taken=2, rejected=1, margin=1e-7, error=1e-7),
)


def row(tokens: str, ids: tuple[int, ...], verdict: Verdict, gap: float) -> RowResult:
    return RowResult(
        ids=ids,
        tokens=tokens,
        evidence=Evidence(
            gap=gap,
            allowed=1e-5,
            noise=2e-6,
            scale=4.0,
            exact=ExactEvidence(gap=1e-15, noise=0.0, scale=4.0, uncached_error=1e-6, cached_error=2e-6),
        ),
        worst_id=2,
        margin=5.5,
        margin_verdict=MarginVerdict.SAFE,
        verdict=verdict,
        reason="gap within the declared tolerance",
        expected=(4.0, -1.5, -math.inf),
    )


def step(*, chosen: int, draw: int | None, margin_verdict: MarginVerdict) -> Step:
    state = None if draw is None else "c3RhdGU="
    return Step(
        step=0,
        consumed=(0,),
        consumed_tokens="[red]<script>",
        position=0,
        cache_len=1,
        logits_digest="ab" * 32,
        top_logits=(Entry(id=2, token="A", value=4.0), Entry(id=0, token="[red]<script>", value=-math.inf)),
        probabilities=(Entry(id=0, token="[red]<script>", value=0.25), Entry(id=2, token="A", value=0.75)),
        num_kept=2,
        probabilities_digest="ef" * 32,
        draw=draw,
        chosen=chosen,
        chosen_token=VOCABULARY[chosen],
        generator_before=state,
        generator_after=state,
        margin=0.5,
        error=1e-6,
        margin_verdict=margin_verdict,
    )


def run(policy: Policy, only_step: Step, end: End | None) -> Run:
    header = Header(
        ledger_version=2,
        subject="tiny decoder",
        subject_digest="cd" * 32,
        subject_seed=7,
        source=Source(
            target="random:llama", config=None, attention="eager", device="cpu", trust_remote_code=False
        ),
        tokenizer_digest=None,
        transformers="5.0.0",
        dtype="float32",
        path="cached",
        margins=True,
        full_logits=False,
        environment=ENVIRONMENT,
        policy=policy,
        stops=Stops(eos_id=1, max_tokens=3),
        prompt=(0,),
        prompt_tokens="[red]<script>",
        prompt_text=None,
        chat=False,
    )
    return Run(header=header, steps=(only_step,), end=end)


GREEDY_RUN = run(
    Greedy(),
    step(chosen=1, draw=None, margin_verdict=MarginVerdict.SAFE),
    End(stop_reason=StopReason.EOS, problem=None, tokens="[red]<script> <eos>", text=""),
)
SEEDED_RUN = run(
    Sample(temperature=0.5, top_k=2, seed=41),
    step(chosen=2, draw=1, margin_verdict=MarginVerdict.TIE),
    End(stop_reason=None, problem="position 2 is past the context", tokens="[red]<script> A", text="A"),
)


def pair(name: str, made: Run, *, equal: bool) -> RunPair:
    return RunPair(
        name=name,
        cached=made,
        uncached=made,
        equal=equal,
        reproduced=equal,
        difference=None if equal else DIVERGENCE,
        problem=None if equal else "line 2: chosen is 2, and 0 follows",
        expected_trace="[red]<script> <eos>" if equal else None,
        expected_stop="eos",
    )


MILESTONE = Milestone(
    checkpoint=CheckpointInfo(
        source="trained",
        seed=7,
        num_parameters=30,
        loss=0.5,
        entropy_floor=0.25,
        largest_probability_error=1e-3,
        digest_before="cd" * 32,
        digest_after="cd" * 32,
        tie="The tie fell to A.",
    ),
    vocabulary=VOCABULARY,
    patterns=("A A",),
    switched_off=("seed",),
    cache_trace=(
        CacheTraceRow(
            tokens="[red]<script>",
            position=0,
            layer=0,
            k_shape=(1, 2, 1, 4),
            v_shape=(1, 2, 1, 4),
            expected_shape=(1, 2, 1, 4),
            asserted=True,
            holds=True,
        ),
    ),
    memory=CacheMemory(
        bytes_per_element=4,
        bytes_per_token_and_layer=64,
        bytes_per_token=64,
        bytes_per_layer=128,
        bytes_per_request=64,
        bytes_full_context=128,
        num_tokens_measured=1,
        measured_bytes=64,
    ),
    requests_isolated=True,
    refusals=(Refusal(attempt="feed no token", message="no token at all", refused=True, unchanged=False),),
    runs=(pair("greedy", GREEDY_RUN, equal=True), pair("seeded", SEEDED_RUN, equal=False)),
    gate=(
        GateItem(name="all prefixes match", passed=True, detail="2 of 2"),
        GateItem(name="every run repeats", passed=False, detail="seeded: [bold]not reproducible[/bold]"),
    ),
    notes=("A note.",),
)


def planted(name: str, **members: Any) -> FaultResult:
    """Return what came of a fault in the certificate."""
    in_audit = ("verdict", "largest_gap", "tolerance", "num_rows_beyond", "margin", "divergence")
    return FaultResult(
        name=name, breaks="a contract", expected_stages=(Stage.CACHE_K,), **members, **dict.fromkeys(in_audit)
    )


CERTIFICATE = Certificate(
    dtype="float64",
    sequence=(0, 1, 2, 3),
    faults=(
        planted(
            "stale-slot",
            layer=1,
            position=2,
            outcome=Outcome.CAUGHT,
            where="cache_k of layer 1",
            right_stage=True,
            gap=0.5,
            reason=None,
        ),
        planted(
            "missing-append",
            layer=None,
            position=2,
            outcome=Outcome.RAISED,
            where=None,
            right_stage=None,
            gap=0.0,
            reason="layer 0 holds 1 entries where 2 tokens were consumed",
        ),
        planted(
            "heads-out-of-order",
            layer=1,
            position=2,
            outcome=Outcome.HIDDEN,
            where="new_k of layer 1",
            right_stage=True,
            gap=1e-12,
            reason=None,
        ),
    ),
    not_planted=(NotPlanted(fault="state-restarts", reason="the subject has no place for it"),),
    clean_gap=0.0,
    margin=5e14,
    smallest_changes=(
        SmallestChange(dtype="float64", layer=0, tensor="k", position=1, value=1e-9),
        SmallestChange(dtype="float32", layer=0, tensor="state", position=1, value=None),
    ),
    smallest_steps=(
        SmallestStep(dtype="float64", what="position", layer=None, seen=True),
        SmallestStep(dtype="float64", what="mask", layer=1, seen=False),
    ),
    shown_stages=(Stage.TOKEN, Stage.CACHE_K, Stage.LOGITS),
    problem="nothing misplaced in the cache of layer 0 changed a row of logits",
    reached=Reach(num_tokens=4, block_len=2, num_rows=2),
    planted_in=Reach(num_tokens=4, block_len=2, num_rows=2),
)

SPREAD = Spread(
    scenario="token-by-token",
    fault="wrong-layer",
    dtype="float64",
    tokens=(
        ConsumedToken(call=0, batch_row=0, position=0, token="[red]<script>"),
        ConsumedToken(call=1, batch_row=0, position=1, token="A"),
    ),
    sites=(
        SpreadSite(name="position", layer=None, allowed=0.0),
        SpreadSite(name="cache_k of layer 0", layer=0, allowed=1e-9),
        SpreadSite(name="logits", layer=None, allowed=1e-9),
    ),
    gaps=((0.0, 0.0), (0.0, 0.5), (None, math.inf)),
    kept=(
        KeptSlot(
            first_call=0,
            last_call=0,
            layer=0,
            slot=0,
            position=0,
            token="[red]<script>",
            gap=0.0,
            wrong=False,
            origin=None,
        ),
        KeptSlot(
            first_call=1,
            last_call=1,
            layer=0,
            slot=0,
            position=0,
            token="[red]<script>",
            gap=0.5,
            wrong=True,
            origin="layer 1's key of position 0",
        ),
    ),
    left_out=True,
)

REPORT = Report(
    schema_version=VERSION.major,
    schema_minor=VERSION.minor,
    verdict=Verdict.ROUNDING,
    summary="The gate fails: 1 of 2 lines do not hold.",
    environment=ENVIRONMENT,
    request=AuditRequest(
        target=None,
        config="config.json",
        dtype="float32",
        attention="eager",
        device="cpu",
        trust_remote_code=False,
        seed=3,
        sequences=((0, 2), (2, 2)),
        num_programs=4,
        command="kvproof audit --config config.json --seed 3 --programs 4",
    ),
    subject=SubjectInfo(
        name="tiny decoder",
        digest="cd" * 32,
        mode="eval",
        dtype="float32",
        num_layers=1,
        vocab_size=3,
        context_len=2,
        abilities=(Ability.CAST, Ability.TAP),
    ),
    tolerance=Tolerance(dtype="float32", absolute=1e-5, relative=0.0, source="declared for this test"),
    constants=(Constant(name="noise factor", value=1000.0, source="measured"),),
    scenarios=(
        ScenarioResult(
            name="token-by-token",
            advice=False,
            verdict=Verdict.ROUNDING,
            rows=(
                row("[red]<script>", (0,), Verdict.MATCH, 0.0),
                row("[red]<script> A", (0, 2), Verdict.ROUNDING, 2e-5),
            ),
            largest_gap=2e-5,
            num_values_compared=12,
            reason=None,
            divergence=None,
            errors=ERRORS,
            four_ways=FourWays(
                ids=(0, 2),
                groups=(("literal", "one-pass"), ("this scenario",)),
                suspect="this scenario",
                sentence="the suspect is the cached path",
            ),
        ),
        ScenarioResult(
            name="fork",
            advice=True,
            verdict=Verdict.MATCH,
            rows=(
                dataclasses.replace(
                    row("A", (2,), Verdict.MATCH, 1e-6),
                    evidence=Evidence(
                        gap=1e-6, allowed=1e-5, noise=2e-6, scale=4.0, exact=None, choices=CHOICES, truth=TRUTH
                    ),
                    expected=None,
                ),
            ),
            largest_gap=1e-6,
            num_values_compared=0,
            reason=None,
            divergence=None,
            four_ways=None,
            raised=RAISED,
            condition="in exactly the calls that feed several tokens",
        ),
    ),
    faults=(
        FaultResult(
            name="wrong-layer",
            breaks="layer 0 reads layer 1's cache",
            expected_stages=(Stage.CACHE_K,),
            layer=0,
            position=None,
            outcome=Outcome.CAUGHT,
            where="cache_k of layer 0",
            gap=0.5,
            reason=None,
            verdict=Verdict.DIVERGED,
            largest_gap=12.5,
            tolerance=1e-5,
            num_rows_beyond=1,
            margin=math.inf,
            divergence=DIVERGENCE,
            right_stage=True,
        ),
        FaultResult(
            name="no-op",
            breaks="nothing at all",
            expected_stages=(Stage.POSITION,),
            layer=None,
            position=None,
            outcome=Outcome.EQUIVALENT,
            where=None,
            gap=0.0,
            reason=None,
            verdict=Verdict.MATCH,
            largest_gap=0.0,
            tolerance=1e-5,
            num_rows_beyond=0,
            margin=0.0,
            divergence=None,
            right_stage=None,
        ),
    ),
    certificate=CERTIFICATE,
    notes=("no float64 rung",),
    partial=True,
    spreads=(SPREAD,),
    milestone=MILESTONE,
)
