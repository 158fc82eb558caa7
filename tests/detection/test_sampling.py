"""Random rounding excuses a badly conditioned row, and no bug that one dtype alone shows."""

import dataclasses
import random

import pytest
import torch
from tests.strategies import random_subject

from kvproof import ReferenceSubject, Verdict, audit
from kvproof._compare import Evidence, judge
from kvproof._stages import Site, Stage
from kvproof._trace import Tap
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


EXPLAINED = Evidence(
    gap=1.0,
    allowed=1e-6,
    noise=1e-6,
    top_gap=1e-14,
    top_noise=1e-14,
    top_scale=1.0,
    uncached_error=1e-6,
    cached_error=3e-5,
)


@pytest.mark.parametrize(("sampled", "verdict"), [(1e-5, Verdict.ROUNDING), (5e-6, Verdict.DIVERGED)])
def test_a_sampled_error_excuses_up_to_four_times_itself(sampled: float, verdict: Verdict):
    assert EXPLAINED.hangs_on_sampling
    assert judge(dataclasses.replace(EXPLAINED, sampled_error=sampled))[0] is verdict


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"gap": 1e-7, "cached_error": 1e-7}, id="a match"),
        pytest.param({"cached_error": 4e-6}, id="rounding already"),
        pytest.param({"top_gap": 1e-6}, id="a bug that float64 shows"),
        pytest.param({"gap": float("inf")}, id="a value that is not finite"),
        pytest.param({"gap": float("nan")}, id="no evidence"),
        pytest.param({"top_noise": 1e-3}, id="no reference"),
        pytest.param({"top_gap": None, "top_noise": None, "top_scale": None}, id="no float64"),
    ],
)
def test_samples_are_taken_only_where_they_can_decide(changes: dict[str, float | None]):
    assert not dataclasses.replace(EXPLAINED, **changes).hangs_on_sampling


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
#: Of width 2, whose norms leave signs alone: bfloat16 in its query moves no row by more than float32 does.
UNFELT = {(917, Stage.NEW_Q)}
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
    assert "in float64 all ways give this row the same" in result.four_ways.sentence
