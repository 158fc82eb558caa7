"""The uncached rows: two ways to them, kept in blocks, and what is known of a decoder that raises."""

import sys
from collections.abc import Sequence
from typing import Literal

import pytest
import torch
from tests.strategies import random_subject

from kvproof import ReferenceSubject, Report, Tolerance, Verdict, audit
from kvproof._engine import rung as rung_module
from kvproof._engine.audit import NO_CERTIFICATE
from kvproof._engine.rung import Rung
from kvproof._engine.uncached_rows import CAUSALITY_LEN, Uncached
from kvproof._numerics.taps import Tap
from kvproof.errors import SubjectError
from kvproof.reference import Checkpoint, DecoderConfig
from kvproof.scenarios import Ability, chunked_prefill, token_by_token
from kvproof.subjects._base import Opening
from kvproof.subjects._reference import ReferenceSession

Reference = Literal["literal", "one-pass"]

needs_fork = pytest.mark.skipif(sys.platform != "linux", reason="only Linux forks")

VOCABULARY = 16
CONFIG = DecoderConfig(num_layers=2, num_heads=2, head_dim=4, mlp_width=8, context_len=40, vocab_size=VOCABULARY)
IDS = tuple(7 * i % VOCABULARY for i in range(30))
OTHER = (1, *IDS[1:12])
#: Wide enough for a healthy float32 decoder to match where there is no float64 to excuse it.
LOOSE = Tolerance(dtype="float32", absolute=1e-3, relative=0.0, source="a test")


def notes_of(report: Report) -> tuple[str, ...]:
    """Return the notes, but for the one that no audit here is certified."""
    return tuple(note for note in report.notes if note != NO_CERTIFICATE)


class Watched(ReferenceSubject):
    """A random decoder that writes down each uncached forward, and raises where it is told to."""

    abilities: tuple[Ability, ...] | None = None

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint)
        self.forwards: list[tuple[tuple[int, ...], range]] = []
        self.broken: set[tuple[torch.dtype, int]] = set()  #: dtypes and lengths at which it raises

    def _kept_rows(self, ids: Sequence[int], tap: Tap, keep: range) -> torch.Tensor:
        self.forwards.append((tuple(ids), keep))
        if (self.dtype, len(ids)) in self.broken:
            raise RuntimeError(f"no kernel for {len(ids)} tokens\nand a second line")
        return super()._kept_rows(ids, tap, keep)

    def _cast(self, dtype: torch.dtype) -> "Watched":
        cast = type(self)(super()._cast(dtype).checkpoint)
        cast.broken = self.broken
        return cast


@pytest.fixture
def watched() -> Watched:
    return Watched(random_subject(CONFIG, seed=3).checkpoint)


def known(subject: ReferenceSubject, reference: Reference, *sequences: tuple[int, ...]) -> Uncached:
    uncached = Uncached(subject, reference)
    uncached.measure(sequences)
    return uncached


@pytest.mark.parametrize("top", [False, True], ids=["declared", "float64"])
def test_both_ways_give_the_same_rows(watched: Watched, top: bool):
    literal, one_pass = (known(watched, reference, IDS) for reference in ("literal", "one-pass"))
    for length in range(1, len(IDS) + 1):
        expected = literal.row(IDS[:length], top=top)
        bound = 1e-13 if top else 1e-5
        torch.testing.assert_close(one_pass.row(IDS[:length], top=top), expected, rtol=0, atol=bound)


def test_a_literal_row_comes_from_the_forward_over_exactly_its_prefix(watched: Watched):
    uncached = known(watched, "literal", IDS[:6])
    watched.forwards.clear()
    uncached.row(IDS[:4])
    uncached.row((3, 3))
    assert watched.forwards == [((3, 3), range(1, 2))], "what is known is not computed again"


def ids_of(*lengths: int) -> list[tuple[int, ...]]:
    return [tuple((start + 7 * i) % VOCABULARY for i in range(n)) for start, n in enumerate(lengths)]


