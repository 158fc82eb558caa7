"""Findings in transformers models are confirmed: in attention, caches, padding and the library's generate()."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.hf.test_localise import Tampered, changing, found, ids_for, subject_of
from torch import Tensor

from kvproof._numerics.taps import Recorder, Tap
from kvproof.contract.stages import AFTER_READOUT, Site, Stage
from kvproof.faults import Fault, Planting
from kvproof.scenarios import (
    Ability,
    CacheKind,
    Extend,
    Method,
    Scenario,
    beam_search,
    chunked_prefill,
    generation,
    prompt_lookup,
    token_by_token,
    with_cache,
)


def always(*sites: Site) -> Fault:
    """Change every value at these sites: in every call, session and forward."""

    def tap(site: Site, value: Tensor) -> Tensor:
        return value * 1.5 + 0.25 if site in sites else value

    return Fault(
        name="always",
        breaks="sites",
        stages=frozenset({sites[0].stage}),
        make=lambda place: Planting(lambda: tap),
    )


def padded(ids: tuple[int, ...]) -> Scenario:
    return Scenario(
        name="left-padded",
        exposes="padding",
        operations=(
            Extend(ids=(ids[:6], ids[6:9])),
            *(Extend(ids=((ids[6 + i],), (ids[9 + i],))) for i in range(3)),
        ),
        needs=frozenset({Ability.BATCH, Ability.PAD}),
        batch=2,
    )


@pytest.mark.parametrize("stage", [Stage.NEW_Q, Stage.NEW_K, Stage.NEW_V, Stage.CACHE_K, Stage.ATTN_MIX], ids=str)
@pytest.mark.parametrize("build", [padded, token_by_token, lambda ids: chunked_prefill(ids, 5)])
def test_a_value_that_is_always_wrong_is_one_place(build: Callable[[tuple[int, ...]], Scenario], stage: Stage):
    """A cache keeps what it was given, so a wrong new key is also put right where later calls read it."""
    subject = subject_of("llama")
    divergence = found(subject, build(ids_for(subject)), fault=always(Site(stage, 1)), one_pass=True)
    assert (divergence.confirmed, divergence.introduced) == (True, (f"{stage.value} of layer 1",))


def test_padding_keeps_its_own_values():
    """What stands before a shorter row has no uncached value: a fault there alone is put right nowhere."""
    seen: list[Tensor] = []

    def tap(site: Site, value: Tensor) -> Tensor:
        if site == Site(Stage.NEW_Q, 1):
            value = value + 0.5
        if site.stage is Stage.MODULE and site.module == "model.layers.1.self_attn":
            seen.append(value.detach().clone())
        return value

    subject = subject_of("llama")
    ids = ids_for(subject)
    fault = Fault(
        name="seen", breaks="new_q", stages=frozenset({Stage.NEW_Q}), make=lambda place: Planting(lambda: tap)
    )
    assert found(subject, padded(ids), fault=fault).confirmed
    top = subject.cast(torch.float64)
    recorder = Recorder()
    top.session(batch=2, tap=recorder).extend([ids[:6], ids[6:9]])
    healthy = recorder.values[Site(Stage.MODULE, 1, "model.layers.1.self_attn")]
    faulty, mended = seen[0], seen[len(seen) // 2]
    assert not torch.allclose(faulty, healthy)
    assert torch.allclose(mended[0], healthy[0], rtol=0, atol=1e-9)
    assert torch.allclose(mended[1, 3:], healthy[1, 3:], rtol=0, atol=1e-9)
    assert torch.equal(mended[1, :3], faulty[1, :3])


def test_a_missing_cache_row_is_put_right_by_what_attention_reads():
    def tamper(arguments: dict[str, Any]) -> None:
        layer = arguments["past_key_values"].layers[1]
        if arguments["past_key_values"].get_seq_length() == 6:
            layer.keys, layer.values = layer.keys[:, :, 1:], layer.values[:, :, 1:]

    subject = subject_of("llama", "sdpa")
    divergence = found(Tampered(subject, tamper), token_by_token(ids_for(subject)[:7]))
    assert divergence.confirmed
    assert divergence.introduced == ("cache_len of layer 1 (by way of attn_mix of layer 1)",)


def test_a_rotation_is_put_right_as_a_whole():
    """A cosine and a sine: with one of them alone, every query and key of every layer would be another place."""
    subject = subject_of("llama")
    recorder = Recorder()
    subject.rows(ids_for(subject), tap=recorder)
    parts = [site for site in recorder.values if site.module == "model.rotary_emb"]
    assert list(map(str, parts)) == ["the output of model.rotary_emb", "the output of model.rotary_emb (part 1)"]
    for part in parts:
        divergence = found(
            subject, token_by_token(ids_for(subject)), fault=changing(part, torch.zero_, call=5), one_pass=True
        )
        assert (divergence.confirmed, divergence.introduced) == (True, (str(part),))
    divergence = found(subject, token_by_token(ids_for(subject)), fault=always(*parts), one_pass=True)
    assert (divergence.confirmed, divergence.introduced) == (True, (str(parts[0]),))


def test_a_value_of_one_part_that_is_put_back_leaves_the_rest_of_a_tuple():
    subject = subject_of("llama")
    ids = ids_for(subject)

    def negated(site: Site, value: Tensor) -> Tensor:
        return -value if site.part else value

    expected = subject.rows(ids)
    assert not torch.allclose(subject.rows(ids, tap=negated), expected), "a negative sine turns the other way"

    def twice(site: Site, value: Tensor) -> Tensor:
        return value.clone()

    assert torch.equal(subject.rows(ids, tap=twice), expected)


GENERATIONS = [
    generation(Method.GREEDY, (range(9),), (range(10, 13),)),
    generation(Method.GREEDY, (range(9), range(3)), (range(10, 13), range(20, 23))),
    generation(Method.CHUNKED_PREFILL, (range(9),), (range(10, 13),)),
    generation(Method.STATIC_CACHE, (range(9),), (range(10, 13),)),
    beam_search(range(5), (7, 8, 9)),
    prompt_lookup(range(3), 7),
]


@pytest.mark.parametrize("stage", [Stage.NEW_V, Stage.CACHE_V], ids=str)
@pytest.mark.parametrize("scenario", GENERATIONS, ids=lambda scenario: scenario.name)
def test_each_forward_of_generate_is_put_right(scenario: Scenario, stage: Stage):
    """Also the chunks of a prompt that give no row, and proposals up to the first that was rejected."""
    divergence = found(subject_of("llama"), scenario, fault=always(Site(stage, 0)), one_pass=True)
    assert (divergence.confirmed, divergence.introduced) == (True, (f"{stage.value} of layer 0",))


def test_positions_that_generate_counts_from_zero_are_confirmed():
    subject = subject_of("roberta")
    divergence = found(subject, generation(Method.GREEDY, (range(2, 8),), (range(8, 11),)))
    assert (divergence.confirmed, divergence.introduced) == (True, ("position",))


def test_a_scan_that_starts_again_in_every_layer_needs_every_layer():
    subject = subject_of("mamba")
    divergence = found(subject, chunked_prefill(ids_for(subject), 3), one_pass=True)
    assert divergence.confirmed
    layers = range(subject.info.num_layers)
    assert divergence.introduced == tuple(f"the output of backbone.layers.{i}.mixer.out_proj" for i in layers)


def test_a_window_placed_by_the_buffer_s_length_needs_every_local_layer():
    subject = subject_of("gpt_neo")
    divergence = found(subject, with_cache(token_by_token(ids_for(subject)), CacheKind.STATIC), one_pass=True)
    assert divergence.confirmed
    local = [i for i, kind in enumerate(subject.config.attention_layers) if kind == "local"]
    assert divergence.introduced == tuple(
        f"the output of transformer.h.{i}.attn.attention.out_proj" for i in local
    )


def test_what_comes_after_the_last_module_is_not_confirmed():
    """The logits are changed where no tap sees them, besides a value that one does."""
    subject = subject_of("llama")

    class Scaled(Tampered):
        def forward(self, tap: Tap, **arguments: Any) -> Any:
            output = super().forward(tap, **arguments)
            if arguments["use_cache"]:
                output.logits = output.logits * 1.5
            return output

        def _cast(self, dtype: torch.dtype) -> "Scaled":
            return Scaled(super()._cast(dtype), self.tamper)

    scaled = Scaled(subject, lambda arguments: None)
    alone = found(scaled, token_by_token(ids_for(subject)))
    assert (alone.stage, alone.contract, alone.introduced) == (Stage.LOGITS, AFTER_READOUT, ())
    divergence = found(
        scaled, token_by_token(ids_for(subject)), fault=always(Site(Stage.NEW_V, 0)), one_pass=True
    )
    assert (divergence.confirmed, divergence.introduced) == (False, ("new_v of layer 0",))
