"""Two values to a gap."""

import itertools
import math
import re
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvproof._numerics.gaps import first_of_largest, gap_between, is_within, largest

NAN, INF, MAX = math.nan, math.inf, sys.float_info.max


def row(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize(
    ("expected", "actual", "size", "index"),
    [
        pytest.param((1, 2, 3), (1, 2.5, 3), 0.5, 1, id="finite"),
        pytest.param((1, -2), (1, -2), 0.0, 0, id="equal"),
        pytest.param((0, 0), (-0.0, -3), 3.0, 1, id="signed zeros are equal"),
        pytest.param((1, 5, 1), (4, 2, -2), 3.0, 0, id="the first of equal gaps"),
        pytest.param((INF, -INF), (INF, -INF), 0.0, 0, id="equal infinities"),
        pytest.param((INF, 1), (INF, 3), 2.0, 1, id="equal infinities and a finite gap"),
        pytest.param((1, INF), (1, -INF), INF, 1, id="opposite infinities"),
        pytest.param((1, INF), (1, 7), INF, 1, id="infinite against finite"),
        pytest.param((1, 7), (1, -INF), INF, 1, id="finite against infinite"),
        pytest.param((1, NAN), (1, 7), INF, 1, id="NaN expected alone"),
        pytest.param((1, 7), (1, NAN), INF, 1, id="NaN actual alone"),
        pytest.param((1, INF), (1, NAN), INF, 1, id="NaN against infinite"),
        pytest.param((1, NAN), (1, NAN), NAN, 1, id="NaN on both sides"),
        pytest.param((1, NAN, 1), (1e300, NAN, 1), NAN, 1, id="NaN on both sides outranks a finite gap"),
        pytest.param((NAN, 1), (NAN, INF), INF, 1, id="an infinite gap outranks NaN on both sides"),
    ],
)
def test_a_gap_has_the_size_and_place_of_the_worst_entry(expected, actual, size: float, index: int):
    gap = gap_between(row(*expected), row(*actual))
    assert gap.size == pytest.approx(size, abs=0, nan_ok=True)
    assert gap.index == (index,)


def test_the_scale_is_the_expected_values_largest_finite_magnitude():
    assert gap_between(row(1, -8, 2), row(1, -8, 100)).scale == 8.0
    assert gap_between(row(1, -8, INF, NAN), row(1, -8, INF, NAN)).scale == 8.0
    assert gap_between(row(1, -8), row(1, NAN)).scale == 8.0
    assert gap_between(row(NAN, INF), row(9, 9)).scale == 0.0


def test_the_index_has_one_place_for_each_axis():
    expected = torch.zeros(2, 3, 4)
    actual = expected.clone()
    actual[1, 2, 3] = 0.5
    actual[0, 1, 2] = 2.0
    assert gap_between(expected, actual).index == (0, 1, 2)
    assert gap_between(torch.tensor(1.0), torch.tensor(3.0)).index == ()


AXES = {
    "the last axis": ((0, 1, 1), (0, 1, 3)),
    "the middle": ((0, 0, 3), (0, 2, 0)),
    "the first": ((0, 2, 3), (1, 0, 0)),
}
UNITS = {torch.float64: 2.0**-52, torch.float32: 2.0**-23, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}


def between(sizes: dict[tuple[int, ...], float], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Two values that differ by such sizes at such places, and are of the order of 1."""
    expected = torch.full((2, 3, 4), 0.5, dtype=dtype)
    actual = expected.clone()
    for place, size in sizes.items():
        actual[place] += size
    return expected, actual


@pytest.mark.parametrize("dtype", UNITS, ids=str)
@pytest.mark.parametrize("places", AXES.values(), ids=AXES)
@pytest.mark.parametrize("larger", [0, 1], ids=["the first", "the second"])
def test_of_differences_that_rounding_alone_tells_apart_the_earliest_is_named(
    places: tuple[tuple[int, ...], ...], larger: int, dtype: torch.dtype
):
    """Equal by algebra, in two slots: the last digit chose which of them a finding named."""
    sizes = dict.fromkeys(places, 0.5)
    sizes[places[larger]] += UNITS[dtype]
    gap = gap_between(*between(sizes, dtype))
    assert gap.index == places[0]
    assert gap.size == 0.5 + UNITS[dtype], "the size is that of the largest all the same"


@pytest.mark.parametrize("dtype", UNITS, ids=str)
@pytest.mark.parametrize("places", AXES.values(), ids=AXES)
@pytest.mark.parametrize("larger", [0, 1], ids=["the first", "the second"])
def test_of_differences_of_different_sizes_the_larger_is_named(
    places: tuple[tuple[int, ...], ...], larger: int, dtype: torch.dtype
):
    sizes = dict.fromkeys(places, 0.5)
    sizes[places[larger]] += 0.25 if dtype in (torch.float16, torch.bfloat16) else 1e-3
    assert gap_between(*between(sizes, dtype)).index == places[larger]


@pytest.mark.parametrize(
    ("one", "other"), [(torch.float64, torch.float32), (torch.float32, torch.float64)], ids=str
)
def test_the_coarser_of_two_dtypes_says_what_rounding_moves(one: torch.dtype, other: torch.dtype):
    places = AXES["the last axis"]
    expected, actual = between({places[0]: 0.5, places[1]: 0.5 + 2.0**-23}, torch.float32)
    assert gap_between(expected.to(one), actual.to(other)).index == places[0]
    assert gap_between(expected.double(), actual.double()).index == places[1]


def test_whole_numbers_have_no_rounding():
    expected = torch.tensor([0, 0])
    assert gap_between(expected, torch.tensor([2**40, 2**40 + 1])).index == (1,)


def test_where_rounding_is_all_there_is_what_differs_is_named():
    """All entries are alike but for rounding then, those that agree to the last bit among them."""
    expected, actual = between({(0, 2, 1): 2.0**-50}, torch.float64)
    assert gap_between(expected, actual).index == (0, 2, 1)


@pytest.mark.parametrize(("first_axis", "index"), [(0, (0, 2, 3)), (1, (1, 0, 2)), (2, (1, 1, 0))])
@pytest.mark.parametrize("larger", [(0, 2, 3), (1, 0, 2), (1, 1, 0)])
def test_earliest_means_along_the_axis_that_is_asked_for(
    first_axis: int, index: tuple[int, ...], larger: tuple[int, ...]
):
    sizes = {(0, 2, 3): 0.5, (1, 0, 2): 0.5, (1, 1, 0): 0.5}
    values = between({**sizes, larger: 0.5 + 2.0**-52}, torch.float64)
    assert gap_between(*values, first_axis=first_axis).index == index


@pytest.mark.parametrize(
    ("sizes", "within", "place"),
    [
        ((1.0, 2.0, 3.0), 0.5, 2),
        ((1.0, 2.75, 3.0), 0.5, 1),
        ((3.0, 2.75, 1.0), 0.5, 0),
        ((2.0, 2.0), 0.0, 0),
        ((0.0,), 0.0, 0),
    ],
)
def test_the_first_of_the_largest_sizes_is_found(sizes: tuple[float, ...], within: float, place: int):
    assert first_of_largest(sizes, within) == place


@pytest.mark.parametrize("shape", [(0,), (2, 0)])
def test_nothing_differs_from_nothing_by_nothing(shape: tuple[int, ...]):
    gap = gap_between(torch.zeros(shape), torch.zeros(shape))
    assert (gap.size, gap.index, gap.scale) == (0.0, (), 0.0)


@pytest.mark.parametrize(("left", "right"), [((2,), (3,)), ((1, 2), (2,)), ((0,), (0, 1))])
def test_values_of_different_shapes_are_refused(left: tuple[int, ...], right: tuple[int, ...]):
    with pytest.raises(ValueError, match=f"^{re.escape(f'shapes differ: {left} and {right}')}$"):
        gap_between(torch.zeros(left), torch.zeros(right))


def test_low_dtypes_are_compared_in_float64():
    """A difference taken in float16 would overflow to infinity, and one in bfloat16 round."""
    large = torch.tensor([60000.0], dtype=torch.float16)
    assert gap_between(large, -large).size == 120000.0
    fine = torch.tensor([1.0078125], dtype=torch.bfloat16)
    assert gap_between(fine, torch.tensor([1e-3])).size == 1.0078125 - float(torch.tensor(1e-3))


def test_a_gap_can_be_taken_of_values_that_carry_gradients():
    assert gap_between(torch.ones(1, requires_grad=True), torch.zeros(1)).size == 1.0


@pytest.mark.parametrize(
    ("expected", "actual"), [((MAX, 1), (0, 1)), ((MAX, INF), (0, INF)), ((0, -INF), (-MAX, -INF))]
)
def test_the_largest_finite_gap_is_itself_and_not_nan(expected: tuple[float, ...], actual: tuple[float, ...]):
    """The largest float stands for NaN on both sides while gaps are ranked, and was read back as NaN."""
    gap = gap_between(row(*expected), row(*actual))
    assert (gap.size, gap.index) == (MAX, (0,))


@pytest.mark.parametrize("gaps", sorted(set(itertools.permutations((NAN, 0.0, 1.0, INF)))))
def test_nan_is_the_largest_gap_wherever_it_stands(gaps: tuple[float, ...]):
    """The largest of two was the first where either is NaN, so NaN was lost or kept by its place."""
    assert math.isnan(largest(gaps))
    assert math.isnan(largest(iter(gaps)))


@pytest.mark.parametrize(
    ("gaps", "expected"), [((), 0.0), ((0.0,), 0.0), ((1.0, 3.0, 2.0), 3.0), ((1.0, INF), INF), ((NAN,), NAN)]
)
def test_the_largest_of_gaps_is_their_maximum_and_0_of_none(gaps: tuple[float, ...], expected: float):
    assert repr(largest(gaps)) == repr(expected)


def slow_gap(expected: list[float], actual: list[float], part: float) -> tuple[float, int, float]:
    """The obvious twin: entry by entry, ranked finite < NaN on both sides < infinite; the first that is alike."""
    ranks = []
    for e, a in zip(expected, actual, strict=True):
        if math.isnan(e) and math.isnan(a):
            ranks.append((1, NAN))
        elif e == a:
            ranks.append((0, 0.0))
        elif math.isfinite(e) and math.isfinite(a):
            ranks.append((0, abs(e - a)))
        else:
            ranks.append((2, INF))
    worst = 0
    for place, (rank, size) in enumerate(ranks):
        if rank > ranks[worst][0] or (rank == ranks[worst][0] == 0 and size > ranks[worst][1]):
            worst = place
    scale = max((abs(e) for e in expected if math.isfinite(e)), default=0.0)
    rank, size = ranks[worst]
    if rank == 0:
        least = size - min(part * (scale + size), size / 8)
        worst = next(place for place, (_, other) in enumerate(ranks) if other >= least)
    return size, worst, scale


# Few distinct values make equal entries common; 32 bits keep every difference finite in float64.
ENTRIES = st.sampled_from([NAN, INF, -INF, 0.0, -0.0, 1.0, -1.0]) | st.floats(width=32)


@given(
    pairs=st.lists(st.tuples(ENTRIES, ENTRIES), min_size=1, max_size=12),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_the_gap_agrees_with_its_slow_twin(pairs: list[tuple[float, float]], dtype: torch.dtype):
    expected, actual = ([pair[side] for pair in pairs] for side in (0, 1))
    gap = gap_between(torch.tensor(expected, dtype=dtype), torch.tensor(actual, dtype=dtype))
    size, place, scale = slow_gap(expected, actual, {torch.float32: 2.0**-21, torch.float64: 2.0**-30}[dtype])
    assert repr((gap.size, gap.index, gap.scale)) == repr((size, (place,), scale))


@given(
    pairs=st.lists(st.tuples(ENTRIES, ENTRIES), max_size=12),
    limit=st.sampled_from([0.0, 0.5, 1.0, 2.0, 1e30]),
)
def test_what_is_within_a_limit_at_a_glance_has_no_larger_gap(pairs: list[tuple[float, float]], limit: float):
    """The glance may miss what is equal without being finite, and never calls equal what is not."""
    expected, actual = (torch.tensor([pair[side] for pair in pairs]) for side in (0, 1))
    gap = gap_between(expected, actual)
    if all(map(math.isfinite, itertools.chain(*pairs))):
        assert is_within(expected, actual, limit) == (gap.size <= limit)
    elif is_within(expected, actual, limit):
        assert gap.size <= limit


@given(place=st.integers(0, 23))
def test_an_index_leads_to_the_entry_that_differs(place: int):
    expected = torch.zeros(2, 3, 4)
    actual = expected.clone()
    actual.view(-1)[place] = 1.0
    assert float(actual[gap_between(expected, actual).index]) == 1.0


def test_a_small_difference_is_never_taken_for_none():
    """Where all differences are within rounding, the largest is still the one that is named."""
    expected = torch.full((4,), 1e6, dtype=torch.float64)
    actual = expected.clone()
    actual[3] += 1e-6
    assert gap_between(expected, actual).index == (3,)
