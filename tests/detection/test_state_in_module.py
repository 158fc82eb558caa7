"""An attention decoder that keeps its cache in its own buffers, as many inference codes do; sound, or broken."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kvproof import Verdict, audit, conformance
from kvproof.contract.report import Report
from kvproof.contract.results import ScenarioResult
from kvproof.subjects import CacheOps, ModuleSubject

VOCAB, WIDTH, HEADS, LAYERS, CONTEXT, ROWS = 31, 16, 2, 2, 64, 4


class Attention(nn.Module):
    """One layer with its buffers (row, head, position, head_dim)."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        for name in ("k", "v"):
            self.register_buffer(name, torch.zeros(ROWS, HEADS, CONTEXT, WIDTH // HEADS), persistent=False)

    def forward(self, x: Tensor, start: int | None, *, reads_all: bool) -> Tensor:
        batch, new, _ = x.shape
        q, k, v = self.qkv(x).view(batch, new, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        first = start or 0
        if start is not None:
            self.k[:batch, :, start : start + new], self.v[:batch, :, start : start + new] = k, v
            end = CONTEXT if reads_all else start + new
            k, v = self.k[:batch, :, :end], self.v[:batch, :, :end]
        at = torch.arange(first, first + new)[:, None]
        visible = torch.arange(k.shape[2])[None] <= at
        visible |= torch.tensor(reads_all and start is not None)
        weights = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~visible, float("-inf")).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).reshape(batch, new, WIDTH))


class Decoder(nn.Module):
    """``forward(ids)`` without a cache, ``forward(ids, keep=True)`` with the one in the buffers."""

    def __init__(self, broken: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.place = nn.Embedding(VOCAB, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.layers = nn.ModuleList(Attention() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCAB)
        self.length = 0
        self.broken = broken

    def forward(self, ids: Tensor, keep: bool = False) -> Tensor:
        start = self.length if keep else None
        first = start or 0
        x = self.embed(ids) * 2 + self.place(torch.arange(first, first + ids.shape[1]))
        for layer in self.layers:
            x = x + layer(x, start, reads_all=self.broken == "reads all")
        if keep:
            self.length += ids.shape[1]
        return self.head(x)

    def crop(self, length: int) -> None:
        self.length = length + (self.broken == "crop keeps one")

    def reorder(self, rows: Any) -> None:
        for layer in self.layers[self.broken == "reorder leaves a layer" :]:
            layer.k[: len(rows)], layer.v[: len(rows)] = layer.k[list(rows)], layer.v[list(rows)]

    def reset(self) -> None:
        if self.broken != "reset keeps the length":
            self.length = 0

    def poison(self) -> int:
        unused = [value[:, :, self.length :] for layer in self.layers for value in (layer.k, layer.v)]
        for value in unused:
            value.fill_(1e3)
        return sum(value.numel() for value in unused)


def subject(broken: str = "") -> ModuleSubject:
    return ModuleSubject(
        Decoder(broken),
        state=("layers.*.k", "layers.*.v", "length"),
        cached_options={"keep": True},
        context_len=CONTEXT,
        ops=CacheOps(
            crop=lambda module, length: module.crop(length),
            reorder=lambda module, rows: module.reorder(rows),
            reset=lambda module: module.reset(),
            poison=lambda module: (module, module.poison()),
        ),
    )


def result(report: Report, name: str) -> ScenarioResult:
    (found,) = (s for s in report.scenarios if s.name == name)
    return found


def test_a_cache_in_buffers_is_audited_in_every_scenario_that_a_session_can_run():
    report = audit(subject())
    assert report.verdict.passes, report
    for name in (
        *("token-by-token", "chunked prefill", "rollback", "fork", "interleaved requests", "buffer reuse"),
        *("batch", "batch isolation", "beam reorder", "poisoned buffer", "static cache", "context end"),
    ):
        assert result(report, name).verdict.passes, name
    assert conformance.check(subject()).passed, conformance.check(subject())


@pytest.mark.parametrize(
    ("broken", "scenario"),
    [
        ("reads all", "token-by-token"),
        ("crop keeps one", "rollback"),
        ("reorder leaves a layer", "beam reorder"),
        ("reset keeps the length", "buffer reuse"),
    ],
)
def test_what_is_broken_is_found_where_it_is(broken: str, scenario: str):
    assert result(audit(subject(broken), [scenario]), scenario).verdict is Verdict.DIVERGED
    if broken != "reads all":
        assert not conformance.check(subject(broken)).passed
