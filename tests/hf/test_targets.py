"""What a person can name as a model, and what each one that cannot be loaded is refused for."""

import importlib.metadata
import sys
import tomllib
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from tests.hf.folders import (
    WORDS,
    cached_on_hub,
    copied,
    saved_model,
    saved_tokenizer,
    with_config,
    with_weights,
)
from transformers import AutoTokenizer

from kvproof import UsageError
from kvproof._engine.prompts import sequences_for
from kvproof.errors import AbilityError
from kvproof.subjects import Subject
from kvproof.subjects._adapter import LoadOptions
from kvproof.subjects._registry import ADAPTERS, find_entry
from kvproof.subjects._targets import load_target
from kvproof.subjects._transformers import load as _load
from kvproof.subjects._transformers import random_model

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny llama with a tokenizer. Nothing may change it."""
    return saved_tokenizer(saved_model(tmp_path_factory.mktemp("targets") / "tiny"))


@pytest.fixture
def spoilt(folder: Path, tmp_path: Path) -> Path:
    """A copy that a test may spoil."""
    return copied(folder, tmp_path / "spoilt")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty hub cache."""
    cache = tmp_path / "hub"
    cache.mkdir()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))
    return cache


def loaded(target: object = None, **options: Any) -> Subject:
    return load_target(None if target is None else str(target), LoadOptions(**options))


def refused(target: object = None, **options: Any) -> str:
    """Return why a target is refused: one line."""
    with pytest.raises(UsageError) as caught:
        loaded(target, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_folder_loads_in_the_dtype_that_is_asked_for(folder: Path):
    subject = loaded(folder, dtype="bfloat16")
    assert (subject.info.name, subject.info.dtype) == ("tiny", "bfloat16")
    assert subject.seed is None
    same = random_model("llama", seed=0, dtype=torch.bfloat16, attention="eager")
    assert subject.info.digest == same.info.digest


def test_the_folder_one_stands_in_has_a_name(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(folder)
    assert loaded(".").info.name == "tiny"


@pytest.mark.parametrize("target", ["nowhere", "no/such/folder", "gone.gguf", "models/gone.gguf", "~"])
def test_what_is_not_there_is_refused_with_all_that_could_be_named(target: str):
    message = refused(target)
    assert target in message
    for way in ("folder", ".gguf", "org/name", "random:TYPE"):
        assert way in message


def test_a_file_in_place_of_its_folder_is_refused(folder: Path):
    assert "give the folder" in refused(folder / "model.safetensors")


def test_a_name_on_the_hub_is_taken_from_the_local_cache_without_the_network(folder: Path, hub: Path):
    cached_on_hub(hub, "tiny-org/tiny", folder)
    subject = loaded("tiny-org/tiny")
    assert subject.info.name == "tiny-org/tiny"
    assert subject.info.digest == loaded(folder).info.digest
    assert subject.encode("the path") == (1, 3)


@pytest.mark.usefixtures("hub")
def test_a_name_that_is_not_in_the_cache_says_what_to_type():
    message = refused("tiny-org/tiny")
    assert message.startswith("tiny-org/tiny is neither a folder nor in the local hub cache")
    assert "--download" in message


def test_a_name_in_the_cache_with_pickled_weights_is_refused(folder: Path, spoilt: Path, hub: Path):
    (spoilt / "model.safetensors").rename(spoilt / "pytorch_model.bin")
    cached_on_hub(hub, "tiny-org/tiny", spoilt)
    assert "tiny-org/tiny holds pickled weights, which can run code" in refused("tiny-org/tiny")


@pytest.mark.parametrize("trusted", [False, True])
def test_only_a_download_asks_the_network_and_code_is_fetched_only_to_be_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch, trusted: bool
):
    asked: list[dict[str, Any]] = []

    def fetch(name: str, **how: Any) -> str:
        asked.append(how)
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    loaded("tiny-org/tiny", trust_remote_code=trusted)
    loaded("tiny-org/tiny", trust_remote_code=trusted, network=True)
    assert [how["local_files_only"] for how in asked] == [True, False]
    for how in asked:
        assert "*.safetensors" in how["allow_patterns"]
        assert not {"*.bin", "*", "*.pt"} & set(how["allow_patterns"])
        assert ("*.py" in how["allow_patterns"]) is trusted


def test_a_download_that_fails_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch):
    def fetch(name: str, **how: Any) -> str:
        raise ConnectionError("no route\nto the hub")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    message = refused("tiny-org/tiny", network=True)
    assert message == "tiny-org/tiny cannot be downloaded: ConnectionError: no route to the hub"


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path):
    (tmp_path / "model.gguf").write_bytes(b"GGUF or not")
    assert refused(tmp_path / "model.gguf").startswith("model.gguf cannot be loaded: ")


