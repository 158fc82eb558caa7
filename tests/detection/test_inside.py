"""Where inside a decoder an error is found: heads before tokens, compiled and wrapped modules, the readout."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.detection.small_decoders import HEAD_DIM, HEADS, LAYERS, SmallDecoder
from torch import Tensor, nn

from kvproof import Verdict, audit
from kvproof._numerics.taps import Recorder
from kvproof.contract.report import Report
from kvproof.contract.results import Divergence
from kvproof.scenarios import Extend, Scenario
from kvproof.subjects import ModuleSubject
from kvproof.subjects._taps import tapped

COMPILED_NOTE = "the decoder is compiled"
#: Blocks of as many tokens as there are heads, of fewer and of more, and single ones.
IDS = tuple(torch.randint(0, 37, (14,), generator=torch.Generator().manual_seed(0)).tolist())


def calls(*widths: int) -> Scenario:
    """Return a program of calls of these widths."""
    ends = [sum(widths[: number + 1]) for number in range(len(widths))]
    operations = tuple(Extend(ids=(IDS[end - width : end],)) for width, end in zip(widths, ends, strict=True))
    return Scenario(name=f"calls of {widths}", exposes="", operations=operations)


class PerHead(nn.Module):
    """Scales keys (batch, heads, new, head_dim); a broken one scales those of later calls otherwise."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor, self.is_cached = factor, False

    def forward(self, x: Tensor) -> Tensor:
        """Return the scaled keys."""
        return x * self.factor if self.is_cached else x * 1.0


