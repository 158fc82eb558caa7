"""Scenarios on transformers models: healthy types equal their uncached path, known faults do not."""

import copy
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("transformers")

import torch
from transformers import GenerationConfig

from kvproof import Verdict, audit
from kvproof._engine.programs import Coverage, run_program
from kvproof._numerics.taps import Recorder
from kvproof.contract.stages import Site, Stage
from kvproof.errors import AbilityError, ContextError, SubjectError, UsageError
from kvproof.scenarios import (
    Ability,
    Boundaries,
    CacheKind,
    Claim,
    Generate,
    Method,
    Scenario,
    capacity,
    catalogue,
    chunked_prefill,
    compared_prefixes,
    generation,
    longest_sequences,
    prompt_lookup,
    select,
    with_cache,
)
from kvproof.subjects._transformers import TransformersSubject, random_model
from kvproof.subjects._transformers.caches import why_not_compiled

NEW = (
    "rollback across calls",
    "positions left out",
    "batch isolation",
    "window crossing",
    "context end",
    "static cache",
    "poisoned buffer",
    "generate greedy",
    "generate left-padded batch",
    "generate chunked prefill",
    "generate static cache",
    "generate prompt lookup",
    "generate beam search",
)
SEQUENCE = tuple(range(3, 31))
OTHER = tuple(range(40, 68))

_SUBJECTS: dict[str, TransformersSubject] = {}


def subject_of(model_type: str) -> TransformersSubject:
    """In true float64: what is no rounding there is a fault."""
    if model_type not in _SUBJECTS:
        small = random_model(model_type, seed=0, dtype=torch.float32, attention="eager")
        _SUBJECTS[model_type] = small.cast(torch.float64)
    return _SUBJECTS[model_type]


def scenarios_of(subject: TransformersSubject, *names: str) -> tuple[Scenario, ...]:
    return select(catalogue(SEQUENCE, OTHER, subject.boundaries), only=names)


def largest_gap(subject: TransformersSubject, scenario: Scenario) -> float:
    """Run a program, check that it did what it says, and return the largest relative gap."""
    uncached = {
        sequence[:length]: row
        for sequence in longest_sequences(scenario)
        for length, row in enumerate(subject.rows(sequence), 1)
    }
    gaps, coverage, prefixes = [0.0], Coverage(), set()
    for call in run_program(subject, scenario, coverage=coverage):
        for row in call.rows:
            expected = uncached[row.prefix]
            gaps.append(float((row.logits - expected).abs().max() / expected.abs().max()))
            prefixes.add(row.prefix)
    assert prefixes == compared_prefixes(scenario)
    assert coverage.missing(scenario) is None
    return max(gaps)


def cases(model_type: str) -> Iterator[tuple[str, str]]:
    return ((model_type, name) for name in NEW)


@pytest.mark.parametrize(("model_type", "name"), [*cases("llama"), *cases("gemma3_text"), *cases("mixtral")])
def test_a_healthy_type_equals_its_uncached_path(model_type: str, name: str):
    subject = subject_of(model_type)
    for scenario in scenarios_of(subject, name):
        if scenario.skipped is not None:
            assert (model_type, name) == ("llama", "window crossing")
        else:
            assert scenario.needs <= set(subject.info.abilities)
            assert largest_gap(subject, scenario) < 1e-12


@pytest.mark.parametrize(
    ("model_type", "name"),
    [
        ("bamba", "positions left out"),  # its default positions ignore the past
        ("gpt2", "positions left out, left-padded batch"),  # and these ignore the padding
        ("roberta", "generate greedy"),  # generate() counts from 0, the model from the padding index + 1
        ("gpt_neo", "static cache"),  # the local bias uses the buffer's length
        ("gpt_neo", "generate static cache"),
        ("mamba", "window crossing"),  # a block on a warm cache restarts the scan
    ],
)
def test_a_known_fault_is_seen(model_type: str, name: str):
    subject = subject_of(model_type)
    assert max(largest_gap(subject, scenario) for scenario in scenarios_of(subject, name)) > 1e-2


