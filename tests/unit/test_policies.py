"""Policies, the choice of a token, stop rules, margins and generator states."""

import base64
import dataclasses
import math
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.small_report import GREEDY_RUN

from kvproof import generate
from kvproof._engine.verdict_rules import judge_margin
from kvproof._generation.choosing import NUM_TOP, generator_at, new_generator, ranked, state_of
from kvproof._generation.choosing import choose as chosen_of
from kvproof._generation.requests import stop_reason
from kvproof.contract.ledger import MarginVerdict, Step, StopReason
from kvproof.errors import SubjectError, UsageError
from kvproof.policies import Greedy, Policy, Sample, Stops
from kvproof.reference.corpus import EOS_ID
from kvproof.subjects import ReferenceSubject

NOTHING_TO_CHOOSE = r"^the logits hold NaN, infinity or nothing finite, so no token can be chosen from them$"


def choose(
    policy: Policy, row: torch.Tensor, generator: torch.Generator | None
) -> tuple[list[tuple[int, float]], int | None]:
    choice = chosen_of(policy, row, generator)
    return list(zip(choice.ids.tolist(), choice.probabilities.tolist(), strict=True)), choice.draw


@pytest.mark.parametrize("temperature", [0.0, -1.0, 1e-31, 1e-46, 5e-324, 1e31, math.inf, math.nan])
def test_a_temperature_must_be_finite_and_positive(temperature: float):
    with pytest.raises(
        UsageError, match=re.escape(f"temperature must lie in 1e-30..1e30, not {temperature}; or use Greedy()")
    ):
        Sample(temperature=temperature, top_k=1, seed=1)


@pytest.mark.parametrize("top_k", [0, -3])
def test_a_top_k_keeps_at_least_one_token(top_k: int):
    with pytest.raises(UsageError, match=f"^top_k must be at least 1, not {top_k}$"):
        Sample(top_k=top_k, seed=1)


@pytest.mark.parametrize("seed", [-1, 2**63])
def test_a_seed_is_what_a_generator_takes(seed: int):
    with pytest.raises(UsageError, match=f"not {seed}$"):
        Sample(top_k=1, seed=seed)


@pytest.mark.parametrize("seed", [0, 2**63 - 1])
def test_both_ends_of_the_seeds_start_a_generator(seed: int):
    assert new_generator(Sample(top_k=1, seed=seed)).initial_seed() == seed


@pytest.mark.parametrize("max_tokens", [0, -1])
def test_a_request_returns_at_least_one_token(max_tokens: int):
    with pytest.raises(UsageError, match=f"^max_tokens must be at least 1, not {max_tokens}$"):
        Stops(eos_id=None, max_tokens=max_tokens)


def test_a_top_k_above_the_vocabulary_is_refused(subject: ReferenceSubject):
    stops = Stops(eos_id=EOS_ID)
    with pytest.raises(UsageError, match=r"^top_k 9 is larger than the vocabulary of 8 tokens$"):
        generate(subject, (0,), Sample(top_k=9, seed=1), stops, path="cached")
    assert generate(subject, (0,), Sample(top_k=8, seed=1), stops, path="cached").end is not None


@pytest.mark.parametrize("eos_id", [-1, 8])
def test_an_end_token_outside_the_vocabulary_is_refused(eos_id: int, subject: ReferenceSubject):
    with pytest.raises(UsageError, match=f"^eos_id {eos_id} is outside the vocabulary$"):
        generate(subject, (0,), Greedy(), Stops(eos_id=eos_id), path="cached")


# Quarters in a small range tie often, and divide by powers of two without rounding.
ROWS = st.lists(st.integers(-12, 12).map(lambda n: n / 4), min_size=2, max_size=12)


def slow_ranks(row: list[float]) -> list[int]:
    return sorted(range(len(row)), key=lambda i: (-row[i], i))


def slow_softmax(values: list[float]) -> list[float]:
    exponentials = [math.exp(value) for value in values]
    return [exponential / sum(exponentials) for exponential in exponentials]