@needs_fork
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_other_processes_computed_is_what_this_one_would_have(watched: Watched, dtype: torch.dtype):
    """Rows and all that is measured by them; what is known by then is not computed again."""
    sequences = [*ids_of(30, 20, 9), IDS[:4]]
    subject = watched if dtype is torch.float32 else watched._cast(dtype)
    alone, helped = Uncached(subject, "one-pass"), Uncached(subject, "one-pass")
    alone.measure(sequences)
    subject.forwards.clear()
    for sequence in helped.precompute(sequences, jobs=2):
        helped.measure([sequence])
    assert subject.forwards == []
    assert helped.both_ways == alone.both_ways
    for length in range(1, 31):
        row = helped.row(sequences[0][:length]), alone.row(sequences[0][:length])
        assert torch.equal(*row), length
        for known in ("noise", "top_noise", "error"):
            assert getattr(helped, known)(length) == getattr(alone, known)(length)


@needs_fork
def test_what_raised_in_another_process_raises_where_it_is_asked_for(watched: Watched):
    sequences = ids_of(20, 9)
    watched.broken = {(torch.float32, 20)}
    uncached = Uncached(watched, "one-pass")
    first, second = uncached.precompute(sequences, jobs=2)
    with pytest.raises(SubjectError, match="no kernel for 20 tokens"):
        uncached.measure([first])
    uncached.measure([second])
    assert uncached.noise(9) >= 0


@needs_fork
def test_a_sequence_that_another_starts_with_is_not_computed_apart(watched: Watched):
    uncached = Uncached(watched, "one-pass")
    sequences = [IDS, IDS[:12], IDS[:5]]
    assert list(uncached.precompute(sequences, jobs=2)) == sequences
    whole = [key for key in uncached.declared.blocks if len(key[0]) == 12]
    assert whole == []
    uncached.measure(sequences)
    assert list(uncached.precompute([IDS[:7]], jobs=2)) == [IDS[:7]]


def in_blocks(monkeypatch: pytest.MonkeyPatch, block_len: int, num_blocks: int) -> int:
    """Let a float32 rung of this vocabulary keep so many blocks of so many rows; return a block's bytes."""
    block_bytes = block_len * VOCABULARY * 4
    monkeypatch.setattr(rung_module, "BLOCK_BYTES", block_bytes)
    monkeypatch.setattr(rung_module, "KEPT_BYTES", num_blocks * block_bytes)
    return block_bytes


@pytest.mark.parametrize("num_blocks", [0, 1, 2])
@pytest.mark.parametrize("block_len", [1, 7, 30, 100])
def test_rows_in_blocks_are_the_rows_of_one_block(
    watched: Watched, monkeypatch: pytest.MonkeyPatch, block_len: int, num_blocks: int
):
    expected = watched.rows(IDS)
    in_blocks(monkeypatch, block_len, num_blocks)
    rung = Rung(watched)
    for length in (*range(1, len(IDS) + 1), *range(len(IDS), 0, -3)):
        assert torch.equal(rung.one_pass(IDS, length), expected[length - 1]), length


def test_what_is_kept_stays_within_its_bytes_and_what_was_dropped_is_computed_again(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
):
    block_bytes = in_blocks(monkeypatch, block_len=10, num_blocks=2)
    rung = Rung(watched)
    for length in (1, 10, 11, 21, 1, 30, 2):
        rung.one_pass(IDS, length)
        assert sum(block.numel() * 4 for block in rung._blocks.values()) <= 2 * block_bytes
    first, second, third = (range(start, start + 10) for start in (0, 10, 20))
    assert [keep for _, keep in watched.forwards] == [first, second, third, first], (
        "a block is dropped when it was not used for the longest time"
    )


