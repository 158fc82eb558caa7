"""How the decoders that people bring are called: blocks, last rows, batches, state of their own, casts."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from tests.unit.test_given import VOCAB, Sums, sums, table
from torch import Tensor, nn

from kvproof import Verdict, audit, conformance
from kvproof.contract.report import Report
from kvproof.contract.results import ScenarioResult
from kvproof.errors import SubjectError, UsageError
from kvproof.scenarios import Ability
from kvproof.subjects import CacheOps, CallableSubject, ModuleSubject


def result(report: Report, name: str) -> ScenarioResult:
    (found,) = (s for s in report.scenarios if s.name == name)
    return found


def in_blocks(dtype: str = "float32", *, most: int = 3, scale: float = 1.0) -> tuple[Any, Any]:
    """A decoder that takes few tokens in a call, and on a warm cache scales a block's rows."""
    full, step = sums(dtype)

    def taking(ids: Any, cache: Any) -> Any:
        assert len(ids) <= most, "too many tokens"
        logits, after = step(ids, cache)
        return logits * (1.0 if cache is None or len(ids) == 1 else scale), after

    return full, taking


def test_longer_calls_are_split_and_the_report_says_so():
    report = audit(CallableSubject(*in_blocks(), max_block=3))
    assert report.verdict.passes, report
    assert "a call takes at most 3 tokens of a row (max_block), so longer ones are split" in report.notes
    assert result(report, "chunked prefill").verdict.passes
    assert report.certificate is not None
    assert conformance.check(CallableSubject(*in_blocks(), max_block=3)).passed


def test_a_block_that_is_wrong_is_found_at_the_size_that_is_taken():
    broken = CallableSubject(*in_blocks(scale=1.01), max_block=3, cast=lambda dtype: in_blocks(dtype, scale=1.01))
    report = audit(broken, ["chunked prefill", "token-by-token"])
    assert result(report, "chunked prefill").verdict is Verdict.DIVERGED
    assert result(report, "token-by-token").verdict.passes


def test_a_decoder_that_does_not_say_its_largest_block_raises():
    assert audit(CallableSubject(*in_blocks()), ["prefill+steps"]).verdict is Verdict.RAISED


@pytest.mark.parametrize("size", [0, -1, True, 2.5])
def test_a_largest_block_is_a_number_of_tokens(size: Any):
    with pytest.raises(UsageError, match="max_block must be an integer of at least 1"):
        CallableSubject(*sums(), max_block=size)


def last_rows(dtype: str = "float32", *, scale: float = 1.0) -> tuple[Any, Any]:
    """A decoder whose calls return their last row alone; a block on a warm cache scales it."""
    full, step = sums(dtype)

    def last(ids: Any, cache: Any) -> Any:
        logits, after = step(ids, cache)
        return logits[-1] * (1.0 if cache is None or len(ids) == 1 else scale), after

    return full, last


def test_of_calls_that_return_their_last_row_that_row_is_compared():
    subject = CallableSubject(*last_rows(), last_row=True, cast=last_rows)
    report = audit(subject)
    assert report.verdict.passes, report
    assert report.certificate is not None
    assert any("last_row" in note for note in report.notes)
    assert {len(row.ids) for row in result(report, "chunked prefill").rows} == {*range(2, 29, 2), 9, 18, 27}
    assert conformance.check(subject).passed, conformance.check(subject)
    broken = CallableSubject(
        *last_rows(scale=1.01), last_row=True, cast=lambda dtype: last_rows(dtype, scale=1.01)
    )
    assert result(audit(broken), "chunked prefill").verdict is Verdict.DIVERGED


def test_a_call_that_returns_more_rows_than_it_says_is_no_match():
    subject = CallableSubject(*sums(), last_row=True)
    with pytest.raises(SubjectError, match="gave 2 rows of logits for 2 tokens, and last_row=True means one"):
        subject.session().extend([[1, 2]])


class LastOfModule(Sums):
    """Returns the last row alone, on both paths."""

    def forward(self, ids: Tensor, memory: Tensor | None = None, where: Tensor | None = None) -> Any:
        logits, after = super().forward(ids, memory)
        return logits[:, -1], after


def test_a_module_that_returns_its_last_row_is_asked_for_each_prefix():
    torch.manual_seed(0)
    report = audit(ModuleSubject(LastOfModule(), cache="memory", last_row=True))
    assert report.verdict.passes, report
    assert result(report, "batch").verdict.passes


