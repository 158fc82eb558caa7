"""The audit can fail: every fault of the catalogue is caught on subjects of every kind, at its own stage.

Power, as a claim: on the architectures below, every planted fault that changes anything in float64 changes a row
by more than 1000 times the largest gap without a fault, or makes the decoder raise, and shows first at the stage
and layer that the catalogue names. False alarms: none of the programs without a fault differs, so over their
about 100 programs the bound at 95 % is one false alarm in 33; the sweeps bound it further. Each fault is also
seen by every whole scenario of the catalogue that it names.
"""

import dataclasses
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.small_report import CERTIFICATE, REPORT
from tests.strategies import subjects

from kvproof import ReferenceSubject, Report, Subject, Verdict, audit
from kvproof._engine.audit import Auditor
from kvproof._engine.certificate import Certifier
from kvproof._engine.conclusion import summarise
from kvproof._engine.prompts import random_sequences
from kvproof.contract.certified import misplaced_sentence
from kvproof.contract.codec import from_plain
from kvproof.contract.results import Certificate, Outcome, Reach, SmallestChange
from kvproof.contract.stages import Stage
from kvproof.faults import catalogue, probe
from kvproof.reference.corpus import SEQUENCES
from kvproof.scenarios import Ability, batch_of, chunked_prefill, prefill_and_steps, token_by_token

transformers = pytest.importorskip("transformers")

from kvproof.subjects._transformers import TransformersSubject, random_model  # noqa: E402

#: dense and grouped heads, learned positions, window and experts, latent attention, recurrent, hybrid of both.
ARCHITECTURES = ("llama", "gpt2", "mixtral", "deepseek_v3", "mamba2", "falcon_h1")

#: What these types let be planted nowhere, and why.
NOWHERE = {
    "mamba2": {"crop", "pad"},
    "falcon_h1": {"crop"},
}

#: Whose smallest change is sought; keys and values where nothing else is said.
KEPT = {"mamba2": {"state"}, "falcon_h1": {"k", "v", "state"}}

#: How many scenarios of the catalogue, of those that must see some fault, each type lets run.
NUM_SCENARIOS = {"llama": 13, "gpt2": 13, "mixtral": 12, "deepseek_v3": 13, "mamba2": 8, "falcon_h1": 11}


@cache
def model(model_type: str) -> TransformersSubject:
    return random_model(model_type, seed=0, dtype=torch.float32, attention="eager")


def certified(subject: Subject, first: tuple[int, ...], second: tuple[int, ...]) -> Certificate:
    auditor = Auditor(subject)
    auditor.uncached.measure([first, second])
    return Certifier(auditor.uncached, auditor.tolerance, first, second).certificate()


@pytest.fixture(scope="module")
def power() -> dict[str, dict[str, Any]]:
    """What came of every fault in every architecture; a process of its own, in which shapes are not checked."""
    command = [sys.executable, str(Path(__file__).with_name("power.py")), *ARCHITECTURES]
    plain = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE")}
    done = subprocess.run(command, capture_output=True, text=True, env=plain)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.xdist_group("power")
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_planted_fault_is_caught_at_its_stage(power: dict[str, dict[str, Any]], name: str):
    check_power(name, from_plain(Certificate, power[name]["certificate"]))


@pytest.mark.xdist_group("power")
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_scenario_sees_the_faults_that_it_must_see(power: dict[str, dict[str, Any]], name: str):
    """Whole scenarios of the catalogue, each fault in its last layer; and none of them sees one where none is."""
    found = [tuple(entry) for entry in power[name]["scenarios"]]
    clean = {scenario: seen for fault, scenario, seen in found if fault == "none"}
    assert clean == dict.fromkeys(clean, False)
    assert len(clean) >= NUM_SCENARIOS[name]
    faulty = {(fault, scenario): seen for fault, scenario, seen in found if fault != "none"}
    assert [pair for pair, seen in faulty.items() if not seen] == []
    planted = {m["name"] for m in power[name]["certificate"]["faults"]}
    assert {fault for fault, _ in faulty} == planted


