"""The errors of all rows together: what the largest of one row excuses, a whole vocabulary of them does not.

Keys in a coarser dtype, angles in bfloat16 or a softmax in the wrong type make every row a little worse, and
none so much that rounding could not. Over all rows and entries the root mean square error of either path is known
to a few parts in a hundred, and the two are of a size where nothing is wrong.
"""

import dataclasses
import math
from collections.abc import Iterable, Sequence

import torch

from kvproof._engine.programs import run_program
from kvproof._engine.rung import Rung
from kvproof._engine.uncached_rows import Uncached
from kvproof._engine.verdict_rules import has_known_errors, may_be_too_large
from kvproof._numerics.dtypes import dtype_of
from kvproof._numerics.gaps import mean_square_error
from kvproof._numerics.random_rounding import RandomRounding
from kvproof.contract.results import ErrorRatio, Evidence, RowResult
from kvproof.errors import SubjectError
from kvproof.faults import Fault, plant
from kvproof.scenarios import Scenario, longest_sequences

#: Fewer rows say nothing of their spread.
FEWEST_ROWS = 8
#: So many resamples of the rows, from a seed of their own, of which the third smallest ratio counts.
_RESAMPLES, _LOWEST = 400, 2
#: How often the programs are run with random rounding.
_SAMPLES = 2


def measured_errors(
    uncached: Uncached, rows: Sequence[RowResult], programs: Sequence[Scenario], fault: Fault | None
) -> ErrorRatio | None:
    """Return the errors of the rows of these programs together, with what random rounding costs if it decides."""
    errors = errors_together(row.evidence for row in rows)
    is_decided = any(not row.verdict.passes for row in rows)
    if errors is None or is_decided or not may_be_too_large(errors):
        return errors
    try:
        return dataclasses.replace(errors, sampled_ratio=sampled_ratio(uncached, programs, fault))
    except SubjectError:  # it decides without
        return errors


def errors_together(rows: Iterable[Evidence]) -> ErrorRatio | None:
    """Return the errors of rows together, by their evidence, or None where too few have any.

    Rows whose errors are not those of their dtype alone are left out.
    """
    pairs = []
    for row in rows:
        exact = row.exact or row.truth
        if exact is not None and exact.uncached_rms is not None and exact.cached_rms is not None:
            pairs += [(exact.uncached_rms, exact.cached_rms)] if has_known_errors(row) else []
    # A row without an error on either path says nothing; one without an error on the uncached path has no ratio.
    pairs = [pair for pair in pairs if all(map(math.isfinite, pair)) and pair[0] > 0]
    if len(pairs) < FEWEST_ROWS:
        return None
    squares = torch.tensor(pairs, dtype=torch.float64).square()
    uncached, cached = squares.mean(0).sqrt().tolist()
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(len(pairs), (_RESAMPLES, len(pairs)), generator=generator)
    resampled = squares[drawn].mean(1)
    ratios = (resampled[:, 1] / resampled[:, 0]).sqrt().sort().values
    return ErrorRatio(
        num_rows=len(pairs),
        uncached_rms=uncached,
        cached_rms=cached,
        ratio=cached / uncached,
        lowest=float(ratios[_LOWEST]),
        median=float((squares[:, 1] / squares[:, 0]).sqrt().median()),
        sampled_ratio=None,
    )


def sampled_ratio(uncached: Uncached, programs: Sequence[Scenario], fault: Fault | None) -> float | None:
    """Return the ratio of the two paths' errors over all rows if every result is rounded at random, on either.

    A recurrence that steps rounds more often than one that scans a block, and nothing is wrong with it: what the
    operations of either path cost tells. Each is moved by the unit of the dtype that it has on the uncached path,
    so that what the cached path alone computes in a coarser dtype is not excused. None where this cannot be
    measured.
    """
    top = uncached.top
    if top is None or not uncached.ladder.can_sample:
        return None
    exact, declared = dtype_of(top.subject.info.dtype), dtype_of(uncached.declared.subject.info.dtype)
    squares = {True: 0.0, False: 0.0}  #: by whether they are of the cached path
    for program in programs:
        units = uncached.units_of(max(longest_sequences(program), key=len))
        for seed in range(_SAMPLES):
            calls, moved = run_program(top.subject, program, plant(fault)), Rung(top.subject)
            while True:
                with RandomRounding(declared, seed, units, exact):
                    call = next(calls, None)
                if call is None:
                    break
                for row in call.rows:
                    true = uncached.row(row.prefix, top=True)
                    squares[True] += mean_square_error(true, row.logits)
                    with RandomRounding(declared, seed, units, exact):
                        other = moved.one_pass(uncached.source_sequence(row.prefix), len(row.prefix))
                    squares[False] += mean_square_error(true, other)
    return math.sqrt(squares[True] / squares[False]) if squares[False] else None
