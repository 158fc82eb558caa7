"""What an audit makes of scenarios that were not run, showed nothing, or are no part of the verdict."""

import dataclasses
from collections.abc import Callable, Sequence

import pytest
import torch
from tests.strategies import random_subject

from kvproof import ReferenceSubject, Report, Verdict, audit, faults
from kvproof.reference import DecoderConfig
from kvproof.render import terminal
from kvproof.scenarios import (
    Ability,
    Claim,
    Extend,
    Refused,
    Scenario,
    chunked_prefill,
    context_end,
    prefill_and_steps,
    token_by_token,
)
from kvproof.subjects._base import Opening
from kvproof.subjects._reference import ReferenceSession

CONFIG = DecoderConfig(num_layers=1, num_heads=2, head_dim=4, mlp_width=8, context_len=12, vocab_size=16)
IDS = (3, 1, 4, 1, 5, 9)
STEPS = token_by_token(IDS)
BLOCKS = chunked_prefill(IDS, 2)


@pytest.fixture
def healthy() -> ReferenceSubject:
    return random_subject(CONFIG, seed=2)


class NoWarmBlocks(ReferenceSubject):
    """A decoder whose sessions are wrong where a block meets a warm cache."""

    def _session(self, opening: Opening) -> ReferenceSession:
        session = super()._session(opening)
        session.__class__ = _NoWarmBlocks
        return session

    def _cast(self, dtype: torch.dtype) -> "NoWarmBlocks":
        return NoWarmBlocks(super()._cast(dtype).checkpoint)


class _NoWarmBlocks(ReferenceSession):
    def _extend(self, ids: Sequence[Sequence[int]], start: int) -> torch.Tensor:
        logits = super()._extend(ids, start)
        return logits + logits.roll(1, dims=-1) if start and len(ids[0]) > 1 else logits


@pytest.fixture
def broken(healthy: ReferenceSubject) -> NoWarmBlocks:
    return NoWarmBlocks(healthy.checkpoint)


def like(scenario: Scenario, name: str, **changes: object) -> Scenario:
    return dataclasses.replace(scenario, name=name, **changes)


def verdicts(report: Report) -> dict[str, Verdict]:
    return {result.name: result.verdict for result in report.scenarios}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        pytest.param({"crosses": (3, 9)}, "no row after 9 tokens", id="a length that is not reached"),
        pytest.param({"claims": frozenset({Claim.POISONED})}, f"no {Claim.POISONED.value}", id="no garbage"),
        pytest.param({"claims": frozenset({Claim.REFUSED})}, f"no {Claim.REFUSED.value}", id="no refusal"),
    ],
)
def test_a_scenario_that_did_not_do_what_it_says_is_vacuous(
    healthy: ReferenceSubject, changes: dict[str, object], reason: str
):
    report = audit(healthy, [STEPS, like(STEPS, "claims", **changes)])
    assert report.verdict is Verdict.VACUOUS
    assert report.exit_status == 4
    _, steps, claims = report.scenarios
    assert steps.verdict.passes
    assert claims.verdict is Verdict.VACUOUS
    assert claims.reason == reason
    assert all(row.verdict.passes for row in claims.rows)


def test_a_row_that_is_only_fed_and_not_compared_crosses_nothing(healthy: ReferenceSubject):
    unseen = Scenario(
        name="unseen", exposes="x", operations=(Extend(ids=(IDS[:4],), last_only=True),), crosses=(3, 4)
    )
    (_, result) = audit(healthy, [unseen]).scenarios
    assert result.verdict is Verdict.VACUOUS
    assert result.reason == "no row after 3 tokens"


def test_a_scenario_that_did_what_it_says_is_not_vacuous(healthy: ReferenceSubject):
    report = audit(healthy, [like(BLOCKS, "reached", crosses=(1, 6)), context_end(tuple(range(12)))])
    assert report.verdict.passes
    assert [result.reason for result in report.scenarios] == [None] * 3


def test_one_program_of_a_name_that_showed_nothing_makes_the_name_vacuous(healthy: ReferenceSubject):
    programs = [like(STEPS, "two"), like(BLOCKS, "two", crosses=(7,))]
    assert verdicts(audit(healthy, programs))["two"] is Verdict.VACUOUS


def test_a_bug_outranks_a_claim_that_does_not_hold(broken: NoWarmBlocks):
    report = audit(broken, [like(BLOCKS, "claims", crosses=(9,))])
    assert verdicts(report)["claims"] is Verdict.DIVERGED
    assert report.exit_status == 1


def test_tokens_past_the_context_that_are_taken_are_inconclusive(healthy: ReferenceSubject):
    taken = Scenario(
        name="taken",
        exposes="x",
        operations=(Extend(ids=(IDS[:2],)), Refused(ids=((1,),))),
        claims=frozenset({Claim.REFUSED}),
    )
    (_, result) = audit(healthy, [taken]).scenarios
    assert result.verdict is Verdict.INCONCLUSIVE
    assert "the context ends before" in result.reason


SKIPPED = Scenario(name="window crossing", exposes="x", operations=(), skipped="the subject has no window")
UNABLE = like(STEPS, "left-padded", needs=frozenset({Ability.PAD, Ability.POISON}))