@pytest.mark.parametrize("name", ["generate greedy", "generate beam search", "generate chunked prefill"])
def test_a_type_that_is_wrong_elsewhere_is_right_here(name: str):
    subject = subject_of("gpt_neo")
    assert max(largest_gap(subject, scenario) for scenario in scenarios_of(subject, name)) < 1e-12


@pytest.mark.parametrize("model_type", ["roberta", "xmod"])
@pytest.mark.parametrize("name", ["token-by-token", "chunked prefill", "left-padded batch", "context end"])
def test_positions_that_start_after_the_padding_index_are_given_as_the_model_counts_them(
    model_type: str, name: str
):
    subject = subject_of(model_type)
    padding = subject.padding_position
    assert padding is not None
    assert subject.info.context_len == subject.config.max_position_embeddings - padding - 1
    with_padding = (*SEQUENCE[:5], padding, *SEQUENCE[6:])  # its token takes that position, and counts for none
    for scenario in select(catalogue(with_padding, OTHER, subject.boundaries), only=[name]):
        assert largest_gap(subject, scenario) < 1e-12


@pytest.mark.parametrize(("model_type", "reason"), [("xlnet", "query stream"), ("musicgen", "not the library's")])
def test_a_generate_that_is_no_plain_forward_is_not_checked_and_says_why(model_type: str, reason: str):
    subject = subject_of(model_type)
    assert Ability.GENERATE not in subject.info.abilities
    assert reason in subject.lacks[Ability.GENERATE]


def test_poisoned_slots_that_are_read_are_seen():
    """A mask of the buffer's own would hide them; one that lets everything through shows them."""
    subject = subject_of("llama")
    (scenario,) = scenarios_of(subject, "poisoned buffer")
    model = copy.deepcopy(subject.model)
    reading = TransformersSubject(model, name="reads everything")
    for layer in model.model.layers:
        attend = layer.self_attn.forward

        def everything(*args: object, attend: object = attend, **kwargs: object) -> object:
            return attend(*args, **{**kwargs, "attention_mask": None})

        layer.self_attn.forward = everything
    gaps = [
        float((row.logits - subject.rows(row.prefix)[-1]).abs().max())
        for call in run_program(reading, scenario)
        for row in call.rows
        if row.is_last
    ]
    assert max(gaps) > 1


@pytest.mark.parametrize(
    ("model_type", "boundaries"),
    [
        ("llama", Boundaries(context_len=128)),
        ("gemma3_text", Boundaries(context_len=128, windows=(8,))),
        ("gpt_neo", Boundaries(context_len=128, windows=(8,))),
        ("llama4_text", Boundaries(context_len=128, windows=(8,))),
        ("mamba", Boundaries(context_len=2**20, windows=(4,))),
        ("bamba", Boundaries(context_len=128, windows=(4, 8))),
    ],
)
def test_boundaries_are_what_the_configuration_declares(model_type: str, boundaries: Boundaries):
    assert subject_of(model_type).boundaries == boundaries


def test_caches_that_cannot_be_had_say_why():
    subject = subject_of("llama")
    assert "model stands on the CPU" in subject.lacks[Ability.OFFLOADED_CACHE]
    missing = {Ability.OFFLOADED_CACHE, Ability.QUANTISED_CACHE} - set(subject.info.abilities)
    assert missing == set(subject.lacks)
    with pytest.raises(AbilityError, match="'offloaded-cache'"):
        subject.session(cache=CacheKind.OFFLOADED)


def test_a_state_has_no_slots_to_poison_and_takes_no_chunked_prompt():
    abilities = set(subject_of("mamba").info.abilities)
    assert {Ability.STATIC_CACHE, Ability.GENERATE} <= abilities
    assert not {Ability.POISON, Ability.GENERATE_CHUNKED, Ability.GENERATE_ASSISTED} & abilities
    assert not {Ability.PAD, Ability.OMIT_POSITIONS} & abilities


