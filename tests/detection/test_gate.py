"""Each line of the acceptance gate can be made to fail, by the fault that it is there for (spec R4, R21)."""

import copy
import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kvproof import Greedy, ReferenceSubject, Report, Stops, Verdict, audit, generate, milestone
from kvproof._generation import requests as generate_module
from kvproof._generation.choosing import Choice
from kvproof._reference_system import milestone as milestone_module
from kvproof.contract.ledger import StopReason
from kvproof.errors import ContextError
from kvproof.faults import Fault, Planting, mask_off_by_one, position_off_by_one
from kvproof.policies import Policy
from kvproof.reference import Checkpoint
from kvproof.reference.cache import Append, DecoderCache
from kvproof.reference.corpus import BOS_ID, PATTERNS, SEQUENCES, VOCABULARY
from kvproof.scenarios import token_by_token
from kvproof.subjects._reference import ReferenceSession

PREFIXES, SHAPES, FAILURES, POLICIES, STOPS = range(5)


@pytest.fixture
def private(checkpoint: Checkpoint) -> Checkpoint:
    """A copy of the checkpoint that a test may change."""
    return Checkpoint(decoder=copy.deepcopy(checkpoint.decoder), seed=checkpoint.seed, loss=checkpoint.loss)


def failing(report: Report) -> list[int]:
    assert report.milestone is not None
    return [index for index, item in enumerate(report.milestone.gate) if not item.passed]


@pytest.fixture(scope="module")
def healthy(checkpoint: Checkpoint) -> Report:
    return milestone(checkpoint)


def test_the_healthy_system_passes_every_line(healthy: Report):
    assert failing(healthy) == []
    assert healthy.exit_status == 0


def test_a_run_that_changes_a_weight_fails(private: Checkpoint):
    def sabotage(stage: str) -> None:
        if stage.startswith("policy seeded"):
            private.decoder.final_norm.bias[0] += 1e-6

    report = milestone(private, on_stage=sabotage)
    assert PREFIXES in failing(report)
    assert report.exit_status == 1
    assert "weights CHANGED during the run" in report.milestone.gate[PREFIXES].detail


