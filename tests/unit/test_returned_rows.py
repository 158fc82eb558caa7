"""Rows that a decoder returns: copied when they are taken, and refused by dtype and shape if not logits."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from kvproof import CallableSubject, ModuleSubject, audit
from kvproof.contract.results import Verdict
from kvproof.errors import MalformedRowError
from kvproof.scenarios import chunked_prefill, fork, token_by_token

VOCAB = 11
IDS = (3, 1, 4, 1, 5, 9, 2, 6)
TABLE = np.random.default_rng(0).normal(size=(VOCAB, VOCAB))

Pair = tuple[Callable[[Any], Any], Callable[[Any, Any], Any]]


def into_one_buffer(*, last_only: bool, as_torch: bool, wrong: bool = False) -> Pair:
    """Two functions that write every result into the same memory, as engines do."""
    buffer = np.zeros((64, VOCAB))

    def lend(rows: np.ndarray) -> Any:
        buffer[: len(rows)] = rows
        lent = buffer[0 if not last_only else len(rows) - 1 : len(rows)]
        return torch.from_numpy(lent) if as_torch else lent

    def full(ids: np.ndarray) -> Any:
        return lend(TABLE[ids].cumsum(axis=0))

    def step(ids: np.ndarray, cache: Any) -> Any:
        rows = (0 if cache is None else cache) + TABLE[ids].cumsum(axis=0)
        kept = (rows[0] if wrong else rows[-1]).copy()
        buffer[: len(rows)] = rows
        lent = buffer[: len(rows)]
        return (torch.from_numpy(lent) if as_torch else lent), kept

    return full, step


@pytest.mark.parametrize("as_torch", [False, True])
@pytest.mark.parametrize("last_only", [False, True])
@pytest.mark.parametrize("wrong", [False, True])
def test_functions_that_share_one_buffer_are_judged_by_what_they_computed(
    last_only: bool, as_torch: bool, wrong: bool
):
    """Rows of an earlier call were overwritten by a later one, and a sound decoder diverged."""
    pair = into_one_buffer(last_only=last_only, as_torch=as_torch, wrong=wrong)
    programs = [token_by_token(IDS), chunked_prefill(IDS, 3), fork(IDS[:4], (1, 2), (3, 4))]
    for reference in ("one-pass", "literal"):
        verdict = audit(pair, programs, reference=reference).verdict
        assert verdict is Verdict.DIVERGED if wrong else verdict.passes


class Lending(nn.Module):
    """Sums rows, and writes all of its logits into one buffer."""

    def __init__(self, *, wrong: bool) -> None:
        super().__init__()
        self.rows = nn.Embedding.from_pretrained(torch.from_numpy(TABLE))
        self.wrong = wrong
        self.memory = [torch.zeros(1, 64, VOCAB, dtype=torch.float64)]

    def forward(self, ids: Tensor, cache: Tensor | None = None) -> Any:
        logits = self.rows(ids).cumsum(dim=1) + (0 if cache is None else cache[:, None])
        kept = logits[:, 0 if self.wrong else -1].clone()
        lent = self.memory[0][:, : logits.shape[1]]
        lent.copy_(logits)
        return lent, kept


@pytest.mark.parametrize("wrong", [False, True])
def test_a_module_that_returns_one_buffer_is_judged_by_what_it_computed(wrong: bool):
    subject = ModuleSubject(Lending(wrong=wrong), cache="cache", batch=False)
    verdict = audit(subject, [token_by_token(IDS), chunked_prefill(IDS, 3)]).verdict
    assert verdict is Verdict.DIVERGED if wrong else verdict.passes


#: What is returned in place of rows of logits, and what is said of it.
NO_LOGITS: dict[str, tuple[Callable[[np.ndarray], Any], str]] = {
    "integers": (lambda rows: rows.astype(np.int64), "hold torch.int64 of shape (2, 11), not floating-point"),
    "torch integers": (lambda rows: torch.from_numpy(rows).int(), "hold torch.int32 of shape (2, 11), not"),
    "unsigned": (lambda rows: rows.astype(np.uint16), "hold torch.uint16 of shape (2, 11), not"),
    "bool": (lambda rows: rows > 0, "hold torch.bool of shape (2, 11), not"),
    "complex": (lambda rows: rows.astype(np.complex128), "hold torch.complex128 of shape (2, 11), not"),
    "texts": (lambda rows: rows.astype("U4"), "hold <U4 of shape (2, 11), not"),
    "objects": (lambda rows: rows.astype(object), "hold object of shape (2, 11), not"),
    "long doubles": (lambda rows: rows.astype(np.longdouble), "of shape (2, 11): torch has no such dtype"),
    "eight bits": (
        lambda rows: torch.from_numpy(rows).to(torch.float8_e4m3fn),
        "hold torch.float8_e4m3fn of shape (2, 11): cast them",
    ),
    "text": (lambda rows: "logits", "are a str: give a torch tensor"),
    "a list": (lambda rows: rows.tolist(), "are a list: give a torch tensor"),
    "a number": (lambda rows: 1.0, "are a float: give a torch tensor"),
    "nothing": (lambda rows: None, "are a NoneType: give a torch tensor"),
}


@pytest.mark.parametrize("kind", NO_LOGITS)
def test_what_is_no_row_of_logits_is_the_decoders_mistake(kind: str):
    """Some ended as an error inside kvproof."""
    if kind == "long doubles" and np.longdouble is np.float64:
        pytest.skip("long doubles are ordinary ones on this system")
    convert, said = NO_LOGITS[kind]

    def full(ids: np.ndarray) -> Any:
        return TABLE[ids].cumsum(axis=0)

    def step(ids: np.ndarray, cache: Any) -> Any:
        return convert(TABLE[ids]), None

    with pytest.raises(MalformedRowError) as refused:
        CallableSubject(full, step).session().extend([[1, 2]])
    assert f"the logits {said}" in str(refused.value) or said in str(refused.value)
    assert refused.value.__cause__ is None
    report = audit((full, step), [chunked_prefill(IDS, 2)])
    assert report.verdict is Verdict.RAISED
    with pytest.raises(MalformedRowError):
        CallableSubject(lambda ids: convert(TABLE[[*ids, 0]]), step)


def test_numbers_in_the_other_byte_order_are_numbers():
    def full(ids: np.ndarray) -> Any:
        return TABLE[ids].cumsum(axis=0).astype(">f8")

    def step(ids: np.ndarray, cache: Any) -> Any:
        rows = (0 if cache is None else cache) + TABLE[ids].cumsum(axis=0)
        return rows.astype(">f8"), rows[-1]

    assert audit((full, step), [token_by_token(IDS)]).verdict.passes