@given(row=ROWS)
def test_greedy_agrees_with_its_slow_twin(row: list[float]):
    kept, draw = choose(Greedy(), torch.tensor(row), None)
    ranks, probabilities = slow_ranks(row), slow_softmax(row)
    assert [i for i, _ in kept] == ranks[:NUM_TOP] == ranked(torch.tensor(row), NUM_TOP).tolist()
    assert [p for _, p in kept] == pytest.approx([probabilities[i] for i in ranks[:NUM_TOP]], rel=1e-5)
    assert draw is None


@given(
    row=ROWS,
    temperature=st.sampled_from([0.25, 0.5, 1.0, 2.0, 8.0]),
    top_k=st.integers(1, 12),
    seed=st.integers(0, 2**63 - 1),
)
def test_sampling_agrees_with_its_slow_twin(row: list[float], temperature: float, top_k: int, seed: int):
    policy = Sample(temperature=temperature, top_k=top_k, seed=seed)
    generator, twin = new_generator(policy), torch.Generator().manual_seed(seed)
    kept, draw = choose(policy, torch.tensor(row), generator)
    ids = sorted(slow_ranks(row)[:top_k])
    assert [i for i, _ in kept] == ids
    assert [p for _, p in kept] == pytest.approx(slow_softmax([row[i] / temperature for i in ids]), rel=1e-5)
    assert draw == int(torch.multinomial(torch.tensor([p for _, p in kept]), 1, generator=twin))
    assert state_of(generator) == state_of(twin), "one draw, and nothing else, moves the generator on"


def test_greedy_takes_the_lowest_id_of_an_exact_tie():
    kept, _ = choose(Greedy(), torch.tensor([0.0, 3.0, 1.0, 3.0, 3.0]), None)
    assert [i for i, _ in kept] == [1, 3, 4, 2, 0]


def sampled(row: list[float], top_k: int, dtype: torch.dtype = torch.float32) -> list[tuple[int, float]]:
    policy = Sample(top_k=top_k, seed=1)
    return choose(policy, torch.tensor(row, dtype=dtype), new_generator(policy))[0]


def test_sampling_keeps_its_tokens_in_order_of_id():
    assert [i for i, _ in sampled([1.0, 5.0, 3.0, 4.0], top_k=3)] == [1, 2, 3]


def test_equal_logits_at_the_border_of_top_k_keep_the_lowest_ids():
    assert [i for i, _ in sampled([1.0, 1.0, 2.0, 1.0], top_k=3)] == [0, 1, 2]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_sampled_probabilities_are_a_float32_softmax_that_sums_to_1(dtype: torch.dtype):
    probabilities = [p for _, p in sampled([0.0, 1.0, 2.5, -3.0], top_k=3, dtype=dtype)]
    assert torch.tensor(probabilities, dtype=torch.float32).tolist() == probabilities
    assert probabilities == torch.tensor([0.0, 1.0, 2.5]).softmax(dim=-1).tolist()
    assert sum(probabilities) == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("place", [0, 1, 3])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("policy", [Greedy(), Sample(top_k=2, seed=1)], ids=lambda policy: policy.kind)
def test_no_token_is_chosen_from_a_row_that_holds_nan(policy: Policy, dtype: torch.dtype, place: int):
    """NaN was ranked above every number, so greedy took it as the most likely token."""
    values = torch.tensor([0.0, 1.0, 2.5, -3.0], dtype=dtype)
    values[place] = math.nan
    generator = new_generator(policy)
    before = state_of(generator)
    with pytest.raises(SubjectError, match=NOTHING_TO_CHOOSE):
        choose(policy, values, generator)
    assert state_of(generator) == before


@pytest.mark.parametrize("policy", [Greedy(), Sample(top_k=2, seed=1)], ids=["greedy", "sample"])
@pytest.mark.parametrize("row", [[0.0, math.inf, 2.0], [-math.inf] * 3, [0.0, 1e300, 1.0]], ids=str)
def test_no_token_is_chosen_from_a_row_without_a_finite_largest_logit(policy: Policy, row: list[float]):
    """Sampling ended in an error of the library's own, and greedy recorded NaN probabilities."""
    with pytest.raises(SubjectError, match=NOTHING_TO_CHOOSE):
        choose(policy, torch.tensor(row, dtype=torch.float64), new_generator(policy))


