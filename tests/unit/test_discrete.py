"""What each top-k of a forward takes is noted, and may be told to it."""

import pytest
import torch

from kvproof._numerics.top_k import Choices
from kvproof._numerics.true_float64 import TrueFloat64

SCORES = torch.tensor([[[1.0, 3.0, 2.0], [5.0, 4.0, 6.0]], [[0.0, 0.5, 0.25], [7.0, 9.0, 8.0]]])
BEST = [[1, 2], [2, 0], [1, 2], [1, 2]]


def test_every_top_k_is_noted_in_order_with_its_leading_axes_made_one():
    with Choices() as choices:
        torch.topk(SCORES, 2)
        SCORES[0].topk(1, dim=1)
        torch.sort(SCORES)
    first, second = choices.made
    assert first.scores.tolist() == SCORES.reshape(4, 3).tolist()
    assert first.taken.tolist() == first.own.tolist() == BEST
    assert second.taken.tolist() == [[1], [2]]


def test_a_forced_top_k_gives_the_scores_of_what_it_takes():
    told = torch.tensor([[0, 2], [0, 1], [2, 0], [2, 1]])
    with Choices([None, told]) as choices:
        free, forced = torch.topk(SCORES, 2), SCORES.topk(2)
    assert free.indices.reshape(4, 2).tolist() == BEST
    assert forced.indices.tolist() == told.reshape(2, 2, 2).tolist()
    assert torch.equal(forced.values, SCORES.gather(-1, forced.indices))
    assert choices.made[1].taken.tolist() == told.tolist()
    assert choices.made[1].own.tolist() == BEST


@pytest.mark.parametrize("told", [torch.zeros(4, 1, dtype=torch.int64), torch.zeros(3, 2, dtype=torch.int64)])
def test_what_is_told_for_another_number_of_candidates_or_tokens_is_not_taken(told: torch.Tensor):
    with Choices([told]):
        assert torch.topk(SCORES, 2).indices.reshape(4, 2).tolist() == BEST


def test_choices_are_of_the_same_kind_that_take_as_many_of_as_many():
    with Choices() as choices:
        for scores, number in ((SCORES, 2), (SCORES[0], 2), (SCORES, 1), (SCORES[..., :2], 2)):
            torch.topk(scores, number)
    first, *others = choices.made
    assert [first.is_of_the_same_kind(other) for other in others] == [True, False, False]


def test_the_stable_top_k_of_the_top_rung_is_noted_once_and_forced_alike():
    told = torch.tensor([[2, 0], [1, 2]])
    scores = torch.tensor([[1.0, 1.0, 1.0], [2.0, 3.0, 3.0]], dtype=torch.float64)
    with Choices([None, told]) as choices, TrueFloat64():
        free, forced = torch.topk(scores, 2), scores.topk(2)
    assert free.indices.tolist() == [[0, 1], [1, 2]], "ties go to the lowest index"
    assert forced.indices.tolist() == told.tolist()
    assert len(choices.made) == 2


def test_a_top_k_along_another_axis_is_left_alone():
    square = torch.arange(9.0).reshape(3, 3)
    told = torch.zeros(3, 3, dtype=torch.int64)
    with Choices([told]) as choices:
        found = torch.topk(square, 3, dim=0)
        torch.topk(square[0], 2)
    assert found.indices[0].tolist() == [2, 2, 2]
    assert choices.made == []