@pytest.mark.parametrize(
    ("missing", "words"),
    [(["gguf"], "needs gguf:"), (["gguf", "accelerate"], "needs gguf and accelerate:")],
    ids=str,
)
def test_a_gguf_file_says_which_libraries_it_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: list[str], words: str
):
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    monkeypatch.setattr(_load, "find_spec", lambda name: None if name in missing else object())
    message = refused(tmp_path / "model.gguf")
    assert words in message
    assert "pip install 'kvproof[gguf]'" in message


def test_a_configuration_gives_a_random_model_of_exactly_its_sizes(folder: Path, tmp_path: Path):
    file = with_config(copied(folder, tmp_path / "wide"), intermediate_size=52) / "config.json"
    first, again, other = (loaded(config=file, seed=seed) for seed in (3, 3, 4))
    assert first.info.digest == again.info.digest != other.info.digest
    assert (first.info.name, first.seed) == (f"config:{file}", 3)
    assert first.model.config.intermediate_size == 52
    assert first.model.model.layers[0].mlp.up_proj.weight.shape[0] == 52
    assert loaded(config=file, dtype="bfloat16").info.dtype == "bfloat16"


def test_a_random_model_of_a_configuration_is_scaled_so_that_every_branch_counts(folder: Path):
    weight = loaded(config=folder / "config.json").model.model.embed_tokens.weight
    assert weight.std().item() == pytest.approx(0.5, rel=0.1)


def test_building_from_a_configuration_leaves_the_global_generator_as_it_was(folder: Path):
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    loaded(config=folder / "config.json")
    assert torch.equal(torch.rand(1), expected)


def test_a_configuration_that_is_not_there_is_refused(tmp_path: Path):
    assert "no such configuration" in refused(config=tmp_path / "config.json")


@pytest.mark.parametrize("both", [True, False])
def test_a_target_and_a_configuration_exclude_each_other(folder: Path, both: bool):
    options = {"config": folder / "config.json"} if both else {}
    assert refused("random:llama" if both else None, **options) == "give a TARGET or --config FILE, and not both"


@pytest.mark.parametrize(
    "text", ["{nope", "[1]", "", "\x00", "{}"], ids=["broken", "list", "empty", "nul", "bare"]
)
def test_a_configuration_that_holds_none_is_refused(spoilt: Path, text: str):
    (spoilt / "config.json").write_text(text)
    assert refused(spoilt).startswith("spoilt cannot be loaded: ")
    assert "config.json" in refused(config=spoilt / "config.json")


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"model_type": "lama"}, ["lama", "does not recognize"]),
        ({"model_type": "distilbert"}, ["'distilbert' model", "no causal-LM class", "no cache to audit"]),
        ({"model_type": "bert", "is_decoder": False}, ["'bert' encoder", '"is_decoder": true']),
        ({"model_type": "vit"}, ["'vit' model", "no causal-LM class"]),
        ({"hidden_size": "wide"}, ["hidden_size", "wide"]),
    ],
    ids=["unknown", "encoder", "decoder switched off", "images", "wrong value"],
)
def test_a_model_that_has_no_cache_to_audit_is_refused(spoilt: Path, values: dict[str, object], words: list[str]):
    with_config(spoilt, **values)
    for message in (refused(spoilt), refused(config=spoilt / "config.json")):
        assert "spoilt" in message
        assert all(word in message for word in words)


