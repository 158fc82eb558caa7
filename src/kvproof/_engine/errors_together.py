"""The errors of all rows together: what the largest of one row excuses, a whole vocabulary of them does not.

Keys in a coarser dtype, angles in bfloat16 or a softmax in the wrong type make every row a little worse, and
none so much that rounding could not. Over all rows and entries the root mean square error of either path is known
to a few parts in a hundred, and the two are of a size where nothing is wrong.
"""

import math
from collections.abc import Iterable

import torch

from kvproof.contract.results import ErrorRatio, Evidence

#: Fewer rows say nothing of their spread.
FEWEST_ROWS = 8
#: So many resamples of the rows, from a seed of their own, of which the third smallest ratio counts.
_RESAMPLES, _LOWEST = 400, 2


def errors_together(rows: Iterable[Evidence]) -> ErrorRatio | None:
    """Return the errors of rows together, by their evidence, or None where too few have any.

    Rows that a choice of experts moved, and those whose tables were rounded, are left out.
    """
    pairs = []
    for row in rows:
        exact = row.exact or row.truth
        if exact is None or exact.uncached_rms is None or exact.cached_rms is None:
            continue
        if row.choices is None and not row.rounded_tables:
            pairs.append((exact.uncached_rms, exact.cached_rms))
    pairs = [pair for pair in pairs if all(map(math.isfinite, pair)) and min(pair) > 0]
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
    )
