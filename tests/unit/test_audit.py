"""What an audit makes of a subject whose uncached path itself is not finite."""

import math
import weakref
from collections.abc import Iterator

import pytest
import torch
from tests.strategies import random_subject

from kvproof._engine import program_rows
from kvproof._engine.audit import Auditor
from kvproof._engine.programs import Call, run_program
from kvproof._engine.uncached_rows import Uncached
from kvproof._numerics.taps import Tap
from kvproof.contract.results import Verdict
from kvproof.contract.stages import Stage
from kvproof.faults import Fault, disturbed
from kvproof.reference import Checkpoint, DecoderConfig
from kvproof.scenarios import token_by_token
from kvproof.subjects import ReferenceSubject

SEQUENCE = (0, 2, 3, 5)
LONG = DecoderConfig(num_layers=2, num_heads=2, head_dim=4, mlp_width=8, context_len=16, vocab_size=8)


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
    uncached.measure([SEQUENCE])
    assert [math.isnan(uncached.noise(length)) for length in range(1, 5)] == [False, True, True, True]


def test_noise_that_is_nan_outlives_other_sequences(broken: WithNan):
    """Joining what two sequences say of one length kept whichever came first."""
    uncached = Uncached(broken, "literal")
    for sequence in (SEQUENCE[:2], SEQUENCE, (1, 1, 1)):
        uncached.measure([sequence])
        assert math.isnan(uncached.noise(2))


def test_rows_after_a_nan_in_the_uncached_path_are_never_called_a_match(broken: WithNan):
    auditor = Auditor(broken, reference="literal", top_rung=False, all_values=False)
    verdicts = [row.verdict for row in auditor.check([token_by_token(SEQUENCE)]).rows]
    assert verdicts[0] is Verdict.MATCH
    assert verdicts[1] is Verdict.DIVERGED, "the cached path is finite there"
    assert verdicts[2:] == [Verdict.INCONCLUSIVE] * 2


@pytest.mark.parametrize("fault", [None, disturbed(Stage.NEW_K, 0)], ids=["right", "wrong"])
def test_logits_are_let_go_once_they_are_judged(monkeypatch: pytest.MonkeyPatch, fault: Fault | None):
    """The float64 row of every result was kept to the end: 8.6 GB of 4,096 tokens of a large vocabulary."""
    logits: list[weakref.ref[torch.Tensor]] = []
    most_alive = 0

    def watched(*args: object, **options: object) -> Iterator[Call]:
        nonlocal most_alive
        for call in run_program(*args, **options):
            logits.extend(weakref.ref(row.logits) for row in call.rows)
            most_alive = max(most_alive, sum(known() is not None for known in logits))
            yield call

    monkeypatch.setattr(program_rows, "run_program", watched)
    auditor = Auditor(random_subject(LONG, seed=3), all_values=False)
    result = auditor.check([token_by_token(SEQUENCE * 4)], fault)
    assert result.verdict is (Verdict.MATCH if fault is None else Verdict.DIVERGED)
    assert len(logits) == 2 * 16, "two rungs"
    assert most_alive <= 7, "of a row that diverged, a longer one is kept too"
