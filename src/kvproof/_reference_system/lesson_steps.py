"""Walks the reference decoder for the lesson: every number on the way, healthy and with each fault planted."""

import dataclasses
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from kvproof._engine.localise import localise, traced_calls
from kvproof._engine.uncached_values import LiteralRuns, Trace, UncachedRun
from kvproof._generation.choosing import choose, generator_at
from kvproof._generation.requests import first_difference, generate
from kvproof._numerics.gaps import gap_between
from kvproof._numerics.taps import token_axis
from kvproof._reference_system.milestone import TOLERANCE
from kvproof._system.machine import environment, use_one_thread
from kvproof.contract.ledger import Run
from kvproof.contract.lesson import Kept, Lesson, LessonStep, LessonValue, Numbers, Walk
from kvproof.contract.stages import Site, Stage
from kvproof.errors import UsageError
from kvproof.faults import (
    Fault,
    cancelling_pair,
    choose_place,
    disturbed,
    find,
    mask_off_by_one,
    plant,
    position_off_by_one,
    wrong_layer,
    wrong_position,
)
from kvproof.policies import Greedy, Policy, Sample, Stops
from kvproof.reference import VOCABULARY, Checkpoint
from kvproof.reference.corpus import BOS_ID, EOS_ID, SEQUENCES
from kvproof.scenarios import Scenario, interleaved_requests, token_by_token
from kvproof.subjects import ReferenceSubject

#: A value differs where a reader of four digits sees it. Rounding stays an order of magnitude below, and every
#: fault goes beyond; the rows of logits are held against the declared tolerance.
VISIBLE = 5e-5
#: The page's switches, in the causal order of what they break; the policy's own comes last.
FAULTS: tuple[Fault, ...] = (
    find("token-fed-twice").at(position=1),
    wrong_position(),
    position_off_by_one(),
    find("heads-out-of-order").at(layer=0, position=1),
    find("missing-append").at(layer=1, position=1),
    find("duplicate-append").at(layer=0, position=1),
    wrong_layer(),
    find("stale-slot").at(layer=0, position=2),
    find("swapped-kv").at(layer=0, position=1),
    find("lower-dtype").at(layer=0, position=1),
    find("shared-between-requests").at(layer=0),
    mask_off_by_one(),
    disturbed(Stage.ATTN_OUT, layer=1, position=1),
    cancelling_pair(),
)
#: The generator of a run whose policy is at fault starts from this seed instead of the declared one.
OTHER_SEED = 42
_POLICIES: dict[str, Policy] = {
    "greedy": Greedy(),
    "seeded": Sample(temperature=1.0, top_k=3, seed=41),
}


def walk(checkpoint: Checkpoint, on_stage: Callable[[str], None] = lambda name: None) -> Lesson:
    """Return the lesson's numbers; nothing changes the checkpoint. ``on_stage`` is told what is being run."""
    subject = ReferenceSubject(checkpoint, counts_entries=False)  # so that wrong lengths show in the values
    if subject.info.vocab_size != len(VOCABULARY):
        raise UsageError("the lesson walks the reference system's own decoder, of eight tokens")
    decoder = checkpoint.decoder
    with use_one_thread():
        return Lesson(
            environment=environment(),
            seed=checkpoint.seed,
            loss=checkpoint.loss,
            num_parameters=sum(p.numel() for p in decoder.parameters()),
            vocabulary=VOCABULARY,
            context_len=decoder.config.context_len,
            allowed=TOLERANCE.absolute,
            token_table=_numbers(decoder.token_embedding.weight),
            position_table=_numbers(decoder.position_embedding.weight),
            walks=tuple(_walks(subject, on_stage)),
        )


def _walks(subject: ReferenceSubject, on_stage: Callable[[str], None]) -> Iterator[Walk]:
    for name, policy in _POLICIES.items():
        run = generate(subject, (BOS_ID,), policy, Stops(eos_id=EOS_ID), path="cached")
        healthy = _walk(subject, name, run, None)
        yield healthy
        for fault in FAULTS:
            on_stage(f"{name}, {fault.name}")
            yield _walk(subject, name, run, fault)
        if isinstance(policy, Sample):
            yield _other_generator(subject, run, healthy)


def _walk(subject: ReferenceSubject, name: str, run: Run, fault: Fault | None) -> Walk:
    """Walk one run's tokens on the cached path."""
    ids = (*run.header.prompt, *run.returned[:-1])
    program = _program(ids, fault)
    fault = None if fault is None else choose_place(fault, subject, [program])
    first = localise(subject, program, fault=fault).divergence
    runs = LiteralRuns(subject)
    steps: list[LessonStep] = []
    for rows, trace in traced_calls(subject, program, plant(fault)):
        prefix = rows[0].prefix
        if prefix == ids[: len(prefix)] and len(prefix) == len(steps) + 1:
            steps.append(_step(run, len(steps), trace, runs.over(prefix)))
    return Walk(
        run=name,
        policy=_words(run.header.policy),
        fault=None if fault is None else fault.name,
        breaks=None if fault is None else _breaks(fault),
        steps=tuple(steps),
        first=first,
    )