def test_weights_that_are_missing_are_named(spoilt: Path):
    with_weights(spoilt, model__norm__weight=None)
    assert refused(spoilt) == "spoilt: its weights lack model.norm.weight"


def test_many_missing_weights_are_counted(spoilt: Path):
    layer = "model__layers__0__self_attn__{}_proj__weight"
    with_weights(spoilt, **{layer.format(kind): None for kind in "qkvo"})
    assert refused(spoilt).endswith("and 1 more")


def test_weights_of_another_shape_are_named_with_both(spoilt: Path):
    with_weights(spoilt, model__norm__weight=torch.zeros(3))
    message = refused(spoilt)
    assert "do not fit its config.json: model.norm.weight is (3,), not (" in message


def test_a_weight_that_is_not_a_number_is_named(spoilt: Path, folder: Path):
    good = loaded(folder).model.model.norm.weight
    bad = good.clone()
    bad[0] = float("nan")
    with_weights(spoilt, model__norm__weight=bad)
    assert "weight 'model.norm.weight' holds a value that is not finite" in refused(spoilt)


@pytest.mark.parametrize("kept", [0, 4, 0.5], ids=["nothing", "four bytes", "half"])
def test_truncated_weights_are_refused(spoilt: Path, kept: float):
    whole = (spoilt / "model.safetensors").read_bytes()
    (spoilt / "model.safetensors").write_bytes(whole[: int(kept * len(whole)) if kept < 1 else int(kept)])
    assert refused(spoilt).startswith("spoilt cannot be loaded: ")


def test_what_the_library_says_while_it_loads_is_not_printed(spoilt: Path, capfd: pytest.CaptureFixture[str]):
    with_weights(spoilt, model__norm__weight=None)
    capfd.readouterr()
    refused(spoilt)
    with_config(spoilt, model_type="bert", is_decoder=False)
    refused(spoilt)
    assert capfd.readouterr() == ("", "")


CODE = """
from transformers import LlamaConfig, LlamaForCausalLM

class OwnConfig(LlamaConfig):
    model_type = "own"

class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig
    print("code of the model's own runs")
"""


