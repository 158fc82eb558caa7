"""Tables that hold a lower dtype: what they move is rounding, and a bug beside it stays a bug."""

import pytest
import torch

pytest.importorskip("transformers", reason="the models are those of the transformers library")

from kvproof._engine.audit import audit
from kvproof._engine.prompts import random_sequences
from kvproof.contract.report import Report
from kvproof.contract.results import Verdict
from kvproof.scenarios import beam_reorder, token_by_token
from kvproof.subjects._transformers import TransformersSubject, random_model


def audited(dtype: torch.dtype) -> Report:
    """MiniMax computes slopes and decay factors when it is built, in float32 or in the dtype that it is cast to.

    Its linear attention multiplies them step by step on the cached path and takes powers on the uncached one.
    """
    subject = random_model("minimax", seed=0, dtype=dtype, attention="eager")
    ids, other = random_sequences(subject, 16, 0)
    programs = [token_by_token(ids), beam_reorder(ids[:8], ((1, 0, 2), (2, 2, 0)), other[:5])]
    return audit(subject, programs, all_values=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_gap_that_exact_tables_end_is_rounding_and_one_that_they_do_not_is_a_bug(dtype: torch.dtype):
    report = audited(dtype)
    causality, steps, beams = report.scenarios
    assert causality.verdict.passes
    assert steps.verdict is Verdict.ROUNDING
    excused = [row for row in steps.rows if "goes away once" in row.reason]
    assert excused
    assert all(row.top_gap is not None and row.top_gap > 1e-9 * row.scale for row in excused)
    assert beams.verdict is Verdict.DIVERGED
    assert beams.largest_gap > 0.1


def test_exact_tables_are_put_in_place_and_nothing_else_is():
    subject = random_model("minimax", seed=0, dtype=torch.float64, attention="eager")
    exact = subject.with_exact_tables(torch.float32)
    assert exact is not None
    changed, names = exact
    assert isinstance(changed, TransformersSubject)
    assert any("slope_rate" in name for name in names)
    before, after = dict(subject.model.named_buffers()), dict(changed.model.named_buffers())
    assert {name for name in before if not torch.equal(before[name], after[name])} == set(names)
    weights = dict(changed.model.named_parameters())
    assert all(torch.equal(weight, weights[name]) for name, weight in subject.model.named_parameters())


def test_a_model_whose_tables_are_exact_has_none_to_offer():
    subject = random_model("gpt2", seed=0, dtype=torch.float64, attention="eager")
    assert subject.with_exact_tables(torch.float32) is None


def test_a_model_that_cannot_be_built_again_excuses_nothing_and_is_tried_once(monkeypatch: pytest.MonkeyPatch):
    tries = []

    def failing(self: TransformersSubject, rounded_to: torch.dtype) -> None:
        tries.append(rounded_to)
        raise RuntimeError("no memory for a second model")

    monkeypatch.setattr(TransformersSubject, "with_exact_tables", failing)
    _, steps, beams = audited(torch.float32).scenarios
    assert steps.verdict is Verdict.DIVERGED
    assert beams.verdict is Verdict.DIVERGED
    assert tries == [torch.float32]


def test_exact_tables_that_raise_when_they_run_leave_the_finding_as_it_is(monkeypatch: pytest.MonkeyPatch):
    def raising(
        self: TransformersSubject, rounded_to: torch.dtype
    ) -> tuple[TransformersSubject, tuple[str, ...]]:
        exact = random_model("minimax", seed=0, dtype=torch.float64, attention="eager")
        monkeypatch.setattr(exact.model, "forward", None)
        return exact, ("a table",)

    monkeypatch.setattr(TransformersSubject, "with_exact_tables", raising)
    assert audited(torch.float32).scenarios[1].verdict is Verdict.DIVERGED


@pytest.mark.parametrize("kind", ["codegen", "gptj"])
def test_a_table_of_rounded_angles_is_exact_also_where_its_sines_are_small(kind: str):
    """Positions left out are shifted by the padding, and a table in float32 makes a shift visible."""
    subject = random_model(kind, seed=0, dtype=torch.float32, attention="eager")
    (_, shifted) = audit(subject, ["positions left out, left-padded batch"], all_values=False).scenarios
    assert shifted.verdict is Verdict.ROUNDING
    assert any("goes away once" in row.reason and "embed_positions" in row.reason for row in shifted.rows)
