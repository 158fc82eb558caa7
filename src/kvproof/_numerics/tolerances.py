"""Tolerances and the constants of the verdict rules, each with where it comes from.

A fixed threshold fails both ways, so three numbers stand beside every gap: what the declared dtype
allows, the noise (the gap between two *uncached* ways to compute the same row, which no cache touches),
and the gap at the top rung, float64, where regrouping costs about 1e-14 and a bug stays where it was.
"""

import torch

from kvproof.contract.results import Constant, Tolerance
from kvproof.errors import UsageError

#: The dtype in which rounding cannot be mistaken for a bug.
TOP_RUNG = torch.float64

_TORCH_TESTING = "torch.testing.assert_close, relative tolerance of the dtype, × the row's largest |logit|"

#: Declared tolerances, relative to the row's scale. One source for both members: absolute is 0 on purpose.
DECLARED = {
    dtype: Tolerance(dtype=name, absolute=0.0, relative=relative, source=_TORCH_TESTING)
    for dtype, name, relative in (
        (torch.float64, "float64", 1e-7),
        (torch.float32, "float32", 1.3e-6),
        (torch.float16, "float16", 1e-3),
        (torch.bfloat16, "bfloat16", 1.6e-2),
    )
}

#: A top-rung gap counts as a bug only above this multiple of its own noise …
NOISE_FACTOR = Constant(
    name="noise factor",
    value=1000.0,
    source="uncached noise in float64 stays below 1.4e-14 of the scale over 170 model types; "
    "the smallest bug seen was 1e-8: three orders above the one, three below the other",
)
#: … and above this part of the value's scale.
STRUCTURAL_FLOOR = Constant(
    name="structural floor",
    value=1e-9,
    source="of 8,871 float64 comparisons over 170 model types none fell between 1e-13 and 1e-8 of the scale",
)
#: How much larger than noise or the uncached path's own error a rounding error may be.
ROUNDING_FACTOR = Constant(
    name="rounding factor",
    value=4.0,
    source="two roundings of either path, each at most twice the measured one",
)
#: How often random rounding moves a row whose error nothing else explains.
NUM_SAMPLES = Constant(
    name="rounding samples",
    value=16.0,
    source="with 16 the largest error of 72,000 healthy float32 rows was 1.9 times what was measured; "
    "with none it was 16 times",
)
#: A float64 gap of up to so many units in the declared dtype's last place may come from rounded tables.
TABLE_UNITS = Constant(
    name="table units",
    value=100.0,
    source="such a gap is excused only if it goes away once the tables are computed in float64; "
    "beyond it nothing is computed anew",
)
#: Without float64, noise beyond this multiple of the allowed gap is no longer taken for noise.
NOISE_LIMIT = Constant(
    name="noise limit",
    value=64.0,
    source="uncached noise is at most 5e-5 of the scale in float32 over 170 model types, 40 times what is "
    "allowed; a leak of the future is of the order of the scale",
)
#: In the declared dtype, how much larger than the uncached path's error a value's error must be to be named.
POINTER_FACTOR = Constant(
    name="pointer factor",
    value=16.0,
    source="four times the rounding factor, because a single value's error varies more than a row's largest",
)
#: The cached path's root mean square error over all rows of a scenario, by the uncached path's …
RATIO_LIMIT = Constant(
    name="ratio limit",
    value=1.3,
    source="in 343 audits of 138 healthy model types, in three dtypes, no ratio's lowest resample was above 1.04",
)
#: … and the same of the median row: one row that a near-tie moved says nothing of a dtype.
MEDIAN_LIMIT = Constant(
    name="median limit",
    value=1.2,
    source="in the same audits the largest median was 1.17, of a type whose recurrent and chunked forms differ",
)
#: Where random rounding cannot be tried, the ratio from which on all rows together show a coarser dtype.
UNSAMPLED_RATIO = Constant(
    name="unsampled ratio",
    value=6.0,
    source="the unit of bfloat16 is 8 times float16's; a float32 recurrence that scans in float64 had 3.4",
)
#: A row that random rounding alone excuses is no evidence where it moves the row this much further than all that
#: was measured.
FAR_FACTOR = Constant(
    name="far factor",
    value=64.0,
    source="over 72,000 healthy float32 rows no rounding was more than 16 times what noise and uncached errors "
    "had measured; four times that",
)
#: Where the run cannot be watched, random rounding cannot be tried, and a maximum may be this much larger.
UNSAMPLED_FACTOR = Constant(
    name="unsampled factor",
    value=64.0,
    source="the far factor, for a decoder that computes outside torch, where the errors of all rows decide",
)
#: A dtype that a run is known to compute in, unseen, counts for so many of its units of the row's scale.
HIDDEN_UNITS = Constant(
    name="hidden units",
    value=100.0,
    source="a noise of zero measures nothing; the noise factor times so many units of float32 is 240 times the "
    "largest float32 noise over 170 model types, 5e-5 of the scale",
)
#: A float64 run that cannot be watched is taken for one if regrouping moves its rows by no more than this part.
FLOAT64_NOISE = Constant(
    name="float64 noise",
    value=1e-12,
    source="uncached noise in float64 stays below 1.4e-14 of the scale over 170 model types; float32's unit is "
    "100,000 times larger",
)
#: Without a more exact run, and without a look at the dtypes inside, a gap of this part of the scale is a bug.
UNKNOWN_PART = Constant(
    name="unknown part",
    value=0.5,
    source="an engine whose activations are quantised to 8 bits moves log-probabilities by up to 0.86 when it "
    "steps, and is as near to float64 then as before; a decoder that ignores its cache moves rows by their scale",
)
#: The root mean square error of a more exact run's rows against the declared dtype's, in units of that dtype.
SAME_FUNCTION_UNITS = Constant(
    name="same-function units",
    value=1000.0,
    source="beyond it, and beyond the far factor times what random rounding does, the runs are of two functions",
)
CONSTANTS = (
    NOISE_FACTOR,
    STRUCTURAL_FLOOR,
    ROUNDING_FACTOR,
    NUM_SAMPLES,
    TABLE_UNITS,
    NOISE_LIMIT,
    POINTER_FACTOR,
    FAR_FACTOR,
    UNSAMPLED_FACTOR,
    HIDDEN_UNITS,
    FLOAT64_NOISE,
    UNKNOWN_PART,
    SAME_FUNCTION_UNITS,
    RATIO_LIMIT,
    UNSAMPLED_RATIO,
    MEDIAN_LIMIT,
)


def declared_tolerance(dtype: torch.dtype) -> Tolerance:
    """Return the declared tolerance of a dtype; raise `UsageError` for one that has none."""
    if dtype not in DECLARED:
        raise UsageError(f"no tolerance is declared for {dtype}; give one, or use one of {list(DECLARED)}")
    return DECLARED[dtype]


def value_limit(dtype: torch.dtype, noise: float, scale: float) -> float:
    """Return the gap beyond which an intermediate value of this dtype and scale is wrong.

    Below the top rung rounding reaches every value, so there a value only points to where to look.
    """
    if dtype is TOP_RUNG:
        return structural_limit(noise, scale)
    return ROUNDING_FACTOR.value * max(noise, declared_tolerance(dtype).relative * scale)


def structural_limit(noise: float, scale: float) -> float:
    """Return the top-rung gap beyond which a difference is a bug, for values of this scale."""
    return max(noise * NOISE_FACTOR.value, scale * STRUCTURAL_FLOOR.value)