def test_a_static_cache_is_made_for_the_program_and_reset_in_place():
    subject = subject_of("llama")
    scenario = with_cache(chunked_prefill(SEQUENCE[:6], 3), CacheKind.STATIC)
    session = subject.session(cache=scenario.cache, capacity=capacity(scenario))
    first = session.extend([SEQUENCE[:6]])
    buffer = session.cache.layers[0].keys
    assert buffer.shape[2] == 6
    session.reset()
    assert session.ids == ((),)
    torch.testing.assert_close(session.extend([SEQUENCE[:6]]), first, atol=1e-12, rtol=0)
    assert session.cache.layers[0].keys is buffer


def test_poison_counts_what_it_fills():
    subject = subject_of("llama")
    session = subject.session(cache=CacheKind.STATIC, capacity=5)
    assert session.poison() == 0, "there is no buffer before the first call"
    session.extend([SEQUENCE[:3]])
    keys = session.cache.layers[0].keys
    num_layers, per_slot = subject.info.num_layers, 2 * keys.shape[1] * keys.shape[3]
    assert session.poison() == num_layers * per_slot * 2
    assert bool((keys[:, :, 3:] == 1e4).all())
    assert float(keys[:, :, :3].abs().max()) < 1e3
    assert subject.session().poison() == 0


def test_prompt_lookup_accepts_and_rejects():
    coverage = Coverage()
    scenario = prompt_lookup((5, 6, 7), 9)
    calls = list(run_program(subject_of("llama"), scenario, coverage=coverage))
    assert coverage.counts[Claim.ACCEPTED] == 5
    assert coverage.counts[Claim.REJECTED] == 2
    assert [len(call.rows) for call in calls] == [4, 2, 1, 2]
    assert not calls[1].rows[-1].is_last, "what follows it was rejected"


def test_generate_leaves_the_model_as_it_was():
    subject = subject_of("llama")
    model = subject.model
    before = dict(vars(model))
    limit = torch._dynamo.config.cache_size_limit
    for name in ("generate static cache", "generate chunked prefill", "generate prompt lookup"):
        for scenario in scenarios_of(subject, name):
            list(run_program(subject, scenario))
    assert vars(model) == before
    assert torch._dynamo.config.cache_size_limit == limit


def test_the_models_own_generation_settings_do_not_leak_in():
    model = copy.deepcopy(subject_of("llama").model)
    model.generation_config = GenerationConfig(
        do_sample=True, temperature=0.1, eos_token_id=list(range(101)), max_new_tokens=1, repetition_penalty=3.0
    )
    subject = TransformersSubject(model, name="opinionated")
    assert largest_gap(subject, generation(Method.GREEDY, (SEQUENCE[:4],), (SEQUENCE[4:8],))) < 1e-12
    assert model.generation_config.repetition_penalty == 3.0


def test_each_forward_inside_generate_has_a_tap_of_its_own():
    subject = subject_of("llama")
    scenario = generation(Method.GREEDY, (SEQUENCE[:4],), (SEQUENCE[4:7],))
    calls = list(run_program(subject, scenario, Recorder))
    taps = [call.tap for call in calls]
    assert len({id(tap) for tap in taps}) == 3
    embedded = [tap.values[Site(Stage.MODULE, None, "model.embed_tokens")].shape[1] for tap in taps]
    assert embedded == [4, 1, 1]
    assert [(row.offset, row.is_last) for call in calls for row in call.rows] == [(3, True), (0, True), (0, True)]


def forced(method: Method, prompts: tuple, steps: tuple) -> Generate:
    return Generate(method=method, prompts=prompts, steps=steps)


@pytest.mark.parametrize(
    ("operation", "message"),
    [
        (forced(Method.GREEDY, (), (((0, 1),),)), "at least one prompt"),
        (forced(Method.GREEDY, ((1,),), ()), "at least one prompt and one step"),
        (forced(Method.GREEDY, ((1,), (2,)), (((0, 1),),)), "of 2 rows cannot take the step"),
        (forced(Method.GREEDY, ((1,), (2,)), (((1, 1), (0, 1)),)), "cannot take the step"),
        (forced(Method.BEAM, ((1,),), (((0, 1), (0, 1)),)), "beam search of 2 rows cannot take the step"),
        (forced(Method.BEAM, ((1,),), (((0, 1), (1, 2)),)), "cannot take the step"),
        (forced(Method.BEAM, ((1,), (2,)), (((0, 1), (0, 2)),)), "is forced from one prompt, not from 2"),
        (forced(Method.PROMPT_LOOKUP, ((1,), (2,)), (((0, 1), (1, 2)),)), "is forced from one prompt"),
    ],
)
def test_a_generation_that_cannot_be_forced_is_refused(operation: Generate, message: str):
    with pytest.raises(UsageError, match=message):
        subject_of("llama").generate(operation)