def check_power(name: str, certificate: Certificate) -> None:
    assert certificate.problem is None, name
    seen = [m for m in certificate.faults if m.outcome is not Outcome.EQUIVALENT]
    assert [m for m in seen if m.outcome is Outcome.HIDDEN] == [], name
    assert [m for m in seen if m.outcome is Outcome.CAUGHT and not m.right_stage] == [], name
    assert len(seen) > 40, name
    assert certificate.margin is not None
    assert certificate.margin > 1000, name

    planted = {m.name for m in certificate.faults}
    left_out = {n.fault: n.reason for n in certificate.not_planted}
    assert planted | set(left_out) == {fault.name for fault in catalogue()}
    assert planted & set(left_out) == set()
    lacking = {reason.rpartition(": ")[2] for reason in left_out.values() if "lacks" in reason}
    assert lacking == NOWHERE.get(name, set())
    assert not [reason for reason in left_out.values() if "without a fault" in reason], name

    changes = {(change.tensor, change.dtype): change.value for change in certificate.smallest_changes}
    assert {tensor for tensor, _ in changes} == KEPT.get(name, {"k", "v"})
    for tensor, dtype in changes:
        exact, declared = changes[tensor, "float64"], changes.get((tensor, "float32"))
        assert exact is not None
        assert exact < 1e-6, name  # far below what float32 rounds by
        assert declared is None or declared > 10 * exact, (name, dtype)
    steps = {(step.what, step.dtype) for step in certificate.smallest_steps if step.seen}
    assert len(steps) == len(certificate.smallest_steps), name
    expected = {"position", "mask"} if "k" in KEPT.get(name, {"k"}) else set()
    assert steps == {(what, dtype) for what in expected for dtype in ("float32", "float64")}


def test_every_fault_has_a_place_on_some_architecture():
    sites = [probe(model(name), *random_sequences(model(name), 16, 0)) for name in ARCHITECTURES]
    placed = {fault.name for fault in catalogue() if any(list(fault.layers(site)) for site in sites)}
    assert {fault.name for fault in catalogue()} - placed == {"weights-hide-newest"}  # the reference decoder's


def test_the_reference_decoder_is_certified_too(subject: ReferenceSubject):
    certificate = certified(subject, SEQUENCES[0], SEQUENCES[2])
    assert certificate.problem is None
    assert {m.outcome for m in certificate.faults} == {Outcome.CAUGHT, Outcome.RAISED}
    assert all(m.right_stage for m in certificate.faults if m.outcome is Outcome.CAUGHT)
    refused = {m.name for m in certificate.faults if m.outcome is Outcome.RAISED}
    assert {"duplicate-append", "missing-append", "tail-survives-crop"} <= refused  # its cache counts its entries


@settings(max_examples=2)
@given(subjects(), st.data())
def test_decoders_of_any_size_are_certified(subject: ReferenceSubject, data: st.DataObject):
    """Random weights at the tests' scale are visible: no layer's cache is without effect."""
    if subject.info.context_len < 4 or subject.info.vocab_size < 4:
        return
    ids = st.integers(0, subject.info.vocab_size - 1)
    first = data.draw(st.lists(ids, min_size=4, max_size=4, unique=True))
    certificate = certified(subject, tuple(first), tuple(reversed(first)))
    assert all(m.right_stage for m in certificate.faults if m.outcome is Outcome.CAUGHT)


def small(change: Callable[[torch.nn.Module], None] = lambda model: None, **sizes: int) -> TransformersSubject:
    """Return a model of two small layers, changed."""
    config = transformers.LlamaConfig(
        **{
            "vocab_size": 40,
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "initializer_range": 0.5,
            **sizes,
        }
    )
    torch.manual_seed(0)
    llama = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        change(llama)
    return TransformersSubject(llama, name="small")


