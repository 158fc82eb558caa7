"""The transformers adapter: healthy types pass, known faults are found where they are, bad input is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from kvproof import Report, UsageError, Verdict, audit, localise
from kvproof._engine.prompts import random_sequences
from kvproof._numerics.taps import Recorder
from kvproof.contract.results import ScenarioResult
from kvproof.contract.stages import Site, Stage
from kvproof.errors import AbilityError, SessionError, SubjectError
from kvproof.scenarios import Ability, Generate, catalogue, chunked_prefill, select, token_by_token
from kvproof.subjects._adapter import LoadOptions
from kvproof.subjects._targets import load_target
from kvproof.subjects._transformers import (
    TransformersSession,
    TransformersSubject,
    known_types,
    load_folder,
    random_model,
    tiny_model,
)

LENGTH = 16  # twice the tiny models' window
BEFORE_5 = int(transformers.__version__.partition(".")[0]) < 5


def subject_of(model_type: str, dtype: torch.dtype = torch.float32) -> TransformersSubject:
    return random_model(model_type, seed=0, dtype=dtype, attention="eager")


def audited(subject: TransformersSubject, *only: str) -> Report:
    sequences = random_sequences(subject, LENGTH, seed=1)
    return audit(subject, select(catalogue(*sequences), only=only), all_values=False)


def of_name(report: Report, name: str) -> ScenarioResult:
    return next(scenario for scenario in report.scenarios if scenario.name == name)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_rounding_in_another_dtype_is_not_called_a_bug(dtype: torch.dtype):
    report = audited(subject_of("llama", dtype), "token-by-token", "chunked prefill", "left-padded batch")
    assert report.verdict.passes, report.summary


def test_float64_is_true_although_the_model_casts_inside():
    """Gemma's norms and rotary tables ask for float32 by name."""
    report = audited(subject_of("gemma3_text"), "token-by-token")
    rows = of_name(report, "token-by-token").rows
    assert all(row.top_gap <= 1e-12 * row.scale for row in rows)
    assert all(row.top_noise <= 1e-12 * row.scale for row in rows)


@pytest.mark.parametrize(
    ("model_type", "scenario", "where"),
    [
        ("mamba", "chunked prefill", "layers.0.mixer"),  # a block on a warm cache restarts the scan
        ("zamba2", "token-by-token", "mamba.norm"),  # dt is clamped in the scan, not in the step
        (
            "roberta",
            "generate greedy",
            "differs is position: 0 where",
        ),  # generate() counts from 0, the model does not
    ],
)
def test_a_known_fault_is_found_where_it_is(model_type: str, scenario: str, where: str):
    if BEFORE_5 and model_type in ("mamba", "zamba2"):
        pytest.skip("before 5.0 a block on mamba's warm cache raises, and zamba2's uncached scan is not causal")
    report = audited(subject_of(model_type), scenario)
    assert report.verdict is Verdict.DIVERGED
    found = of_name(report, scenario).divergence
    assert found.stage is (Stage.POSITION if model_type == "roberta" else Stage.MODULE)
    assert where in found.sentence
    assert found.logits_differ


@pytest.mark.parametrize(
    ("model_type", "lacking"),
    [
        ("bart", {Ability.PAD}),  # a decoder without its encoder, which takes no positions
        ("recurrent_gemma", {Ability.CROP, Ability.REORDER}),  # recurrences on its modules
        ("rwkv", {Ability.CROP, Ability.REORDER, Ability.PAD}),  # gives its state back
        ("xlnet", {Ability.CROP, Ability.REORDER, Ability.PAD}),
        ("xlstm", {Ability.CROP, Ability.REORDER, Ability.PAD}),
    ],
)
def test_a_type_with_a_state_of_another_kind_passes_all_that_it_can_do(model_type: str, lacking: set[Ability]):
    if BEFORE_5 and model_type in ("recurrent_gemma", "xlstm"):
        pytest.skip("before 5.0 one starts its state anew at every prompt, and the other raises")
    subject = subject_of(model_type)
    usual = {Ability.CROP, Ability.REORDER, Ability.PAD, Ability.FORK, Ability.BATCH}
    assert usual - set(subject.info.abilities) == lacking
    report = audited(subject, "token-by-token", "fork", "buffer reuse")
    assert report.verdict.passes, report.summary
    assert all(scenario.rows for scenario in report.scenarios)