@pytest.mark.parametrize("wrong", [0.0, 0.1])
def test_the_first_call_may_be_another_function(wrong: float):
    def decoder(dtype: str) -> tuple[Any, ...]:
        full, step = sums(dtype)

        def first(ids: Any) -> Any:
            logits, after = step(ids, None)
            return logits, after + wrong

        def later(ids: Any, cache: Any) -> Any:
            assert cache is not None
            return step(ids, cache)

        return full, later, {"first": first}

    full, later, more = decoder("float32")
    report = audit(CallableSubject(full, later, **more, cast=decoder), ["token-by-token", "prefill+steps"])
    assert report.verdict.passes == (not wrong)
    with pytest.raises(UsageError, match=r"cast= must return \(full, step, {'first'"):
        CallableSubject(full, later, **more, cast=sums).cast(torch.float64)


class Inside(Sums):
    """Keeps its sum in a buffer, one row for each batch row; ``keep`` says that a call is of the cached path."""

    def __init__(self, *, forgets_reset: bool = False) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(4, VOCAB))
        self.num_calls = 0
        self.forgets_reset = forgets_reset

    def forward(self, ids: Tensor, keep: bool = False, memory: Any = None, where: Any = None) -> Tensor:
        logits, _ = super().forward(ids)
        if keep:
            logits = logits + self.total[: len(ids), None]
            self.total[: len(ids)] = logits[:, -1]
            self.num_calls += 1
        return logits

    def clear(self, rows: int = 4) -> None:
        if not self.forgets_reset:
            self.total[:rows] = 0
            self.num_calls = 0


def inside(*, forgets_reset: bool = False, **options: Any) -> ModuleSubject:
    reset = options.pop("reset", lambda module: module.clear())
    return ModuleSubject(
        Inside(forgets_reset=forgets_reset),
        cached_options={"keep": True},
        **{"state": ("total", "num_calls"), "ops": CacheOps(reset=reset), **options},
    )


def test_state_in_a_module_is_each_sessions_own():
    report = audit(inside())
    assert report.verdict.passes, report
    for name in ("interleaved requests", "fork", "buffer reuse", "batch"):
        assert result(report, name).verdict.passes, name
    assert conformance.check(inside()).passed, conformance.check(inside())


def test_a_reset_is_really_called():
    broken = inside(forgets_reset=True)
    assert result(audit(broken), "buffer reuse").verdict is Verdict.DIVERGED
    assert "a reset session is as good as a new one" in str(conformance.check(broken)).split("kept:")[0]


def test_without_a_reset_nothing_is_said_of_one():
    report = audit(inside(ops=CacheOps()))
    reuse = result(report, "buffer reuse")
    assert reuse.verdict is Verdict.NOT_CHECKED
    assert reuse.reason is not None
    assert "give CacheOps(reset=" in reuse.reason
    assert report.verdict.passes


def test_a_state_that_is_not_there_is_refused():
    with pytest.raises(UsageError, match="state='kv': Inside has no such buffer or attribute; it has: total"):
        inside(state=("kv",))


def test_state_that_half_is_declared_leaks_and_is_found():
    """The sum is left out: sessions share it."""
    report = audit(inside(state=("num_calls",), start=lambda module, rows: module.clear(rows)))
    assert result(report, "interleaved requests").verdict is Verdict.DIVERGED
    assert any("all sessions share: total" in note for note in report.notes), report.notes


def test_one_session_at_a_time_is_not_run_beside_another():
    subject = inside(state=(), one_session=True, start=lambda module, rows: module.clear(rows))
    report = audit(subject)
    assert report.verdict.passes, report
    for name in ("interleaved requests", "fork", "batch isolation"):
        assert result(report, name).verdict is Verdict.NOT_CHECKED, name
    assert result(report, "token-by-token").verdict.passes
    assert conformance.check(subject).passed, conformance.check(subject)
    first, second = subject.session(), subject.session()
    second.extend([[1]])
    with pytest.raises(SubjectError, match="one session at a time"):
        first.extend([[1]])


@pytest.mark.parametrize("leak", [0.0, 1.0])
def test_functions_keep_state_in_an_object_of_theirs(leak: float):
    def decoder(dtype: str) -> tuple[Any, ...]:
        full, step = sums(dtype)
        box: dict[str, Any] = {"sum": None, "all": np.zeros((), dtype)}

        def stepping(ids: Any, cache: Any) -> Any:
            logits, box["sum"] = step(ids, box["sum"])
            box["all"] = box["all"] + len(ids) * leak
            return logits + box["all"] * 0.01 - len(ids) * 0.01 * leak, None

        def load(saved: Any) -> None:
            box["sum"] = saved

        return full, stepping, {"state": (lambda: box["sum"], load)}

    full, step, more = decoder("float32")
    subject = CallableSubject(full, step, **more, cast=decoder)
    report = audit(subject, ["token-by-token", "interleaved requests", "fork"])
    assert report.verdict.passes == (not leak), report