def zeroed(name: str) -> Callable[[torch.nn.Module], None]:
    return lambda model: model.get_submodule(name).weight.zero_()


def constant(model: torch.nn.Module) -> None:
    for parameter in model.parameters():
        parameter.fill_(0.1)


def audited(subject: Subject, ids: tuple[int, ...]) -> Report:
    return audit(subject, [token_by_token(ids)], all_values=False, certificate=True)


@pytest.mark.parametrize(
    ("change", "num_layers", "problem"),
    [
        (zeroed("lm_head"), 1, "no planted fault changed a row"),
        (constant, 1, "nothing misplaced in the cache of layer 0 changed"),
        (zeroed("model.layers.1.self_attn.o_proj"), 2, "nothing misplaced in the cache of layer 1 changed"),
    ],
    ids=["uniform logits", "constant weights", "a projection of zeros"],
)
def test_a_subject_that_hides_its_cache_is_vacuous(
    change: Callable[[torch.nn.Module], None], num_layers: int, problem: str
):
    subject = small(change, num_hidden_layers=num_layers)
    report = audited(subject, random_sequences(subject, 8, 0)[0])
    assert report.verdict is Verdict.VACUOUS
    assert report.certificate is not None
    assert report.certificate.problem is not None
    assert re.search(problem, report.certificate.problem)
    assert report.certificate.problem in report.summary


def test_tokens_that_hide_the_cache_are_vacuous():
    """One token again and again: every entry holds the same value, so none can be missed or misplaced."""
    report = audited(small(num_hidden_layers=1), (7,) * 8)
    assert report.verdict is Verdict.VACUOUS


def test_a_fault_that_changes_nothing_here_is_no_evidence():
    """One key head has no neighbour to trade places with."""
    subject = small(num_key_value_heads=1, num_hidden_layers=1)
    certificate = certified(subject, *random_sequences(subject, 8, 0))
    outcomes = {m.outcome for m in certificate.faults if m.name == "heads-out-of-order"}
    assert outcomes == {Outcome.EQUIVALENT}
    assert certificate.problem is None


def test_a_report_without_a_certificate_says_so(subject: ReferenceSubject):
    report = audit(subject, [token_by_token(SEQUENCES[0])])
    assert report.certificate is None
    assert any("no certificate" in note for note in report.notes)


def test_a_subject_without_taps_has_no_certificate_and_says_so(subject: ReferenceSubject):
    class Closed(ReferenceSubject):
        def __init__(self, other: ReferenceSubject) -> None:
            super().__init__(other.checkpoint)
            able = tuple(a for a in self._info.abilities if a not in (Ability.TAP, Ability.CAST))
            self._info = dataclasses.replace(self._info, abilities=able)

    report = audit(Closed(subject), [token_by_token(SEQUENCES[0])], certificate=True)
    assert report.certificate is None
    assert "no certificate: the subject lacks the ability: tap" in report.notes


def test_what_diverges_has_no_certificate_and_a_program_that_fails_by_itself_plants_nothing():
    """mamba restarts its scan on a block, so what a fault would add there shows nothing."""
    subject = model("mamba")
    first, second = random_sequences(subject, 9, 0)
    report = audit(subject, [chunked_prefill(first, 3)], all_values=False, certificate=True)
    assert report.verdict is Verdict.DIVERGED
    assert report.certificate is None
    certificate = certified(subject, first, second)
    assert "without a fault" in {n.fault: n.reason for n in certificate.not_planted}["state-restarts"]
    assert certificate.problem is None


