"""An uncached path that sees the future is found before any scenario, and no cache is blamed for it."""

from collections.abc import Sequence

import pytest
import torch
from tests.strategies import random_subject

from kvproof import ReferenceSubject, Verdict, audit
from kvproof._engine.uncached_rows import CAUSALITY_LEN
from kvproof.reference import Checkpoint, DecoderConfig
from kvproof.render import terminal
from kvproof.scenarios import Scenario, chunked_prefill, rollback, token_by_token

CONFIG = DecoderConfig(num_layers=2, num_heads=2, head_dim=4, mlp_width=8, context_len=40, vocab_size=16)
IDS = tuple(7 * i % 16 for i in range(24))
PROGRAMS = (token_by_token(IDS), chunked_prefill(IDS, 5), rollback(IDS, 3, (1, 2)))


class Leaky(ReferenceSubject):
    """A decoder whose uncached rows feel one token after them: the one at a distance, or the newest of all.

    ``first`` is the first position whose row feels it.
    """

    def __init__(self, checkpoint: Checkpoint, distance: int | None, first: int = 0) -> None:
        super().__init__(checkpoint)
        self.distance = distance
        self.first = first

    def _rows(self, ids: Sequence[int], tap: object) -> torch.Tensor:
        rows = super()._rows(ids, tap).clone()
        for position in range(self.first, len(ids)):
            felt = len(ids) - 1 if self.distance is None else position + self.distance
            if felt < len(ids):
                rows[position, 0] += 0.01 * (1 + ids[felt])
        return rows

    def _cast(self, dtype: torch.dtype) -> "Leaky":
        return Leaky(super()._cast(dtype).checkpoint, self.distance, self.first)


def leaky(distance: int | None, first: int = 0) -> Leaky:
    return Leaky(random_subject(CONFIG, seed=5).checkpoint, distance, first)


LEAKS = [
    pytest.param(None, id="from the newest token"),
    pytest.param(1, id="from the token just after"),
    pytest.param(8, id="over a distance of 8"),
    pytest.param(23, id="from the last token to the first row alone"),
]


@pytest.mark.parametrize("distance", LEAKS)
def test_a_leak_diverges_as_not_causal_and_the_cached_path_is_held_to_literal_rows(distance: int | None):
    report = audit(leaky(distance), PROGRAMS)
    assert report.verdict is Verdict.DIVERGED
    assert report.exit_status == 1
    causality, *others = report.scenarios
    assert causality.name == "causality"
    assert causality.verdict is Verdict.DIVERGED
    assert causality.reason is not None
    assert causality.reason.startswith("not causal: the row after 1 tokens changes when later tokens follow; ")
    assert "not causal" in report.summary
    assert [result.name for result in others] == [program.name for program in PROGRAMS]
    for result in others:
        assert result.rows
        # The newest token is a literal row's own, too: only then does the cached path differ from it.
        assert result.verdict.passes is (distance is not None)


@pytest.mark.parametrize("distance", LEAKS)
def test_the_rows_that_do_not_feel_it_are_told_from_those_that_do(distance: int | None):
    (causality, *_) = audit(leaky(distance), PROGRAMS).scenarios
    felt = {len(row.ids) for row in causality.rows if row.verdict is Verdict.DIVERGED}
    alike = {n for n in range(1, 24) if distance is None and IDS[n - 1] == IDS[-1]}
    expected = set(range(1, 25 - (1 if distance is None else distance))) - alike
    assert felt & set(range(1, 24)) == expected & {len(row.ids) for row in causality.rows}


@pytest.mark.parametrize("first", [1, CAUSALITY_LEN - 1])
def test_a_leak_that_begins_late_is_found_at_its_first_row(first: int):
    (causality, *_) = audit(leaky(1, first), PROGRAMS).scenarios
    assert causality.verdict is Verdict.DIVERGED
    assert f"the row after {first + 1} tokens" in causality.reason


def test_a_leak_that_begins_after_the_proof_is_laid_to_the_uncached_path():
    """It is past what causality was shown for; the scenarios meet it, and four ways say where it stands."""
    first = CAUSALITY_LEN + 4
    assert first + 1 not in (len(IDS) // 2, len(IDS))  # where both ways are computed too
    report = audit(leaky(1, first), PROGRAMS[:1], all_values=False)
    causality, result = report.scenarios
    assert causality.verdict.passes
    assert report.verdict is Verdict.DIVERGED
    assert result.four_ways is not None
    assert result.four_ways.suspect == "one-pass"
    assert "the uncached path is the suspect" in result.four_ways.sentence


def test_a_healthy_subject_is_shown_to_be_causal_before_the_scenarios_run():
    told: list[str] = []
    report = audit(random_subject(CONFIG, seed=5), PROGRAMS, on_scenario=told.append)
    assert report.verdict.passes
    assert report.scenarios[0].name == "causality"
    assert report.scenarios[0].verdict.passes
    assert report.scenarios[0].reason is None
    assert [len(row.ids) for row in report.scenarios[0].rows][:CAUSALITY_LEN] == [*range(1, CAUSALITY_LEN + 1)]
    assert told == ["causality", *(program.name for program in PROGRAMS)]


@pytest.mark.parametrize("distance", LEAKS)
def test_literal_rows_never_pass_where_they_are_not_the_rows_of_a_longer_pass(distance: int | None):
    """Where every row is literal there is no proof to fail: a row beyond the leak cannot be told."""
    report = audit(leaky(distance), PROGRAMS[:1], reference="literal", all_values=False)
    assert [result.name for result in report.scenarios] == ["token-by-token"]
    assert report.verdict is Verdict.INCONCLUSIVE
    assert any("not causal" in row.reason for row in report.scenarios[0].rows)


@pytest.mark.parametrize(
    ("distance", "reference"),
    [
        pytest.param(None, "literal", id="from the newest token, literal"),
        *(pytest.param(*leak.values, "one-pass", id=f"{leak.id}, one-pass") for leak in LEAKS[:3]),
    ],
)
def test_without_float64_a_leak_is_not_taken_for_noise(distance: int | None, reference: str):
    """Four times the leak excused a gap as large as the leak: an audit without float64 passed."""
    report = audit(leaky(distance), PROGRAMS[:1], reference=reference, top_rung=False, all_values=False)
    assert not report.verdict.passes


def test_the_report_for_a_person_says_what_the_subject_is():
    text = terminal.render(audit(leaky(8), PROGRAMS))
    assert "not causal" in text
    assert "passes of up to 8 tokens are causal" in " ".join(text.split())


def test_a_scenario_that_is_advice_stays_advice_where_nothing_is_checked():
    advice = Scenario(name="advised against", exposes="x", operations=PROGRAMS[0].operations, advice=True)
    (_, *others) = audit(leaky(1), [PROGRAMS[0], advice]).scenarios
    assert [result.advice for result in others] == [False, True]
