"""Random rounding: every result of an operation moves by at most what its dtype rounds it by."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from kvproof._numerics.random_rounding import RandomRounding

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
VALUES = torch.linspace(-3, 3, 200, dtype=torch.float64)


def half_unit(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps / 2


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_result_moves_by_at_most_half_a_unit_in_its_last_place(dtype: torch.dtype):
    exact = VALUES * 3
    with RandomRounding(dtype, seed=0):
        moved = VALUES * 3
    change = ((moved - exact) / exact).abs()
    assert change.max() <= half_unit(dtype) * (1 + 1e-6)
    assert change.max() > 0.9 * half_unit(dtype), "draws reach the ends"
    assert (change > 0).all(), "each entry has its own draw"
    assert (moved > exact).any()
    assert (moved < exact).any()


@given(
    value=st.floats(-1e299, 1e299, allow_subnormal=False),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**16),
)
def test_any_finite_value_moves_by_at_most_half_a_unit(value: float, dtype: torch.dtype, seed: int):
    entry = torch.tensor([value], dtype=torch.float64)
    with RandomRounding(dtype, seed):
        moved = entry * 1.0
    assert abs(float(moved) - value) <= half_unit(dtype) * abs(value) * (1 + 1e-6)


def test_each_operation_draws_anew():
    with RandomRounding(torch.float32, seed=0):
        first, second = VALUES + 1, VALUES + 1
    assert not torch.equal(first, second)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_same_seed_moves_alike_and_another_otherwise(dtype: torch.dtype):
    def moved(seed: int) -> torch.Tensor:
        with RandomRounding(dtype, seed):
            return (VALUES.exp() @ VALUES.cos()) + VALUES

    assert torch.equal(moved(1), moved(1))
    assert not torch.equal(moved(1), moved(2))


def test_zeros_stay_zeros():
    with RandomRounding(torch.bfloat16, seed=0):
        assert torch.equal(VALUES * 0, torch.zeros_like(VALUES))


@pytest.mark.parametrize(
    "left_alone",
    [
        pytest.param(torch.tensor([1e301, -1e308, torch.finfo(torch.float64).max]), id="stand-ins for infinity"),
        pytest.param(torch.tensor([torch.inf, -torch.inf, torch.nan]), id="no finite values"),
    ],
)
def test_a_mask_s_values_stay_as_they_are(left_alone: torch.Tensor):
    mask = left_alone.to(torch.float64)
    with RandomRounding(torch.bfloat16, seed=0):
        moved = mask.neg().neg()
    torch.testing.assert_close(moved, mask, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    "values",
    [
        pytest.param(torch.arange(1, 9), id="integers"),
        pytest.param(torch.tensor([True, False]), id="booleans"),
        pytest.param(VALUES.float(), id="float32"),
        pytest.param(VALUES.bfloat16(), id="bfloat16"),
        pytest.param(torch.zeros(0, dtype=torch.float64), id="nothing"),
    ],
)
def test_what_is_not_float64_or_holds_nothing_is_left_alone(values: torch.Tensor):
    expected = torch.cat([values, values])
    with RandomRounding(torch.bfloat16, seed=0):
        assert torch.equal(torch.cat([values, values]), expected)


@pytest.mark.parametrize(
    "view",
    [
        pytest.param(lambda value: value[3:7], id="slice"),
        pytest.param(lambda value: value.view(10, 20), id="view"),
        pytest.param(lambda value: value.view(10, 20).transpose(0, 1), id="transpose"),
        pytest.param(lambda value: value.expand(2, 200), id="expand"),
        pytest.param(lambda value: value.split(50)[1], id="split"),
    ],
)
def test_a_view_is_no_computation_and_stays_exact(view):
    expected = view(VALUES)
    with RandomRounding(torch.bfloat16, seed=0):
        seen = view(VALUES)
    assert torch.equal(seen, expected)
    assert seen.untyped_storage().data_ptr() == VALUES.untyped_storage().data_ptr(), "still a view"


def test_a_result_written_in_place_stays_exact_and_in_its_place():
    value = VALUES.clone()
    with RandomRounding(torch.bfloat16, seed=0):
        returned = value.add_(1)
    assert returned is value
    assert torch.equal(value, VALUES + 1)


def test_each_tensor_of_a_tuple_is_moved_by_its_own_dtype():
    values, indices = VALUES.topk(5)
    with RandomRounding(torch.bfloat16, seed=0):
        moved, order = VALUES.topk(5)
        deviation, mean = torch.std_mean(VALUES)
    assert torch.equal(order, indices)
    change = ((moved - values) / values).abs()
    assert ((change > 0) & (change <= half_unit(torch.bfloat16))).all()
    assert float(deviation) != float(VALUES.std())
    assert abs(float(mean)) <= 1e-12


def test_outside_it_nothing_is_moved():
    rounding = RandomRounding(torch.bfloat16, seed=0)
    with rounding:
        pass
    assert torch.equal(VALUES * 3, VALUES.mul(3))
    with rounding:
        again = VALUES * 3
    assert not torch.equal(again, VALUES * 3), "it can be entered again"


def test_the_caller_s_generator_is_not_touched():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    with RandomRounding(torch.float32, seed=0):
        VALUES.exp()
    assert torch.equal(torch.get_rng_state(), before)


#: Rows of two entries that differ by a tenth or less, far more than the norm's epsilon: it leaves their signs.
NEARLY_EQUAL = torch.tensor([[1.1 * start, start] for start in (0.7, 1.3, 2.9, 5.3, 11.1)])
NORMS = {
    "layer norm": lambda rows, weight, bias: F.layer_norm(rows, (2,), weight, bias),
    "layer norm without weights": lambda rows, weight, bias: F.layer_norm(rows, (2,)),
    "group norm": lambda rows, weight, bias: F.group_norm(rows, 1, weight, bias),
    "group norm of several groups": lambda rows, weight, bias: F.group_norm(
        rows.reshape(1, -1, 1), len(rows), weight.repeat(len(rows)), bias.repeat(len(rows))
    ).view(rows.shape),
}


@pytest.mark.parametrize("norm", NORMS.values(), ids=NORMS)
def test_a_norm_is_moved_by_what_it_rounds_inside(norm):
    """As one operation its result moves by half a unit, and float32's is off by many of them."""
    given = (NEARLY_EQUAL, torch.tensor([0.7, -1.3]), torch.tensor([0.2, 0.4]))
    in_float64 = tuple(value.double() for value in given)
    exact = norm(*in_float64)
    error = (norm(*given) - exact).abs().amax()
    moved = exact.new_zeros(())
    for seed in range(16):
        with RandomRounding(torch.float32, seed):
            result = norm(*in_float64)
        moved = torch.maximum(moved, (result - exact).abs().amax())
    assert error < 4 * moved
    assert moved > 10 * half_unit(torch.float32)
    assert moved < 1e-4


@pytest.mark.parametrize("shape", [(2, 6), (3, 6, 4), (2, 6, 2, 3)], ids=str)
def test_a_norm_computed_in_parts_is_torch_s_own(shape: tuple[int, ...]):
    generator = torch.Generator().manual_seed(0)
    value, weight, bias = (
        torch.randn(size, generator=generator, dtype=torch.float64) for size in (shape, (6,), (6,))
    )
    over = shape[1:]
    wide, shift = (part.view(-1, *(1,) * (len(shape) - 2)).expand(over) for part in (weight, bias))

    def norms() -> tuple[torch.Tensor, ...]:
        return (
            F.layer_norm(value, over, wide, shift, eps=0.1),
            F.layer_norm(value, over[-1:]),
            F.group_norm(value, 3, weight, bias, eps=0.1),
            *torch.native_layer_norm(value, over, wide, None, 0.1),
            *torch.native_group_norm(value, None, bias, shape[0], 6, math.prod(shape[2:]), 2, 0.1),
        )

    expected = norms()
    with RandomRounding(torch.float32, seed=0):
        moved = norms()
    for theirs, ours in zip(expected, moved, strict=True):
        assert not torch.equal(ours, theirs)
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
