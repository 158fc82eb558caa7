"""What an audit makes of a subject whose uncached path itself is not finite."""

import math

import pytest
import torch

from kvproof._audit import Auditor, Oracle
from kvproof._report import Verdict
from kvproof._trace import Tap
from kvproof.reference import Checkpoint
from kvproof.scenarios import token_by_token
from kvproof.subjects import ReferenceSubject

SEQUENCE = (0, 2, 3, 5)


class WithNan(ReferenceSubject):
    """The reference decoder, whose uncached path gives one NaN at the second position."""

    def _rows(self, ids: tuple[int, ...], tap: Tap) -> torch.Tensor:
        rows = super()._rows(ids, tap)
        rows[1:2, 0] = math.nan
        return rows


@pytest.fixture
def broken(checkpoint: Checkpoint) -> WithNan:
    return WithNan(checkpoint)


@pytest.mark.parametrize("reference", ["literal", "one-pass"])
def test_noise_that_was_nan_once_stays_nan_at_every_later_length(reference: str, broken: WithNan):
    """A running maximum forgot NaN at the next length, and the rows after it passed."""
    oracle = Oracle(broken, reference)
    oracle.prepare(token_by_token(SEQUENCE))
    noise = [oracle.noise(SEQUENCE[:length]) for length in range(1, 5)]
    assert [math.isnan(value) for value in noise] == [False, True, True, True]


def test_noise_that_is_nan_outlives_a_longer_sequence_of_the_same_prefix(broken: WithNan):
    """Joining what two sequences say of one prefix kept whichever came first."""
    oracle = Oracle(broken)
    for sequence in (SEQUENCE[:2], SEQUENCE, SEQUENCE[:3]):
        oracle.prepare(token_by_token(sequence))
        assert math.isnan(oracle.noise(SEQUENCE[:2]))


def test_rows_after_a_nan_in_the_uncached_path_are_never_called_a_match(broken: WithNan):
    result = Auditor(broken, top_rung=False, all_values=False).check([token_by_token(SEQUENCE)])
    verdicts = [row.verdict for row in result.rows]
    assert verdicts[0] is Verdict.MATCH
    assert verdicts[1] is Verdict.DIVERGED, "the cached path is finite there"
    assert verdicts[2:] == [Verdict.INCONCLUSIVE] * 2
