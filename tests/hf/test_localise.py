"""Inside the attention of transformers models: new keys, cache rows and what was read are three findings."""

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvproof import localise
from kvproof._engine.prompts import random_sequences
from kvproof._numerics.taps import Recorder
from kvproof.contract.results import Divergence
from kvproof.contract.stages import LIKELY_CONTRACT, WRONG_DTYPE, WRONG_SLOT, Site, Stage
from kvproof.errors import SubjectError
from kvproof.faults import Fault, Planting
from kvproof.scenarios import Ability, CacheKind, Extend, Scenario, chunked_prefill, token_by_token, with_cache
from kvproof.subjects._transformers import TransformersSubject, random_model

TYPES = ("llama", "gpt2", "gemma3_text", "mixtral")  # gemma's odd layers see a window of 8
INNER = (Stage.NEW_Q, Stage.NEW_K, Stage.NEW_V, Stage.CACHE_K, Stage.CACHE_V, Stage.ATTN_WEIGHTS, Stage.ATTN_MIX)
LENGTH = 12


def subject_of(
    model_type: str, attention: str = "eager", dtype: torch.dtype = torch.float32
) -> TransformersSubject:
    return random_model(model_type, seed=0, dtype=dtype, attention=attention)


def ids_for(subject: TransformersSubject, length: int = LENGTH) -> tuple[int, ...]:
    return random_sequences(subject, length, seed=1)[0]


def found(subject: TransformersSubject, scenario: Scenario, **options: Any) -> Divergence:
    divergence = localise(subject, scenario, **options).divergence
    assert divergence is not None
    return divergence


def changing(site: Site, change: Callable[[Tensor], None], *, call: int) -> Fault:
    """Change what attention goes on with at one site, in one call of the cached path."""

    def plant() -> Callable[[Site, Tensor], Tensor]:
        calls: list[int] = []

        def tap(at: Site, value: Tensor) -> Tensor:
            if at != site:
                return value
            calls.append(1)
            if len(calls) != call + 1:
                return value
            value = value.clone()
            change(value)
            return value

        return tap

    return Fault(
        name="changed", breaks=str(site), stages=frozenset({site.stage}), make=lambda place: Planting(plant)
    )


class Tampered(TransformersSubject):
    """Runs ``tamper`` on the arguments of each cached forward first."""

    def __init__(self, subject: TransformersSubject, tamper: Callable[[dict[str, Any]], None]) -> None:
        super().__init__(subject.model, name="tampered")
        self.tamper = tamper

    def forward(self, tap: Any, **arguments: Any) -> Any:
        if arguments["use_cache"]:
            self.tamper(arguments)
        return super().forward(tap, **arguments)

    def _cast(self, dtype: torch.dtype) -> "Tampered":
        return Tampered(super()._cast(dtype), self.tamper)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("model_type", TYPES)
def test_a_healthy_model_differs_nowhere_and_is_not_changed_by_being_looked_at(model_type: str, attention: str):
    subject = subject_of(model_type, attention)
    ids = ids_for(subject)
    recorder = Recorder()
    assert torch.equal(subject.rows(ids, tap=recorder), subject.rows(ids))
    inner = {site.stage for site in recorder.values if site.layer == 1 and site.stage is not Stage.MODULE}
    shown = set(INNER) - (set() if attention == "eager" else {Stage.ATTN_WEIGHTS})
    assert inner == shown | {Stage.CACHE_LEN, Stage.MASK}
    watched, alone = subject.session(tap=Recorder()), subject.session()
    for part in (ids[:9], ids[9:10], ids[10:]):
        assert torch.equal(watched.extend([part]), alone.extend([part]))
    for scenario, one_pass in ((token_by_token(ids), True), (chunked_prefill(ids, 5), False)):
        located = localise(subject, scenario, one_pass=one_pass)
        assert located.divergence is None, located.divergence.sentence
        assert located.num_values > 0


