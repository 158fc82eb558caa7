"""A row's evidence to its verdict."""

import dataclasses
import math
from typing import Any

import pytest

from kvproof._engine.verdict_rules import (
    are_too_large,
    explained_error,
    is_near_tie,
    judge,
    judge_scenario,
    margin_with_more_evidence,
    needs_sampling,
)
from kvproof._numerics.tolerances import (
    HIDDEN_UNITS,
    MEDIAN_LIMIT,
    NOISE_FACTOR,
    RATIO_LIMIT,
    ROUNDING_FACTOR,
    STRUCTURAL_FLOOR,
    UNKNOWN_PART,
    UNSAMPLED_RATIO,
)
from kvproof.contract.ledger import MarginVerdict
from kvproof.contract.results import (
    ChoiceEvidence,
    ChoiceFlip,
    Comparison,
    ErrorRatio,
    Evidence,
    ExactEvidence,
    RowResult,
    Verdict,
)

NAN, INF = math.nan, math.inf

ALLOWED = 2.0**-10
NOISE = 2.0**-8
SCALE = 8.0
#: Smaller than any float64 gap that the floor calls a bug at this scale.
CLEAN = 1e-12


def above(limit: float) -> float:
    return math.nextafter(limit, INF)


EXACT = {"top_gap": "gap", "top_noise": "noise", "top_scale": "scale"}


def evidence(*, exact: bool = True, **changes: float) -> Evidence:
    """A row that matches at both rungs, with a noise of `NOISE`; changed as told."""
    declared = {"gap": ALLOWED / 2, "allowed": ALLOWED, "noise": NOISE, "scale": SCALE}
    top = {"gap": CLEAN, "noise": CLEAN, "scale": SCALE, "uncached_error": NOISE / 2, "cached_error": ALLOWED / 2}
    for name, value in changes.items():
        if name in declared or name == "sampled_error":
            declared[name] = value
        else:
            top[EXACT.get(name, name)] = value
    return Evidence(**declared, exact=ExactEvidence(**top) if exact else None)


NO_TOP_RUNG: dict[str, Any] = {"exact": False}


def verdict(**changes: Any) -> Verdict:
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


@pytest.mark.parametrize("member", ["gap", "allowed"])
def test_nan_never_matches_without_a_top_rung(member: str):
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


def test_a_row_that_lacks_the_top_rung_is_judged_by_noise():
    changes = {"gap": 1.0, "cached_error": 1.0}
    assert verdict(**changes) is Verdict.DIVERGED
    assert verdict(**changes, exact=False) is Verdict.INCONCLUSIVE


def test_without_a_top_rung_a_gap_matches_up_to_what_is_allowed():
    assert verdict(**NO_TOP_RUNG | {"gap": ALLOWED, "noise": 0.0}) is Verdict.MATCH
    assert verdict(**NO_TOP_RUNG | {"gap": above(ALLOWED), "noise": 0.0}) is Verdict.INCONCLUSIVE


def test_without_a_top_rung_noise_excuses_up_to_four_times_itself_and_half_the_scale_convicts():
    limit = ROUNDING_FACTOR.value * NOISE
    assert verdict(**NO_TOP_RUNG | {"gap": limit}) is Verdict.ROUNDING
    found, reason = judge(evidence(**NO_TOP_RUNG | {"gap": above(limit)}))
    assert found is Verdict.INCONCLUSIVE
    assert "no more exact run" in reason
    most = max(UNKNOWN_PART.value * SCALE, NOISE_FACTOR.value * NOISE)
    assert verdict(**NO_TOP_RUNG | {"gap": most}) is Verdict.INCONCLUSIVE
    assert verdict(**NO_TOP_RUNG | {"gap": above(most)}) is Verdict.DIVERGED


@pytest.mark.parametrize("unit", [2.0**-23, 2.0**-10])
def test_without_a_top_rung_noise_counts_as_some_units_of_the_coarsest_dtype_inside(unit: float):
    quiet = dataclasses.replace(evidence(exact=False, noise=0.0), coarsest_unit=unit)
    limit = NOISE_FACTOR.value * HIDDEN_UNITS.value * unit * SCALE
    assert judge(dataclasses.replace(quiet, gap=limit))[0] is Verdict.INCONCLUSIVE
    assert judge(dataclasses.replace(quiet, gap=above(limit)))[0] is Verdict.DIVERGED


def inside(rounding: float, **changes: float) -> Evidence:
    """A row whose float64 run holds results in a lower dtype that may move it so far."""
    row = evidence(**changes)
    assert row.exact is not None
    return dataclasses.replace(row, exact=dataclasses.replace(row.exact, inner_rounding=rounding))


