"""What the cache holds and what it refuses (spec R7, R8, R9, R10)."""

from collections.abc import Callable

import pytest
import torch

from kvproof import ReferenceSubject, Session
from kvproof._numerics.taps import Recorder
from kvproof._reference_system.milestone import cache_memory, requests_isolated
from kvproof._reference_system.refusals import try_refusals
from kvproof.errors import CacheError, SessionError, SubjectError
from kvproof.reference import DecoderCache
from kvproof.reference.cache import Append
from kvproof.reference.corpus import SEQUENCES


def empty_cache(request: str = "r") -> DecoderCache:
    return DecoderCache.empty(request, num_layers=2, batch=1, num_heads=2, head_dim=2, dtype=torch.float32)


def entries(num_new: int = 1, fill: float = 1.0) -> torch.Tensor:
    return torch.full((1, 2, num_new, 2), fill)


def grown(num_tokens: int, request: str = "r") -> DecoderCache:
    append = Append(empty_cache(request), num_new=num_tokens)
    for layer in (0, 1):
        append(layer, entries(num_tokens, fill=layer + 1.0), entries(num_tokens, fill=-layer - 1.0))
    return append.finish()


@pytest.mark.parametrize("sequence", SEQUENCES, ids=str)
def test_every_layer_grows_by_one_entry_a_token(subject: ReferenceSubject, sequence: tuple[int, ...]):
    session = subject.session()
    for position, token in enumerate(sequence):
        before = session.cache_tensors()
        session.extend([[token]])
        for old, new in zip(before, session.cache_tensors(), strict=True):
            for name in ("k", "v"):
                assert new[name].shape == (1, 2, position + 1, 2)
                assert torch.equal(new[name][:, :, :position], old[name]), "an old entry changed"


def test_an_append_leaves_the_old_cache_alone():
    cache = grown(2)
    append = Append(cache, num_new=1)
    append(0, entries(), entries())
    append(1, entries(), entries())
    after = append.finish()
    assert (cache.num_consumed, after.num_consumed) == (2, 3)
    assert [len(layer) for layer in cache.layers] == [2, 2]
    assert [len(layer) for layer in after.layers] == [3, 3]


def twice(append: Append) -> None:
    append(0, entries(), entries())
    append(0, entries(), entries())


def missing(append: Append) -> None:
    append(0, entries(), entries())
    append.finish()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (twice, "layer 0 appended twice"),
        (missing, "layer 1 did not append"),
        (lambda append: append(1, entries(), entries()), "layer 1 appended where layer 0 of 2 was due"),
        (lambda append: append(2, entries(), entries()), "layer 2 appended where layer 0 of 2 was due"),
        (
            lambda append: append(0, entries().transpose(1, 2), entries()),
            r"new keys have shape \(1, 1, 2, 2\), not \(1, 2, 1, 2\)",
        ),
        (
            lambda append: append(0, entries(), entries(num_new=2)),
            r"new values have shape \(1, 2, 2, 2\), not \(1, 2, 1, 2\)",
        ),
        (
            lambda append: append(0, entries().double(), entries().double()),
            "new keys are torch.float64, and the cache holds torch.float32",
        ),
    ],
)
def test_an_append_that_breaks_the_contract_is_refused(call: Callable[[Append], None], message: str):
    with pytest.raises(CacheError, match=message):
        call(Append(grown(2), num_new=1))


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (lambda: DecoderCache("r", grown(2).layers[::-1], 2), "layer 0 was given layer 1's cache"),
        (lambda: DecoderCache("r", grown(2, "s").layers, 2), "belongs to request 's', not to 'r'"),
        (lambda: DecoderCache("r", grown(2).layers, 3), "layer 0 holds 2 entries where 3 tokens were consumed"),
        (lambda: DecoderCache("r", grown(2).layers, 1), "layer 0 holds 2 entries where 1 tokens were consumed"),
    ],
)
def test_a_cache_that_is_not_its_own_is_refused(broken: Callable[[], DecoderCache], message: str):
    with pytest.raises(CacheError, match=message):
        Append(broken(), num_new=1)


def test_every_refusal_leaves_the_session_as_it_was(subject: ReferenceSubject):
    refusals = try_refusals(subject)
    assert len(refusals) == 10
    assert [r for r in refusals if not (r.refused and r.unchanged)] == []


