"""A choice of experts that rounding decides is excused; any other is a bug, and so is a bug beside a near-tie."""

import itertools
from collections.abc import Sequence
from functools import cache

import pytest
import torch
from tests.strategies import random_subject

from kvproof import ReferenceSubject, Verdict, audit
from kvproof._engine.calls import Token
from kvproof._engine.expert_ties import _clearest, _flips, _Pair
from kvproof._engine.uncached_rows import Uncached
from kvproof._numerics.taps import Tap
from kvproof._numerics.top_k import Choice
from kvproof.contract.results import ChoiceFlip, RowResult, ScenarioResult
from kvproof.contract.stages import Site, Stage
from kvproof.reference import Checkpoint, DecoderConfig
from kvproof.scenarios import Scenario, batch_of, chunked_prefill, token_by_token
from kvproof.subjects._base import Opening
from kvproof.subjects._reference import ReferenceSession

CONFIG = DecoderConfig(num_layers=2, num_heads=2, head_dim=8, mlp_width=32, context_len=24, vocab_size=24)
IDS = tuple(7 * i % 24 for i in range(13))
OTHER = tuple(5 * i % 24 for i in range(1, 14))
TIED_AT = Site(Stage.MLP_OUT, 0)
#: What the first layer takes changes the scores of the second, so one near-tie makes other choices that are none.
ROUTED = (TIED_AT, Site(Stage.MLP_OUT, 1))
#: Past the prefixes at which the uncached path is computed both ways: there noise would be as large as a flip.
TIED = 9
#: A lead that rounding cannot be told from, of scores around 20, and what turns it round.
NEAR, TURN = 3e-7, 3e-5
#: So many decoders of each kind are tried; which seeds give them depends on how the machine rounds.
NUMBERS = range(4)


