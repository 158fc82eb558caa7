"""An adapter is held to its word: one that keeps it passes, and each way to break it is named."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from tests.unit.test_given import Sums, sums
from torch import Tensor

from kvproof import ReferenceSubject, conformance
from kvproof.scenarios import Boundaries
from kvproof.subjects import CacheOps, CallableSubject, ModuleSubject
from kvproof.subjects._reference import ReferenceSession


def test_the_reference_adapter_keeps_its_word(subject: ReferenceSubject):
    result = conformance.check(subject)
    assert result.passed, result
    assert len(result.checks) == 14
    conformance.assert_conforms(subject)


def test_what_people_bring_keeps_its_word():
    assert conformance.check(sums()).passed, conformance.check(sums())
    module = ModuleSubject(Sums(), cache="memory")
    assert conformance.check(module).passed, conformance.check(module)


def test_a_transformers_model_keeps_its_word():
    pytest.importorskip("transformers")
    from kvproof.subjects._transformers import random_model

    for kind in ("llama", "mamba2", "gemma3_text"):
        result = conformance.check(random_model(kind, seed=0, dtype=torch.float32, attention="eager"))
        assert result.passed, result


def broken(method: str, replacement: Callable[..., Any]) -> type[ReferenceSubject]:
    """Return the reference adapter with one method of its sessions replaced."""
    session = type("Broken", (ReferenceSession,), {method: replacement})

    class Adapter(ReferenceSubject):
        def _session(self, opening: Any) -> Any:
            opened = super()._session(opening)
            return session(self, opened.ids, opened.cache, opened.tap)

        def _cast(self, dtype: torch.dtype) -> ReferenceSubject:
            return ReferenceSubject(self.checkpoint) if method == "cast" else super()._cast(dtype)

    return Adapter


def keep_tail(session: ReferenceSession, length: int) -> None:
    session.cache = session.cache.crop(max(length, 3) if length else 0)


def share(session: ReferenceSession, tap: Any) -> ReferenceSession:
    """A fork that is the session itself under another name."""

    class Shared(ReferenceSession):
        @property
        def cache(self) -> Any:
            return session.cache

        @cache.setter
        def cache(self, cache: Any) -> None:
            session.cache = cache

    return Shared(session.reference, session.ids, session.cache, tap)


def stay(session: ReferenceSession, rows: Sequence[int]) -> None:
    """Rows that are not moved."""


def remember(session: ReferenceSession) -> None:
    """A reset that forgets nothing."""


def deaf(session: ReferenceSession, ids: Sequence[Sequence[int]], start: int) -> Tensor:
    """A session that shows its tap nothing."""
    tap, session.tap = session.tap, lambda site, value: value
    try:
        return ReferenceSession._extend(session, ids, start)
    finally:
        session.tap = tap


def keep_own(session: ReferenceSession, layers: Any) -> None:
    """Tensors that are handed in and not taken."""


@pytest.mark.parametrize(
    ("method", "replacement", "promise"),
    [
        ("_crop", keep_tail, "after a crop other tokens follow"),
        ("_fork", share, "a fork shares nothing"),
        ("_reorder", stay, "rows that are reordered take their state along"),
        ("_reset", remember, "a reset session is as good as a new one"),
        ("_extend", deaf, "a tap sees the tokens"),
        ("_put_tensors", keep_own, "tensors that are put back change nothing, and others do"),
        ("cast", None, "a cast decoder is the same one in another dtype"),
        ("_cache_tensors", lambda session: ({},), "cache tensors are by layer"),
    ],
)
def test_a_broken_promise_is_named(
    subject: ReferenceSubject, method: str, replacement: Callable[..., Any], promise: str
):
    result = conformance.check(broken(method, replacement)(subject.checkpoint))
    assert not result.passed
    problems = [check for check in result.checks if check.problem is not None]
    assert any(check.promise.startswith(promise) for check in problems), result
    assert str(result).splitlines()[1].startswith("BROKEN: ")
    with pytest.raises(AssertionError, match="BROKEN"):
        conformance.assert_conforms(broken(method, replacement)(subject.checkpoint))


def test_functions_that_share_a_cache_are_named():
    subject = CallableSubject(*sums(), ops=CacheOps(fork=lambda cache: cache))
    assert conformance.check(subject).passed  # this cache is a value: sharing it does no harm

    full, step = sums()

    def in_place(ids: Any, cache: Any) -> Any:
        logits, kept = step(ids, cache)
        if cache is not None:
            cache[:] = kept
            kept = cache
        return logits, kept

    shared = CallableSubject(full, in_place, ops=CacheOps(fork=lambda cache: cache))
    broken_ones = [check.promise for check in conformance.check(shared).checks if check.problem]
    assert "a fork shares nothing with what it was forked from" in broken_ones


def test_rows_that_change_by_themselves_are_named():
    full, step = sums()
    calls = iter(range(1000))
    subject = CallableSubject(lambda ids: full(ids) + next(calls), step)
    problems = {check.promise: check.problem for check in conformance.check(subject).checks}
    assert problems["rows are of the declared dtype, and the same each time"] is not None


def test_boundaries_that_say_another_context_are_named(subject: ReferenceSubject):
    class Other(ReferenceSubject):
        @property
        def boundaries(self) -> Boundaries:
            return Boundaries(context_len=99)

    problems = [str(check) for check in conformance.check(Other(subject.checkpoint)).checks if check.problem]
    assert problems == [
        "BROKEN: tokens past the context are refused, and nothing is changed by that: the boundaries say 99 "
        f"positions, the info {subject.info.context_len}"
    ]


def raising(ids: Any, cache: Any) -> Any:
    raise KeyError("no such layer")


def test_what_raises_is_shown_with_its_own_file_and_line():
    result = conformance.check(CallableSubject(sums()[0], raising))
    line = raising.__code__.co_firstlineno + 1
    broken = [check for check in result.checks if check.problem]
    assert broken
    assert all(
        check.where is not None and f"test_conformance.py, line {line}, in raising: raise" in check.where
        for check in broken
    ), result
    assert f"the decoder raised KeyError: 'no such layer' ({broken[0].where})" in str(result)


def test_an_adapter_that_returns_anything_is_a_broken_promise_and_no_crash(subject: ReferenceSubject):
    class Adapter(ReferenceSubject):
        def _session(self, opening: Any) -> Any:
            return None

    result = conformance.check(Adapter(subject.checkpoint))
    assert not result.passed
    assert "AttributeError: 'NoneType' object has no attribute" in str(result)


def test_a_quick_check_leaves_out_what_is_slow(subject: ReferenceSubject):
    quick = conformance.check(subject, quick=True)
    assert quick.passed
    assert {check.promise for check in quick.checks} < {c.promise for c in conformance.check(subject).checks}
