"""What an audit makes of a subject whose uncached path itself is not finite."""

import math

import pytest
import torch

from kvproof._audit import Auditor
from kvproof._report import Verdict
from kvproof._trace import Tap
from kvproof._uncached import Uncached
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
    uncached = Uncached(broken, reference)
    uncached.know([SEQUENCE])
    assert [math.isnan(uncached.noise(length)) for length in range(1, 5)] == [False, True, True, True]


def test_noise_that_is_nan_outlives_other_sequences(broken: WithNan):
    """Joining what two sequences say of one length kept whichever came first."""
    uncached = Uncached(broken, "literal")
    for sequence in (SEQUENCE[:2], SEQUENCE, (1, 1, 1)):
        uncached.know([sequence])
        assert math.isnan(uncached.noise(2))


def test_rows_after_a_nan_in_the_uncached_path_are_never_called_a_match(broken: WithNan):
    auditor = Auditor(broken, reference="literal", top_rung=False, all_values=False)
    verdicts = [row.verdict for row in auditor.check([token_by_token(SEQUENCE)]).rows]
    assert verdicts[0] is Verdict.MATCH
    assert verdicts[1] is Verdict.DIVERGED, "the cached path is finite there"
    assert verdicts[2:] == [Verdict.INCONCLUSIVE] * 2
