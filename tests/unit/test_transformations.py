"""The transformations of a policy, value by value against transformers' own logits processors, and their ties."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.generation import logits_process as theirs

from kvproof._generation.choosing import choose, new_generator
from kvproof.errors import UsageError
from kvproof.policies import Greedy, Sample

VOCAB = 40


def random_row(seed: int) -> torch.Tensor:
    return 4 * torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed))


def their_scores(row: torch.Tensor, history: list[int], policy: Sample) -> torch.Tensor:
    """Return what transformers' processors make of a row, in the order of its ``generate()``."""
    scores, ids = row[None].clone(), torch.tensor([history])
    processors = [
        (policy.repetition_penalty, theirs.RepetitionPenaltyLogitsProcessor),
        (policy.temperature, theirs.TemperatureLogitsWarper),
        (policy.top_k, theirs.TopKLogitsWarper),
        (policy.top_p, theirs.TopPLogitsWarper),
        (policy.min_p, theirs.MinPLogitsWarper),
        (policy.typical_p, theirs.TypicalLogitsWarper),
    ]
    for value, processor in processors:
        if value is not None:
            scores = processor(value)(ids, scores)
    return scores[0]


def probabilities_of(policy: Sample, row: torch.Tensor, history: list[int]) -> torch.Tensor:
    """Return every entry's probability, 0 where it was not kept."""
    choice = choose(policy, row, new_generator(policy), history)
    return torch.zeros(len(row)).index_put((choice.ids,), choice.probabilities)


RULES = {
    "temperature": {"temperature": 0.7},
    "top-k": {"top_k": 5},
    "top-p": {"top_p": 0.8},
    "top-p that one token reaches": {"top_p": 1e-6},
    "min-p": {"min_p": 0.05},
    "typical-p": {"typical_p": 0.5},
    "repetition penalty": {"repetition_penalty": 1.5},
    "a reward for repetition": {"repetition_penalty": 0.5},
    "all together": {
        "temperature": 1.3,
        "top_k": 20,
        "top_p": 0.95,
        "min_p": 0.01,
        "typical_p": 0.9,
        "repetition_penalty": 1.2,
    },
}


@pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
def test_each_probability_is_that_of_the_processors_of_transformers(rules: dict[str, float]):
    policy = Sample(seed=0, **rules)
    dropped = 0
    for seed in range(200):
        row, history = random_row(seed), [seed % VOCAB, 7, 7, 3]
        expected = their_scores(row, history, policy)
        found = probabilities_of(policy, row, history)
        assert torch.equal(found > 0, expected > -math.inf), (seed, rules)
        assert torch.allclose(found, expected.softmax(dim=-1), rtol=1e-5, atol=0)
        dropped += int((found == 0).sum())
    assert dropped or not set(rules) - {"temperature", "repetition_penalty"}, "the rule has dropped nothing"


def test_greedy_with_a_penalty_takes_what_the_processor_leaves_largest():
    for seed in range(50):
        row = random_row(seed)
        history = row.topk(3).indices.tolist()
        expected = theirs.RepetitionPenaltyLogitsProcessor(3.0)(torch.tensor([history]), row[None].clone())[0]
        choice = choose(Greedy(repetition_penalty=3.0), row, None, history)
        assert choice.chosen == int(expected.argmax())
        assert torch.equal(choice.probabilities, expected.softmax(dim=-1)[choice.ids])


def test_a_penalty_counts_a_token_once_and_leaves_the_row_as_it_was():
    row = torch.tensor([2.0, -2.0, 1.0])
    policy = Sample(repetition_penalty=2.0, seed=0)
    found = probabilities_of(policy, row, [0, 0, 1])
    assert torch.equal(found, torch.tensor([1.0, -4.0, 1.0]).softmax(dim=-1))
    assert row.tolist() == [2.0, -2.0, 1.0]


def kept(row: list[float], **rules: float) -> list[int]:
    policy = Sample(seed=0, **rules)
    return choose(policy, torch.tensor(row), new_generator(policy)).ids.tolist()


def test_equal_tokens_at_the_border_of_top_p_keep_the_lowest_ids():
    assert kept([0.0, 0.0, 0.0, 0.0], top_p=0.5) == [0, 1]
    assert kept([0.0, 1.0, 1.0, 1.0], top_p=0.3) == [1, 2]


def test_a_whole_row_is_kept_where_no_rule_drops_anything():
    assert kept([0.0, 5.0, -3.0]) == kept([0.0, 5.0, -3.0], top_p=1.0) == [0, 1, 2]


@given(
    row=st.lists(st.integers(-12, 12).map(lambda n: n / 4), min_size=1, max_size=12),
    rules=st.fixed_dictionaries(
        {},
        optional={
            "top_p": st.floats(0.01, 1.0),
            "min_p": st.floats(0.01, 1.0),
            "typical_p": st.floats(0.01, 1.0),
            "top_k": st.integers(1, 12),
        },
    ),
)
def test_every_policy_leaves_at_least_one_token_in_order_of_id(row: list[float], rules: dict[str, float]):
    ids = kept(row, **rules)
    assert ids == sorted(set(ids))
    assert ids
    if "typical_p" not in rules:
        assert row.index(max(row)) in ids


@pytest.mark.parametrize("name", ["top_p", "min_p", "typical_p"])
@pytest.mark.parametrize("value", [0.0, -0.1, 1.0000001, math.nan, math.inf])
def test_a_probability_must_lie_above_0_and_not_above_1(name: str, value: float):
    with pytest.raises(UsageError, match=rf"^{name} must lie above 0 and not above 1, not "):
        Sample(seed=0, **{name: value})
    assert getattr(Sample(seed=0, **{name: 1.0}), name) == 1.0


@pytest.mark.parametrize("policy", [Greedy, lambda **rules: Sample(seed=0, **rules)], ids=["greedy", "sample"])
@pytest.mark.parametrize("value", [0.0, -1.0, 1e-9, 1e9, math.nan, math.inf])
def test_a_penalty_must_be_reasonable(policy: type[Greedy], value: float):
    with pytest.raises(UsageError, match=r"^repetition_penalty must lie in 0\.01\.\.100, not "):
        policy(repetition_penalty=value)
