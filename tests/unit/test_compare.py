"""Two rows to a gap, and a row's evidence to a verdict."""

import itertools
import math
import re
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvproof._engine.verdict_rules import Evidence, judge
from kvproof._numerics.gaps import gap_between, is_within, largest
from kvproof._numerics.tolerances import NOISE_FACTOR, ROUNDING_FACTOR, STRUCTURAL_FLOOR
from kvproof.contract.results import Verdict

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


def slow_gap(expected: list[float], actual: list[float]) -> tuple[float, int, float]:
    """The obvious twin: entry by entry, ranked finite < NaN on both sides < infinite."""
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
    return ranks[worst][1], worst, scale


# Few distinct values make equal entries common; 32 bits keep every difference finite in float64.
ENTRIES = st.sampled_from([NAN, INF, -INF, 0.0, -0.0, 1.0, -1.0]) | st.floats(width=32)


@given(
    pairs=st.lists(st.tuples(ENTRIES, ENTRIES), min_size=1, max_size=12),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_the_gap_agrees_with_its_slow_twin(pairs: list[tuple[float, float]], dtype: torch.dtype):
    expected, actual = ([pair[side] for pair in pairs] for side in (0, 1))
    gap = gap_between(torch.tensor(expected, dtype=dtype), torch.tensor(actual, dtype=dtype))
    size, place, scale = slow_gap(expected, actual)
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


ALLOWED = 2.0**-10
NOISE = 2.0**-8
SCALE = 8.0
#: Smaller than any float64 gap that the floor calls a bug at this scale.
CLEAN = 1e-12


def above(limit: float) -> float:
    return math.nextafter(limit, INF)


def evidence(**changes: float | None) -> Evidence:
    """A row that matches at both rungs, with a noise of `NOISE`; changed as told."""
    members: dict[str, float | None] = {
        "gap": ALLOWED / 2,
        "allowed": ALLOWED,
        "noise": NOISE,
        "top_gap": CLEAN,
        "top_noise": CLEAN,
        "top_scale": SCALE,
        "uncached_error": NOISE / 2,
        "cached_error": ALLOWED / 2,
    }
    return Evidence(**{**members, **changes})


NO_TOP_RUNG: dict[str, float | None] = dict.fromkeys(
    ("top_gap", "top_noise", "top_scale", "uncached_error", "cached_error")
)


def verdict(**changes: float | None) -> Verdict:
    return judge(evidence(**changes))[0]


def test_a_clean_row_matches():
    assert verdict() is Verdict.MATCH


def test_an_infinite_gap_diverges_before_every_other_rule():
    everything_else = {"top_gap": NAN, "top_noise": NAN, "allowed": INF, "noise": INF, "cached_error": NAN}
    found, reason = judge(evidence(gap=INF, **everything_else))
    assert found is Verdict.DIVERGED
    assert "not finite" in reason


def test_an_infinite_gap_in_float64_alone_diverges_too():
    assert verdict(top_gap=INF) is Verdict.DIVERGED
    assert verdict(top_gap=INF, gap=NAN) is Verdict.DIVERGED


@pytest.mark.parametrize("member", ["gap", "top_gap"])
def test_nan_in_both_paths_is_inconclusive_even_where_float64_has_a_bug(member: str):
    found, reason = judge(evidence(**{"top_gap": 1.0, "gap": 1.0, member: NAN}))
    assert found is Verdict.INCONCLUSIVE
    assert "NaN" in reason


def test_nan_in_both_paths_is_inconclusive_without_a_top_rung():
    assert verdict(gap=NAN, **NO_TOP_RUNG) is Verdict.INCONCLUSIVE


@pytest.mark.parametrize("member", ["gap", "allowed", "top_gap"])
def test_nan_never_matches(member: str):
    assert verdict(**{member: NAN}) is not Verdict.MATCH
    assert verdict(**NO_TOP_RUNG | {member: NAN}) is not Verdict.MATCH


def test_noise_in_float64_is_inconclusive_before_the_gap_is_looked_at():
    """A subject that is not causal gives two different uncached rows, and neither is the oracle."""
    found, reason = judge(evidence(top_noise=1.0, top_gap=5.0, gap=5.0))
    assert found is Verdict.INCONCLUSIVE
    assert "not causal" in reason


def test_noise_in_float64_is_rounding_up_to_the_floor():
    floor = STRUCTURAL_FLOOR.value * SCALE
    assert verdict(top_noise=floor) is Verdict.MATCH
    assert verdict(top_noise=above(floor)) is Verdict.INCONCLUSIVE


def test_a_float64_gap_beyond_the_floor_is_a_bug_though_the_declared_gap_matches():
    limit = STRUCTURAL_FLOOR.value * SCALE
    assert verdict(top_gap=limit, top_noise=0.0) is Verdict.MATCH
    assert verdict(top_gap=above(limit), top_noise=0.0) is Verdict.DIVERGED


def test_a_float64_gap_beyond_its_noise_is_a_bug_where_noise_is_above_the_floor():
    noise = 1e-10
    limit = NOISE_FACTOR.value * noise
    assert limit > STRUCTURAL_FLOOR.value * SCALE
    assert verdict(top_gap=limit, top_noise=noise) is Verdict.MATCH
    assert verdict(top_gap=above(limit), top_noise=noise) is Verdict.DIVERGED


def test_a_structural_bug_is_never_excused_as_rounding():
    found, reason = judge(evidence(top_gap=1.0, gap=1.0, noise=1.0, uncached_error=1.0, cached_error=0.0))
    assert found is Verdict.DIVERGED
    assert "not rounding" in reason


def test_a_gap_matches_up_to_what_is_allowed():
    assert verdict(gap=ALLOWED, cached_error=1.0) is Verdict.MATCH
    assert verdict(gap=above(ALLOWED), cached_error=1.0) is Verdict.DIVERGED


@pytest.mark.parametrize(
    ("noise", "uncached_error"), [(NOISE, NOISE / 2), (NOISE / 2, NOISE)], ids=["noise", "uncached error"]
)
def test_a_cached_error_is_rounding_up_to_four_times_the_larger_of(noise: float, uncached_error: float):
    limit = ROUNDING_FACTOR.value * NOISE
    beyond = {"gap": 1.0, "noise": noise, "uncached_error": uncached_error}
    assert verdict(cached_error=limit, **beyond) is Verdict.ROUNDING
    assert verdict(cached_error=above(limit), **beyond) is Verdict.DIVERGED


def test_an_unexplained_error_in_the_declared_dtype_alone_is_called_one_of_dtype():
    _, reason = judge(evidence(gap=1.0, cached_error=1.0))
    assert "too low a dtype" in reason


@pytest.mark.parametrize("gap", [0.0, ALLOWED, 1.0, 1e6])
@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("member", ["noise", "top_noise", "uncached_error", "cached_error"])
def test_noise_or_an_error_that_is_not_finite_is_inconclusive_whatever_the_gap(
    member: str, value: float, gap: float
):
    """NaN lost every comparison and infinity won it, so either could let a gap of any size pass."""
    found, reason = judge(evidence(**{"gap": gap, "top_gap": gap, member: value}))
    assert found is Verdict.INCONCLUSIVE
    assert "uncached path itself is not finite" in reason


@pytest.mark.parametrize("gap", [0.0, ALLOWED, 1.0, 1e6])
@pytest.mark.parametrize("noise", [NAN, INF])
def test_noise_that_is_not_finite_excuses_nothing_without_a_top_rung(noise: float, gap: float):
    """Four times an infinite noise excused a gap of any size as rounding."""
    assert verdict(**NO_TOP_RUNG | {"gap": gap, "noise": noise}) is Verdict.INCONCLUSIVE


@pytest.mark.parametrize("missing", ["top_gap", "top_noise", "top_scale"])
def test_a_row_that_lacks_any_of_the_top_rung_is_judged_by_noise(missing: str):
    changes = {"gap": 1.0, "cached_error": 1.0}
    assert verdict(**changes) is Verdict.DIVERGED
    assert verdict(**changes, **{missing: None}) is Verdict.INCONCLUSIVE


def test_without_a_top_rung_a_gap_matches_up_to_what_is_allowed():
    assert verdict(**NO_TOP_RUNG | {"gap": ALLOWED, "noise": 0.0}) is Verdict.MATCH
    assert verdict(**NO_TOP_RUNG | {"gap": above(ALLOWED), "noise": 0.0}) is Verdict.INCONCLUSIVE


def test_without_a_top_rung_noise_excuses_up_to_four_times_itself_and_convicts_nothing():
    limit = ROUNDING_FACTOR.value * NOISE
    assert verdict(**NO_TOP_RUNG | {"gap": limit}) is Verdict.ROUNDING
    found, reason = judge(evidence(**NO_TOP_RUNG | {"gap": above(limit)}))
    assert found is Verdict.INCONCLUSIVE
    assert "no float64" in reason
    assert verdict(**NO_TOP_RUNG | {"gap": 1e6}) is Verdict.INCONCLUSIVE


def test_without_a_top_rung_an_infinite_gap_diverges():
    assert verdict(**NO_TOP_RUNG | {"gap": INF}) is Verdict.DIVERGED