def test_a_block_that_alone_takes_more_than_may_be_kept_is_kept_alone(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
):
    block_bytes = in_blocks(monkeypatch, block_len=10, num_blocks=1)
    monkeypatch.setattr(rung_module, "KEPT_BYTES", 1)
    rung = Rung(watched)
    for length in (1, 2, 11, 12):
        rung.one_pass(IDS, length)
        assert [block.numel() * 4 for block in rung._blocks.values()] == [block_bytes]
    assert len(watched.forwards) == 2


def test_rows_that_are_kept_hold_the_memory_of_no_others(watched: Watched, monkeypatch: pytest.MonkeyPatch):
    """A view counted as one row, and kept every row of its forward alive."""
    in_blocks(monkeypatch, block_len=10, num_blocks=9)
    rung = Rung(watched)
    rung.literal(IDS)
    rung.one_pass(IDS, 25)
    for block in rung._blocks.values():
        assert block.untyped_storage().nbytes() == block.numel() * 4


def test_an_audit_in_tiny_blocks_finds_what_one_in_a_single_block_does(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
):
    programs = [token_by_token(IDS[:12]), chunked_prefill(OTHER, 5)]
    whole = audit(watched, programs, all_values=False)
    in_blocks(monkeypatch, block_len=3, num_blocks=1)
    assert audit(watched, programs, all_values=False).scenarios == whole.scenarios


def test_a_sequence_that_starts_a_known_one_costs_no_forward(watched: Watched):
    uncached = known(watched, "one-pass", IDS)
    assert uncached.top is not None
    forwards = uncached.top.subject.forwards
    counts = len(watched.forwards), len(forwards)
    both_ways = list(uncached.both_ways)
    uncached.measure([IDS[:5], IDS, IDS[:1]])
    for length in range(1, len(IDS) + 1):
        uncached.row(IDS[:length])
        uncached.row(IDS[:length], top=True)
    assert (len(watched.forwards), len(forwards)) == counts
    assert uncached.both_ways == both_ways


def test_the_longest_sequence_comes_first_and_the_shorter_ones_share_its_pass(watched: Watched):
    known(watched, "one-pass", IDS[:3], IDS[:8], IDS)
    assert {keep for ids, keep in watched.forwards if ids == IDS} == {range(len(IDS))}
    assert [keep for ids, keep in watched.forwards if len(keep) > 1] == [range(len(IDS))]


@pytest.mark.parametrize("reference", ["literal", "one-pass"])
def test_every_prefix_of_the_longest_sequence_up_to_the_proof_s_length_is_measured_both_ways(
    watched: Watched, reference: Reference
):
    uncached = known(watched, reference, OTHER, IDS)
    assert len(IDS) > CAUSALITY_LEN
    measured = [both.prefix for both in uncached.both_ways]
    assert set(measured) >= {IDS[:length] for length in range(1, CAUSALITY_LEN + 1)}
    assert len(set(measured)) == len(measured)
    assert any(OTHER[: len(prefix)] == prefix for prefix in measured), "a spot of every other sequence too"


def test_noise_and_error_never_fall_with_length_and_are_pooled_over_sequences(watched: Watched):
    uncached = known(watched, "one-pass", IDS)
    before = [uncached.error(length) for length in range(1, len(IDS) + 1)]
    uncached.measure([OTHER])
    for known_of in (uncached.noise, uncached.top_noise, uncached.error):
        values = [known_of(length) for length in range(1, len(IDS) + 1)]
        assert values == sorted(values)
        assert known_of(1000) == values[-1]
    after = [uncached.error(length) for length in range(1, len(IDS) + 1)]
    assert all(old <= new for old, new in zip(before, after, strict=True))
    assert 0 < uncached.top_noise(30) < 1e-12 < uncached.noise(30) < 1e-4


