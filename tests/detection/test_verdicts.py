"""What the verdict rules say of whole audits: bugs that one dtype hides, and healthy subjects."""

import dataclasses
import random
from collections.abc import Sequence

import pytest
import torch
from tests.strategies import random_subject

from kvproof import ReferenceSubject, Report, Subject, Tolerance, Verdict, audit, faults, localise
from kvproof._engine.audit import Auditor
from kvproof._reference_system.milestone import TOLERANCE
from kvproof.contract.ledger import MarginVerdict
from kvproof.contract.stages import Site, Stage
from kvproof.errors import AbilityError, SubjectError
from kvproof.faults import Fault, Planting
from kvproof.reference import DecoderConfig
from kvproof.reference.corpus import SEQUENCES
from kvproof.scenarios import Ability, chunked_prefill, token_by_token
from kvproof.subjects._base import Opening
from kvproof.subjects._reference import ReferenceSession

ALL = list(map(token_by_token, SEQUENCES))


class Without(ReferenceSubject):
    """The reference decoder without some of its abilities."""

    def __init__(self, subject: ReferenceSubject, *missing: Ability) -> None:
        super().__init__(subject.checkpoint, counts_entries=subject.counts_entries)
        abilities = tuple(a for a in Ability if a not in missing)
        self._info = dataclasses.replace(self._info, abilities=abilities)


class Leaky(ReferenceSubject):
    """An uncached path that sees the future: each row feels the newest token."""

    def _rows(self, ids: Sequence[int], tap: object) -> torch.Tensor:
        rows = super()._rows(ids, tap)
        return rows + 0.01 * ids[-1]

    def _cast(self, dtype: torch.dtype) -> "Leaky":
        cast = super()._cast(dtype)
        return Leaky(cast.checkpoint)


class Noisy(ReferenceSubject):
    """An uncached path whose every row is off by the same tiny amount, beyond what float32 declares."""

    def _rows(self, ids: Sequence[int], tap: object) -> torch.Tensor:
        rows = super()._rows(ids, tap)
        return rows + 2e-4 if rows.dtype is torch.float32 else rows


def in_float32_only(site: Site) -> Fault:
    """Hold a value in bfloat16 where the decoder computes in float32, and leave float64 alone."""

    def tap(at: Site, value: torch.Tensor) -> torch.Tensor:
        low = at == site and value.dtype is torch.float32
        return value.to(torch.bfloat16).to(torch.float32) if low else value

    return Fault(
        name="dtype-only",
        breaks="a value held in bfloat16",
        stages=frozenset({site.stage}),
        make=lambda place: Planting(lambda: tap),
    )


@pytest.mark.parametrize("stage", [Stage.EMBEDDING, Stage.FINAL_NORM])
def test_a_bug_that_only_the_declared_dtype_shows_is_found(subject: ReferenceSubject, stage: Stage):
    """An audit in float64 alone would pass it."""
    report = audit(subject, ALL, faults=[in_float32_only(Site(stage))], tolerance=TOLERANCE)
    (result,) = report.faults
    assert result.verdict is Verdict.DIVERGED
    assert result.divergence is not None
    assert "look first at" in result.divergence.sentence, "a pointer: float64 agrees everywhere"
    assert result.right_stage
    assert report.verdict is Verdict.MATCH


def test_the_reason_names_the_low_dtype(subject: ReferenceSubject):
    rows = Auditor(subject, TOLERANCE).check(ALL, in_float32_only(Site(Stage.FINAL_NORM))).rows
    reasons = {row.reason.split(":")[-1] for row in rows if row.verdict is Verdict.DIVERGED}
    assert reasons == {" something is held in too low a dtype"}


def test_an_error_of_the_uncached_path_is_not_blamed_on_the_cache(subject: ReferenceSubject):
    """The arbiter: the cached rows are nearer to float64 than the uncached ones."""
    report = audit(Noisy(subject.checkpoint), ALL)
    assert report.verdict is Verdict.ROUNDING
    for row in report.scenarios[-1].rows:
        assert row.cached_error is not None
        assert row.uncached_error is not None
        assert row.cached_error < row.uncached_error


@pytest.mark.parametrize("reference", ["literal", "one-pass"])
def test_an_uncached_path_that_sees_the_future_is_not_a_reference(subject: ReferenceSubject, reference: str):
    """Its noise would excuse any gap at all."""
    report = audit(Leaky(subject.checkpoint), ALL, reference=reference)
    assert report.verdict in (Verdict.INCONCLUSIVE, Verdict.DIVERGED)
    reasons = [row.reason for row in report.scenarios[0].rows]
    assert any("not causal" in reason for reason in reasons)


def test_without_a_top_rung_a_bug_is_not_called_rounding(subject: ReferenceSubject):
    blind = Without(subject, Ability.CAST, Ability.TAP)
    with pytest.raises(AbilityError, match="'tap'"):
        localise(blind, ALL[0])
    assert audit(blind, ALL, tolerance=TOLERANCE).verdict is Verdict.MATCH
    strict = Tolerance(dtype="float32", absolute=1e-12, relative=0.0, source="a test")
    report = audit(blind, ALL, tolerance=strict)
    assert report.verdict in (Verdict.ROUNDING, Verdict.INCONCLUSIVE)
    assert all(row.top_gap is None and row.cached_error is None for row in report.scenarios[0].rows)


