"""Random rounding excuses a badly conditioned row, and no bug that one dtype alone shows."""

import dataclasses
import random
from typing import Any, Literal

import pytest
import torch
from tests.strategies import random_subject

from kvproof import ReferenceSubject, Verdict, audit
from kvproof._engine.verdict_rules import judge, needs_sampling
from kvproof._numerics.taps import Tap
from kvproof.contract.results import Evidence, ExactEvidence
from kvproof.contract.stages import Site, Stage
from kvproof.reference import Checkpoint, DecoderConfig
from kvproof.scenarios import chunked, token_by_token
from kvproof.subjects._base import Opening
from kvproof.subjects._reference import ReferenceSession

#: Found among the first 1,010 seeds, one in 200: there float32 moves a row beyond four times what noise and
#: uncached error measured, on the machine where they were searched for. Other machines round otherwise.
NEEDS_SAMPLES = (64, 204, 399, 917, 1009)


def decoder(seed: int, dtype: torch.dtype = torch.float32) -> tuple[ReferenceSubject, tuple[int, ...]]:
    """Return a healthy decoder of random sizes, and tokens for it."""
    rng = random.Random(seed)
    config = DecoderConfig(
        num_layers=rng.randint(1, 4),
        num_heads=rng.randint(1, 4),
        head_dim=rng.randint(2, 8),
        mlp_width=rng.randint(1, 16),
        context_len=12,
        vocab_size=rng.randint(3, 24),
    )
    return random_subject(config, seed, dtype), tuple(rng.randrange(config.vocab_size) for _ in range(12))


@pytest.mark.parametrize("seed", NEEDS_SAMPLES)
def test_a_healthy_decoder_with_a_badly_conditioned_row_raises_no_alarm(seed: int):
    subject, ids = decoder(seed)
    report = audit(subject, [token_by_token(ids), chunked(ids, 5)], all_values=False)
    assert report.verdict.passes, report.summary
    for row in (row for result in report.scenarios for row in result.rows):
        assert row.sampled_error is None or row.verdict is Verdict.ROUNDING


#: Layers, width of the MLP, vocabulary, seed and tokens. Of 1,500 decoders of width 2 these ten raised an alarm
#: on the machine where they were tried, while a norm was moved as one operation: over two values it leaves their
#: signs, which no change of what it is fed moves as what it rounds inside does.
NORMS_OVER_TWO = (
    (3, 13, 10, 2511, (0, 9, 2, 7, 9, 2, 3, 9)),
    (3, 1, 17, 28994, (9, 0, 0, 9, 0, 1, 7, 16, 10, 11, 11, 2)),
    (3, 8, 8, 60421, (0, 6, 7, 1, 4, 5, 0, 7, 4, 0, 2)),
    (3, 12, 17, 61500, (7, 15, 5, 13, 9, 2, 14, 10, 4)),
    (2, 16, 20, 78, (7, 1, 18, 13)),
    (3, 1, 5, 51711, (3, 4, 3, 1, 4, 0, 0, 0, 3, 1, 3, 4)),
    (2, 14, 15, 15576, (8, 2, 11, 2, 2)),
    (2, 16, 21, 29196, (20, 17, 15, 20, 8, 19)),
    (2, 9, 12, 10335, (11, 10, 0, 9, 8, 5, 0, 8, 3, 3, 8, 4)),
    (2, 11, 16, 5490, (15, 3, 2, 6, 11, 12)),
)


@pytest.mark.parametrize("reference", ["literal", "one-pass"])
@pytest.mark.parametrize("sizes", NORMS_OVER_TWO, ids=lambda sizes: str(sizes[3]))
def test_a_healthy_decoder_whose_norms_go_over_two_values_raises_no_alarm(
    sizes: tuple[int, int, int, int, tuple[int, ...]], reference: Literal["literal", "one-pass"]
):
    num_layers, mlp_width, vocab_size, seed, ids = sizes
    config = DecoderConfig(
        num_layers=num_layers,
        num_heads=1,
        head_dim=2,
        mlp_width=mlp_width,
        context_len=len(ids),
        vocab_size=vocab_size,
    )
    subject = random_subject(config, seed)
    report = audit(subject, [token_by_token(ids)], reference=reference, all_values=False)
    assert report.verdict.passes, report.summary