def test_what_is_computed_in_a_lower_dtype_inside_excuses_a_little_and_leaves_more_undecided():
    rounding = 1e-6
    assert judge(inside(rounding, top_gap=ROUNDING_FACTOR.value * rounding))[0] is Verdict.MATCH
    found, reason = judge(inside(rounding, top_gap=above(ROUNDING_FACTOR.value * rounding)))
    assert found is Verdict.INCONCLUSIVE
    assert "lower dtype inside" in reason
    assert judge(inside(rounding, top_gap=NOISE_FACTOR.value * rounding))[0] is Verdict.INCONCLUSIVE
    assert judge(inside(rounding, top_gap=above(NOISE_FACTOR.value * rounding)))[0] is Verdict.DIVERGED


def test_a_row_is_held_to_its_own_uncached_error_and_not_to_the_largest():
    row = evidence(gap=1.0, noise=1.0, cached_error=1.0, uncached_error=1.0)
    assert row.exact is not None
    assert judge(row)[0] is Verdict.ROUNDING
    own = dataclasses.replace(row, exact=dataclasses.replace(row.exact, own_error=0.1))
    assert judge(own)[0] is Verdict.DIVERGED
    assert needs_sampling(own)
    assert judge(dataclasses.replace(own, sampled_error=0.25))[0] is Verdict.ROUNDING


def ratio(**changes: Any) -> ErrorRatio:
    """Errors of all rows that show a lower dtype; changed as told."""
    shown = {"num_rows": 20, "uncached_rms": 1.0, "cached_rms": 2.0, "ratio": 2.0, "lowest": 1.9, "median": 1.8}
    return ErrorRatio(**{**shown, "sampled_ratio": 1.0, **changes})


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        pytest.param({}, True, id="a lower dtype"),
        pytest.param({"lowest": RATIO_LIMIT.value}, False, id="too near for the number of rows"),
        pytest.param({"median": MEDIAN_LIMIT.value}, False, id="a few rows alone"),
        pytest.param({"sampled_ratio": 1.9}, False, id="what the path's own rounding costs"),
        pytest.param({"sampled_ratio": None}, False, id="not sampled, and no factor of its own"),
        pytest.param({"sampled_ratio": None, "lowest": above(UNSAMPLED_RATIO.value)}, True, id="a large factor"),
    ],
)
def test_errors_of_all_rows_together(changes: dict[str, Any], found: bool):
    assert are_too_large(ratio(**changes)) is found
    verdict = judge_scenario([], errors=ratio(**changes))
    assert verdict is (Verdict.DIVERGED if found else Verdict.NOT_CHECKED)


@pytest.mark.parametrize(
    ("leak", "found"),
    [
        (0.0, Verdict.MATCH),
        (ALLOWED, Verdict.MATCH),
        (above(ALLOWED), Verdict.INCONCLUSIVE),
        (above(UNKNOWN_PART.value * SCALE), Verdict.DIVERGED),
        (None, Verdict.NOT_CHECKED),
    ],
)
def test_without_a_top_rung_a_leak_is_told_by_changing_later_tokens_alone(leak: float | None, found: Verdict):
    row = dataclasses.replace(evidence(exact=False), comparison=Comparison.CAUSALITY, leak=leak)
    assert judge(row)[0] is found


def test_the_same_call_twice_is_undecided_where_its_rows_differ():
    row = dataclasses.replace(evidence(exact=False, gap=ALLOWED), comparison=Comparison.REPEATED)
    assert judge(row)[0] is Verdict.MATCH
    assert judge(dataclasses.replace(row, gap=above(ALLOWED)))[0] is Verdict.INCONCLUSIVE


def test_without_a_top_rung_an_infinite_gap_diverges():
    assert verdict(**NO_TOP_RUNG | {"gap": INF}) is Verdict.DIVERGED


FLIP = ChoiceFlip(position=3, number=0, taken=2, rejected=1, margin=1e-6, error=1e-6)
#: A row that its dtype alone moved far, beside a choice that fell the other way.
MOVED = evidence(gap=1.0, cached_error=1.0)


def chosen(flip: ChoiceFlip | None, **changes: float | None) -> Evidence:
    """`MOVED` with what is left of its error once every choice is the uncached path's."""
    left: dict[str, Any] = {"gap": 0.0, "uncached_error": NOISE, "cached_error": NOISE, "sampled_error": None}
    return dataclasses.replace(MOVED, choices=ChoiceEvidence(**{**left, **changes}, flip=flip))


def test_a_near_tie_is_rounding_where_the_same_choices_end_the_error():
    assert judge(MOVED)[0] is Verdict.DIVERGED
    found, reason = judge(chosen(FLIP))
    assert found is Verdict.ROUNDING
    assert "position 3 takes 2 where the uncached path takes 1" in reason


