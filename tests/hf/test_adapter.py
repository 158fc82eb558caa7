"""The transformers adapter: healthy types pass, known faults are found where they are, bad input is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch

from kvproof import Report, UsageError, Verdict, audit, localise
from kvproof._audit import random_sequences
from kvproof._errors import AbilityError, SessionError, SubjectError
from kvproof._stages import Site, Stage
from kvproof._trace import Recorder
from kvproof.scenarios import Ability, catalogue, chunked, named, token_by_token
from kvproof.subjects._targets import load_target
from kvproof.subjects._transformers import TransformersSession, TransformersSubject, load_folder, random_model

LENGTH = 16  # twice the tiny models' window


def subject_of(model_type: str, dtype: torch.dtype = torch.float32) -> TransformersSubject:
    return random_model(model_type, seed=0, dtype=dtype, attention="eager")


def audited(subject: TransformersSubject, *only: str) -> Report:
    sequences = random_sequences(subject, LENGTH, seed=1)
    return audit(subject, named(catalogue(*sequences), only=only), all_values=False)


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "gemma3_text", "mixtral", "deepseek_v3"])
def test_a_clean_type_passes_every_scenario(model_type: str):
    report = audited(subject_of(model_type))
    assert report.verdict.passes, report.summary
    assert {scenario.verdict for scenario in report.scenarios} <= {Verdict.MATCH, Verdict.ROUNDING}
    assert len(report.scenarios) == 11


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_rounding_in_another_dtype_is_not_called_a_bug(dtype: torch.dtype):
    report = audited(subject_of("llama", dtype), "token-by-token", "chunked prefill", "left-padded batch")
    assert report.verdict.passes, report.summary


def test_float64_is_true_although_the_model_casts_inside():
    """Gemma's norms and rotary tables ask for float32 by name."""
    report = audited(subject_of("gemma3_text"), "token-by-token")
    rows = report.scenarios[0].rows
    assert all(row.top_gap <= 1e-12 * row.scale for row in rows)
    assert all(row.top_noise <= 1e-12 * row.scale for row in rows)


@pytest.mark.parametrize(
    ("model_type", "scenario", "where"),
    [
        ("mamba", "chunked prefill", "layers.0.mixer"),  # a block on a warm cache restarts the scan
        ("zamba2", "token-by-token", "mamba.norm"),  # dt is clamped in the scan, not in the step
        ("roberta", "token-by-token", "position_embeddings"),  # positions count from the padding index + 1
    ],
)
def test_a_known_fault_is_found_where_it_is(model_type: str, scenario: str, where: str):
    report = audited(subject_of(model_type), scenario)
    assert report.verdict is Verdict.DIVERGED
    found = report.scenarios[0].divergence
    assert found.stage is Stage.MODULE
    assert where in found.sentence
    assert found.logits_differ


class Shifted(TransformersSubject):
    """Forgets the past when it counts positions."""

    def forward(self, tap: Any, **arguments: Any) -> Any:
        if arguments["use_cache"]:
            arguments["position_ids"] = arguments["position_ids"] * 0
        return super().forward(tap, **arguments)

    def _cast(self, dtype: torch.dtype) -> "Shifted":
        cast = super()._cast(dtype)
        return Shifted(cast.model, name="shifted")


def test_positions_that_do_not_advance_are_named_at_the_rotary_embedding():
    subject = Shifted(subject_of("llama").model, name="shifted")
    ids, _ = random_sequences(subject, 8, seed=1)
    found = localise(subject, token_by_token(ids)).divergence
    assert "rotary_emb" in found.sentence
    assert found.position == 1


class Forgetful(TransformersSubject):
    """Answers every call without its cache, as a model that ignores the argument does."""

    def forward(self, tap: Any, **arguments: Any) -> Any:
        arguments.pop(str(self.cache_argument), None)
        return super().forward(tap, **{**arguments, "attention_mask": None, "use_cache": False})


def test_a_call_that_did_not_use_its_cache_is_not_judged():
    subject = Forgetful(subject_of("llama").model, name="forgetful")
    with pytest.raises(SubjectError, match="not a cached one: the cache holds 0 tokens, not 2"):
        subject.session().extend([[1, 2]])


def test_a_call_that_fails_half_way_leaves_the_session_as_it_was():
    subject = subject_of("llama")
    armed: list[bool] = []

    def breaking(site: Site, value: torch.Tensor) -> torch.Tensor:
        if armed and site.module == "model.layers.2.mlp":
            armed.clear()
            raise RuntimeError("broke half-way")
        return value

    session, undisturbed = subject.session(tap=breaking), subject.session()
    undisturbed.extend([[1, 2, 3]])
    session.extend([[1, 2, 3]])
    armed.append(True)
    with pytest.raises(SubjectError, match="broke half-way"):
        session.extend([[4]])
    assert session.ids == ((1, 2, 3),)
    assert torch.allclose(session.extend([[5]]), undisturbed.extend([[5]]), atol=1e-4)
    assert session.ids == undisturbed.ids