def test_masked_entries_have_probability_0():
    policy = Sample(top_k=3, seed=1)
    kept, _ = choose(policy, torch.tensor([1.0, -math.inf, 1.0]), new_generator(policy))
    assert kept == [(0, 0.5), (1, 0.0), (2, 0.5)]


def test_a_temperature_does_not_change_which_ids_are_kept():
    """Scaled logits overflow or become equal, and then the lowest ids were kept."""
    row = torch.tensor([0.0, 1.0, 2.5, 2.5])
    for temperature in (1e-30, 1.0, 1e30):
        policy = Sample(temperature=temperature, top_k=3, seed=1)
        assert [i for i, _ in choose(policy, row, new_generator(policy))[0]] == [1, 2, 3]


@pytest.mark.parametrize("temperature", [1e-3, 1e-20, 1e-30])
@pytest.mark.parametrize("row", [[0.0, 1.0, 2.5, -3.0], [0.0, 30.0, 80.0, 40.0], [-9.0, -7.0, -5.0, -8.0]])
def test_a_tiny_temperature_reaches_its_limit_the_most_likely_token(row: list[float], temperature: float):
    """Logits divided by a tiny temperature overflowed to infinities, and softmax of those is NaN."""
    policy = Sample(temperature=temperature, top_k=3, seed=1)
    kept, draw = choose(policy, torch.tensor(row), new_generator(policy))
    assert dict(kept)[2] == 1.0
    assert sum(p for _, p in kept) == 1.0
    assert kept[draw][0] == 2


@given(row=st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=12), top_k=st.integers(1, 12))
def test_at_temperature_1_the_probabilities_are_those_of_the_kept_logits_to_the_last_bit(
    row: list[float], top_k: int
):
    """The largest logit is taken off first, so that nothing overflows; that must not cost a bit."""
    kept = sampled(row, top_k)
    plain = torch.tensor([row[i] for i, _ in kept]).softmax(dim=-1)
    assert [p for _, p in kept] == plain.tolist()


def test_a_draw_hangs_on_the_request_s_own_generator_alone():
    policy, row = Sample(top_k=4, seed=5), torch.zeros(4)

    def draws(disturbance: int) -> list[int | None]:
        generator = new_generator(policy)
        drawn = []
        for _ in range(6):
            torch.rand(disturbance)  # the global generator moves
            drawn.append(choose(policy, row, generator)[1])
        return drawn

    assert draws(0) == draws(3)
    assert len(set(draws(0))) > 1


def steps(num_steps: int, *, chosen: int, cache_len: int) -> list[Step]:
    newest = dataclasses.replace(GREEDY_RUN.steps[0], chosen=chosen, position=cache_len - 1)
    return [GREEDY_RUN.steps[0]] * (num_steps - 1) + [newest]


EOS, OTHER, CONTEXT = 1, 2, 4
ALL_STOPS = Stops(eos_id=EOS, context=True, max_tokens=3)


@pytest.mark.parametrize(
    ("chosen", "cache_len", "num_steps", "expected"),
    [
        (EOS, CONTEXT, 3, StopReason.EOS),
        (EOS, 3, 3, StopReason.EOS),
        (OTHER, CONTEXT, 3, StopReason.CONTEXT),
        (OTHER, 3, 3, StopReason.MAX_TOKENS),
        (OTHER, 3, 2, None),
    ],
)
def test_of_two_stop_rules_the_first_declared_is_recorded(
    chosen: int, cache_len: int, num_steps: int, expected: StopReason | None
):
    assert stop_reason(ALL_STOPS, steps(num_steps, chosen=chosen, cache_len=cache_len), CONTEXT) is expected


@pytest.mark.parametrize(
    ("stops", "expected"),
    [
        (Stops(eos_id=None, max_tokens=3), StopReason.CONTEXT),
        (Stops(eos_id=None, context=False, max_tokens=3), StopReason.MAX_TOKENS),
        (Stops(eos_id=None, context=False), None),
    ],
)
def test_a_stop_rule_that_is_not_declared_ends_nothing(stops: Stops, expected: StopReason | None):
    assert stop_reason(stops, steps(3, chosen=EOS, cache_len=CONTEXT), CONTEXT) is expected