def _breaks(fault: Fault) -> str:
    """Return what a fault breaks, and where if it does not say so itself."""
    layer = fault.place.layer
    return fault.breaks if fault.layers is None or layer is None else f"in layer {layer}, {fault.breaks}"


def _program(ids: tuple[int, ...], fault: Fault | None) -> Scenario:
    """Return the program that shows a fault: one request alone, or two where one disturbs the other."""
    if fault is not None and fault.name == "shared-between-requests":
        other = next(sequence for sequence in SEQUENCES if sequence[1] != ids[1])
        return interleaved_requests(ids, other)
    return token_by_token(ids)


def _step(run: Run, number: int, trace: Trace, uncached: UncachedRun) -> LessonStep:
    cached, expected = trace[Site(Stage.LOGITS)][0, -1], uncached.row(len(uncached.ids))
    recorded = run.steps[number]
    state = recorded.generator_before
    choice = choose(run.header.policy, cached, None if state is None else generator_at(state))
    kept, probabilities = choice.ids.tolist(), choice.probabilities.tolist()
    last = number == len(run.steps) - 1
    reason = run.end.stop_reason if last and run.end is not None else None
    return LessonStep(
        token=recorded.consumed_tokens,
        position=number,
        values=tuple(_values(trace, uncached)),
        gap=gap_between(expected, cached).size,
        same_choice=int(cached.argmax()) == int(expected.argmax()),
        kept=tuple(Kept(token=VOCABULARY[i], p=p) for i, p in zip(kept, probabilities, strict=True)),
        draw=choice.draw,
        chosen=VOCABULARY[choice.chosen],
        stop=None if reason is None else reason.value,
    )


def _values(trace: Trace, uncached: UncachedRun) -> Iterator[LessonValue]:
    for site, value in trace.items():
        if site.stage is Stage.CACHE_K:  # whose length the decoder shows by its shape alone
            length = Site(Stage.CACHE_LEN, site.layer)
            yield _value(length, torch.tensor(value.shape[2]), torch.tensor(len(uncached.ids)))
        yield _value(site, _of_newest(site, value), _of_newest(site, uncached.values[site]))


def _value(site: Site, cached: Tensor, uncached: Tensor) -> LessonValue:
    same = cached.shape == uncached.shape and gap_between(uncached, cached).size < VISIBLE
    return LessonValue(
        stage=site.stage,
        layer=site.layer,
        cached=_numbers(cached),
        uncached=None if same else _numbers(uncached),
    )


def _of_newest(site: Site, value: Tensor) -> Tensor:
    """Return the newest token's part of a value, and all of what a cache holds."""
    axis = token_axis(site.stage)
    return value[0] if axis is None else value[0].select(axis - 1, -1)


def _numbers(value: Tensor) -> Numbers:
    return Numbers(shape=tuple(value.shape), values=tuple(round(float(x), 6) for x in value.flatten()))


def _other_generator(subject: ReferenceSubject, run: Run, healthy: Walk) -> Walk:
    """Return the run whose logits are right and whose generator is not the declared one."""
    policy = run.header.policy
    assert isinstance(policy, Sample)
    other = dataclasses.replace(policy, seed=OTHER_SEED)
    wrong = generate(subject, run.header.prompt, other, Stops(eos_id=EOS_ID), path="cached")
    steps = []
    for number, step in enumerate(healthy.steps):
        draw, chosen = step.draw, step.chosen
        if number < len(wrong.steps) and wrong.steps[number].consumed == run.steps[number].consumed:
            draw, chosen = wrong.steps[number].draw, wrong.steps[number].chosen_token
        steps.append(dataclasses.replace(step, draw=draw, chosen=chosen))
    first = first_difference(wrong, run, TOLERANCE)
    return dataclasses.replace(
        healthy,
        fault="other-generator-state",
        breaks=f"the generator starts from seed {OTHER_SEED} instead of {policy.seed}",
        steps=tuple(steps),
        first=None if first is None else dataclasses.replace(first, scenario="token-by-token"),
    )


def _words(policy: Policy) -> str:
    if isinstance(policy, Sample):
        return f"temperature {policy.temperature:g}, the {policy.top_k} most likely tokens, seed {policy.seed}"
    return "the most likely token; of equal ones the lowest id"
