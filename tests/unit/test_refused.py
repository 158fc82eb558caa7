"""An operation that a decoder refuses by design: not checked, with the reason, and never a pass."""

from typing import Any

import numpy as np
from tests.unit.test_given import VOCAB, table

from kvproof import Verdict, audit, conformance
from kvproof.contract.report import Report
from kvproof.contract.results import ScenarioResult
from kvproof.errors import RefusedError
from kvproof.scenarios import Ability, random_programs
from kvproof.subjects import CacheOps, CallableSubject, limits_of

RING = 4  #: how many of the newest states a cache keeps, and so can go back to


def ring(
    *, clamps: bool = False, keeps_none: bool = False, scale: float = 1.0, fork_refuses: bool = False
) -> CallableSubject:
    """A decoder that adds up its tokens' rows and keeps the newest sums alone.

    ``clamps``: a crop past them goes back as far as it can, and says nothing. ``keeps_none``: no crop is done.
    ``scale``: what is wrong with a row on a warm cache.
    """

    def functions(dtype: str) -> tuple[Any, Any]:
        rows = table(dtype)

        def full(ids: Any) -> Any:
            return rows[ids].cumsum(axis=0)

        def step(ids: Any, cache: Any) -> Any:
            length, kept = (0, [np.zeros(VOCAB, dtype)]) if cache is None else cache
            sums = kept[-1] + rows[ids].cumsum(axis=0)
            logits = sums if cache is None else sums * scale
            return logits, (length + len(ids), [*kept, *sums][-RING:])

        return full, step

    def crop(cache: Any, length: int) -> Any:
        now, kept = cache
        back = now - length
        if keeps_none or back >= len(kept):
            if not clamps:
                raise RefusedError(f"the ring has overwritten what followed token {length}")
            back = len(kept) - 1
        return length, kept[: len(kept) - back]

    def fork(cache: Any) -> Any:
        if fork_refuses:
            raise RefusedError("this engine has no copy of a request in flight")
        return cache

    return CallableSubject(*functions("float32"), cast=functions, ops=CacheOps(crop=crop, fork=fork))


def result(report: Report, name: str) -> ScenarioResult:
    (found,) = (s for s in report.scenarios if s.name == name)
    return found


def test_a_crop_that_is_refused_is_not_checked_with_the_reason():
    report = audit(ring())
    assert report.verdict.passes, report
    rollback = result(report, "rollback")
    assert rollback.verdict is Verdict.NOT_CHECKED
    assert rollback.reason == (
        "crop to 9 after 28 tokens was refused: the ring has overwritten what followed token 9"
    )
    assert not rollback.rows
    assert report.certificate is not None


def test_a_crop_that_the_ring_can_do_is_checked():
    report = audit(ring(), ["rollback"], length=8)
    assert result(report, "rollback").verdict is Verdict.NOT_CHECKED
    (near, *_) = (p for p in random_programs(limits_of(ring()), num=1, seed=0, max_len=4))
    assert audit(ring(), [near]).verdict.passes


def test_a_crop_that_goes_elsewhere_without_a_word_is_found():
    assert result(audit(ring(clamps=True)), "rollback").verdict is Verdict.DIVERGED


def test_a_refusal_covers_no_row_before_it():
    report = audit(ring(scale=1.01), ["rollback across calls"])
    assert result(report, "rollback across calls").verdict is Verdict.DIVERGED


def test_random_programs_count_what_they_did_before_a_refusal():
    programs = random_programs(limits_of(ring()), num=30, seed=0, max_len=20)
    found = audit(ring(), programs).scenarios[-1]
    assert found.verdict.passes
    assert found.reason is not None
    assert "was refused" in found.reason
    broken = audit(ring(clamps=True), programs).scenarios[-1]
    assert broken.verdict is Verdict.DIVERGED


def test_a_fork_may_be_refused_too():
    found = result(audit(ring(fork_refuses=True)), "fork")
    assert found.verdict is Verdict.NOT_CHECKED
    assert found.reason is not None
    assert found.reason.startswith("fork after 14 tokens was refused: this engine")


def test_a_call_that_feeds_tokens_cannot_be_refused():
    """Feeding tokens is what a decoder is for: one that does not is not passed by."""
    full, step = ring().full, ring()._step

    def refusing(ids: Any, cache: Any) -> Any:
        if cache is not None:
            raise RefusedError("not today")
        return step(ids, cache)

    report = audit((full, refusing), ["token-by-token"])
    assert result(report, "token-by-token").verdict is Verdict.INCONCLUSIVE
    assert not report.verdict.passes


def test_an_adapter_that_declares_a_crop_and_does_none_breaks_its_word():
    assert Ability.CROP in ring().info.abilities
    assert conformance.check(ring()).passed, conformance.check(ring())
    broken = conformance.check(ring(keeps_none=True))
    assert not broken.passed
    assert "every crop is refused: the ring has overwritten" in str(broken)


def test_a_refused_crop_must_leave_the_session_as_it_was():
    subject = ring()
    crop = subject.ops.crop
    assert crop is not None

    def spoiling(cache: Any, length: int) -> Any:
        try:
            return crop(cache, length)
        except RefusedError:
            cache[1].append(cache[1][-1] + 1)
            raise

    spoiled = CallableSubject(subject.full, subject._step, ops=CacheOps(crop=spoiling))
    assert "what follows a crop that was refused differs" in str(conformance.check(spoiled))