def forgetful(num_tokens: int | None) -> TransformersSubject:
    """Return a model of one layer whose attention adds nothing from a position on."""

    def forget(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        shown = (kwargs["position_ids"] < num_tokens).unsqueeze(-1)
        return output[0] * shown, *output[1:]

    def change(llama: torch.nn.Module) -> None:
        attention = llama.get_submodule("model.layers.0.self_attn")
        if num_tokens is not None:
            attention.register_forward_hook(forget, with_kwargs=True)

    return small(change, num_hidden_layers=1)


def far_audit(subject: Subject) -> Report:
    """Audit 40 tokens in a row, a block of 15 on a warm cache, and a batch of three rows."""
    a, b = random_sequences(subject, 40, 0)
    rows = batch_of("batch", "rows that affect each other", (a[:8], b[:8], b[8:16]), (a[8:10], b[:2], a[:2]))
    return audit(
        subject, [prefill_and_steps(a, 38), chunked_prefill(a, 15), rows], all_values=False, certificate=True
    )


@pytest.mark.parametrize("num_tokens", [None, 30], ids=["attention everywhere", "no attention from token 30 on"])
def test_faults_are_planted_as_far_as_the_audit_went(num_tokens: int | None):
    """In 16 tokens and one row alone, what hides the cache of longer sequences went unnoticed."""
    certificate = far_audit(forgetful(num_tokens)).certificate
    assert certificate is not None
    assert certificate.reached == Reach(num_tokens=40, block_len=15, num_rows=3)
    assert certificate.planted_in is not None
    assert certificate.planted_in.num_tokens == 40
    assert certificate.planted_in.block_len == 15
    assert certificate.planted_in.num_rows == 3
    stale = {(m.position, m.batch_row): m.outcome for m in certificate.faults if m.name == "stale-slot"}
    far = Outcome.CAUGHT if num_tokens is None else Outcome.HIDDEN
    near = dict.fromkeys([(2, None), (12, None), (12, 2)], Outcome.CAUGHT)
    assert stale == {**near, (37, None): far}


@pytest.mark.parametrize("num_tokens", [None, 30], ids=["attention everywhere", "no attention from token 30 on"])
def test_a_pass_names_the_faults_that_no_row_shows(num_tokens: int | None):
    report = far_audit(forgetful(num_tokens))
    assert report.verdict.passes
    assert ("hidden" in report.summary) == (num_tokens is not None)
    if num_tokens is not None:
        named = r"; \d+ of \d+ planted faults changed no row \(hidden\): [a-z-]+ after 37 tokens, "
        assert re.search(named, report.summary)


@pytest.mark.parametrize("value", [1e-3, None], ids=["seen", "not seen"])
def test_a_pass_says_if_no_change_of_an_entry_is_seen_in_the_declared_dtype(value: float | None):
    change = SmallestChange(dtype="bfloat16", layer=1, tensor="k", position=3, value=value)
    certificate = dataclasses.replace(
        CERTIFICATE, faults=CERTIFICATE.faults[:1], smallest_changes=(change,), smallest_steps=()
    )
    summary = summarise(Verdict.MATCH, REPORT.scenarios, certificate)
    is_said = summary.endswith("; in bfloat16 even doubling layer 1's newest key is not seen.")
    assert is_said == (value is None)


@pytest.mark.parametrize("num_wrong", [2, 3], ids=["one in five", "more"])
def test_many_faults_at_another_stage_are_explained_by_what_the_taps_show(num_wrong: int):
    right = CERTIFICATE.faults[0]
    wrong = dataclasses.replace(right, where="logits", right_stage=False)
    faults = (wrong,) * num_wrong + (right,) * (10 - num_wrong)
    certificate = dataclasses.replace(CERTIFICATE, faults=faults, shown_stages=(Stage.TOKEN, Stage.LOGITS))
    sentence = misplaced_sentence(certificate)
    assert (sentence is None) == (num_wrong == 2)
    if sentence is not None:
        assert sentence.startswith("3 of 10 caught faults first showed at another stage than theirs")
        assert "taps show token, logits, and not cache_k." in sentence


@pytest.mark.parametrize(("switched_off", "seen"), [((), True), (("v_proj",), False)], ids=["whole", "no values"])
def test_the_smallest_change_of_a_value_is_sought_apart_from_a_key_s(switched_off: tuple[str, ...], seen: bool):
    """Without values nothing that attention reads counts; only the first of two layers still has some."""

    def change(llama: torch.nn.Module) -> None:
        for name in switched_off:
            zeroed(f"model.layers.0.self_attn.{name}")(llama)

    certificate = certified(small(change), *random_sequences(small(), 12, 0))
    found = {(each.tensor, each.dtype): each.value is not None for each in certificate.smallest_changes}
    assert found == {(t, d): seen for t in ("k", "v") for d in ("float64", "float32")}
    steps = {(step.what, step.layer): step.seen for step in certificate.smallest_steps if step.dtype == "float64"}
    assert steps == {("position", None): True, ("mask", 0): seen}


def test_enough_rows_show_a_change_that_few_rows_hide(subject: ReferenceSubject, monkeypatch: pytest.MonkeyPatch):
    """By three rows, the smallest change of a key that float32 showed in these weights was 9e-4."""

    def smallest_key() -> float:
        certificate = certified(subject, SEQUENCES[0], SEQUENCES[2])
        found = {each.tensor: each.value for each in certificate.smallest_changes if each.dtype == "float32"}
        assert found["k"] is not None
        return found["k"]

    by_many = smallest_key()
    monkeypatch.setattr("kvproof._engine.certificate.FEWEST_ROWS", 1)
    assert 3 * by_many < smallest_key()
    assert by_many < 2e-4


@pytest.mark.parametrize("is_broken", [False, True], ids=["sound", "wrong steps from position 30 on"])
def test_where_the_program_fails_without_a_fault_nothing_is_planted_and_that_is_said(is_broken: bool):
    """The places near the start are kept: what is shown there does not depend on what fails later."""

    def double(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        positions = kwargs["position_ids"]
        is_step = positions.shape[1] == 1 and int(positions.min()) >= 30
        return output[0] * (2 if is_step and is_broken else 1), *output[1:]

    def change(llama: torch.nn.Module) -> None:
        llama.get_submodule("model.layers.0.self_attn").register_forward_hook(double, with_kwargs=True)

    subject = small(change, num_hidden_layers=1)
    first, second = random_sequences(subject, 40, 0)
    auditor = Auditor(subject)
    auditor.uncached.measure([first, second])
    audited = [prefill_and_steps(first, 38)]
    certifier = Certifier(auditor.uncached, auditor.tolerance, first[:16], second[:16], audited)
    certificate = certifier.certificate()
    positions = {m.position for m in certificate.faults if m.name == "stale-slot"}
    assert positions == ({2, 12} if is_broken else {2, 12, 37})
    reasons = [n.reason for n in certificate.not_planted if n.fault == "stale-slot"]
    said = ["after 37 tokens its program fails without a fault: its rows differ all the same"]
    assert reasons == (said if is_broken else [])


def test_a_fault_in_the_last_row_alone_is_found_in_that_row():
    certificate = far_audit(forgetful(None)).certificate
    assert certificate is not None
    last = {m.name: m for m in certificate.faults if m.batch_row is not None}
    assert {"stale-slot", "neighbours-row", "position-lags", "token-fed-twice", "stage-skipped"} <= set(last)
    assert "duplicate-append" not in last  # all rows of a cache have as many entries
    assert {(m.batch_row, m.outcome, m.right_stage) for m in last.values()} == {(2, Outcome.CAUGHT, True)}


def test_planting_leaves_the_subject_as_it_was():
    subject = small(num_hidden_layers=1)
    first, second = random_sequences(subject, 8, 0)
    before = subject.rows(first)
    certified(subject, first, second)
    assert torch.equal(subject.rows(first), before)


def test_few_layers_are_chosen_from_many():
    site = probe(model("llama").cast(torch.float64), (1, 2, 3, 4), (5, 6, 7, 8))
    many = dataclasses.replace(site, kept=site.kept * 4)
    assert many.layers_keeping("k", "v") == [0, 8, 15]