def test_a_refused_session_goes_on_as_if_nothing_had_happened(subject: ReferenceSubject):
    undisturbed, tried = subject.session(), subject.session()
    for token in SEQUENCES[0]:
        for broken in ([[8]], [[-1]], [[]], [[1, 1, 1, 1, 1]], [[0], [0]]):
            with pytest.raises(SessionError):
                tried.extend(broken)
        assert torch.equal(tried.extend([[token]]), undisturbed.extend([[token]]))


def interrupting(times: int) -> Callable[..., torch.Tensor]:
    """Return a tap that raises the ``times``-th time it is called."""
    calls = iter(range(times, 0, -1))

    def tap(site: object, value: torch.Tensor) -> torch.Tensor:
        if next(calls, None) == 1:
            raise RuntimeError("the decoder broke half-way")
        return value

    return tap


NUM_TAPPED = 27  # values in one call of two layers


def test_one_call_taps_as_many_values_as_the_next_test_breaks(subject: ReferenceSubject):
    recorder = Recorder()
    subject.session(tap=recorder).extend([[0]])
    assert len(recorder.values) == NUM_TAPPED


@pytest.mark.parametrize("at", range(1, NUM_TAPPED + 1))
def test_a_call_that_fails_anywhere_half_way_changes_nothing(subject: ReferenceSubject, at: int):
    session = subject.session(tap=interrupting(at))
    with pytest.raises(SubjectError, match="broke half-way"):
        session.extend([[0]])
    assert session.ids == ((),)
    assert [tuple(layer["k"].shape) for layer in session.cache_tensors()] == [(1, 2, 0, 2)] * 2
    session.extend([[0]])
    assert torch.equal(session.extend([[2]])[0, -1], fresh_row(subject, (0, 2)))


def fresh_row(subject: ReferenceSubject, ids: tuple[int, ...]) -> torch.Tensor:
    session = subject.session()
    return [session.extend([[token]]) for token in ids][-1][0, -1]


def test_two_interleaved_requests_give_the_rows_of_each_alone(subject: ReferenceSubject):
    assert requests_isolated(subject)


def test_a_fork_and_its_parent_go_separate_ways(subject: ReferenceSubject):
    parent = subject.session()
    parent.extend([[0, 2]])
    child = parent.fork()
    rows = (parent.extend([[3]])[0, -1], child.extend([[4]])[0, -1])
    assert torch.allclose(rows[0], subject.rows((0, 2, 3))[-1], atol=1e-5)
    assert torch.allclose(rows[1], subject.rows((0, 2, 4))[-1], atol=1e-5)
    assert (parent.ids, child.ids) == (((0, 2, 3),), ((0, 2, 4),))


def test_memory_is_what_the_tensors_hold(subject: ReferenceSubject):
    memory = cache_memory(subject)
    assert memory.bytes_per_element == 4
    assert memory.bytes_per_token_and_layer == 2 * 2 * 2 * 4  # K and V × heads × head_dim × float32
    assert memory.bytes_per_token == 2 * memory.bytes_per_token_and_layer
    assert memory.bytes_per_layer == 4 * memory.bytes_per_token_and_layer
    assert memory.bytes_full_context == 256
    assert memory.measured_bytes == memory.bytes_per_request == 256


def test_a_layer_reports_its_bytes():
    assert grown(3).layers[0].num_bytes == 2 * (1 * 2 * 3 * 2) * 4
    assert grown(3).num_bytes == 2 * grown(3).layers[0].num_bytes


@pytest.mark.parametrize("length", [-1, 3])
def test_a_crop_to_a_length_that_is_not_there_is_refused(subject: ReferenceSubject, length: int):
    session = subject.session()
    session.extend([[0, 2]])
    with pytest.raises(SessionError, match=f"cannot crop 2 tokens to {length}"):
        session.crop(length)


@pytest.mark.parametrize(("rows", "message"), [([2], "no batch row 2"), ([-1], "no batch row -1"), ([], "one")])
def test_a_reorder_of_rows_that_are_not_there_is_refused(
    subject: ReferenceSubject, rows: list[int], message: str
):
    session: Session = subject.session(batch=2)
    session.extend([[0], [1]])
    with pytest.raises(SessionError, match=message):
        session.reorder(rows)