def test_a_longer_sequence_after_a_shorter_one_starts_from_what_that_showed(watched: Watched):
    uncached = known(watched, "one-pass", OTHER)
    shown = uncached.noise(len(OTHER)), uncached.error(len(OTHER))
    uncached.measure([(2, *IDS)])
    assert uncached.noise(31) >= shown[0]
    assert uncached.error(31) >= shown[1]


@pytest.mark.parametrize("reference", ["literal", "one-pass"])
def test_a_sequence_whose_forward_raises_stays_unknown_and_can_be_measured_later(
    watched: Watched, reference: Reference
):
    uncached = Uncached(watched, reference)
    watched.broken = {(torch.float32, 5)}
    with pytest.raises(SubjectError, match="no kernel for 5 tokens"):
        uncached.measure([IDS[:9]])
    assert uncached.continuation(IDS[:2]) is None
    watched.broken.clear()
    uncached.measure([IDS[:9]])
    assert uncached.continuation(IDS[:2]) == IDS[:9]
    fresh = known(Watched(watched.checkpoint), reference, IDS[:9])
    assert uncached.both_ways == fresh.both_ways, "no prefix twice, and none left out"
    for length in range(1, 10):
        assert uncached.noise(length) == fresh.noise(length)
        assert uncached.error(length) == fresh.error(length)


@pytest.mark.parametrize("reference", ["literal", "one-pass"])
@pytest.mark.parametrize("length", [1, 4, 9])
def test_a_float64_rung_that_raises_is_given_up_and_noise_alone_decides(
    watched: Watched, reference: Reference, length: int
):
    watched.broken = {(torch.float64, length)}
    report = audit(
        watched, [token_by_token(IDS[:9]), chunked_prefill(IDS[:9], 4)], reference=reference, tolerance=LOOSE
    )
    assert report.verdict is Verdict.MATCH
    (note,) = notes_of(report)
    assert note == (
        f"no float64 rung, so noise alone decides: the decoder raised RuntimeError: no kernel for {length} tokens"
    )
    scenarios = [result for result in report.scenarios if result.name != "causality"]
    assert [len(result.rows) for result in scenarios] == [9, 9]
    for row in (row for result in scenarios for row in result.rows):
        assert (row.top_gap, row.uncached_error, row.cached_error) == (None, None, None)


def test_causality_holds_each_prefix_once_where_the_float64_rung_was_given_up_half_way(watched: Watched):
    watched.broken = {(torch.float64, 4)}
    report = audit(watched, [token_by_token(IDS[:9])], tolerance=LOOSE)
    causality = report.scenarios[0]
    assert causality.verdict is Verdict.MATCH, "changing later tokens changes no bit"
    lengths = [len(row.ids) for row in causality.rows]
    assert lengths == sorted(set(lengths))


def test_a_float64_rung_that_cannot_be_made_is_given_up(watched: Watched):
    class Uncastable(Watched):
        def _cast(self, dtype: torch.dtype) -> Watched:
            raise MemoryError("8 GB are not there")

    report = audit(Uncastable(watched.checkpoint), [token_by_token(IDS[:9])], tolerance=LOOSE)
    assert report.verdict is Verdict.MATCH
    assert notes_of(report) == (
        "no float64 rung, so noise alone decides: the decoder raised MemoryError: 8 GB are not there",
    )