def test_what_is_skipped_or_cannot_be_done_is_not_checked_and_says_why(healthy: ReferenceSubject):
    report = audit(healthy, [STEPS, SKIPPED, UNABLE])
    assert report.verdict.passes
    assert report.exit_status == 0
    _, steps, skipped, unable = report.scenarios
    assert steps.verdict.passes
    for result, reason in (
        (skipped, "the subject has no window"),
        (unable, "the subject lacks the ability: pad, poison"),
    ):
        assert result.verdict is Verdict.NOT_CHECKED
        assert result.rows == ()
        assert result.reason == reason


@pytest.mark.parametrize("programs", [[SKIPPED], [UNABLE], [SKIPPED, UNABLE]], ids=["skipped", "unable", "both"])
@pytest.mark.parametrize("reference", ["literal", "one-pass"])
def test_causality_alone_proves_nothing_of_a_cache(
    healthy: ReferenceSubject, programs: list[Scenario], reference: str
):
    report = audit(healthy, programs, reference=reference)
    assert report.verdict is Verdict.NOT_CHECKED
    assert not report.verdict.passes
    assert report.summary.startswith("Could not decide")
    if UNABLE in programs and reference == "one-pass":
        assert report.scenarios[0].verdict.passes


ADVICE = like(BLOCKS, "against the documentation", advice=True)


def test_advice_that_diverges_is_shown_and_leaves_the_verdict_alone(broken: NoWarmBlocks):
    report = audit(broken, [STEPS, ADVICE])
    assert report.verdict.passes
    assert report.exit_status == 0
    assert report.summary.startswith("The cached path computes the same logits")
    advice = report.scenarios[-1]
    assert advice.advice
    assert advice.verdict is Verdict.DIVERGED
    assert advice.four_ways is not None
    text = terminal.render(report)
    assert "against the documentation" in text
    assert "diverged" in text


def test_advice_that_passes_proves_nothing(healthy: ReferenceSubject):
    assert audit(healthy, [ADVICE]).verdict is Verdict.NOT_CHECKED


def test_the_same_scenario_that_is_no_advice_diverges(broken: NoWarmBlocks):
    assert audit(broken, [STEPS, BLOCKS]).verdict is Verdict.DIVERGED


@pytest.mark.parametrize("other", [SKIPPED, UNABLE], ids=lambda scenario: scenario.name)
def test_a_fault_is_planted_in_what_can_be_run(healthy: ReferenceSubject, other: Scenario):
    """One scenario that could not be run kept a fault from being planted in any."""
    report = audit(healthy, [STEPS, other], faults=[faults.wrong_position()])
    (result,) = report.faults
    assert result.caught
    assert result.right_stage


def test_a_fault_is_not_caught_by_advice_that_diverges_anyway(broken: NoWarmBlocks):
    nothing = dataclasses.replace(faults.wrong_position(), make=lambda place: faults.Planting())
    report = audit(broken, [STEPS, ADVICE], faults=[nothing])
    (result,) = report.faults
    assert not result.caught


PROGRAMS = [BLOCKS, STEPS, prefill_and_steps(IDS, 3)]


def test_an_audit_that_fails_fast_stops_after_the_first_scenario_that_diverges(broken: NoWarmBlocks):
    whole = audit(broken, PROGRAMS)
    assert not whole.partial
    assert [result.verdict.passes for result in whole.scenarios] == [True, False, True, True]
    report = audit(broken, PROGRAMS, fail_fast=True, faults=[faults.wrong_position()])
    assert report.partial
    assert report.verdict is Verdict.DIVERGED
    assert [result.name for result in report.scenarios] == ["causality", "chunked prefill"]
    assert report.faults == ()


def test_an_audit_that_fails_fast_goes_on_past_advice_and_what_passes(broken: NoWarmBlocks):
    report = audit(broken, [ADVICE, STEPS, BLOCKS, prefill_and_steps(IDS, 3)], fail_fast=True)
    assert [result.name for result in report.scenarios] == [
        "causality",
        "against the documentation",
        "token-by-token",
        "chunked prefill",
    ]


def test_an_audit_that_fails_fast_and_finds_nothing_is_whole(healthy: ReferenceSubject):
    report = audit(healthy, PROGRAMS, fail_fast=True)
    assert not report.partial
    assert len(report.scenarios) == 4


def interrupting(at: str) -> Callable[[str], None]:
    def on_scenario(name: str) -> None:
        if name == at:
            raise KeyboardInterrupt

    return on_scenario


@pytest.mark.parametrize(
    ("at", "done"),
    [
        ("causality", []),
        ("chunked prefill", ["causality"]),
        ("prefill+steps", ["causality", "chunked prefill", "token-by-token"]),
        ("fault wrong-position", ["causality", "chunked prefill", "token-by-token", "prefill+steps"]),
    ],
)
def test_what_was_done_before_an_interrupt_is_kept_where_that_was_asked_for(
    healthy: ReferenceSubject, at: str, done: list[str]
):
    report = audit(
        healthy, PROGRAMS, faults=[faults.wrong_position()], keep_partial=True, on_scenario=interrupting(at)
    )
    assert report.partial
    assert [result.name for result in report.scenarios] == done
    assert report.faults == ()
    assert report.verdict.passes is (len(done) > 1)
    assert "partial" in terminal.render(report)


@pytest.mark.parametrize("at", ["causality", "prefill+steps", "fault wrong-position"])
def test_an_interrupt_comes_through_otherwise(healthy: ReferenceSubject, at: str):
    with pytest.raises(KeyboardInterrupt):
        audit(healthy, PROGRAMS, faults=[faults.wrong_position()], on_scenario=interrupting(at))