def test_a_generation_past_the_context_is_refused():
    with pytest.raises(ContextError, match="accepts positions"):
        subject_of("llama").generate(forced(Method.GREEDY, ((1,) * 128,), (((0, 1),),)))


def test_what_generate_raises_is_the_decoders_error(monkeypatch: pytest.MonkeyPatch):
    subject = TransformersSubject(copy.deepcopy(subject_of("llama").model), name="broken")

    def broken(*args: object, **arguments: object) -> None:
        raise ValueError("no such mode")

    monkeypatch.setattr(type(subject.model), "_update_model_kwargs_for_generation", broken)
    with pytest.raises(SubjectError, match="the decoder raised ValueError: no such mode"):
        subject.generate(forced(Method.GREEDY, ((1, 2),), (((0, 1),),)))
    assert "forward" not in vars(subject.model)


def test_rows_that_generate_does_not_give_are_missed(monkeypatch: pytest.MonkeyPatch):
    """A library that stops early, or takes another token, would leave rows without a comparison."""
    subject = TransformersSubject(copy.deepcopy(subject_of("llama").model), name="hasty")
    monkeypatch.setattr(type(subject.model), "_has_unfinished_sequences", lambda self, done, *rest, **more: False)
    with pytest.raises(SubjectError, match=r"generate\(\) gave no row after 1 2"):
        subject.generate(forced(Method.GREEDY, ((1, 2),), (((0, 1),), ((0, 4),))))


def test_a_kernel_that_cannot_be_compiled_is_no_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The library waits for a killed process's lock for ever, and an audit did with it."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CXX", "ninja")
    assert "ninja and ninja is not installed" in str(why_not_compiled(tmp_path))
    (tmp_path / "ninja").touch(mode=0o755)
    assert why_not_compiled(tmp_path) is None
    lock = tmp_path / "lock"
    lock.touch()
    assert why_not_compiled(tmp_path) is None  # somebody is at it
    os.utime(lock, (0, 0))
    assert str(lock) in str(why_not_compiled(tmp_path))
    lock.unlink()
    (tmp_path / "ninja").unlink()
    (tmp_path / "quanto_cpp.so").touch()
    (tmp_path / "pytorch_version.txt").write_text("1.0")
    assert "ninja is not installed" in str(why_not_compiled(tmp_path))  # it is another torch's
    (tmp_path / "pytorch_version.txt").write_text(torch.__version__)
    assert why_not_compiled(tmp_path) is None
    lock.touch()
    os.utime(lock, (0, 0))
    assert why_not_compiled(tmp_path) is None  # a kernel that is there needs no lock


def test_what_a_quantised_cache_costs_is_shown_and_not_held_against_it():
    pytest.importorskip("optimum.quanto", reason="the library quantises a cache with optimum-quanto alone")
    subject = random_model("llama", seed=0, dtype=torch.float32, attention="eager")
    report = audit(subject, ["token-by-token", "quantised cache"], all_values=False)
    assert report.verdict.passes
    quantised = next(s for s in report.scenarios if s.name == "quantised cache")
    assert (quantised.verdict, quantised.advice) == (Verdict.DIVERGED, True)
    assert quantised.divergence.stage in (Stage.CACHE_K, Stage.CACHE_V)
    assert (quantised.divergence.confirmed, quantised.four_ways) == (False, None)  # nobody asks why
    first = quantised.rows[0]
    assert 0.001 * first.scale < quantised.largest_gap < first.scale  # few bits, and no bug