class WithPerHead(SmallDecoder):
    """Each layer's keys go through a module, heads before tokens."""

    factor = 1.0

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self.per_head = nn.ModuleList(PerHead(self.factor) for _ in range(LAYERS))
        self.number = 0

    def forward(self, ids: Tensor, past: Any = None) -> tuple[Tensor, Any]:
        """Count layers anew."""
        self.number = 0
        return super().forward(ids, past)

    def turned(self, x: Tensor, start: int, *, is_cached: bool) -> Tensor:
        """Send every second tensor, which holds the keys, through the module."""
        turned = super().turned(x, start, is_cached=is_cached)
        self.number += 1
        if self.number % 2:
            return turned
        module = self.per_head[self.number // 2 - 1]
        module.is_cached = start > 0
        return module(turned)


class BrokenPerHead(WithPerHead):
    factor = 1.2


class Softcapped(SmallDecoder):
    """The row is made from the last module's output, which is not the row."""

    def read_out(self, x: Tensor, *, is_cached: bool) -> Tensor:
        """Return capped logits."""
        return 3 * torch.tanh(super().read_out(x, is_cached=is_cached) / 3)


class WrongHead(nn.Linear):
    """A readout that is wrong for blocks of a cached call."""

    is_warm = False

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        return super().forward(x) * (1.1 if self.is_warm else 1.0)


class WrongReadout(Softcapped):
    """The last module is wrong in later calls."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        head = WrongHead(self.head.in_features, self.head.out_features, bias=False)
        head.weight = self.head.weight
        self.head = head

    def forward(self, ids: Tensor, past: Any = None) -> tuple[Tensor, Any]:
        """Note whether the cache holds tokens."""
        self.head.is_warm = past is not None and past[0][0].shape[2] > 0
        return super().forward(ids, past)


class BrokenReads(SmallDecoder):
    """Attention reads old keys otherwise than it wrote them."""

    def read(self, k: Tensor, num_old: int) -> Tensor:
        """Scale old keys."""
        return torch.cat([k[:, :, :num_old] * 1.1, k[:, :, num_old:]], 2)


def empty(module: nn.Module) -> list[tuple[Tensor, Tensor]]:
    """Return an empty cache."""
    nothing = torch.zeros(1, HEADS, 0, HEAD_DIM, dtype=next(module.parameters()).dtype)
    return [(nothing, nothing)] * LAYERS


def run(module: nn.Module, *programs: Scenario) -> Report:
    """Audit a decoder."""
    subject = ModuleSubject(module, cache="past", start=empty, batch=False)
    return audit(subject, programs or (calls(3, 1, 3, 2, 5),), certificate=False)


def first_value(report: Report) -> Divergence:
    """Return the first finding."""
    return next(each.divergence for each in report.scenarios if each.divergence is not None)


@pytest.mark.parametrize("widths", [(4, 3, 1, 3), (4, 1, 1, 1), (3, 3, 3, 3), (1, 3, 2, 5)])
def test_a_value_with_heads_before_tokens_is_compared(widths: tuple[int, ...]):
    divergence = first_value(run(BrokenPerHead(), calls(*widths)))
    assert divergence.site == "the output of per_head.0"
    assert divergence.confirmed
    assert run(WithPerHead(), calls(*widths)).verdict.passes


@pytest.mark.parametrize(
    ("shape", "new", "seen"),
    [
        ((1, 3, 5, 8), 5, (1, 5, 3, 8)),
        ((1, 5, 3, 8), 5, (1, 5, 3, 8)),
        ((2, 3, 1, 8), 1, (2, 1, 3, 8)),
        ((1, 3, 5, 5), 5, None),  # attention weights: the last axis counts slots
        ((1, 3, 4, 8), 5, None),
        ((7, 3, 5, 8), 5, None),
    ],
)
def test_tokens_are_found_on_their_axis(shape: tuple[int, ...], new: int, seen: tuple[int, ...] | None):
    model, recorder = nn.Sequential(nn.Identity()), Recorder()
    with tapped(model, recorder, (shape[0] if shape[0] < 7 else 1, new)):
        model(torch.zeros(shape))
    assert [tuple(value.shape) for value in recorder.values.values()] == ([] if seen is None else [seen])


def test_what_a_tap_returns_goes_back_with_heads_first():
    model = nn.Sequential(nn.Identity())
    value = torch.arange(30.0).view(1, 3, 5, 2)
    with tapped(model, lambda site, x: x + torch.arange(5.0).view(1, 5, 1, 1), (1, 5)):
        changed = model(value)
    assert torch.equal(changed, value + torch.arange(5.0).view(1, 1, 5, 1))


class Parallel(nn.Module):
    """A wrapper as DataParallel is one."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, ids: Tensor, past: Any = None) -> Any:
        """Call the wrapped module."""
        return self.module(ids, past)


def compiled_in_place(module: nn.Module) -> nn.Module:
    """Return the module itself, compiled."""
    module.compile(backend="eager")
    return module


WRAPPERS: dict[str, tuple[Callable[[nn.Module], nn.Module], str]] = {
    "compiled": (lambda module: torch.compile(module, backend="eager"), ""),
    "compiled in place": (compiled_in_place, ""),
    "wrapped": (Parallel, "module."),
    "wrapped and compiled": (lambda module: torch.compile(Parallel(module), backend="eager"), "module."),
    "compiled and wrapped": (lambda module: Parallel(torch.compile(module, backend="eager")), "module."),
}


@pytest.mark.parametrize("name", WRAPPERS)
def test_the_inner_module_of_a_wrapped_decoder_is_named(name: str):
    wrap, prefix = WRAPPERS[name]
    report = run(wrap(BrokenReads()))
    divergence = first_value(report)
    assert divergence.site == f"the output of {prefix}layers.0.out"
    assert divergence.confirmed
    assert any(note.startswith(COMPILED_NOTE) for note in report.notes) == ("compiled" in name)


@pytest.mark.parametrize("name", WRAPPERS)
def test_a_sound_wrapped_decoder_passes(name: str):
    assert run(WRAPPERS[name][0](SmallDecoder())).verdict.passes


def test_the_module_that_the_row_is_made_from_is_never_confirmed():
    divergence = first_value(run(WrongReadout()))
    assert divergence.site == "the output of head"
    assert (divergence.confirmed, divergence.introduced) == (False, ())
    assert run(Softcapped()).verdict is Verdict.MATCH