def buffered(dtype: str = "float32", *, reads_all: bool = False) -> tuple[Any, Any]:
    """A decoder with a preallocated buffer of rows; what is broken reads its unused slots."""
    rows = table(dtype)

    def full(ids: Any) -> Any:
        return rows[ids].cumsum(axis=0)

    def step(ids: Any, cache: Any) -> Any:
        length, buffer = (0, np.zeros((64, VOCAB), dtype)) if cache is None else (cache[0], cache[1].copy())
        out = []
        for token in ids:
            buffer[length] = rows[token]
            length += 1
            out.append(buffer.sum(axis=0) if reads_all else buffer[:length].sum(axis=0))
        return np.stack(out), (length, buffer)

    return full, step


def poison(cache: Any) -> tuple[Any, int]:
    length, buffer = cache
    buffer = buffer.copy()
    buffer[length:] = 1e4
    return (length, buffer), buffer[length:].size


@pytest.mark.parametrize("reads_all", [False, True])
def test_unused_slots_are_poisoned(reads_all: bool):
    def decoder(dtype: str = "float32") -> tuple[Any, Any]:
        return buffered(dtype, reads_all=reads_all)

    empty = lambda cache: (0, cache[1])  # noqa: E731
    subject = CallableSubject(*decoder(), cast=decoder, ops=CacheOps(poison=poison, reset=empty), context_len=64)
    report = audit(subject, ["token-by-token", "poisoned buffer"])
    assert result(report, "token-by-token").verdict.passes
    assert result(report, "poisoned buffer").verdict is (Verdict.DIVERGED if reads_all else Verdict.MATCH)


def batched(dtype: str = "float32", *, ignores: str = "") -> tuple[Any, Any]:
    """A decoder of batches whose rows depend on positions; what is broken ignores the mask or the positions."""
    rows = table(dtype)

    def full(ids: Any) -> Any:
        return (rows[ids] * (1 + np.arange(len(ids))[:, None]).astype(dtype)).cumsum(axis=0)

    def step(ids: Any, cache: Any, at: Any, real: Any) -> Any:
        num_new, start = ids.shape[1], real.shape[1] - ids.shape[1]
        at = np.arange(start, start + num_new)[None].repeat(len(ids), 0) if ignores == "positions" else at
        real = np.ones_like(real) if ignores == "mask" else real
        weighed = rows[ids] * (1 + at)[..., None].astype(dtype) * real[:, -num_new:, None].astype(dtype)
        logits = weighed.cumsum(axis=1) + (0 if cache is None else cache[:, None])
        return logits, logits[:, -1]

    return full, step


@pytest.mark.parametrize("ignores", ["", "mask", "positions"])
def test_two_functions_take_batches_positions_and_a_mask(ignores: str):
    def decoder(dtype: str = "float32") -> tuple[Any, Any]:
        return batched(dtype, ignores=ignores)

    reorder = lambda cache, rows: cache[list(rows)]  # noqa: E731
    subject = CallableSubject(
        *decoder(),
        cast=decoder,
        batch=True,
        positions="at",
        mask="real",
        windows=(6,),
        ops=CacheOps(reorder=reorder),
    )
    report = audit(subject)
    for name in ("batch", "beam reorder", "batch isolation", "window crossing", "token-by-token"):
        assert result(report, name).verdict.passes, (name, report)
    padded = result(report, "left-padded batch").verdict
    assert padded is Verdict.DIVERGED if ignores else padded.passes
    assert conformance.check(subject).passed, conformance.check(subject)


class Masked(Sums):
    """Takes a mask and no positions; what is broken forgets the mask."""

    def __init__(self, *, forgets: bool = False) -> None:
        super().__init__()
        self.forgets = forgets

    def forward(self, ids: Tensor, memory: Any = None, mask: Any = None) -> Any:
        rows = self.rows(ids)
        if mask is not None and not self.forgets:
            rows = rows * mask[:, -ids.shape[1] :, None]
        logits = rows.cumsum(dim=1) + (0 if memory is None else memory[:, None])
        return logits, logits[:, -1]


def test_padding_needs_a_mask_alone_where_the_module_says_so():
    silent = ModuleSubject(Masked(), cache="memory", mask="mask")
    assert Ability.PAD not in silent.info.abilities
    sound = audit(ModuleSubject(Masked(), cache="memory", mask="mask", padding=True))
    assert result(sound, "left-padded batch").verdict.passes
    broken = audit(ModuleSubject(Masked(forgets=True), cache="memory", mask="mask", padding=True))
    assert result(broken, "left-padded batch").verdict is Verdict.DIVERGED