class Uncast(ReferenceSubject):
    """A decoder that cannot be cast."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint)
        abilities = tuple(a for a in self._info.abilities if a is not Ability.CAST)
        self._info = type(self._info)(
            **{name: getattr(self._info, name) for name in self._info.__dataclass_fields__}
            | {"abilities": abilities}
        )


def test_a_subject_that_cannot_be_cast_is_judged_by_noise_and_the_report_says_so(watched: Watched):
    subject = Uncast(watched.checkpoint)
    uncached = known(subject, "one-pass", IDS)
    assert uncached.top is None
    assert uncached.rungs == [uncached.declared]
    assert {both.top_gap for both in uncached.both_ways} == {None}
    assert uncached.noise(30) > 0
    report = audit(subject, [token_by_token(IDS[:9])], tolerance=LOOSE)
    assert report.verdict is Verdict.MATCH
    assert notes_of(report) == ("no float64 rung, so noise alone decides: the subject cannot be cast",)


def test_a_top_rung_that_was_not_asked_for_is_left_out_and_the_report_says_so(watched: Watched):
    report = audit(watched, [token_by_token(IDS[:9])], top_rung=False, tolerance=LOOSE)
    assert report.verdict is Verdict.MATCH
    assert notes_of(report) == ("no float64 rung, so noise alone decides: left out as asked",)


class NoBlocksInFloat64(Watched):
    """A decoder whose float64 session takes one token a call."""

    def _session(self, opening: Opening) -> ReferenceSession:
        session = super()._session(opening)
        if self.dtype is torch.float64:
            session.__class__ = _OneTokenACall
        return session


class _OneTokenACall(ReferenceSession):
    def _extend(self, ids: Sequence[Sequence[int]], start: int) -> torch.Tensor:
        if len(ids[0]) > 1:
            raise NotImplementedError("no float64 kernel for blocks")
        return super()._extend(ids, start)


def test_a_float64_session_that_raises_in_one_scenario_costs_that_scenario_its_top_rung(watched: Watched):
    subject = NoBlocksInFloat64(watched.checkpoint)
    report = audit(subject, [token_by_token(IDS[:9]), chunked_prefill(IDS[:9], 4)], tolerance=LOOSE)
    assert report.verdict is Verdict.MATCH
    assert notes_of(report) == (
        "chunked prefill ran without the float64 rung, which raised: "
        "the decoder raised NotImplementedError: no float64 kernel for blocks",
    )
    causality, steps, chunks = report.scenarios
    assert causality.verdict.passes
    assert all(row.top_gap is not None for row in (*causality.rows, *steps.rows))
    assert len(chunks.rows) == 9
    assert all(row.top_gap is None for row in chunks.rows)


def test_a_declared_forward_that_raises_makes_every_scenario_inconclusive_and_says_why(watched: Watched):
    watched.broken = {(torch.float32, 5), (torch.float64, 5)}
    report = audit(watched, [token_by_token(IDS[:9])], reference="literal")
    assert report.verdict is Verdict.INCONCLUSIVE
    assert report.exit_status == 3
    (result,) = report.scenarios
    assert "no kernel for 5 tokens" in result.reason


def test_a_sequence_that_cannot_be_run_leaves_the_others_their_float64_and_causality(watched: Watched):
    """One scenario past what a decoder can run made the audit of all others do without both."""
    watched.broken = {(torch.float32, len(IDS)), (torch.float64, len(IDS))}
    report = audit(watched, [token_by_token(IDS), chunked_prefill(OTHER, 5)], all_values=False)
    causality, long, short = report.scenarios
    assert notes_of(report) == ()
    assert causality.verdict.passes
    assert len(causality.rows) > 5
    assert long.verdict is Verdict.INCONCLUSIVE
    assert long.reason is not None
    assert "no kernel for 30 tokens" in long.reason
    assert short.verdict.passes
    assert all(row.top_gap is not None for row in short.rows)


def test_a_leak_is_found_beside_a_sequence_that_cannot_be_run():
    class Looks(Watched):
        def _kept_rows(self, ids: Sequence[int], tap: Tap, keep: range) -> torch.Tensor:
            rows = super()._kept_rows(ids, tap, keep)
            return rows + sum(ids)

    subject = Looks(random_subject(CONFIG, seed=3).checkpoint)
    subject.broken = {(torch.float32, len(IDS)), (torch.float64, len(IDS))}
    report = audit(subject, [token_by_token(IDS), chunked_prefill(OTHER, 5)], all_values=False)
    assert report.scenarios[0].verdict is Verdict.DIVERGED
    assert "not causal" in report.summary