@pytest.fixture
def bringing_code(spoilt: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (spoilt / "own.py").write_text(CODE)
    own = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    return with_config(spoilt, model_type="own", auto_map=own)


def test_code_that_comes_with_a_model_is_not_run_unless_it_is_trusted(
    bringing_code: Path, capfd: pytest.CaptureFixture[str]
):
    message = refused(bringing_code)
    assert message.startswith("spoilt cannot be loaded: it brings code of its own")
    assert "--trust-remote-code" in message
    assert capfd.readouterr() == ("", "")


def test_trusted_code_runs_and_does_not_print_among_the_results(
    bringing_code: Path, capfd: pytest.CaptureFixture[str]
):
    subject = loaded(bringing_code, trust_remote_code=True)
    assert type(subject.model).__name__ == "OwnModel"
    out, err = capfd.readouterr()
    assert out == ""
    assert "code of the model's own runs" in err


@pytest.mark.parametrize("device", ["cuda:9", "meta", "gpu", "", "cpu:1"])
def test_a_device_that_is_not_there_is_refused_with_those_that_are(device: str):
    message = refused("random:llama", device=device)
    assert message.startswith(f"no such device: {device!r}; this machine has cpu")


@pytest.mark.parametrize("dtype", ["int8", "float3", "nn"])
def test_a_dtype_that_is_none_is_refused(dtype: str):
    assert f"no such floating-point dtype: {dtype!r}" in refused("random:llama", dtype=dtype)


def test_every_adapter_takes_the_versions_that_the_package_declares_in_its_extra():
    extras = tomllib.loads(PYPROJECT.read_text("utf-8"))["project"]["optional-dependencies"]
    for entry in ADAPTERS:
        if entry.library is not None:
            first, end = entry.versions
            assert f"{entry.library}>={first},<{end}" in extras[entry.extra]
        assert {form.extra for form in entry.forms if form.extra} <= extras.keys()


@pytest.mark.parametrize("version", ["4.56.2", "4.57.5", "6.0.0", "6.0.0.dev0", "unknown"])
def test_another_version_of_transformers_is_refused_with_the_range(version: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    message = refused("random:llama")
    assert f"transformers {version} is installed" in message
    assert all(bound in message for bound in find_entry("random:").versions)


@pytest.mark.parametrize("version", ["4.57.6", "5.0.0", "5.17.0.dev0", "5.24.1", "5.100"])
def test_a_version_inside_the_range_is_taken(version: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    assert loaded("random:gpt2").info.name == "random:gpt2"


def test_text_becomes_ids_and_ids_show_as_text(folder: Path):
    subject = loaded(folder)
    assert subject.encode("the cached path agrees") == (1, 2, 3, 4)
    assert subject.decode((1, 2)) == "'the' 'cached'"
    assert subject.token(100) == "100", "the model has more ids than the tokenizer has words"
    assert subject.cast(torch.float64).token(1) == "'the'"


def test_the_tokenizer_is_loaded_once_and_only_when_it_is_needed(folder: Path, monkeypatch: pytest.MonkeyPatch):
    made: list[Any] = []
    load = AutoTokenizer.from_pretrained
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda *a, **k: made.append(1) or load(*a, **k))
    subject = loaded(folder)
    subject.rows((1, 2, 3))
    assert not made
    subject.cast(torch.float64).decode(subject.encode("the path"))
    subject.decode((1, 2, 3))
    assert len(made) == 1


def test_a_subject_without_a_tokenizer_takes_no_text():
    with pytest.raises(AbilityError, match="random:llama has no tokenizer"):
        loaded("random:llama").encode("the path")


def test_a_tokenizer_that_cannot_be_loaded_leaves_ids_and_is_tried_once(spoilt: Path):
    (spoilt / "tokenizer.json").write_text("{")
    subject = loaded(spoilt)
    assert subject.decode((1, 2)) == "1 2"
    (spoilt / "tokenizer.json").unlink()
    for _ in range(2):
        with pytest.raises(UsageError, match="spoilt: its tokenizer cannot be loaded: ") as caught:
            subject.encode("the path")
        assert "\n" not in str(caught.value)


def test_a_tokenizer_that_does_not_fit_the_model_is_refused(spoilt: Path):
    saved_tokenizer(spoilt, (*WORDS, *(f"w{i}" for i in range(200))))
    subject = loaded(spoilt)
    last = subject.info.vocab_size - 1
    assert subject.encode("the path") == (1, 3)
    with pytest.raises(UsageError, match=rf"does not fit the model: it gives id \d+, .* ids 0\.\.{last}$"):
        subject.encode("the w150")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "the prompt is empty"),
        (" \n", "makes no token of the prompt ' "),
        ("a\udcffb", "cannot take the prompt"),
    ],
    ids=["empty", "blank", "surrogate"],
)
def test_a_prompt_without_tokens_is_refused(folder: Path, text: str, words: str):
    with pytest.raises(UsageError, match=words) as caught:
        loaded(folder).encode(text)
    assert "\n" not in str(caught.value)


def test_a_short_prompt_is_filled_up_and_a_long_one_used_whole(folder: Path):
    subject = loaded(folder)
    first, second = sequences_for(subject, "the cached path", 12, seed=1)
    assert first[:3] == (1, 2, 3)
    assert len(first) == len(second) == 12
    drawn, same = sequences_for(subject, None, 12, seed=1)
    assert (drawn[3:], same) == (first[3:], second)
    long, other = sequences_for(subject, "the cached path " * 5, 12, seed=1)
    assert long == (1, 2, 3) * 5
    assert len(other) == 15


def test_a_prompt_longer_than_the_context_is_refused(folder: Path):
    with pytest.raises(UsageError, match="the prompt has 129 tokens, more than the context of 128"):
        sequences_for(loaded(folder), "the " * 129, 12, seed=0)