@pytest.mark.parametrize("one_pass", [False, True])
@pytest.mark.parametrize("stage", INNER, ids=str)
def test_a_value_changed_inside_attention_is_named_at_its_stage(stage: Stage, one_pass: bool):
    """Each stage is compared: what is planted there is found there, and nowhere before."""
    subject = subject_of("llama")

    def change(value: Tensor) -> None:
        value[0, -1, 0, 1] += 0.5

    fault = changing(Site(stage, 1), change, call=5)
    divergence = found(subject, token_by_token(ids_for(subject)), fault=fault, one_pass=one_pass)
    assert (divergence.stage, divergence.layer, divergence.position) == (stage, 1, 5)
    assert divergence.contract == LIKELY_CONTRACT[stage]
    assert f"{stage.value} of layer 1" in divergence.sentence
    assert divergence.logits_differ is (stage is not Stage.ATTN_WEIGHTS), "weights are shown after they were used"
    assert divergence.confirmed
    instead = " (by way of attn_mix of layer 1)" if stage is Stage.ATTN_WEIGHTS else ""
    assert divergence.introduced == (f"{stage.value} of layer 1{instead}",)


@pytest.mark.parametrize(("model_type", "layer"), [("llama", 1), ("gpt2", 1), ("gemma3_text", 0), ("mixtral", 1)])
def test_a_cache_row_that_changed_between_calls_is_named_with_its_slot(model_type: str, layer: int):
    """In a window the slots hold the last tokens, so a slot's number is not its position."""
    windows: list[bool] = []

    def tamper(arguments: dict[str, Any]) -> None:
        kept = arguments["past_key_values"].layers[layer]
        if arguments["past_key_values"].get_seq_length() == 10:
            windows.append(kept.is_sliding)
            kept.keys = kept.keys.clone()
            kept.keys[0, 1, 2, 3] += 0.5

    subject = subject_of(model_type)
    divergence = found(Tampered(subject, tamper), token_by_token(ids_for(subject)))
    assert divergence.stage is Stage.CACHE_K
    assert (divergence.layer, divergence.head, divergence.slot, divergence.position) == (layer, 1, 2, 10)
    assert set(windows) == {model_type in ("gemma3_text", "mixtral")}
    assert ("slot 2 (position 5)" in divergence.sentence) is windows[0]


def test_a_stale_cache_row_says_what_the_slot_holds():
    def tamper(arguments: dict[str, Any]) -> None:
        kept = arguments["past_key_values"].layers[0]
        if arguments["past_key_values"].get_seq_length() == 10:
            kept.values = kept.values.clone()
            kept.values[:, :, 2] = kept.values[:, :, 4]

    subject = subject_of("gemma3_text")
    divergence = found(Tampered(subject, tamper), token_by_token(ids_for(subject)), one_pass=True)
    assert (divergence.stage, divergence.slot) == (Stage.CACHE_V, 2)
    assert (divergence.origin, divergence.contract) == ("layer 0's value of position 7", WRONG_SLOT)


def test_a_token_missing_from_a_cache_is_named_by_the_length():
    """A mask would refuse the length in other implementations; a single new token has none in sdpa."""

    def tamper(arguments: dict[str, Any]) -> None:
        layer = arguments["past_key_values"].layers[1]
        if arguments["past_key_values"].get_seq_length() == 6:
            layer.keys, layer.values = layer.keys[:, :, 1:], layer.values[:, :, 1:]

    subject = subject_of("llama", "sdpa")
    divergence = found(Tampered(subject, tamper), token_by_token(ids_for(subject)))
    assert (divergence.stage, divergence.layer, divergence.position) == (Stage.CACHE_LEN, 1, 6)
    assert (divergence.expected, divergence.actual) == (7, 6)


