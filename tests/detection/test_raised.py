"""A cached path that raises, or gives a malformed row, where the uncached path gives a row.

Each decoder that raises stands beside a healthy twin, which differs in nothing else.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from kvproof import (
    CacheOps,
    CallableSubject,
    MismatchError,
    ModuleSubject,
    Report,
    Subject,
    Verdict,
    assert_match,
    audit,
    faults,
)
from kvproof._sweeping.sweep import _sentence
from kvproof.contract import Outcome, ScenarioResult
from kvproof.contract.baseline import changes
from kvproof.errors import MalformedRowError, SubjectError, TokenError
from kvproof.render import json as report_json
from kvproof.scenarios import Ability, Crop, Extend, Refused, Scenario, chunked_prefill, token_by_token

IDS = (1, 2, 3, 4, 5, 6)
STEPS, BLOCKS = token_by_token(IDS), chunked_prefill(IDS, 2)
Step = Callable[[np.ndarray, Any], Any]

TABLE = np.random.default_rng(0).normal(size=(11, 11)).astype(np.float32)


def full(ids: np.ndarray) -> np.ndarray:
    return np.cumsum(TABLE[ids], axis=0)


def step(ids: np.ndarray, cache: Any) -> tuple[np.ndarray, Any]:
    logits = np.cumsum(TABLE[ids], axis=0) + (0 if cache is None else cache)
    return logits, logits[-1]


def no_warm_blocks(ids: np.ndarray, cache: Any) -> tuple[np.ndarray, Any]:
    if cache is not None and len(ids) == 2:
        raise ValueError("no blocks on a warm cache")
    return step(ids, cache)


def short_warm_blocks(ids: np.ndarray, cache: Any) -> tuple[np.ndarray, Any]:
    logits, cache_after = step(ids, cache)
    return logits if cache is None else logits[:, :-1], cache_after


def integers(ids: np.ndarray, cache: Any) -> tuple[np.ndarray, Any]:
    logits, cache_after = step(ids, cache)
    return logits.astype(np.int64), cache_after


def nothing(ids: np.ndarray, cache: Any) -> None:
    return None


def found(report: Report, name: str) -> ScenarioResult:
    (result,) = (scenario for scenario in report.scenarios if scenario.name == name)
    return result


class Sums(nn.Module):
    """A decoder with two layers, each of which adds what it has seen to the embedding."""

    def __init__(self, breaks: Callable[["Layer", Tensor], None] = lambda layer, cache: None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(11, 8)
        self.layers = nn.ModuleList(Layer(number, breaks) for number in range(2))
        self.head = nn.Linear(8, 11, bias=False)

    def forward(self, ids: Tensor, cache: list[Tensor] | None = None) -> Any:
        x = self.embedding(ids)
        start = cache or [torch.zeros_like(x[:, :1])] * 2
        kept = []
        for layer, before in zip(self.layers, start, strict=True):
            x = layer(x, before, warm=bool(cache))
            kept.append(x[:, -1:])
        return self.head(x), kept


class Layer(nn.Module):
    def __init__(self, number: int, breaks: Callable[["Layer", Tensor], None]) -> None:
        super().__init__()
        self.number = number
        self.breaks = breaks

    def forward(self, x: Tensor, before: Tensor, *, warm: bool) -> Tensor:
        if warm:
            self.breaks(self, x)
        return x.cumsum(dim=1) + before


def break_layer_1(layer: Layer, x: Tensor) -> None:
    if layer.number == 1 and x.shape[1] == 2:
        raise RuntimeError("layer 1 takes no blocks")


def module(breaks: Callable[[Layer, Tensor], None] | None = None) -> ModuleSubject:
    return ModuleSubject(Sums() if breaks is None else Sums(breaks), cache="cache", context_len=64)


@pytest.mark.parametrize("decoder", [(full, step), module()], ids=["two functions", "module"])
def test_a_healthy_twin_raises_nothing(decoder: Any):
    report = audit(decoder, [STEPS, BLOCKS], top_rung=True)
    assert report.verdict.passes
    assert all(scenario.raised is None for scenario in report.scenarios)


def test_two_functions_that_raise_on_a_warm_cache_are_said_with_call_tokens_and_traceback():
    report = audit((full, no_warm_blocks), [STEPS, BLOCKS])
    assert report.verdict is Verdict.RAISED
    assert report.exit_status == 6
    assert found(report, "token-by-token").verdict.passes
    result = found(report, "chunked prefill")
    assert result.verdict is Verdict.RAISED
    assert [row.ids for row in result.rows] == [IDS[:1], IDS[:2]], "what it gave before is judged"
    raised = result.raised
    assert raised is not None
    assert (raised.call, raised.operation, raised.position, raised.layer) == (1, "extend", 2, None)
    assert (raised.consumed, raised.fed) == (((1, 2),), ((3, 4),))
    assert raised.error == "ValueError: no blocks on a warm cache"
    assert report.summary == (
        "The cached path raises in call 2 of chunked prefill, fed 3 4 at position 2 after 1 2: ValueError: no "
        "blocks on a warm cache; the uncached path gives a row for these tokens."
    )


def test_a_traceback_holds_the_decoder_s_own_frames_alone():
    raised = found(audit((full, no_warm_blocks), [BLOCKS]), "chunked prefill").raised
    assert raised is not None
    assert raised.traceback is not None
    assert raised.traceback.startswith("Traceback (most recent call last):\n")
    assert raised.traceback.endswith("ValueError: no blocks on a warm cache\n")
    assert "in no_warm_blocks\n" in raised.traceback
    assert raised.traceback.count("  File ") == 1


def test_a_module_that_raises_is_said_with_its_layer_and_without_torch_s_frames():
    report = audit(module(break_layer_1), [STEPS, BLOCKS])
    assert report.verdict is Verdict.RAISED
    raised = found(report, "chunked prefill").raised
    assert raised is not None
    assert (raised.call, raised.layer, raised.fed) == (1, 1, ((3, 4),))
    assert raised.traceback is not None
    assert "torch/nn/modules/module.py" not in raised.traceback.replace("\\", "/")
    assert "src/kvproof" not in raised.traceback.replace("\\", "/")
    assert raised.traceback.count("  File ") == 3, "the decoder's forward, the layer's, and what it calls"
    assert ", in layer 1: RuntimeError: layer 1 takes no blocks" in report.summary


def test_the_first_exception_is_kept_where_the_session_cannot_be_rebuilt_either():
    def takes_one_token(ids: np.ndarray, cache: Any) -> Any:
        if len(ids) > 1:
            raise ValueError(f"{len(ids)} tokens")
        return step(ids, cache)

    program = Scenario(name="block", exposes="x", operations=(*STEPS.operations[:4], Extend(ids=(IDS[4:],))))
    raised = found(audit((full, takes_one_token), [program]), "block").raised
    assert raised is not None
    assert (raised.call, raised.error) == (4, "ValueError: 2 tokens"), "the session's 4 tokens raise too"


@pytest.mark.parametrize(
    ("broken", "call", "error"),
    [
        (short_warm_blocks, 1, "the decoder gave logits of shape (1, 2, 10), not (1, 2, 11)"),
        (integers, 0, "the logits hold torch.int64 of shape (2, 11), not floating-point numbers"),
        (nothing, 0, "step(ids, cache) must return (logits, cache), not a NoneType"),
        (lambda ids, cache: (None, cache), 0, "the logits are a NoneType"),
        (lambda ids, cache: (step(ids, cache)[0][:1], 0), 0, "the decoder gave 1 row of logits for 2 tokens"),
    ],
    ids=["a wrong shape", "no floating-point numbers", "None", "None as logits", "too few rows"],
)
def test_a_malformed_row_is_raised_without_a_traceback(broken: Step, call: int, error: str):
    report = audit((full, broken), [BLOCKS])
    assert report.verdict is Verdict.RAISED
    raised = found(report, "chunked prefill").raised
    assert raised is not None
    assert raised.traceback is None
    assert raised.call == call
    assert error in raised.error
    assert f"The cached path gives a malformed row in call {call + 1} of chunked prefill" in report.summary


@pytest.mark.parametrize("output", [None, (None, None), torch.zeros(1, 2, 10)], ids=["None", "pair", "shape"])
def test_a_module_that_gives_a_malformed_row_is_raised(output: Any):
    class Broken(Sums):
        def forward(self, ids: Tensor, cache: list[Tensor] | None = None) -> Any:
            healthy = super().forward(ids, cache)
            return (
                healthy if not cache else output if output is None or isinstance(output, tuple) else (output, 0)
            )

    report = audit(ModuleSubject(Broken(), cache="cache", context_len=64), [BLOCKS])
    assert report.verdict is Verdict.RAISED
    raised = found(report, "chunked prefill").raised
    assert raised is not None
    assert (raised.call, raised.traceback) == (1, None)


def test_one_program_that_raises_ends_no_other_and_hides_no_divergence():
    """Both are said: the verdict is the worse one, and what was raised is kept beside it."""

    def two_bugs(dtype: str = "float32") -> tuple[Any, Any]:
        table = TABLE.astype(dtype)

        def broken(ids: np.ndarray, cache: Any) -> Any:
            if cache is not None and len(ids) == 2:
                raise ValueError("no pairs")
            kept = None if len(ids) == 3 else cache  # a block of three forgets what came before
            logits = np.cumsum(table[ids], axis=0) + (0 if kept is None else kept)
            return logits, logits[-1]

        return lambda ids: np.cumsum(table[ids], axis=0), broken

    programs = [chunked_prefill(IDS, num) for num in (2, 3)]
    for each in (programs, programs[::-1]):
        report = audit(CallableSubject(*two_bugs(), cast=two_bugs), each)
        result = found(report, "chunked prefill")
        assert result.verdict is Verdict.DIVERGED
        assert report.exit_status == 1
        assert result.raised is not None
        assert result.raised.error == "ValueError: no pairs"
        assert len(result.rows) == 2 + len(IDS)
        assert report.summary.startswith("The cached path diverges")
        assert " Besides, the cached path raises in call 2 of chunked prefill" in report.summary
        assert "ValueError: no pairs" in str(report)


def test_rows_before_an_exception_are_judged_and_their_divergence_is_located():
    class Forgets(Sums):
        def forward(self, ids: Tensor, cache: list[Tensor] | None = None) -> Any:
            if cache and ids[0, 0] == IDS[4]:
                raise RuntimeError("enough")
            if cache and ids[0, 0] == IDS[2]:
                cache = [cache[0], torch.zeros_like(cache[1])]
            return super().forward(ids, cache)

    report = audit(ModuleSubject(Forgets(), cache="cache", context_len=64), [BLOCKS])
    result = found(report, "chunked prefill")
    assert result.verdict is Verdict.DIVERGED
    assert [row.verdict for row in result.rows] == [Verdict.MATCH] * 2 + [Verdict.DIVERGED] * 2
    assert result.divergence is not None
    assert result.divergence.layer == 1
    assert result.divergence.confirmed
    assert result.raised is not None
    assert result.raised.error == "RuntimeError: enough"


def test_a_raise_in_every_program_reports_the_first():
    ops = CacheOps(crop=lambda cache, length: 1 / 0)
    report = audit(CallableSubject(full, step, ops=ops), rollback_programs())
    result = found(report, "rollback")
    assert result.verdict is Verdict.RAISED
    assert result.raised is not None
    assert (result.raised.operation, result.raised.error) == ("crop", "ZeroDivisionError: division by zero")
    assert (result.raised.call, result.raised.consumed, result.raised.position) == (1, ((1, 2, 3),), None)
    assert (
        "The cached path raises in crop before call 2 of rollback, after 1 2 3: ZeroDivisionError"
        in report.summary
    )


def rollback_programs() -> list[Scenario]:
    return [
        Scenario(
            name="rollback",
            exposes="x",
            operations=(Extend(ids=(IDS[:num],)), Crop(length=1), Extend(ids=(IDS[1:],))),
            needs=frozenset({Ability.CROP}),
        )
        for num in (3, 4)
    ]


LONG = (*range(1, 11), *range(10, 0, -1))


def raises_at(*lengths: int) -> Callable[[np.ndarray], np.ndarray]:
    """Return an uncached path that raises for sequences of these lengths."""

    def uncached(ids: np.ndarray) -> np.ndarray:
        if len(ids) in lengths:
            raise ValueError(f"no {len(ids)} tokens")
        return full(ids)

    return uncached


@pytest.mark.parametrize("reference", ["one-pass", "literal"])
@pytest.mark.parametrize("length", [6, 14])
def test_tokens_at_which_the_uncached_path_raises_too_are_inconclusive(length: int, reference: Any):
    """The longest sequence alone was asked for, and gives a row at every length."""

    def no_late_blocks(ids: np.ndarray, cache: Any) -> Any:
        if tuple(ids) == LONG[length - 2 : length]:
            raise ValueError("no such block")
        return step(ids, cache)

    programs = [chunked_prefill(LONG, 2)]
    report = audit((raises_at(length), no_late_blocks), programs, reference=reference)
    assert report.verdict is Verdict.INCONCLUSIVE
    assert report.exit_status == 3
    result = found(report, "chunked prefill")
    assert result.raised is None
    assert f"ValueError: no {length} tokens" in str(result.reason)
    healthy = audit((full, no_late_blocks), programs, reference=reference)
    assert healthy.verdict is Verdict.RAISED


def test_a_sequence_that_the_uncached_path_cannot_run_leaves_the_other_programs_of_its_scenario():
    programs = [chunked_prefill(IDS, 2), chunked_prefill((7, 8, 9), 2)]
    report = audit((raises_at(6), no_warm_blocks), programs)
    result = found(report, "chunked prefill")
    assert result.verdict is Verdict.INCONCLUSIVE
    assert "ValueError: no 6 tokens" in str(result.reason)
    assert [row.ids for row in result.rows] == [(7,), (7, 8), (7, 8, 9)]


def test_an_adapter_that_refuses_a_call_shows_nothing_of_the_decoder():
    class Refuses(ModuleSubject):
        def step(self, *args: Any) -> Any:
            raise SubjectError("the call was not a cached one")

    report = audit(Refuses(Sums(), cache="cache", context_len=64), [STEPS])
    assert report.verdict is Verdict.INCONCLUSIVE
    assert found(report, "token-by-token").raised is None
    assert found(report, "token-by-token").reason == "the call was not a cached one"


def test_what_a_session_refuses_still_comes_through():
    with pytest.raises(TokenError, match="outside the vocabulary"):
        audit((full, step), [Scenario(name="x", exposes="x", operations=(Extend(ids=((99,),)),))])


def test_tokens_past_the_context_that_are_taken_have_no_row_to_miss():
    taken = Scenario(name="taken", exposes="x", operations=(Extend(ids=(IDS,)), Refused(ids=((7,),))))
    report = audit(CallableSubject(full, step, context_len=64), [taken])
    assert found(report, "taken").verdict is Verdict.INCONCLUSIVE


def test_an_exception_of_float64_alone_costs_the_top_rung_and_is_no_finding():
    def cast(dtype: str) -> tuple[Any, Any]:
        return lambda ids: full(ids).astype(dtype), lambda ids, cache: 1 / 0

    report = audit(CallableSubject(full, step, cast=cast), [BLOCKS])
    assert report.verdict is Verdict.MATCH
    assert any("ran without the float64 rung, which raised" in note for note in report.notes)


class Malformed(ModuleSubject):
    """An adapter of someone else's, whose sessions give something that is no tensor."""

    def step(self, *args: Any) -> Any:
        logits, cache = super().step(*args)
        return logits.tolist(), cache