@pytest.mark.parametrize(
    ("row", "other", "error", "expected"),
    [
        pytest.param([0.0, 1.0], [0.0, 1.0], 0.0, MarginVerdict.SAFE, id="no error"),
        pytest.param([0.0, 1.0], [0.25, 0.75], 0.25, MarginVerdict.SAFE, id="a margin above twice the error"),
        pytest.param([0.0, 1.0], [0.5, 0.5], 0.5, MarginVerdict.EXPLAINED_FLIP, id="a margin of twice the error"),
        pytest.param([0.0, 1.0], [2.0, 0.0], 2.0, MarginVerdict.EXPLAINED_FLIP, id="a flip within the error"),
        pytest.param([0.0, 1.0], [1.0, 0.0], 0.25, MarginVerdict.UNEXPLAINED_FLIP, id="a flip beyond the error"),
        pytest.param([1.0, 1.0, 0.0], [1.0, 1.0, 0.0], 0.0, MarginVerdict.TIE, id="a tie"),
        pytest.param([1.0, 1.0, 0.0], [0.0, 9.0, 0.0], 8.0, MarginVerdict.TIE, id="a tie on one side"),
    ],
)
def test_a_margin_is_judged_against_twice_the_error(
    row: list[float], other: list[float], error: float, expected: MarginVerdict
):
    margin, verdict = judge_margin(torch.tensor(row), torch.tensor(other), error)
    largest, second = sorted(row)[-1], sorted(row)[-2]
    assert (margin, verdict) == (largest - second, expected)


def test_the_margin_of_a_vocabulary_of_one_token_is_infinite():
    """There is no second token, and looking for it was an error of Python's own."""
    assert judge_margin(torch.tensor([1.0]), torch.tensor([5.0]), 4.0) == (math.inf, MarginVerdict.SAFE)


@pytest.mark.parametrize("row", [[math.inf, 0.0, math.inf], [-math.inf, -math.inf]])
@pytest.mark.parametrize("error", [0.0, math.inf, math.nan])
def test_equal_infinities_are_a_tie(row: list[float], error: float):
    """Their difference is NaN, which is neither a tie nor within any error: the margin was called safe."""
    assert judge_margin(torch.tensor(row), torch.tensor(row), error) == (0.0, MarginVerdict.TIE)


@pytest.mark.parametrize("error", [math.nan, math.inf])
@pytest.mark.parametrize("other", [[0.0, 1.0], [1.0, 0.0]])
def test_no_margin_is_safe_or_explained_by_an_error_that_is_not_finite(other: list[float], error: float):
    """NaN is never at least half the margin, so it was called safe, and infinity explained every flip."""
    found = judge_margin(torch.tensor([0.0, 1.0]), torch.tensor(other), error)
    assert found == (1.0, MarginVerdict.UNEXPLAINED_FLIP)


def test_greedy_has_no_generator():
    assert new_generator(Greedy()) is None
    assert state_of(None) is None


@given(seed=st.integers(0, 2**63 - 1), num_draws=st.integers(0, 5))
def test_a_generator_goes_on_from_its_recorded_state(seed: int, num_draws: int):
    generator = new_generator(Sample(top_k=1, seed=seed))
    torch.rand(num_draws, generator=generator)
    again = generator_at(state_of(generator))
    assert state_of(again) == state_of(generator)
    assert torch.equal(torch.rand(3, generator=again), torch.rand(3, generator=generator))


GOOD = base64.b64decode(state_of(torch.Generator()))


@pytest.mark.parametrize(
    "state",
    [
        pytest.param("", id="nothing"),
        pytest.param("not base64", id="not base64"),
        pytest.param("é", id="not ASCII"),
        pytest.param("AAAA", id="three bytes"),
        pytest.param(base64.b64encode(GOOD[:-1]).decode(), id="a byte too short"),
        pytest.param(base64.b64encode(GOOD + b"\0").decode(), id="a byte too long"),
        pytest.param(base64.b64encode(bytes(len(GOOD))).decode(), id="all zeros"),
    ],
)
def test_what_is_no_generator_state_is_refused(state: str):
    with pytest.raises(UsageError, match=r"^not a generator state: "):
        generator_at(state)