def test_a_choice_that_no_rounding_decides_is_a_bug_though_the_same_choices_end_the_error():
    wide = dataclasses.replace(FLIP, margin=above(2 * ROUNDING_FACTOR.value * FLIP.error))
    assert is_near_tie(FLIP)
    assert not is_near_tie(wide)
    assert judge(chosen(wide))[0] is Verdict.DIVERGED


def test_a_bug_beside_a_near_tie_stays_a_bug():
    left = {"gap": 1.0, "cached_error": 1.0}
    assert needs_sampling(chosen(FLIP, **left))
    assert judge(chosen(FLIP, **left, sampled_error=NOISE))[0] is Verdict.DIVERGED


def test_noise_that_holds_choices_excuses_nothing_once_choices_are_the_same():
    noisy = dataclasses.replace(chosen(None, gap=1.0, cached_error=1.0), noise=1.0)
    assert judge(dataclasses.replace(noisy, choices=None))[0] is Verdict.ROUNDING
    assert judge(noisy)[0] is Verdict.DIVERGED


def test_rounded_tables_excuse_a_float64_gap_and_nothing_of_the_declared_dtype():
    tables = ("decay",)
    gap = evidence(top_gap=1e-6)
    assert judge(gap)[0] is Verdict.DIVERGED
    assert judge(dataclasses.replace(gap, rounded_tables=tables))[0] is Verdict.ROUNDING
    both = dataclasses.replace(evidence(top_gap=1e-6, gap=1.0, cached_error=1.0), rounded_tables=tables)
    assert judge(both)[0] is Verdict.DIVERGED


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        pytest.param({}, Verdict.MATCH, id="both ways agree"),
        pytest.param({"gap": 1.0}, Verdict.ROUNDING, id="float64 agrees"),
        pytest.param({"top_gap": 1e-7}, Verdict.DIVERGED, id="float64 does not"),
        pytest.param({"gap": INF}, Verdict.DIVERGED, id="one way is not finite"),
        pytest.param({"top_gap": NAN}, Verdict.INCONCLUSIVE, id="NaN both ways"),
        pytest.param({"exact": False}, Verdict.NOT_CHECKED, id="no float64"),
    ],
)
def test_two_uncached_ways_are_judged_by_float64(changes: dict[str, Any], found: Verdict):
    row = dataclasses.replace(evidence(**changes), comparison=Comparison.CAUSALITY)
    assert judge(row)[0] is found


def test_a_scenario_is_as_bad_as_the_worst_that_came_of_it():
    assert judge_scenario([]) is Verdict.NOT_CHECKED
    assert judge_scenario([], wrong_value=True, raised=True) is Verdict.DIVERGED
    assert judge_scenario([], raised=True, undecided=True) is Verdict.RAISED
    assert judge_scenario([], undecided=True, unreached=True) is Verdict.INCONCLUSIVE
    assert judge_scenario([], unreached=True) is Verdict.VACUOUS


def test_the_gap_of_a_row_that_passes_is_explained_and_that_of_another_is_not():
    row = {"gap": 1.0, "cached_error": 1.0, "noise": NOISE, "uncached_error": NOISE / 2}
    assert explained_error(evidence()) == NOISE
    assert explained_error(evidence(**row)) == NOISE
    assert explained_error(evidence(**row, top_gap=1.0)) == NOISE
    assert explained_error(evidence(**{**row, "uncached_error": 2 * NOISE})) == 2 * NOISE
    assert explained_error(evidence(**row, sampled_error=3 * NOISE)) == 3 * NOISE
    near = {**row, "uncached_error": 0.02}
    assert explained_error(evidence(**near, sampled_error=0.25)) == 1.0, "rounding explains all of the gap"
    assert explained_error(evidence(**row, sampled_error=0.25)) == 0.25, "samples alone are no evidence"
    assert explained_error(evidence(**row, exact=False)) == NOISE


@pytest.mark.parametrize("gap", [INF, NAN])
def test_no_error_explains_a_gap_that_is_not_finite(gap: float):
    assert not math.isfinite(explained_error(evidence(gap=gap)))


def test_evidence_that_clears_a_row_explains_its_flip():
    flipped = RowResult(
        ids=(1,),
        tokens="1",
        evidence=MOVED,
        worst_id=0,
        margin=0.5,
        margin_verdict=MarginVerdict.UNEXPLAINED_FLIP,
        verdict=Verdict.DIVERGED,
        reason="",
        expected=None,
    )
    assert margin_with_more_evidence(flipped, chosen(FLIP)) is MarginVerdict.EXPLAINED_FLIP
    assert margin_with_more_evidence(flipped, MOVED) is MarginVerdict.UNEXPLAINED_FLIP
    safe = dataclasses.replace(flipped, margin_verdict=MarginVerdict.SAFE)
    assert margin_with_more_evidence(safe, chosen(FLIP)) is MarginVerdict.SAFE