@pytest.mark.parametrize("model_type", TYPES)
def test_a_wrong_position_is_named_before_the_cache(model_type: str):
    def tamper(arguments: dict[str, Any]) -> None:
        if arguments["past_key_values"].get_seq_length() == 5:
            arguments["position_ids"] = arguments["position_ids"] - 1

    subject = subject_of(model_type)
    divergence = found(Tampered(subject, tamper), token_by_token(ids_for(subject)))
    assert divergence.position == 5
    assert (divergence.stage, divergence.expected, divergence.actual) == (Stage.POSITION, 5, 4)
    assert (divergence.confirmed, divergence.introduced) == (True, ("position",))


@pytest.mark.parametrize(("attention", "stage"), [("eager", Stage.ATTN_WEIGHTS), ("sdpa", Stage.ATTN_MIX)])
@pytest.mark.parametrize("model_type", TYPES)
def test_a_mask_that_hides_one_row_too_many_is_named_where_attention_reads(
    model_type: str, attention: str, stage: Stage
):
    def tamper(arguments: dict[str, Any]) -> None:
        if arguments["past_key_values"].get_seq_length() == 5:
            arguments["attention_mask"] = arguments["attention_mask"].index_fill(1, torch.tensor([2]), 0)

    subject = subject_of(model_type, attention)
    divergence = found(Tampered(subject, tamper), token_by_token(ids_for(subject)))
    assert (divergence.stage, divergence.layer, divergence.position) == (stage, 0, 5)
    assert divergence.head is not None
    assert (divergence.slot is not None) is (attention == "eager")


def test_a_fault_inside_a_block_is_named_at_its_own_token():
    subject = subject_of("llama")

    def change(value: Tensor) -> None:
        value[0, 0, 1, 2] += 0.5

    fault = changing(Site(Stage.NEW_V, 0), change, call=1)
    for last_row in (ids_for(subject)[:8], None):
        divergence = found(subject, chunked_prefill(ids_for(subject), 4), fault=fault, until=last_row)
        assert (divergence.stage, divergence.layer, divergence.position) == (Stage.NEW_V, 0, 5)
        assert divergence.logits_differ


@pytest.mark.parametrize("one_pass", [False, True])
@pytest.mark.parametrize("model_type", TYPES)
def test_padding_moves_the_slots_and_the_batch_row_is_named(model_type: str, one_pass: bool):
    subject = subject_of(model_type)
    ids = ids_for(subject)
    scenario = Scenario(
        name="left-padded",
        exposes="padding",
        operations=(
            Extend(ids=(ids[:6], ids[6:9])),
            *(Extend(ids=((ids[6 + i],), (ids[9 + i],))) for i in range(3)),
        ),
        needs=frozenset({Ability.BATCH, Ability.PAD}),
        batch=2,
    )
    assert localise(subject, scenario, one_pass=one_pass).divergence is None

    def change(value: Tensor) -> None:
        value[1, 1, 4, 0] += 0.5

    fault = changing(Site(Stage.CACHE_K, 1), change, call=1)
    divergence = found(subject, scenario, fault=fault, one_pass=one_pass)
    assert (divergence.stage, divergence.layer, divergence.slot) == (Stage.CACHE_K, 1, 4)
    assert divergence.ids == ids[6:10]
    assert divergence.batch_row == 1
    assert "at position 3 of batch row 1" in divergence.sentence
    assert "slot 4 (position 1)" in divergence.sentence
    assert (divergence.confirmed, divergence.introduced) == (True, ("cache_k of layer 1",))


