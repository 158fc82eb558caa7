"""Which token ids programs are made of: never padding that a decoder declares, and what the caller says."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.unit.test_given import VOCAB, Sums, sums
from torch import Tensor, nn

from kvproof import ModuleSubject, Verdict, audit, conformance
from kvproof._engine.prompts import random_sequences
from kvproof.contract.report import Report
from kvproof.errors import UsageError
from kvproof.scenarios import Extend, random_programs
from kvproof.subjects import CallableSubject, Subject, limits_of


class Special(Sums):
    """A decoder that gives other rows with a cache than without one for the ids in ``wrong`` alone."""

    def __init__(self, *wrong: int, padding_idx: int | None = None) -> None:
        super().__init__()
        self.wrong = torch.tensor(wrong)
        self.declared = nn.Embedding(VOCAB, 2, padding_idx=padding_idx)

    def forward(self, ids: Tensor, memory: Any = None) -> tuple[Tensor, Any]:
        logits, after = super().forward(ids, memory)
        if memory is not None:
            logits = logits + torch.isin(ids, self.wrong)[..., None].to(logits.dtype)
        return logits, after


def fed(report: Report) -> set[int]:
    """Return every token id that a report's rows follow."""
    return {i for s in report.scenarios for row in s.rows for i in row.ids}


def drawn(subject: Subject) -> Iterator[int]:
    """Yield the token ids of many random programs."""
    for program in random_programs(limits_of(subject), num=40, seed=0, max_len=20):
        for operation in program.operations:
            if isinstance(operation, Extend):
                yield from (i for row in operation.ids for i in row)


def test_padding_that_a_module_declares_is_not_fed_and_the_report_says_so():
    report = audit(ModuleSubject(Special(0, padding_idx=0), cache="memory"))
    assert report.verdict.passes, report
    assert 0 not in fed(report)
    assert "no program feeds token id 0" in report.notes


def test_a_token_that_no_one_declares_is_fed_and_its_bug_is_found():
    report = audit(ModuleSubject(Special(0), cache="memory"))
    assert report.verdict is Verdict.DIVERGED
    assert 0 in fed(report)


def test_ids_to_avoid_are_not_fed_by_any_program():
    subject = ModuleSubject(Special(3, 5), cache="memory", avoid_ids=(3, 5))
    assert audit(subject).verdict.passes
    assert not {3, 5} & set(drawn(subject))
    assert not {3, 5} & {i for s in random_sequences(subject, 40, seed=1) for i in s}
    assert conformance.check(subject).passed, conformance.check(subject)


def test_ids_to_use_are_the_only_ones_fed():
    report = audit(ModuleSubject(Special(3, 5), cache="memory"), ids=(1, 2, 4, 7), certificate=True)
    assert report.verdict.passes, report
    assert fed(report) <= {1, 2, 4, 7}
    assert "programs feed only token ids 1, 2, 4, 7" in report.notes


def test_ids_that_are_asked_for_are_fed_even_if_they_are_padding():
    subject = ModuleSubject(Special(0, padding_idx=0), cache="memory", ids=(0, 1, 2))
    assert audit(subject).verdict is Verdict.DIVERGED


def test_the_other_tokens_of_a_program_stay_as_they_were():
    whole, short = CallableSubject(*sums()), CallableSubject(*sums(), avoid_ids=(3,))
    for before, after in zip(random_sequences(whole, 40, 0)[0], random_sequences(short, 40, 0)[0], strict=True):
        assert before == after or before == 3


def test_a_cast_decoder_feeds_the_same_ids():
    subject = ModuleSubject(Sums(), cache="memory", avoid_ids=(3,))
    assert subject.cast(torch.float64).token_ids.ids == subject.token_ids.ids


def test_a_decoder_that_cannot_take_token_0_is_tried_with_another():
    full, step = sums()

    def refusing(ids: Any) -> Any:
        assert 0 not in ids
        return full(ids)

    def stepping(ids: Any, cache: Any) -> Any:
        assert 0 not in ids
        return step(ids, cache)

    report = audit((refusing, stepping), avoid_ids=(0,))
    assert report.verdict.passes, report
    assert report.certificate is not None  # planted faults feed no other token either
    assert all(fault.reason is None for fault in report.certificate.faults)
    subject = CallableSubject(refusing, stepping, avoid_ids=(0,))
    assert conformance.check(subject).passed
    assert audit(subject, random_programs(limits_of(subject), num=20, seed=0, max_len=20)).verdict.passes


@pytest.mark.parametrize(
    ("ids", "avoid", "message"),
    [
        ((1, VOCAB), (), f"token id {VOCAB} is not in the vocabulary"),
        (None, (-1,), "token id -1 is not in the vocabulary"),
        ((1, True), (), "token id True is not in the vocabulary"),
        ((1, 2), (2,), "at least two different token ids, and 1 remain"),
    ],
)
def test_ids_that_no_program_can_be_made_of_are_refused(ids: Any, avoid: Any, message: str):
    with pytest.raises(UsageError, match=message):
        CallableSubject(*sums()).with_ids(ids, avoid)