class Foreign(nn.Module):
    """Computes outside torch, with weights that no parameter shows, and cannot be copied."""

    def __init__(self, dtype: str = "float32", *, forgets: bool = False) -> None:
        super().__init__()
        self.held = {"full_step": sums(dtype)}
        self.forgets = forgets

    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("this module holds a handle")

    def forward(self, ids: Tensor, cache: Any = None) -> Any:
        step = self.held["full_step"][1]
        logits, after = step(ids[0].numpy(), None if self.forgets else cache)
        return torch.from_numpy(logits)[None], after


@pytest.mark.parametrize("forgets", [False, True])
def test_a_module_that_cannot_be_copied_is_cast_by_its_owner(forgets: bool):
    subject = ModuleSubject(
        Foreign(forgets=forgets), cache="cache", batch=False, cast=lambda dtype: Foreign(dtype, forgets=forgets)
    )
    report = audit(subject, ["token-by-token"])
    assert report.verdict is (Verdict.DIVERGED if forgets else Verdict.MATCH), report
    assert result(report, "token-by-token").rows[0].top_gap is not None


def test_start_gets_the_number_of_rows_if_it_has_a_place_for_it():
    seen: list[Sequence[Any]] = []

    def start(module: Any, rows: int) -> Any:
        seen.append((module, rows))
        return torch.zeros(rows, VOCAB)

    module = Sums()
    ModuleSubject(module, cache="memory", start=start).session(batch=3)
    assert seen == [(module, 3)]
    ModuleSubject(module, cache="memory", start=lambda module, dtype=None: dtype).session(batch=3)


def test_a_padded_batch_that_is_longer_than_a_block_is_not_checked():
    report = audit(ModuleSubject(Masked(), cache="memory", mask="mask", padding=True, max_block=4))
    padded = result(report, "left-padded batch")
    assert padded.verdict is Verdict.NOT_CHECKED
    assert padded.reason is not None
    assert "a padded batch of 14 tokens is longer than the largest call of 4" in padded.reason
    assert result(report, "batch").verdict.passes


def right_padded(dtype: str = "float32", *, counts_padding: bool = False) -> tuple[Any, Any]:
    """A decoder of batches that are padded on the right; what is broken continues after the padding."""
    rows = table(dtype)

    def full(ids: Any) -> Any:
        return (rows[ids] * (1 + np.arange(len(ids))[:, None]).astype(dtype)).cumsum(axis=0)

    def step(ids: Any, cache: Any, lengths: Any) -> Any:
        start, sums = (np.zeros(len(ids), int), np.zeros((len(ids), VOCAB), dtype)) if cache is None else cache
        at = start[:, None] + np.arange(ids.shape[1])
        real = np.ones_like(at) if counts_padding else at < lengths[:, None]
        weighed = rows[ids] * (1 + at)[..., None].astype(dtype) * real[..., None].astype(dtype)
        logits = weighed.cumsum(axis=1) + sums[:, None]
        return logits, (lengths, logits[:, -1])

    return full, step


@pytest.mark.parametrize("broken", [False, True])
def test_shorter_rows_may_be_padded_on_the_right(broken: bool):
    def decoder(dtype: str = "float32") -> tuple[Any, Any]:
        return right_padded(dtype, counts_padding=broken)

    report = audit(CallableSubject(*decoder(), cast=decoder, batch=True, lengths="lengths"))
    assert result(report, "batch").verdict.passes, report
    padded = result(report, "left-padded batch").verdict
    assert padded is Verdict.DIVERGED if broken else padded.passes
    assert report.verdict.passes == (not broken)


def test_right_padding_gives_positions_and_a_mask_by_slot():
    seen: list[Any] = []

    def step(ids: Any, cache: Any, **given: Any) -> Any:
        seen.append((ids.tolist(), {name: value.tolist() for name, value in given.items()}))
        return np.zeros((*ids.shape, VOCAB), "float32"), 0

    names = {"positions": "at", "mask": "real", "lengths": "lengths"}
    session = CallableSubject(sums()[0], step, batch=True, **names).session(batch=2)
    session.extend([[5, 6, 7], [8]])
    session.extend([[1], [2]])
    (first, given), (second, later) = seen
    assert first == [[5, 6, 7], [8, 0, 0]]
    assert given == {"at": [[0, 1, 2], [0, 0, 0]], "real": [[1, 1, 1], [1, 0, 0]], "lengths": [3, 1]}
    assert second == [[1], [2]]
    assert later == {"at": [[3], [1]], "real": [[1, 1, 1, 1], [1, 1, 0, 0]], "lengths": [4, 2]}