def test_modules_are_seen_in_order_and_a_tap_can_replace_them():
    subject = subject_of("llama")
    recorder = Recorder()
    plain = subject.rows((1, 2, 3), tap=recorder)
    names = [site.module for site in recorder.values]
    assert names[0] == "model.embed_tokens"
    assert names[-1] == "lm_head"
    assert names.index("model.layers.0.mlp") < names.index("model.layers.1.self_attn")
    assert torch.equal(recorder.values[Site(Stage.MODULE, None, "lm_head")][0], plain)

    def silenced(site: Site, value: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(value) if site.module == "model.layers.0.mlp" else value

    assert not torch.allclose(subject.rows((1, 2, 3), tap=silenced), plain)
    assert torch.equal(subject.rows((1, 2, 3)), plain), "no hook stays behind"


def test_a_module_whose_output_grows_with_the_prefix_is_passed_by():
    """Indices of selected tokens were held against a longer list of them, which ended in a traceback."""
    subject = subject_of("deepseek_v4")
    ids, _ = random_sequences(subject, 9, seed=1)
    assert localise(subject, token_by_token(ids)).num_values > 0


def test_rows_of_unequal_length_start_a_session_only():
    subject = subject_of("llama")
    session = subject.session(batch=2)
    logits = session.extend([[1, 2, 3], [4]])
    assert torch.allclose(logits[1, -1], subject.rows((4,))[-1], atol=1e-4)
    with pytest.raises(SessionError, match="rows of"):
        session.extend([[1], [2, 3]])
    assert session.ids == ((1, 2, 3), (4,))


def test_a_recurrent_state_is_not_rolled_back_and_says_so():
    subject = subject_of("mamba")
    assert Ability.CROP not in subject.info.abilities
    report = audited(subject, "rollback")
    assert report.verdict is Verdict.NOT_CHECKED
    assert report.scenarios[0].reason == "the subject lacks the ability: crop"
    with pytest.raises(AbilityError, match="'crop'"):
        subject.session(needs={Ability.CROP})


def test_what_a_decoder_raises_is_inconclusive_and_the_other_scenarios_go_on(monkeypatch: pytest.MonkeyPatch):
    def broken(self: object, rows: object) -> None:
        raise AttributeError("no reorder here")

    monkeypatch.setattr(TransformersSession, "_reorder", broken)
    report = audited(subject_of("llama"), "beam reorder", "fork")
    verdicts = {scenario.name: scenario.verdict for scenario in report.scenarios}
    assert verdicts["beam reorder"] is Verdict.INCONCLUSIVE
    assert verdicts["fork"].passes
    assert report.verdict is Verdict.INCONCLUSIVE
    assert any("AttributeError: no reorder here" in (s.reason or "") for s in report.scenarios)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    subject_of("llama").model.save_pretrained(path)
    return path


def test_a_folder_gives_the_model_that_was_saved(folder: Path):
    loaded = load_folder(folder, dtype=torch.float32, attention="eager")
    assert loaded.info.digest == subject_of("llama").info.digest
    assert audit(loaded, [chunked(range(8), 3)], all_values=False).verdict.passes


def test_pickled_weights_are_refused_with_the_reason(folder: Path, tmp_path: Path):
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    torch.save({}, tmp_path / "pytorch_model.bin")
    with pytest.raises(UsageError, match=r"pickled weights, which can run code .* safetensors alone"):
        load_folder(tmp_path, dtype=torch.float32, attention="eager")


def test_a_folder_without_a_model_is_refused(folder: Path, tmp_path: Path):
    with pytest.raises(UsageError, match=r"holds no config\.json"):
        load_folder(tmp_path, dtype=torch.float32, attention="eager")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(UsageError, match="holds no weights"):
        load_folder(tmp_path, dtype=torch.float32, attention="eager")


def test_weights_that_cannot_be_read_are_refused_in_one_line(folder: Path, tmp_path: Path):
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    (tmp_path / "model.safetensors").write_bytes(b"not safetensors")
    with pytest.raises(UsageError, match="cannot be loaded") as caught:
        load_folder(tmp_path, dtype=torch.float32, attention="eager")
    assert "\n" not in str(caught.value)


def test_a_weight_that_is_not_finite_is_named():
    model = subject_of("llama").model
    model.model.norm.weight[0] = float("nan")
    with pytest.raises(UsageError, match=r"'model\.norm\.weight' holds a value that is not finite"):
        TransformersSubject(model, name="broken")


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("nowhere", "no such model: 'nowhere' is neither a folder nor random:TYPE"),
        ("random:lama", "llama"),
        ("random:", "unknown|no causal"),
    ],
)
def test_a_target_that_is_not_there_is_refused(target: str, message: str):
    with pytest.raises(UsageError, match=message):
        load_target(target, dtype="float32", seed=0, attention="eager")


def test_more_tokens_than_the_context_are_refused():
    with pytest.raises(UsageError, match="129 tokens are more than the context of 128"):
        random_sequences(subject_of("llama"), 129, seed=0)