EXACT = ExactEvidence(gap=1e-14, noise=1e-14, scale=1.0, uncached_error=1e-6, cached_error=3e-5)


def exact(**changes: float) -> ExactEvidence:
    return dataclasses.replace(EXACT, **changes)


EXPLAINED = Evidence(gap=1.0, allowed=1e-6, noise=1e-6, scale=1.0, exact=EXACT)


@pytest.mark.parametrize(("sampled", "verdict"), [(1e-5, Verdict.ROUNDING), (5e-6, Verdict.DIVERGED)])
def test_a_sampled_error_excuses_up_to_four_times_itself(sampled: float, verdict: Verdict):
    assert needs_sampling(EXPLAINED)
    assert judge(dataclasses.replace(EXPLAINED, sampled_error=sampled))[0] is verdict


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"gap": 1e-7, "exact": exact(cached_error=1e-7)}, id="a match"),
        pytest.param({"exact": exact(cached_error=4e-6)}, id="rounding already"),
        pytest.param({"exact": exact(gap=1e-6)}, id="a bug that float64 shows"),
        pytest.param({"gap": float("inf")}, id="a value that is not finite"),
        pytest.param({"gap": float("nan")}, id="no evidence"),
        pytest.param({"exact": exact(noise=1e-3)}, id="no reference"),
        pytest.param({"exact": None}, id="no float64"),
    ],
)
def test_samples_are_taken_only_where_they_can_decide(changes: dict[str, Any]):
    assert not needs_sampling(dataclasses.replace(EXPLAINED, **changes))


class LowInTheCache(ReferenceSubject):
    """A decoder whose sessions hold one product of a weight matrix in bfloat16, in float32 alone."""

    def __init__(self, checkpoint: Checkpoint, site: Site) -> None:
        super().__init__(checkpoint)
        self.site = site

    def _session(self, opening: Opening) -> ReferenceSession:
        return super()._session(dataclasses.replace(opening, tap=self.lowered(opening.tap)))

    def lowered(self, tap: Tap) -> Tap:
        def low(site: Site, value: torch.Tensor) -> torch.Tensor:
            value = value.bfloat16().float() if site == self.site and value.dtype is torch.float32 else value
            return tap(site, value)

        return low

    def _cast(self, dtype: torch.dtype) -> "LowInTheCache":
        return LowInTheCache(super()._cast(dtype).checkpoint, self.site)


PRODUCTS = [Stage.NEW_Q, Stage.NEW_K, Stage.NEW_V, Stage.ATTN_OUT, Stage.MLP_OUT]
#: Of width 2, whose norms leave signs alone: bfloat16 in its query or key moves no row by more than twice what
#: random rounding in float32 does.
UNFELT = {(917, Stage.NEW_Q), (917, Stage.NEW_K)}
BUGS = [(seed, stage) for seed in (1, *NEEDS_SAMPLES) for stage in PRODUCTS if (seed, stage) not in UNFELT]


@pytest.mark.parametrize(("seed", "stage"), BUGS, ids=lambda value: str(value))
def test_a_matrix_product_held_in_bfloat16_in_the_cached_path_alone_still_diverges(seed: int, stage: Stage):
    subject, ids = decoder(seed)
    report = audit(LowInTheCache(subject.checkpoint, Site(stage, 0)), [token_by_token(ids)], all_values=False)
    assert report.verdict is Verdict.DIVERGED
    causality, result = report.scenarios
    assert causality.verdict.passes
    (first, *_) = (row for row in result.rows if row.verdict is Verdict.DIVERGED)
    assert "too low a dtype" in first.reason
    assert first.sampled_error is not None, "rounding was given its chance"
    assert result.divergence is not None
    assert "look first at" in result.divergence.sentence
    assert (result.divergence.stage, result.divergence.layer) == (stage, 0)
    assert result.four_ways is not None
    assert result.four_ways.suspect is None
    assert "in float64 all ways of computing this row agree" in result.four_ways.sentence
