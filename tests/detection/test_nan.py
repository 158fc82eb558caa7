"""NaN on both sides is undecided, wherever it enters; NaN on one side, and a bug beside NaN, diverge."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kvproof import ModuleSubject, audit
from kvproof.contract.results import Verdict
from kvproof.scenarios import chunked_prefill, token_by_token

IDS = (3, 1, 4, 1, 5, 9, 2, 6)
PROGRAMS = (token_by_token(IDS), chunked_prefill(IDS, 3))
NAN = float("nan")


class Normed(nn.Module):
    """Sums embeddings, normalises the sum and reads it out; parts of what it computes can be NaN."""

    def __init__(self, *, eps: float = 1e-5, nan_in: str | None = None, wrong: str | None = None) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.embedding = nn.Embedding.from_pretrained(torch.randn(11, 8, generator=generator))
        self.inner = nn.Identity()
        self.norm = nn.LayerNorm(8, eps=eps)
        self.head = nn.Linear(8, 11)
        nn.init.normal_(self.head.weight, generator=generator)
        self.nan_in, self.wrong = nan_in, wrong

    def forward(self, ids: Tensor, cache: Tensor | None = None) -> Any:
        warm = cache is not None
        hidden = self.embedding(ids).cumsum(dim=1) + (cache[:, None] if cache is not None else 0)
        kept = hidden[:, -1]
        shown = torch.cat([hidden, torch.zeros_like(hidden[..., :1])], dim=-1)
        if self.nan_in == "a value" or (self.nan_in == "a warm value" and warm):
            shown = torch.cat([hidden, torch.full_like(hidden[..., :1], NAN)], dim=-1)
        if self.wrong == "beside" and warm:
            shown = shown + torch.eye(9)[0]
        hidden = self.inner(shown)[..., :8]
        logits = self.head(self.norm(hidden))
        if self.nan_in == "a logit" or (self.nan_in == "a warm logit" and warm):
            logits = torch.cat([logits[..., :1] * NAN, logits[..., 1:]], dim=-1)
        return logits, kept


@pytest.mark.parametrize("all_values", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("module", "verdict"),
    [
        ({"eps": NAN}, Verdict.INCONCLUSIVE),
        ({"nan_in": "a logit"}, Verdict.INCONCLUSIVE),
        ({"nan_in": "a warm logit"}, Verdict.DIVERGED),
        ({"wrong": "beside"}, Verdict.DIVERGED),
        ({"wrong": "beside", "nan_in": "a value"}, Verdict.DIVERGED),
    ],
    ids=str,
)
def test_nan_on_both_sides_is_undecided_and_hides_nothing(
    module: dict[str, Any], verdict: Verdict, dtype: torch.dtype, all_values: bool
):
    """A norm whose eps is NaN diverged: "nan where the uncached path has nan"."""
    subject = ModuleSubject(Normed(**module).to(dtype), cache="cache")
    report = audit(subject, PROGRAMS, all_values=all_values)
    assert report.verdict is verdict
    assert ("nan where the uncached path has nan" in str(report)) is False


@pytest.mark.parametrize(("nan_in", "passes"), [(None, True), ("a value", True), ("a warm value", False)])
def test_a_value_on_the_way_is_compared_beside_what_is_nan_in_both(nan_in: str | None, passes: bool):
    report = audit(ModuleSubject(Normed(nan_in=nan_in), cache="cache"), PROGRAMS)
    assert report.verdict.passes == passes
    beside = audit(ModuleSubject(Normed(nan_in=nan_in, wrong="beside"), cache="cache"), PROGRAMS)
    assert beside.verdict is Verdict.DIVERGED
    assert beside.scenarios[-1].divergence is not None
    assert "the output of inner" in str(beside)