def test_a_cache_that_differs_because_the_decoder_is_not_causal_says_so():
    """Reformer sorts all tokens into buckets, so a later token changes earlier rows."""
    report = audited(subject_of("reformer"), "token-by-token")
    assert "not causal" in report.summary


def test_a_cache_class_of_the_models_own_is_built_forked_and_reordered():
    subject = subject_of("minimax")
    assert Ability.CROP not in subject.info.abilities
    session = subject.session(batch=2)
    session.extend([[1, 2, 3], [4, 5, 6]])
    assert type(session.cache).__name__ == "MiniMaxCache"
    fork = session.fork()
    fork.extend([[7], [8]])
    session.reorder([1, 1, 0])
    rows = session.extend([[9], [10], [11]])[:, -1]
    for row, ids in zip(rows, session.ids, strict=True):
        assert torch.allclose(row, subject.rows(ids)[-1], atol=1e-3)
    session.reset()
    assert torch.allclose(session.extend([[1], [2], [3]])[2, -1], subject.rows((3,))[-1], atol=1e-3)


def test_a_state_on_modules_survives_what_runs_in_between():
    if BEFORE_5:
        pytest.skip("before 5.0 recurrent_gemma starts its state anew at every prompt, and is refused")
    subject = subject_of("recurrent_gemma")
    session, other = subject.session(), subject.session()
    session.extend([[1, 2, 3]])
    fork = session.fork()
    other.extend([[9, 8]])
    subject.rows((7, 7, 7, 7))
    fork.extend([[5]])
    assert torch.allclose(session.extend([[4]])[0, -1], subject.rows((1, 2, 3, 4))[-1], atol=1e-4)
    assert torch.allclose(fork.extend([[6]])[0, -1], subject.rows((1, 2, 3, 5, 6))[-1], atol=1e-4)


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("openai-gpt", "nothing can be continued"),
        ("xlm", "its forward wants the whole prefix again at every call"),
        ("cpmant", "its forward wants the whole prefix, behind prompt tokens"),
        ("blt", "it cuts its input into patches"),
    ],
)
def test_a_type_that_cannot_continue_a_prefix_is_refused_with_the_reason(model_type: str, reason: str):
    with pytest.raises(UsageError, match=reason) as caught:
        subject_of(model_type)
    assert "\n" not in str(caught.value)


class Shifted(TransformersSubject):
    """Forgets the past when it counts positions."""

    def forward(self, tap: Any, **arguments: Any) -> Any:
        if arguments["use_cache"]:
            arguments["position_ids"] = arguments["position_ids"] * 0
        return super().forward(tap, **arguments)

    def _cast(self, dtype: torch.dtype) -> "Shifted":
        cast = super()._cast(dtype)
        return Shifted(cast.model, name="shifted")


def test_positions_that_do_not_advance_are_named_as_positions():
    subject = Shifted(subject_of("llama").model, name="shifted")
    ids, _ = random_sequences(subject, 8, seed=1)
    found = localise(subject, token_by_token(ids)).divergence
    assert (found.stage, found.expected, found.actual) == (Stage.POSITION, 1, 0)
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


def test_a_call_that_leaves_a_state_untouched_is_not_judged():
    class Deaf(TransformersSubject):
        def forward(self, tap: Any, **arguments: Any) -> Any:
            arguments[self.cache_argument] = self.new_cache(1)
            output = super().forward(tap, **arguments)
            output.state = None
            return output

    with pytest.raises(SubjectError, match="not a cached one: it left the cache as it was"):
        Deaf(subject_of("rwkv").model, name="deaf").session().extend([[1, 2]])