class WithExperts(ReferenceSubject):
    """A random decoder that adds one of two experts to each layer's output, by the better score.

    In the first layer expert 0 leads by ``margin`` at position `TIED` of `IDS`. In the cached path, in float32
    alone, expert 1's score there is off by ``nudge``, and one matrix product is held in bfloat16 if ``low``.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        margin: float,
        nudge: float = 0.0,
        *,
        low: bool = False,
        bias: float | None = None,
    ) -> None:
        super().__init__(checkpoint)
        self.options = (margin, nudge, low)
        generator = torch.Generator().manual_seed(1)
        width = CONFIG.num_heads * CONFIG.head_dim
        self.gate, self.experts = (torch.randn(2, width, generator=generator) for _ in range(2))
        self.bias = 0.0
        if bias is None:
            leads: list[float] = []

            def note(site: Site, value: torch.Tensor) -> torch.Tensor:
                if site == TIED_AT:
                    first, second = value[0, TIED] @ self.gate.to(value.dtype).T
                    leads.append(float(first - second))
                return value

            ReferenceSubject(checkpoint).cast(torch.float64).rows(IDS, tap=note)
            bias = leads[0] - margin
        self.bias = bias

    def routed(self, tap: Tap, *, is_cached: bool) -> Tap:
        """Return the tap with the experts before it."""
        _, nudge, low = self.options

        def with_experts(site: Site, value: torch.Tensor) -> torch.Tensor:
            is_off = is_cached and value.dtype is torch.float32
            if site in ROUTED:
                # By products alone: one token's score must not hang on how many there are, or rounding decides.
                scores = (value[..., None, :] * self.gate.to(value.dtype)).sum(-1)
                if site == TIED_AT:
                    bias = self.bias + (nudge if is_off else 0.0)
                    scores = scores + torch.tensor([0.0, bias], dtype=value.dtype)
                taken = scores.topk(1).indices[..., 0]
                value = value + self.experts.to(value.dtype)[taken]
            if is_off and low and site == Site(Stage.NEW_V, 1):
                value = value.bfloat16().float()
            return tap(site, value)

        return with_experts

    def _rows(self, ids: Sequence[int], tap: Tap) -> torch.Tensor:
        return super()._rows(ids, self.routed(tap, is_cached=False))

    def _session(self, opening: Opening) -> ReferenceSession:
        tap = self.routed(opening.tap, is_cached=True)
        return super()._session(Opening(**{**{n: getattr(opening, n) for n in opening.__slots__}, "tap": tap}))

    def _cast(self, dtype: torch.dtype) -> "WithExperts":
        margin, nudge, low = self.options
        return WithExperts(super()._cast(dtype).checkpoint, margin, nudge, low=low, bias=self.bias)


def with_experts(seed: int, margin: float, nudge: float = 0.0, *, low: bool = False) -> WithExperts:
    return WithExperts(random_subject(CONFIG, seed=seed).checkpoint, margin, nudge, low=low)


@cache
def seeds(*, turned: bool) -> tuple[int, ...]:
    """Return the first seeds at which float32 is led by expert 0, as float64 is, or is ``turned`` to expert 1.

    Where it is turned, the uncached path's own error is as large as a choice.
    """
    found: list[int] = []
    for seed in itertools.count():
        choice, _ = Uncached(with_experts(seed, NEAR), "one-pass").choices(IDS)
        assert choice is not None
        first, second = choice.scores[TIED].tolist()
        if (first < second) if turned else (first > second):
            found.append(seed)
        if len(found) == len(NUMBERS):
            return tuple(found)
    raise AssertionError("unreachable")


def audited(subject: WithExperts, program: Scenario) -> ScenarioResult:
    report = audit(subject, [program], all_values=False)
    assert report.scenarios[0].verdict.passes
    return report.scenarios[1]


def flipped(result: ScenarioResult) -> list[RowResult]:
    return [row for row in result.rows if "the uncached path takes" in row.reason]


PROGRAMS = [
    token_by_token(IDS),
    chunked_prefill(IDS, 3),
    batch_of("batch", "a test", (IDS[:6], OTHER[:6]), (IDS[6:], OTHER[6:])),
    batch_of("batch", "a test", (OTHER[:6], IDS[:6]), (OTHER[6:], IDS[6:]), size=3),
]


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: f"{program.name} {len(program.operations)}")
def test_a_near_tie_that_falls_the_other_way_is_rounding_and_is_named(program: Scenario, number: int):
    seed = seeds(turned=False)[number]
    error = _error(with_experts(seed, NEAR))
    result = audited(with_experts(seed, NEAR, nudge=TURN), program)
    assert result.verdict is Verdict.ROUNDING
    rows = flipped(result)
    assert rows
    for row in rows:
        assert row.ids[: TIED + 1] == IDS[: TIED + 1]
        assert f"top-k 1 of position {TIED} takes 1 where the uncached path takes 0, by scores that" in row.reason
        assert f"and rounding moves them by {error:.2e}; with the uncached path's choices" in row.reason
    assert max(row.gap for row in rows) > 0.5, "it is no small gap that is excused"


def _error(subject: WithExperts) -> float:
    uncached = Uncached(subject, "one-pass")
    choice, _ = uncached.choices(IDS)
    assert choice is not None
    return choice.error


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: f"{program.name} {len(program.operations)}")
def test_a_choice_that_no_rounding_decides_is_a_bug(program: Scenario, number: int):
    seed = seeds(turned=False)[number]
    result = audited(with_experts(seed, 1e-3, nudge=2e-3), program)
    assert result.verdict is Verdict.DIVERGED
    (first, *_) = (row for row in result.rows if row.verdict is Verdict.DIVERGED)
    assert len(first.ids) >= TIED + 1
    assert first.reason.endswith(": no rounding decides that")


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("nudge", [0.0, TURN], ids=["the same choice", "the other choice"])
def test_a_bug_beside_a_near_tie_is_not_excused_by_it(nudge: float, number: int):
    """Random rounding takes the other expert in some samples, and excused any bug that moves a row by less."""
    seed = seeds(turned=False)[number]
    subject = with_experts(seed, NEAR, nudge, low=True)
    result = audited(subject, token_by_token(IDS))
    assert result.verdict is Verdict.DIVERGED
    (tied,) = (row for row in result.rows if len(row.ids) == TIED + 1)
    assert tied.verdict is Verdict.DIVERGED
    uncached = Uncached(subject, "one-pass")
    uncached.measure([IDS])
    free, alike = (uncached.sampled_error(tied.ids, with_choices=with_choices) for with_choices in (False, True))
    assert tied.cached_error is not None
    assert 4 * free > tied.cached_error
    assert alike < free / 1000


@pytest.mark.parametrize("number", NUMBERS)
def test_a_bug_is_not_excused_by_a_choice_that_the_uncached_path_makes_otherwise_than_float64(number: int):
    """Its own error held the move, and four times that was taken for rounding in every later row."""
    seed = seeds(turned=True)[number]
    subject = with_experts(seed, NEAR, low=True)
    uncached = Uncached(subject, "one-pass")
    uncached.measure([IDS])
    assert uncached.error(TIED + 1) > 0.5
    assert uncached.error_with_choices(IDS) < 1e-4
    result = audited(subject, token_by_token(IDS))
    verdicts = {row.verdict for row in result.rows if len(row.ids) > TIED}
    assert verdicts == {Verdict.DIVERGED}
    assert result.divergence is not None
    assert "look first at" in result.divergence.sentence


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("number", NUMBERS)
def test_a_near_tie_alone_raises_no_alarm(number: int, turned: bool):
    seed = seeds(turned=turned)[number]
    for program in PROGRAMS:
        assert audited(with_experts(seed, NEAR), program).verdict.passes


class WithBlocks(WithExperts):
    """The same, which also takes one block of keys by the scores of all: there are more with more tokens.

    What it takes changes nothing, unless it is another block than its scores say.
    """

    block_len = 1

    def routed(self, tap: Tap, *, is_cached: bool) -> Tap:
        """Return the tap with a choice of blocks where keys are read."""
        rest = super().routed(tap, is_cached=is_cached)
        num_new = 0

        def with_blocks(site: Site, value: torch.Tensor) -> torch.Tensor:
            nonlocal num_new
            if site == Site(Stage.NEW_K, 0):
                num_new = value.shape[2]
            if site == Site(Stage.CACHE_K, 0):
                keys = value.split(self.block_len, dim=2)
                scores = torch.stack([block.abs().amax((1, 2, 3)) for block in keys], dim=-1)[:, None]
                best = scores.expand(-1, num_new, -1).topk(1)
                value = value + (best.values.amax() - scores.amax())
            return rest(site, value)

        return with_blocks

    def _cast(self, dtype: torch.dtype) -> "WithBlocks":
        margin, nudge, low = self.options
        cast = WithBlocks(super()._cast(dtype).checkpoint, margin, nudge, low=low, bias=self.bias)
        cast.block_len = self.block_len
        return cast


#: With the last there are as many blocks of 12 tokens as of 13.
@pytest.mark.parametrize("block_len", [1, 4, 8])
@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: f"{program.name} {len(program.operations)}")
def test_blocks_of_keys_are_no_experts(program: Scenario, number: int, block_len: int):
    """One that a longer pass alone has was forced on a shorter call, whose error was laid to the decoder."""
    seed = seeds(turned=False)[number]
    subject = WithBlocks(random_subject(CONFIG, seed=seed).checkpoint, NEAR, TURN)
    subject.block_len = block_len
    blocks, first, second = Uncached(subject, "one-pass").choices(IDS)
    assert blocks is None
    assert first is not None
    assert second is not None
    result = audited(subject, program)
    assert result.reason is None
    assert result.verdict is Verdict.ROUNDING
    assert flipped(result)


@pytest.mark.parametrize(("margins", "shown"), [((5e-3, 5.9e-3), 0), ((5.9e-3, 5e-3), 0), ((5e-3, 7e-3), 1)])
def test_of_flips_as_wide_but_for_rounding_the_earliest_is_shown(margins: tuple[float, ...], shown: int):
    """The last digit of a score chose which of them a reason named."""
    flips = [
        ChoiceFlip(position=TIED, number=number, taken=1, rejected=0, margin=margin, error=1e-3)
        for number, margin in enumerate(margins)
    ]
    assert _clearest(flips) is flips[shown]


@pytest.mark.parametrize(
    ("scores", "rejected", "taken"),
    [((0.9, 0.9004, 0.3, 0.3004), 0, 2), ((0.9004, 0.9, 0.3004, 0.3), 0, 2), ((0.9, 0.95, 0.3, 0.25), 1, 3)],
)
def test_of_experts_as_far_apart_but_for_rounding_the_lowest_are_named(
    scores: tuple[float, ...], rejected: int, taken: int
):
    chosen = torch.tensor([[1, 0]])
    other = Choice(scores=torch.tensor([scores]), taken=chosen, own=chosen, error=1e-3)
    token = Token(prefix=IDS, batch_row=0, offset=0, is_last=True)
    (found,) = _flips(_Pair(token, 0, slice(0, 1), other, slice(0, 1)), torch.tensor([[3, 2]]))
    assert (found.flip.rejected, found.flip.taken) == (rejected, taken)
    assert found.flip.margin == pytest.approx(max(scores) - min(scores), abs=1e-6), (
        "the verdict hangs on the largest"
    )