def test_an_adapter_whose_session_gives_no_tensor_is_raised_and_ends_nothing():
    subject: Subject = Malformed(Sums(), cache="cache", context_len=64)
    with pytest.raises(MalformedRowError, match="gave a list, not logits"):
        subject.session().extend([[1]])
    assert audit(subject, [STEPS]).verdict is Verdict.RAISED


def test_a_planted_fault_that_makes_the_decoder_raise_is_the_decoder_s_own_guard():
    def guarded(layer: Layer, x: Tensor) -> None:
        if layer.number == 1 and x.shape[1] == 2:
            raise RuntimeError("guard")

    report = audit(module(guarded), [BLOCKS], faults=[faults.find("token-fed-twice")], top_rung=False)
    assert report.verdict is Verdict.RAISED
    (fault,) = report.faults
    assert fault.outcome is Outcome.RAISED
    assert fault.verdict is Verdict.RAISED
    assert fault.reason == "RuntimeError: guard"


def test_it_stops_an_audit_that_stops_at_the_first_finding():
    report = audit((full, no_warm_blocks), [BLOCKS, STEPS], fail_fast=True)
    assert report.partial
    assert [scenario.name for scenario in report.scenarios] == ["causality", "chunked prefill"]


def test_an_assertion_shows_the_call_and_the_traceback():
    with pytest.raises(MismatchError) as caught:
        assert_match((full, no_warm_blocks), [BLOCKS])
    assert "raises in call 2" in str(caught.value)
    assert 'raise ValueError("no blocks on a warm cache")' in str(caught.value)


