"""Tolerances and constants, against where they say they come from."""

import pytest
import torch
from torch.testing._comparison import default_tolerances

from kvproof._numerics.tolerances import (
    CONSTANTS,
    DECLARED,
    NOISE_FACTOR,
    STRUCTURAL_FLOOR,
    TOP_RUNG,
    declared_tolerance,
    structural_limit,
)
from kvproof.errors import UsageError


@pytest.mark.parametrize("dtype", DECLARED, ids=str)
def test_a_declared_tolerance_is_torch_testings_own_relative_one(dtype: torch.dtype):
    relative, _ = default_tolerances(dtype)
    tolerance = declared_tolerance(dtype)
    assert (tolerance.relative, tolerance.absolute) == (relative, 0.0)
    assert getattr(torch, tolerance.dtype) is dtype
    assert "torch.testing" in tolerance.source


def test_every_dtype_that_decoders_compute_in_has_a_tolerance():
    assert set(DECLARED) == {torch.float64, torch.float32, torch.float16, torch.bfloat16}
    assert TOP_RUNG in DECLARED


@pytest.mark.parametrize("dtype", [torch.int8, torch.complex64, torch.float8_e4m3fn], ids=str)
def test_a_dtype_without_a_tolerance_is_refused_by_name(dtype: torch.dtype):
    with pytest.raises(UsageError, match=f"no tolerance is declared for {dtype}"):
        declared_tolerance(dtype)


@pytest.mark.parametrize("constant", CONSTANTS, ids=lambda constant: constant.name)
def test_every_constant_says_where_it_comes_from(constant):
    assert constant.value > 0
    assert len(constant.source.split()) >= 5


def test_the_constants_go_by_different_names():
    assert len({constant.name for constant in CONSTANTS}) == len(CONSTANTS)


def test_the_structural_limit_is_the_larger_of_noise_and_floor():
    assert structural_limit(1e-12, 2.0) == 2.0 * STRUCTURAL_FLOOR.value
    assert structural_limit(1e-10, 2.0) == 1e-10 * NOISE_FACTOR.value
    assert structural_limit(0.0, 0.0) == 0.0
