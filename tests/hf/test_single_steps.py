"""Models whose single steps compute something else than blocks do: a norm, a rotation or a softcap left out."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.llama import modeling_llama
from transformers.models.qwen3 import modeling_qwen3

from kvproof import Verdict, audit, localise
from kvproof._engine.prompts import random_sequences
from kvproof.contract.results import Divergence
from kvproof.contract.stages import AFTER_READOUT, LIKELY_CONTRACT, Stage
from kvproof.scenarios import Scenario, prefill_and_steps, token_by_token
from kvproof.subjects._transformers import TransformersSubject, random_model

Break = Callable[[pytest.MonkeyPatch], None]


def subject_of(model_type: str) -> tuple[TransformersSubject, tuple[int, ...]]:
    subject = random_model(model_type, seed=0, dtype=torch.float32, attention="eager")
    return subject, random_sequences(subject, 10, seed=1)[0]


def without_key_norm(patch: pytest.MonkeyPatch) -> None:
    """Leave out the norm of the new key in every call of one token."""
    plain = modeling_qwen3.Qwen3Attention.forward

    def forward(self: Any, hidden_states: Tensor, *args: Any, **options: Any) -> Any:
        norm = self.k_norm
        if hidden_states.shape[1] == 1:
            self.k_norm = nn.Identity()
        try:
            return plain(self, hidden_states, *args, **options)
        finally:
            self.k_norm = norm

    patch.setattr(modeling_qwen3.Qwen3Attention, "forward", forward)


def without_key_rotation(patch: pytest.MonkeyPatch) -> None:
    """Leave out the rotation of the new key in every call of one token."""
    plain = modeling_llama.apply_rotary_pos_emb

    def rotate(query: Tensor, key: Tensor, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        rotated, turned = plain(query, key, *args, **options)
        return rotated, key if key.shape[2] == 1 else turned

    patch.setattr(modeling_llama, "apply_rotary_pos_emb", rotate)


KEYS = [
    pytest.param("qwen3", without_key_norm, id="norm"),
    pytest.param("llama", without_key_rotation, id="rotation"),
]


@pytest.mark.parametrize("one_pass", [False, True])
@pytest.mark.parametrize(
    "build", [token_by_token, lambda ids: prefill_and_steps(ids, 5)], ids=["steps", "prefill"]
)
@pytest.mark.parametrize(("model_type", "break_it"), KEYS)
def test_a_wrong_new_key_is_not_a_stored_one_that_changed(
    monkeypatch: pytest.MonkeyPatch,
    model_type: str,
    break_it: Break,
    build: Callable[[tuple[int, ...]], Scenario],
    one_pass: bool,
):
    """A literal run of one token makes the same mistake, and hid it as noise until the key was read again."""
    subject, ids = subject_of(model_type)
    assert localise(subject, build(ids), one_pass=one_pass).divergence is None
    break_it(monkeypatch)
    divergence = localise(subject, build(ids), one_pass=one_pass).divergence
    assert divergence is not None
    assert (divergence.stage, divergence.layer, divergence.slot) == (Stage.NEW_K, 0, None)
    assert divergence.contract == LIKELY_CONTRACT[Stage.NEW_K]
    assert "new key: projection, normalisation" in divergence.contract
    assert divergence.confirmed
    assert {place.split(" of ")[0] for place in divergence.introduced} == {"new_k"}


@pytest.mark.parametrize(("model_type", "break_it"), KEYS)
def test_an_audit_names_the_new_key_and_the_single_steps(
    monkeypatch: pytest.MonkeyPatch, model_type: str, break_it: Break
):
    subject, ids = subject_of(model_type)
    break_it(monkeypatch)
    result = audit(subject, [prefill_and_steps(ids, 5)], certificate=False).scenarios[-1]
    assert result.divergence is not None
    assert (result.divergence.stage, result.divergence.position) == (Stage.NEW_K, 5)
    assert result.four_ways is not None
    assert result.four_ways.suspect == "fresh cache in steps"


def without_softcap(patch: pytest.MonkeyPatch) -> None:
    """Leave out the softcap of the logits in every step."""
    plain = modeling_gemma2.Gemma2ForCausalLM.forward

    @functools.wraps(plain)
    def forward(self: Any, input_ids: Tensor, **options: Any) -> Any:
        softcap = self.config.final_logit_softcapping
        if input_ids.shape[1] == 1 and options.get("past_key_values") is not None:
            self.config.final_logit_softcapping = None
        try:
            return plain(self, input_ids, **options)
        finally:
            self.config.final_logit_softcapping = softcap

    patch.setattr(modeling_gemma2.Gemma2ForCausalLM, "forward", forward)


def test_a_softcap_left_out_of_single_steps_is_named_at_the_logits(monkeypatch: pytest.MonkeyPatch):
    """Every module computes what it must, and the finding had no place at all."""
    subject, ids = subject_of("gemma2")
    assert subject.config.final_logit_softcapping
    program = prefill_and_steps(ids, 5)
    healthy = audit(subject, [program], certificate=False)
    assert healthy.verdict.passes
    without_softcap(monkeypatch)
    report = audit(subject, [program], certificate=False)
    assert report.verdict is Verdict.DIVERGED
    divergence: Divergence | None = report.scenarios[-1].divergence
    assert divergence is not None
    assert (divergence.stage, divergence.layer, divergence.position) == (Stage.LOGITS, None, 5)
    assert divergence.contract == AFTER_READOUT
    assert (divergence.confirmed, divergence.introduced) == (False, ())
    alone = localise(subject, program, until=ids[:6]).divergence
    assert alone is not None
    assert (alone.stage, alone.ids, alone.contract) == (Stage.LOGITS, ids[:6], AFTER_READOUT)