def test_it_is_worse_than_inconclusive_and_better_than_a_divergence():
    raised = audit((full, no_warm_blocks), [BLOCKS])
    undecided = audit(CallableSubject(raises_at(6), no_warm_blocks, name="full"), [BLOCKS])
    assert changes(raised, undecided).worse == ("chunked prefill: inconclusive, and now raised",)
    assert changes(raised, undecided).exit_status == 6
    assert not any("chunked prefill" in line for line in changes(undecided, raised).worse)


def test_a_report_with_it_reads_back_equal_and_holds_text_alone(tmp_path: Path):
    report = audit((full, no_warm_blocks), [BLOCKS])
    text = report_json.render(report)
    assert report_json.parse(text, "report.json") == report
    plain = json.loads(text)
    assert {type(value) for value in plain["scenarios"][-1]["raised"].values()} <= {int, str, list, type(None)}


def test_a_message_that_no_file_can_hold_is_escaped():
    def broken(ids: np.ndarray, cache: Any) -> Any:
        raise ValueError("\ud800\x1b[31m")

    report = audit((full, broken), [STEPS])
    assert report_json.parse(report_json.render(report), "report.json") == report
    assert "\x1b" not in str(report)


@pytest.mark.parametrize("jobs", [1, 2])
def test_it_is_the_same_from_another_process(jobs: int):
    class MayFork(ModuleSubject):
        may_fork = True

    subject = MayFork(Sums(break_layer_1), cache="cache", context_len=64)
    report = audit(subject, [STEPS, BLOCKS, chunked_prefill(IDS, 3)], jobs=jobs)
    raised = found(report, "chunked prefill").raised
    assert raised is not None
    assert (raised.call, raised.layer) == (1, 1)


def test_a_sweep_s_cell_says_what_was_raised():
    result = found(audit((full, no_warm_blocks), [BLOCKS]), "chunked prefill")
    assert _sentence(result) == (
        "the cached path raises in call 2, fed 3 4 at position 2 after 1 2: ValueError: no blocks on a warm "
        "cache; the uncached path gives a row for these tokens."
    )
