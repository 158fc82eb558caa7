"""Where a finding is: after the last value that is shown, or in what a call wrote, or nowhere."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from kvproof import ReferenceSubject, Verdict, audit, localise
from kvproof._engine.uncached_rows import Reference
from kvproof._numerics.taps import Tap
from kvproof.contract.stages import AFTER_READOUT, LIKELY_CONTRACT, NOTHING_SHOWN, Site, Stage
from kvproof.faults import Fault, Place
from kvproof.faults._plantings import EditOnce
from kvproof.reference.corpus import SEQUENCES
from kvproof.scenarios import Extend, Scenario, chunked_prefill, prefill_and_steps, token_by_token
from kvproof.subjects import CallableSubject, ModuleSubject, Session
from kvproof.subjects._base import Opening
from kvproof.subjects._reference import ReferenceSession

IDS = (3, 1, 4, 1, 5, 9, 2, 6, 5)


class Prefixed(nn.Module):
    """A decoder of two layers whose first ``prefix`` tokens attend to each other in both directions."""

    def __init__(self, prefix: int = 0, after: Callable[[Tensor, bool], Tensor] = lambda logits, step: logits):
        super().__init__()
        torch.manual_seed(0)
        self.prefix, self.after = prefix, after
        self.embedding, self.positions = nn.Embedding(16, 16), nn.Embedding(16, 16)
        names = ("query", "key", "value", "out", "mix")
        self.layers = nn.ModuleList(nn.ModuleDict({name: nn.Linear(16, 16) for name in names}) for _ in range(2))
        self.shift, self.unshift = nn.Identity(), nn.Identity()
        self.readout = nn.Linear(16, 16)

    def forward(self, ids: Tensor, past: Any = None) -> tuple[Tensor, Any]:
        start = 0 if past is None else past[0][0].shape[1]
        new = torch.arange(start, start + ids.shape[1])[:, None]
        slots = torch.arange(start + ids.shape[1])[None]
        visible = (slots <= new) | ((slots < self.prefix) & (new < self.prefix))
        x, cache = self.embedding(ids) + self.positions(new[:, 0]), []
        for number, layer in enumerate(self.layers):
            query, key, value = (layer[name](x) for name in ("query", "key", "value"))
            if past is not None:
                key, value = (torch.cat(both, 1) for both in zip(past[number], (key, value), strict=True))
            cache.append((key, value))
            weights = (3 * query @ key.transpose(1, 2)).masked_fill(~visible, -math.inf).softmax(-1)
            x = x + layer["out"](weights @ value)
            x = x + torch.tanh(layer["mix"](x))
        x = self.unshift(self.shift(x))
        return self.after(self.readout(x), start > 0), cache


def prompt_then_steps(length: int) -> Scenario:
    """Compare no row of the prompt but its last."""
    return Scenario(
        name="prompt",
        exposes="rows that are left out",
        operations=(
            Extend(ids=(IDS[:length],), last_only=True),
            *(Extend(ids=((token,),)) for token in IDS[length:]),
        ),
    )


AFTER = [
    pytest.param(lambda logits, step: logits if step else 3 * torch.tanh(logits / 3), id="softcap"),
    pytest.param(lambda logits, step: 1.5 * logits if step else logits, id="scale"),
    pytest.param(lambda logits, step: logits.roll(1, -1) if step else logits, id="roll"),
]


@pytest.mark.parametrize("all_values", [False, True])
@pytest.mark.parametrize("after", AFTER)
def test_what_a_module_does_after_its_readout_is_named_at_the_logits(
    after: Callable[[Tensor, bool], Tensor], all_values: bool
):
    program = prefill_and_steps(IDS, 4)
    subject = ModuleSubject(Prefixed(after=after), cache="past")
    report = audit(subject, [program], all_values=all_values, certificate=False)
    assert report.verdict is Verdict.DIVERGED
    divergence = report.scenarios[-1].divergence
    assert divergence is not None
    assert (divergence.stage, divergence.layer, divergence.position) == (Stage.LOGITS, None, 4)
    assert (divergence.contract, divergence.confirmed, divergence.introduced) == (AFTER_READOUT, False, ())
    assert divergence.logits_differ
    healthy = ModuleSubject(Prefixed(after=lambda logits, step: after(logits, False)), cache="past")
    assert audit(healthy, [program], all_values=all_values, certificate=False).verdict.passes


class Wrong(nn.Module):
    """Adds to what it is given when its cache is warm."""

    def __init__(self, module: nn.Module, wrong: Callable[[], bool]) -> None:
        super().__init__()
        self.module, self.wrong = module, wrong

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.module(x)
        return y + 0.5 if self.wrong() else y


def broken_at(name: str) -> ModuleSubject:
    module = Prefixed()
    steps: list[bool] = [False]
    module.register_forward_pre_hook(
        lambda module, args, kwargs: steps.__setitem__(0, kwargs.get("past") is not None), with_kwargs=True
    )
    setattr(module, name, Wrong(getattr(module, name), lambda: steps[0]))
    return Steps(module, steps)


class Steps(ModuleSubject):
    """A module whose parts know whether its cache is warm, also in another dtype."""

    def __init__(self, module: nn.Module, steps: list[bool]) -> None:
        super().__init__(module, cache="past")
        self.steps = steps

    def _cast(self, dtype: torch.dtype) -> "Steps":
        self.module.to(dtype)  # the parts would not know a copy's cache
        return Steps(self.module, self.steps)


def test_the_module_that_returns_the_logits_confirms_nothing():
    """With the right logits in its place they agree, whatever is wrong."""
    readout = localise(broken_at("readout"), token_by_token(IDS)).divergence
    assert readout is not None
    assert "the output of readout" in readout.sentence
    assert (readout.confirmed, readout.introduced) == (False, ())
    before = localise(broken_at("shift"), token_by_token(IDS)).divergence
    assert before is not None
    assert (before.confirmed, before.introduced) == (True, ("the output of shift",))


def callables(*, scales: bool) -> CallableSubject:
    """Two functions whose steps may scale the logits."""
    rows = np.random.default_rng(0).normal(size=(11, 11))

    def full(ids: Any) -> Any:
        return rows[ids].cumsum(axis=0)

    def step(ids: Any, cache: Any) -> tuple[Any, Any]:
        logits = (0 if cache is None else cache) + rows[ids].cumsum(axis=0)
        return logits * (1.5 if scales and cache is not None else 1), logits[-1]

    return CallableSubject(full, step)


def test_of_two_functions_nothing_inside_can_be_seen():
    report = audit(callables(scales=True), [token_by_token(IDS)], certificate=False)
    assert report.verdict is Verdict.DIVERGED
    divergence = report.scenarios[-1].divergence
    assert divergence is not None
    assert (divergence.stage, divergence.position, divergence.contract) == (Stage.LOGITS, 1, NOTHING_SHOWN)
    assert (divergence.confirmed, divergence.introduced) == (False, ())
    assert audit(callables(scales=False), [token_by_token(IDS)], certificate=False).verdict is Verdict.MATCH


class CacheAlone(ReferenceSubject):
    """A decoder that shows its cache and not what it writes into it, which may be wrong."""

    wrong: Stage | None = None

    def _rows(self, ids: Sequence[int], tap: Tap) -> Tensor:
        return super()._rows(ids, self.hidden(tap, None))

    def _session(self, opening: Opening) -> ReferenceSession:
        return super()._session(dataclasses.replace(opening, tap=self.hidden(opening.tap, self.wrong)))

    def hidden(self, tap: Tap, wrong: Stage | None) -> Tap:
        def shown(site: Site, value: Tensor) -> Tensor:
            value = value + 0.5 if site == Site(wrong, 1) and wrong is not None else value
            return value if site.stage in (Stage.NEW_K, Stage.NEW_V) else tap(site, value)

        return shown

    def _cast(self, dtype: torch.dtype) -> "CacheAlone":
        cast = CacheAlone(super()._cast(dtype).checkpoint)
        cast.wrong = self.wrong
        return cast


@pytest.mark.parametrize("one_pass", [False, True])
@pytest.mark.parametrize(
    "program", [token_by_token(SEQUENCES[0]), chunked_prefill(SEQUENCES[0], 2)], ids=lambda program: program.name
)
@pytest.mark.parametrize("stage", [Stage.NEW_K, Stage.NEW_V])
def test_a_wrong_slot_that_the_call_itself_wrote_is_a_wrong_new_key_or_value(
    subject: ReferenceSubject, stage: Stage, program: Scenario, one_pass: bool
):
    decoder = CacheAlone(subject.checkpoint)
    assert localise(decoder, program, one_pass=one_pass).divergence is None
    decoder.wrong = stage
    divergence = localise(decoder, program, one_pass=one_pass).divergence
    assert divergence is not None
    assert (divergence.stage, divergence.layer, divergence.position) == (stage, 1, 0)
    assert (divergence.slot, divergence.contract) == (None, LIKELY_CONTRACT[stage])
    kept = "cache_k" if stage is Stage.NEW_K else "cache_v"
    assert divergence.introduced == (f"{stage.value} of layer 1 (by way of {kept} of layer 1)",)
    assert divergence.confirmed


@pytest.mark.parametrize("shows_all", [False, True])
def test_a_slot_that_changes_after_it_was_written_stays_a_wrong_slot(subject: ReferenceSubject, shows_all: bool):
    def change(layers: tuple[dict[str, Tensor], ...], session: Session) -> None:
        layers[1]["k"] = layers[1]["k"] + 0.5

    fault = Fault(
        name="kept",
        breaks="keys",
        stages=frozenset({Stage.CACHE_K}),
        make=lambda place: EditOnce(Place(position=2), change),
    )
    decoder = subject if shows_all else CacheAlone(subject.checkpoint)
    divergence = localise(decoder, token_by_token(SEQUENCES[0]), fault=fault).divergence
    assert divergence is not None
    assert (divergence.stage, divergence.slot, divergence.position) == (Stage.CACHE_K, 0, 2)


@pytest.mark.parametrize("all_values", [False, True])
@pytest.mark.parametrize("reference", ["literal", "one-pass"])
def test_rows_that_a_program_leaves_out_say_nothing_of_those_that_it_compares(
    reference: Reference, all_values: bool
):
    """In a bidirectional prefix the values of shorter prefixes differ, and no compared row needs them."""
    subject = ModuleSubject(Prefixed(prefix=4), cache="past")
    report = audit(subject, [prompt_then_steps(6)], reference=reference, all_values=all_values, certificate=False)
    assert report.verdict is Verdict.MATCH, report.summary
    assert len(report.scenarios[-1].rows) == 4
    assert report.scenarios[-1].divergence is None


@pytest.mark.parametrize("reference", ["literal", "one-pass"])
def test_rows_within_the_prefix_that_a_program_does_compare_are_no_match(reference: Reference):
    subject = ModuleSubject(Prefixed(prefix=4), cache="past")
    report = audit(subject, [chunked_prefill(IDS, 6)], reference=reference, certificate=False)
    assert not report.verdict.passes


class Cancelling(ModuleSubject):
    """A module whose cached path shifts the output of one module, and shifts that of the next one back."""

    def step(self, old: Any, new: Any, cache: Any, tap: Tap) -> tuple[Tensor, Any]:
        def shifted(site: Site, value: Tensor) -> Tensor:
            by = {"shift": 0.5, "unshift": -0.5}.get(str(site.module), 0.0)
            at_start = value.shape[1] > 1
            changed = value
            if by and at_start:  # the second token of the prompt, whose row is left out
                changed = value.clone()
                changed[:, 1] += by
            return tap(site, changed)

        return super().step(old, new, cache, shifted)

    def _cast(self, dtype: torch.dtype) -> "Cancelling":
        return Cancelling(super()._cast(dtype).module, cache="past")


@pytest.mark.parametrize("reference", ["literal", "one-pass"])
@pytest.mark.parametrize("prefix", [0, 4])
def test_errors_that_cancel_at_a_token_whose_row_is_left_out_are_still_found(prefix: int, reference: Reference):
    subject = Cancelling(Prefixed(prefix=prefix), cache="past")
    report = audit(subject, [prompt_then_steps(6)], reference=reference, certificate=False)
    result = report.scenarios[-1]
    assert {row.verdict for row in result.rows} == {Verdict.MATCH}
    assert result.verdict is Verdict.DIVERGED
    assert result.divergence is not None
    assert (result.divergence.position, result.divergence.logits_differ) == (1, False)
    assert "the output of shift" in result.divergence.sentence