def test_a_crop_that_leaves_the_cache_as_it_was_is_an_error(monkeypatch: pytest.MonkeyPatch):
    session = subject_of("llama").session(needs={Ability.CROP})
    session.extend([[1, 2, 3, 4]])
    monkeypatch.setattr(type(session.cache), "crop", lambda self, tokens_to_remove: None)
    with pytest.raises(SubjectError, match="did not roll the cache back: it holds 4 tokens, not 2"):
        session.crop(2)
    assert session.ids == ((1, 2, 3, 4),)


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
    names = [site.module for site in recorder.values if site.stage is Stage.MODULE]
    assert names[0] == "model.embed_tokens"
    assert names[-1] == "lm_head"
    assert names.index("model.layers.0.mlp") < names.index("model.layers.1.self_attn")
    assert torch.equal(recorder.values[Site(Stage.MODULE, None, "lm_head")][0], plain)

    def silenced(site: Site, value: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(value) if site.module == "model.layers.0.mlp" else value

    assert not torch.allclose(subject.rows((1, 2, 3), tap=silenced), plain)
    assert torch.equal(subject.rows((1, 2, 3)), plain), "no hook stays behind"


@pytest.mark.skipif("deepseek_v4" not in known_types(), reason="this transformers has no such type")
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


@pytest.mark.skipif(
    "inkling_text" not in known_types(), reason="this release knows no type with a padded readout"
)
def test_a_row_holds_the_logits_that_a_padded_readout_leaves():
    model = tiny_model("inkling_text", seed=0, overrides={"unpadded_vocab_size": 90})
    assert model.get_output_embeddings().weight.shape[0] > 90
    subject = TransformersSubject(model, name="padded")
    assert subject.info.vocab_size == 90
    assert audited(subject, "token-by-token").verdict.passes


def test_a_left_padded_session_may_drop_its_longest_row():
    subject = subject_of("llama")
    session = subject.session(batch=2, needs={Ability.CROP})
    session.extend([[1, 2, 3, 4, 5], [6, 7]])
    session.reorder([1])
    for ids in ((6, 7, 8), (6, 7, 8, 9)):
        assert torch.allclose(session.extend([[ids[-1]]])[0, -1], subject.rows(ids)[-1], atol=1e-4)
    session.crop(2)
    assert torch.allclose(session.extend([[3, 4]])[0, -1], subject.rows((6, 7, 3, 4))[-1], atol=1e-4)


def test_a_recurrent_state_is_not_rolled_back_and_says_so():
    subject = subject_of("mamba")
    assert Ability.CROP not in subject.info.abilities
    report = audited(subject, "rollback")
    rolled_back = of_name(report, "rollback")
    assert rolled_back.verdict is Verdict.NOT_CHECKED
    assert rolled_back.reason == "the subject lacks the ability: crop"
    with pytest.raises(AbilityError, match="'crop'"):
        subject.session(needs={Ability.CROP})


def test_what_a_decoder_raises_is_its_scenario_s_verdict_and_the_other_scenarios_go_on(
    monkeypatch: pytest.MonkeyPatch,
):
    def broken(self: object, rows: object) -> None:
        raise AttributeError("no reorder here")

    monkeypatch.setattr(TransformersSession, "_reorder", broken)
    report = audited(subject_of("llama"), "beam reorder", "fork")
    verdicts = {scenario.name: scenario.verdict for scenario in report.scenarios}
    assert verdicts["beam reorder"] is Verdict.RAISED
    assert verdicts["fork"].passes
    assert report.verdict is Verdict.RAISED
    raised = of_name(report, "beam reorder").raised
    assert raised is not None
    assert (raised.operation, raised.error) == ("reorder", "AttributeError: no reorder here")
    assert "in broken" in str(raised.traceback)


def raise_on_a_warm_cache(subject: TransformersSubject, layer: int, at_least: int = 1) -> None:
    """Let a layer's attention raise once its cache holds so many tokens."""

    def refuse(module: torch.nn.Module, args: Any, options: dict[str, Any]) -> None:
        cache = next((value for name, value in options.items() if name.startswith("past_key_value")), None)
        length = 0 if cache is None else cache.get_seq_length(layer)
        if length >= at_least:
            raise RuntimeError("no warm cache")

    attention = subject.model.model.layers[layer].self_attn
    attention.register_forward_pre_hook(refuse, with_kwargs=True)


@pytest.mark.parametrize("layer", [0, 1])
def test_a_layer_that_raises_on_a_warm_cache_is_named_with_its_call(layer: int):
    """The library's own frames are the decoder's; those of kvproof and of torch's module calls are not."""
    subject = subject_of("llama")
    assert audited(subject, "chunked prefill", "fork").verdict.passes
    raise_on_a_warm_cache(subject, layer)
    report = audited(subject, "chunked prefill", "fork")
    assert report.verdict is Verdict.RAISED
    assert report.exit_status == 6
    for name in ("chunked prefill", "fork"):
        raised = of_name(report, name).raised
        assert raised is not None
        assert (raised.call, raised.layer, raised.error) == (1, layer, "RuntimeError: no warm cache")
        assert raised.traceback is not None
        assert "modeling_llama.py" in raised.traceback
        assert "_call_impl" not in raised.traceback
        assert "_transformers/model.py" not in raised.traceback.replace("\\", "/")


def test_generate_that_raises_is_said_with_its_forward_and_its_prompt():
    name = "generate greedy"
    subject = subject_of("llama")
    assert audited(subject, name).verdict.passes
    (program,) = select(catalogue(*random_sequences(subject, LENGTH, seed=1)), only=[name])
    (operation,) = program.operations
    assert isinstance(operation, Generate)
    raise_on_a_warm_cache(subject, layer=1, at_least=1 + len(operation.prompts[0]))
    report = audited(subject, name)
    assert report.verdict is Verdict.RAISED
    raised = of_name(report, name).raised
    assert raised is not None
    assert (raised.call, raised.operation, raised.position, raised.layer) == (2, "generate", None, 1)
    assert raised.consumed == ()
    assert f"raises in call 3 of {name}, generating from " in report.summary


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    subject_of("llama").model.save_pretrained(path)
    return path


def test_a_folder_gives_the_model_that_was_saved(folder: Path):
    loaded = load_folder(folder, LoadOptions())
    assert loaded.info.digest == subject_of("llama").info.digest
    assert audit(loaded, [chunked_prefill(range(8), 3)], all_values=False).verdict.passes


def test_pickled_weights_are_refused_with_the_reason(folder: Path, tmp_path: Path):
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    torch.save({}, tmp_path / "pytorch_model.bin")
    with pytest.raises(UsageError, match=r"pickled weights, which can run code .* safetensors alone"):
        load_folder(tmp_path, LoadOptions())


def test_a_folder_without_a_model_is_refused(folder: Path, tmp_path: Path):
    with pytest.raises(UsageError, match=r"holds no config\.json"):
        load_folder(tmp_path, LoadOptions())
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(UsageError, match="holds no weights"):
        load_folder(tmp_path, LoadOptions())


def test_weights_that_cannot_be_read_are_refused_in_one_line(folder: Path, tmp_path: Path):
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    (tmp_path / "model.safetensors").write_bytes(b"not safetensors")
    with pytest.raises(UsageError, match="cannot be loaded") as caught:
        load_folder(tmp_path, LoadOptions())
    assert "\n" not in str(caught.value)


def test_a_weight_that_is_not_finite_is_named():
    model = subject_of("llama").model
    model.model.norm.weight[0] = float("nan")
    with pytest.raises(UsageError, match=r"'model\.norm\.weight' holds a value that is not finite"):
        TransformersSubject(model, name="broken")


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("nowhere", "no such model: 'nowhere' is neither a folder, a .gguf file"),
        ("random:lama", "llama"),
        ("random:", "unknown|no causal"),
    ],
)
def test_a_target_that_is_not_there_is_refused(target: str, message: str):
    with pytest.raises(UsageError, match=message):
        load_target(target, LoadOptions())


def test_more_tokens_than_the_context_are_refused():
    with pytest.raises(UsageError, match="129 tokens are more than the context of 128"):
        random_sequences(subject_of("llama"), 129, seed=0)