def test_a_known_bad_row_ends_the_search_at_the_first_mismatch():
    subject = subject_of("llama")
    ids = ids_for(subject)

    def change(value: Tensor) -> None:
        value += 0.5

    fault = changing(Site(Stage.NEW_Q, 0), change, call=2)
    whole = localise(subject, token_by_token(ids), fault=fault)
    short = localise(subject, token_by_token(ids), fault=fault, until=ids[:3])
    assert short.divergence == whole.divergence
    assert short.num_values < whole.num_values / 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_float64_does_not_show_is_pointed_at_in_the_declared_dtype(dtype: torch.dtype):
    """Keys kept in a lower dtype, as a cache that is cast would keep them, and float64 is left alone."""
    lower = torch.bfloat16 if dtype is torch.float32 else torch.float8_e4m3fn

    def change(value: Tensor) -> None:
        if value.dtype is dtype:
            value.copy_(value.to(lower).to(dtype))

    subject = subject_of("llama", dtype=dtype)
    scenario = token_by_token(ids_for(subject))
    fault = changing(Site(Stage.CACHE_K, 1), change, call=5)
    assert localise(subject, scenario, fault=fault).divergence is None
    assert localise(subject, scenario, rung="declared").divergence is None
    if dtype is torch.bfloat16:
        return  # 3 bits of 8 lost stay below the pointer's factor, and nothing is named
    for one_pass in (False, True):
        divergence = found(subject, scenario, fault=fault, rung="declared", one_pass=one_pass)
        assert (divergence.stage, divergence.layer, divergence.position) == (Stage.CACHE_K, 1, 5)
        assert "look first at cache_k of layer 1" in divergence.sentence
        assert divergence.contract == WRONG_DTYPE


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_nothing_stays_behind_after_a_forward_that_raises(attention: str):
    subject = subject_of("llama", attention)
    home = sys.modules[type(subject.model).__module__]
    before = (home.eager_attention_forward, ALL_ATTENTION_FUNCTIONS["sdpa"])
    seen: list[bool] = []

    def raising(site: Site, value: Tensor) -> Tensor:
        if site.stage is Stage.CACHE_V and site.layer == 1:
            seen.append((home.eager_attention_forward, ALL_ATTENTION_FUNCTIONS["sdpa"]) != before)
            raise RuntimeError("broke half-way")
        return value

    with pytest.raises(SubjectError, match="broke half-way"):
        subject.rows((1, 2, 3), tap=raising)
    assert seen == [True]
    assert (home.eager_attention_forward, ALL_ATTENTION_FUNCTIONS["sdpa"]) == before
    assert "sdpa" not in ALL_ATTENTION_FUNCTIONS._local_mapping


def test_another_model_that_runs_meanwhile_is_not_looked_at():
    subject, other = subject_of("llama"), random_model("llama", seed=1, dtype=torch.float32, attention="eager")
    expected = other.rows((1, 2))
    recorder = Recorder()
    rows: list[Tensor] = []

    def tap(site: Site, value: Tensor) -> Tensor:
        if site.module == "model.embed_tokens":
            rows.append(other.rows((1, 2)))
        return recorder(site, value)

    subject.rows((1, 2), tap=tap)
    assert torch.equal(rows[0], expected)
    layers = [site.layer for site in recorder.values if site.stage is Stage.NEW_Q]
    assert layers == list(range(subject.info.num_layers))


@pytest.mark.parametrize("model_type", ["bloom", "mamba"])
def test_a_type_without_the_librarys_attention_shows_its_modules(model_type: str):
    subject = subject_of(model_type)
    ids = ids_for(subject)
    recorder = Recorder()
    subject.rows(ids, tap=recorder)
    assert {site.stage for site in recorder.values} == {Stage.TOKEN, Stage.MODULE}
    assert localise(subject, token_by_token(ids)).divergence is None


def test_a_tied_attention_on_a_static_cache_shows_its_new_keys_where_they_stand():
    subject = subject_of("zamba")
    program = with_cache(token_by_token(ids_for(subject, 6)), CacheKind.STATIC)
    assert localise(subject, program, one_pass=True).divergence is None


def test_an_attention_that_layers_share_is_told_apart_by_layer():
    subject = subject_of("zamba2")
    recorder = Recorder()
    subject.rows((1, 2, 3), tap=recorder)
    sites = [site for site in recorder.values if site.stage is Stage.NEW_K]
    assert len(sites) > 1
    assert len({(site.layer, site.module) for site in sites}) == len(sites)