def broken_step(change: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    original = ReferenceSession._extend
    return lambda self, ids, start: change(original(self, ids, start))


@pytest.mark.parametrize("amount", [1.1e-5, 0.5, float("inf"), float("nan")])
def test_a_cached_path_that_misses_one_logit_fails(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, amount: float
):
    """Just over the tolerance, in one entry that no policy would choose."""

    def change(logits: Tensor) -> Tensor:
        logits = logits.clone()
        logits[..., 4] -= amount
        return logits

    monkeypatch.setattr(ReferenceSession, "_extend", broken_step(change))
    report = audit_only(checkpoint)
    assert report.verdict is Verdict.DIVERGED
    assert report.exit_status == 1


def audit_only(checkpoint: Checkpoint) -> Report:
    programs = [token_by_token(ids) for ids in SEQUENCES]
    return audit(ReferenceSubject(checkpoint), programs, tolerance=milestone_module.TOLERANCE)


def test_a_cache_of_the_wrong_length_fails_the_shapes(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch):
    """The cache's own guard is off; the trace's assertion must see it alone."""
    finish = Append.finish

    def forgetful(self: Append) -> DecoderCache:
        grown = finish(self)
        if grown.num_consumed < 4:
            return grown
        layers = tuple(
            type(layer)(layer.request, layer.layer, layer.keys[:, :, 1:], layer.values[:, :, 1:])
            for layer in grown.layers
        )
        return DecoderCache(grown.request, layers, grown.num_consumed)

    monkeypatch.setattr(Append, "finish", forgetful)
    report = milestone(checkpoint)
    assert SHAPES in failing(report)
    short = [row for row in report.milestone.cache_trace if not row.holds]
    assert {row.position for row in short} == {3}
    assert all(row.k_shape == (1, 2, 3, 2) for row in short)


def test_a_cache_that_refuses_nothing_fails_the_shapes(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(DecoderCache, "check", lambda self: None)
    report = milestone(checkpoint)
    assert failing(report) == [SHAPES]
    accepted = [r.attempt for r in report.milestone.refusals if not r.refused]
    assert accepted == ["hand a layer another layer's cache", "hand a request another request's cache"]


def harmless() -> Fault:
    fault = position_off_by_one()
    return Fault(
        name="wrong-position", breaks="nothing", stages=fault.stages, make=lambda place: Planting(lambda: keep)
    )


def keep(site: object, value: Tensor) -> Tensor:
    return value


def test_a_failure_that_is_not_rejected_fails_the_gate(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch):
    """A checker that rejects nothing is weak."""
    monkeypatch.setattr(milestone_module, "wrong_position", harmless)
    report = milestone(checkpoint)
    assert failing(report) == [FAILURES]
    found = re.search(r"wrong-position gap (\S+), NOT rejected", report.milestone.gate[FAILURES].detail)
    assert found is not None
    assert float(found[1]) <= milestone_module.TOLERANCE.absolute, "rounding alone, whatever its digits"


def test_a_failure_named_at_the_wrong_stage_fails_the_gate(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
):
    mask = mask_off_by_one()
    fake = Fault(name="wrong-layer", breaks="the mask", stages=position_off_by_one().stages, make=mask.make)
    monkeypatch.setattr(milestone_module, "wrong_layer", lambda: fake)
    assert failing(milestone(checkpoint)) == [FAILURES]


def test_a_policy_that_chooses_otherwise_than_its_replay_fails(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
):
    """The record is made by one tie rule and replayed by another."""
    choose = generate_module.choose

    def otherwise(policy: Policy, row: Tensor, *others: object) -> Choice:
        return choose(policy, row.index_fill(0, torch.tensor([3]), -1e9), *others)

    monkeypatch.setattr(generate_module, "choose", otherwise)
    report = milestone(checkpoint)
    assert failing(report) == [POLICIES]
    assert "the cached record does not replay: line 2" in report.milestone.gate[POLICIES].detail


def test_a_trace_that_is_not_the_checked_one_fails(private: Checkpoint):
    """With B and C exchanged the tie after A falls to C, and nothing else changes."""
    embedding = private.decoder.token_embedding.weight
    embedding[[3, 4]] = embedding[[4, 3]].clone()
    report = milestone(private)
    assert failing(report) == [POLICIES]
    detail = report.milestone.gate[POLICIES].detail
    assert "<bos> A C D <eos>, and the checked trace is <bos> A B D <eos>" in detail


def test_the_report_holds_every_deliverable(healthy: Report):
    """Spec R6 and R22."""
    result = healthy.milestone
    assert result is not None
    rows = healthy.scenarios[0].rows
    assert len(rows) == 16
    assert healthy.subject.mode == "eval"
    for row in rows:
        assert len(row.expected) == 8
        assert row.tokens.split() == [VOCABULARY[i] for i in row.ids]
    assert [row.tokens for row in rows[3::4]] == [f"<bos> {pattern}" for pattern in PATTERNS]
    assert max(row.gap for row in rows) <= 1e-5
    assert len(result.cache_trace) == 32
    assert all(fault.largest_gap > 1e-5 for fault in healthy.faults)
    assert [pair.cached.end.tokens for pair in result.runs[:2]] == ["<bos> A B D <eos>", "<bos> Y X Y <eos>"]
    assert all(step.probabilities for pair in result.runs for step in pair.cached.steps)
    assert [pair.cached.end.stop_reason for pair in result.runs] == ["eos", "eos", "context"]
    assert "do not measure language quality" in result.notes[0]
    assert "B stands" in result.checkpoint.tie


def test_the_last_position_returns_a_token_that_cannot_be_fed_back(subject: ReferenceSubject):
    """Spec R19: a returned token is not a consumed input."""
    run = generate(subject, (BOS_ID,), Greedy(), Stops(eos_id=None), path="cached")
    assert run.end.stop_reason is StopReason.CONTEXT
    assert len(run.returned) == 4
    session = subject.session()
    session.extend([(BOS_ID, *run.returned[:3])])
    with pytest.raises(ContextError, match="position 4 is past the context"):
        session.extend([[run.returned[3]]])


def test_a_run_without_any_stop_rule_has_no_reason_and_says_what_ended_it(subject: ReferenceSubject):
    run = generate(subject, (BOS_ID,), Greedy(), Stops(eos_id=None, context=False), path="uncached")
    assert run.end.stop_reason is None
    assert "position 4 is past the context" in run.end.problem


def test_max_tokens_is_a_reason_of_its_own(subject: ReferenceSubject):
    run = generate(subject, (BOS_ID,), Greedy(), Stops(eos_id=None, max_tokens=2), path="cached")
    assert run.end.stop_reason is StopReason.MAX_TOKENS
    assert len(run.returned) == 2


def test_the_thread_count_is_put_back(healthy: Report):
    assert healthy.environment.num_threads == 1
    before = torch.get_num_threads()
    with milestone_module.use_one_thread():
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == before