def test_rounding_on_the_way_is_no_divergence_without_a_top_rung(subject: ReferenceSubject):
    """Values in float32 used to be held to float64's limit where the subject could not be cast."""
    uncast = Without(subject, Ability.CAST)
    report = audit(uncast, ALL, tolerance=TOLERANCE)
    assert report.verdict is Verdict.MATCH
    assert all(localise(uncast, program).divergence is None for program in ALL)


@pytest.mark.parametrize("fault", [faults.wrong_position(), faults.wrong_layer(), faults.find("missing-append")])
def test_without_a_top_rung_a_large_fault_diverges_and_is_located_all_the_same(
    uncounted: ReferenceSubject, fault: Fault
):
    (result,) = audit(Without(uncounted, Ability.CAST), ALL, faults=[fault], tolerance=TOLERANCE).faults
    assert result.verdict is Verdict.DIVERGED
    assert result.right_stage


def test_a_fault_that_changes_nothing_is_not_counted_as_caught(subject: ReferenceSubject):
    """The first token is at position 0 anyway: an equivalent fault."""
    report = audit(subject, [token_by_token(SEQUENCES[0][:1])], faults=[faults.wrong_position()])
    (result,) = report.faults
    assert not result.caught
    assert result.largest_gap == 0.0
    assert result.num_rows_beyond == 0


def test_a_row_just_beyond_its_tolerance_does_not_match(subject: ReferenceSubject):
    clean: Report = audit(subject, ALL, tolerance=TOLERANCE)
    steps = next(scenario for scenario in clean.scenarios if scenario.name == "token-by-token")
    largest = max(scenario.largest_gap for scenario in (steps, *clean.scenarios))
    for absolute, expected in ((largest, Verdict.MATCH), (largest * (1 - 1e-9), Verdict.ROUNDING)):
        tolerance = Tolerance(dtype="float32", absolute=absolute, relative=0.0, source="a test")
        assert audit(subject, ALL, tolerance=tolerance).verdict is expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_healthy_decoders_raise_no_alarm(dtype: torch.dtype):
    """24 random decoders, 12 tokens, two scenarios: 576 rows a dtype, and none may be more than rounding.

    Over 72,000 such rows in float32, with random rounding the largest cached error was 1.9 times what was
    measured, where 4 is allowed.
    """
    rng = random.Random(0)
    for seed in range(24):
        config = DecoderConfig(
            num_layers=rng.randint(1, 4),
            num_heads=rng.randint(1, 4),
            head_dim=rng.randint(2, 8),
            mlp_width=rng.randint(1, 16),
            context_len=12,
            vocab_size=rng.randint(3, 24),
        )
        subject: Subject = random_subject(config, seed, dtype)
        ids = [rng.randrange(config.vocab_size) for _ in range(12)]
        report = audit(subject, [token_by_token(ids), chunked_prefill(ids, 5)], all_values=False)
        assert report.verdict.passes, (seed, report.summary)


def test_logits_of_the_wrong_shape_are_the_decoder_s_fault(subject: ReferenceSubject):
    class Short(ReferenceSubject):
        def _rows(self, ids: Sequence[int], tap: object) -> torch.Tensor:
            return super()._rows(ids, tap)[:1]

    with pytest.raises(SubjectError, match=r"logits of shape \(1, 8\), not \(2, 8\)"):
        Short(subject.checkpoint).rows((0, 2))


class Rolled(ReferenceSubject):
    """A cached path whose logits belong to the token before: each call ends with a roll by one."""

    def _session(self, opening: Opening) -> ReferenceSession:
        session = super()._session(opening)
        session.__class__ = _RolledSession
        return session

    def _cast(self, dtype: torch.dtype) -> "Rolled":
        return Rolled(super()._cast(dtype).checkpoint)


class _RolledSession(ReferenceSession):
    def _extend(self, ids: Sequence[Sequence[int]], start: int) -> torch.Tensor:
        return super()._extend(ids, start).roll(1, dims=-1)


def test_a_flip_in_a_row_that_diverged_is_not_explained_by_the_row_s_own_gap(subject: ReferenceSubject):
    """Twice the gap exceeds every margin that a gap of this size can flip, so nothing was ever unexplained."""
    rows = audit(Rolled(subject.checkpoint), ALL).scenarios[-1].rows
    assert {row.verdict for row in rows} == {Verdict.DIVERGED}
    assert {row.margin_verdict for row in rows} == {MarginVerdict.UNEXPLAINED_FLIP}
    healthy = audit(subject, ALL).scenarios[-1].rows
    assert {row.margin_verdict for row in healthy} == {MarginVerdict.SAFE}


class LeakyFlips(ReferenceSubject):
    """An uncached path that is not causal: a token after it makes the least likely token the most likely one."""

    def _rows(self, ids: Sequence[int], tap: object) -> torch.Tensor:
        rows = super()._rows(ids, tap).clone()
        rows[:-1] *= -1
        return rows

    def _cast(self, dtype: torch.dtype) -> "LeakyFlips":
        return LeakyFlips(super()._cast(dtype).checkpoint)


def test_a_flip_between_uncached_ways_that_differ_is_not_explained_by_their_gap(subject: ReferenceSubject):
    causality = audit(LeakyFlips(subject.checkpoint), ALL).scenarios[0]
    assert causality.verdict is Verdict.DIVERGED
    assert {row.margin_verdict for row in causality.rows} == {MarginVerdict.UNEXPLAINED_FLIP}
    healthy = audit(subject, ALL).scenarios[0]
    assert {row.margin_verdict for row in healthy.rows} == {MarginVerdict.SAFE}
