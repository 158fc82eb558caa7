"""An engine is one module and one line in the registry: a toy one goes through every command."""

import json
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from kvproof.cli import cli
from kvproof.errors import UsageError
from kvproof.subjects import CallableSubject, Subject, _registry, as_subject
from kvproof.subjects._adapter import Adapter, LoadOptions, Target
from kvproof.subjects._registry import AdapterEntry, TargetForm, describe_targets, find_scheme, runs_on_one_thread
from kvproof.subjects._targets import load_target

from .running import run


class Toy:
    """An object of the engine's own."""

    def __init__(self, name: str, seed: int = 0) -> None:
        self.name = name
        self.rows = np.random.default_rng(seed).normal(size=(11, 11))

    def subject(self) -> Subject:
        keeps = not self.name.endswith("broken")

        def step(ids: np.ndarray, cache: object) -> tuple[np.ndarray, object]:
            before = cache if keeps and cache is not None else 0
            logits = before + self.rows[ids].cumsum(axis=0)
            return logits, logits[-1]

        return CallableSubject(lambda ids: self.rows[ids].cumsum(axis=0), step, name=self.name)


class ToyAdapter(Adapter):
    def load(self, target: Target, options: LoadOptions) -> Subject:
        if target.rest == "gone":
            raise FileNotFoundError("no toy of that name")
        return Toy(target.text, options.seed).subject()

    def adopt(self, decoder: object, name: str | None) -> Subject | None:
        return Toy(name or decoder.name).subject() if isinstance(decoder, Toy) else None


LINE = AdapterEntry(
    module="_toy", forms=(TargetForm(shown="toy:NAME", help="toy:NAME for a toy", is_tiny=True),), library="numpy"
)


@pytest.fixture(autouse=True)
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("kvproof.subjects._toy")
    module.ADAPTER = ToyAdapter()
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(_registry, "ADAPTERS", (*_registry.ADAPTERS, LINE))


def test_an_engine_is_audited():
    outcome = run("audit", "toy:x", "--scenario", "token-by-token", "--no-certificate")
    assert outcome.status == 0, outcome.err


def test_a_wrong_cache_of_an_engine_is_found_and_shrinking_says_that_it_is_not_written_out(tmp_path: Path):
    outcome = run("audit", "toy:broken", "--scenario", "token-by-token", "--report", tmp_path)
    assert outcome.status == 1, outcome.err
    outcome = run("shrink", tmp_path / "report.json")
    words = "only models of transformers and decoders that a function returns are"
    assert outcome.refused(f"toy:broken is not written out as a file: {words}")


def test_an_engine_generates_and_its_record_replays(tmp_path: Path):
    file = tmp_path / "text.jsonl"
    made = run("generate", "toy:x", "--ids", "1,2,3", "--max-tokens", 4, "--ledger", file)
    assert made.status == 0, made.err
    replayed = run("replay", file)
    assert "all 6 lines replay" in replayed.out, replayed.err


def test_engines_are_swept_and_those_that_are_not_there_refused(tmp_path: Path):
    targets = ("toy:x", "toy:broken", "toy:gone")
    run("sweep", *targets, "--dtype", "float64", "--scenario", "token-by-token", "--out", tmp_path)
    table = json.loads((tmp_path / "sweep.json").read_text("utf-8"))
    endings = {group["job"]["target"]: group["ending"] for group in table["groups"]}
    assert endings == {"toy:x": "finished", "toy:broken": "finished", "toy:gone": "refused"}


def test_help_and_messages_list_an_engine():
    assert describe_targets().endswith(", or toy:NAME for a toy")
    with pytest.raises(UsageError, match=r"neither a folder, .*, module:factory nor toy:NAME"):
        load_target("nowhere", LoadOptions())


def test_the_help_of_audit_lists_every_target_that_kvproof_has(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.undo()
    text = cli.commands["audit"].help
    assert describe_targets() in text
    assert "{" not in text


@pytest.mark.parametrize("options", [{"attention": "sdpa"}, {"device": "cuda"}], ids=str)
def test_an_option_that_an_engine_does_not_take_is_refused(options: dict[str, str]):
    with pytest.raises(UsageError, match="do not go with toy:x, which decides both itself"):
        load_target("toy:x", LoadOptions(**options))


def test_what_an_engine_raises_is_refused_in_one_line():
    with pytest.raises(UsageError, match=r"toy:gone cannot be audited: .*no toy of that name"):
        load_target("toy:gone", LoadOptions())


def test_a_dtype_that_an_engine_does_not_compute_in_is_refused():
    with pytest.raises(UsageError, match="toy:x computes in float64 and cannot be cast to bfloat16"):
        load_target("toy:x", LoadOptions(dtype="bfloat16"))


def test_an_object_of_an_engine_is_taken_as_it_is():
    assert as_subject(Toy("mine")).info.name == "mine"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"library": "no-such-lib"}, r"toy:x needs the no-such-lib library: pip install 'kvproof\[toy\]'"),
        ({"versions": ("0.1", "0.2")}, r"numpy .* is installed, and kvproof knows 0\.1 up to, .*, 0\.2"),
    ],
    ids=["missing", "unknown"],
)
def test_a_library_that_is_missing_or_unknown_is_refused(
    line: dict[str, object], message: str, monkeypatch: pytest.MonkeyPatch
):
    values = {"library": "numpy", "versions": ("1", "99"), "extra": "toy", **line}
    entry = AdapterEntry(module=LINE.module, forms=LINE.forms, **values)
    monkeypatch.setattr(_registry, "ADAPTERS", (*_registry.ADAPTERS[:-1], entry))
    with pytest.raises(UsageError, match=message):
        load_target("toy:x", LoadOptions())


@pytest.mark.parametrize(
    ("text", "scheme"),
    [("toy:x", "toy"), ("random:llama", "random"), ("toys:x", None), ("toy", None), ("a/toy:x", None)],
)
def test_a_scheme_is_known_by_its_word_alone(text: str, scheme: str | None):
    assert find_scheme(text) == scheme


@pytest.mark.parametrize(
    ("target", "expected"), [("toy:x", True), ("random:llama", True), ("org/name", False), (None, False)]
)
def test_a_target_says_whether_one_thread_is_enough(target: str | None, expected: bool):
    assert runs_on_one_thread(target) is expected
