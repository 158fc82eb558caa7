"""Random decoders, random operations, random tokens: cached equals uncached (spec R8, R9, R11)."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.strategies import programs, sequences, subjects

from kvproof import UsageError, Verdict, audit
from kvproof._engine.programs import run_program
from kvproof._numerics.tolerances import TOP_RUNG
from kvproof.scenarios import chunked_prefill, prefill_and_steps, rollback, token_by_token


@settings(max_examples=60)
@given(st.data())
def test_cached_equals_uncached_under_any_order_of_operations(data: st.DataObject):
    """In float64 the two differ by rounding alone: 1e-12 of the row's scale is a thousand times that."""
    subject = data.draw(subjects()).cast(TOP_RUNG)
    for call in run_program(subject, data.draw(programs(subject))):
        for row in call.rows:
            expected = subject.rows(row.prefix)[-1]
            gap = (row.logits - expected).abs().max()
            assert gap <= 1e-12 * max(1.0, float(expected.abs().max())), row.prefix


@settings(max_examples=15)
@given(st.data())
def test_an_audit_of_any_healthy_decoder_passes(data: st.DataObject):
    """No false alarm: float32 rows are judged with noise, and every value on the way is compared."""
    subject = data.draw(subjects())
    ids = data.draw(sequences(subject, min_len=2))
    split = data.draw(st.integers(1, len(ids) - 1))
    report = audit(
        subject,
        [
            token_by_token(ids),
            prefill_and_steps(ids, split),
            chunked_prefill(ids, split),
            rollback(ids, split, ids[split:]),
        ],
    )
    assert report.verdict in (Verdict.MATCH, Verdict.ROUNDING), report.summary
    causality, *checked = report.scenarios
    assert causality.verdict.passes
    assert [scenario.divergence for scenario in checked] == [None] * 4
    assert all(scenario.num_values_compared > 0 for scenario in checked)


@settings(max_examples=15)
@given(st.data())
def test_one_pass_and_literal_references_give_the_same_verdict(data: st.DataObject):
    subject = data.draw(subjects())
    ids = data.draw(sequences(subject, min_len=2))
    literal = audit(subject, [token_by_token(ids)], reference="literal")
    one_pass = audit(subject, [token_by_token(ids)], reference="one-pass", all_values=False)
    assert literal.verdict.passes
    assert one_pass.verdict.passes
    assert [result.name for result in one_pass.scenarios] == ["causality", "token-by-token"]
    assert one_pass.scenarios[1].num_values_compared == 0
    torch.testing.assert_close(
        [row.expected for row in one_pass.scenarios[1].rows],
        [row.expected for row in literal.scenarios[0].rows],
        rtol=1e-4,
        atol=1e-4,
    )


def test_an_audit_of_nothing_is_refused(subject):
    with pytest.raises(UsageError, match="at least one scenario"):
        audit(subject, [])
