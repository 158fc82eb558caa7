"""Localisation's own rules: what is kept, what is cut short, and that one pass says what literal runs say."""

import pytest
import torch
from torch import Tensor

from kvproof import ReferenceSubject, faults, localise
from kvproof._engine import rung
from kvproof._engine import uncached_values as values
from kvproof._engine.uncached_values import LiteralRuns, OnePassRuns
from kvproof._numerics.taps import Recorder, Tap
from kvproof.contract.results import SubjectInfo
from kvproof.contract.stages import OVER_SLOTS, Site, Stage
from kvproof.errors import AbilityError
from kvproof.faults import Fault, Planting
from kvproof.reference.corpus import SEQUENCES
from kvproof.scenarios import Ability, chunked_prefill, interleaved_requests, rollback, token_by_token

FAULTS = [
    faults.wrong_position(),
    faults.find("missing-append").at(layer=0),
    faults.find("duplicate-append").at(layer=0),
    faults.wrong_layer(),
    faults.find("stale-slot"),
    faults.find("swapped-kv"),
    faults.mask_off_by_one(),
    faults.cancelling_pair(),
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_one_pass_finds_what_literal_runs_find(uncounted: ReferenceSubject, fault: Fault):
    scenario = token_by_token(SEQUENCES[0])
    literal = localise(uncounted, scenario, fault=fault).divergence
    one_pass = localise(uncounted, scenario, fault=fault, one_pass=True).divergence
    assert literal is not None
    assert one_pass is not None
    assert (one_pass.stage, one_pass.layer, one_pass.position, one_pass.slot, one_pass.contract) == (
        literal.stage,
        literal.layer,
        literal.position,
        literal.slot,
        literal.contract,
    )


def test_one_pass_finds_nothing_in_a_healthy_path_and_compares_as_much(subject: ReferenceSubject):
    for scenario in (
        token_by_token(SEQUENCES[0]),
        chunked_prefill(SEQUENCES[0], 2),
        interleaved_requests(*SEQUENCES[:2]),
    ):
        literal, one_pass = localise(subject, scenario), localise(subject, scenario, one_pass=True)
        assert literal.divergence is one_pass.divergence is None
        assert literal.num_values == one_pass.num_values


@pytest.mark.parametrize("one_pass", [False, True])
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_rows_in_tiny_blocks_change_no_finding(
    uncounted: ReferenceSubject, monkeypatch: pytest.MonkeyPatch, fault: Fault, one_pass: bool
):
    """All rows of a large vocabulary, several times over, filled the memory."""
    scenario = token_by_token(SEQUENCES[0])
    whole = localise(uncounted, scenario, fault=fault, one_pass=one_pass)
    kept: list[int] = []
    plain = ReferenceSubject._kept_rows

    def counted(self: ReferenceSubject, ids: tuple[int, ...], tap: Tap, keep: range) -> Tensor:
        kept.append(len(keep))
        return plain(self, ids, tap, keep)

    monkeypatch.setattr(ReferenceSubject, "_kept_rows", counted)
    monkeypatch.setattr(rung, "BLOCK_BYTES", 2 * 8 * uncounted.info.vocab_size)
    monkeypatch.setattr(rung, "KEPT_BYTES", 0)
    assert localise(uncounted, scenario, fault=fault, one_pass=one_pass) == whole
    assert max(kept) == 2


def test_literal_runs_without_room_keep_few_whole_and_the_entries_of_each_sequence(
    subject: ReferenceSubject, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(values, "KEPT_BYTES", 0)
    runs = LiteralRuns(subject)
    for sequence in SEQUENCES:
        for length in range(1, len(sequence) + 1):
            assert runs.over(tuple(sequence[:length])).ids == sequence[:length]
    assert len(runs.kept) <= 12
    assert set(runs.entries) == set(map(tuple, SEQUENCES))
    stages = {site.stage for entries in runs.entries.values() for site in entries}
    assert stages == OVER_SLOTS


def test_one_pass_runs_each_longest_sequence_once_and_no_further_than_asked(
    subject: ReferenceSubject, monkeypatch: pytest.MonkeyPatch
):
    lengths: list[int] = []
    plain = ReferenceSubject._rows

    def counted(self: ReferenceSubject, ids: tuple[int, ...], tap: object) -> Tensor:
        lengths.append(len(ids))
        return plain(self, ids, tap)

    monkeypatch.setattr(ReferenceSubject, "_rows", counted)
    sequence = tuple(SEQUENCES[0])
    runs = OnePassRuns(subject, [sequence])
    for length in range(1, len(sequence) + 1):
        assert runs.over(sequence[:length]).ids == sequence
    assert lengths == [len(sequence), len(sequence) - 1], "one pass, and one for the noise"
    assert OnePassRuns(subject, [sequence], until=sequence[:2]).over(sequence[:1]).ids == sequence[:2]


def test_a_prefix_consumed_twice_does_not_end_the_search_early(subject: ReferenceSubject):
    """After a crop the same ids come again; the row that is known to be wrong may be the second."""
    sequence = SEQUENCES[0]
    scenario = rollback(sequence, 1, sequence[1:])
    calls: list[int] = []

    def tap(site: Site, value: Tensor) -> Tensor:
        calls.append(site.stage is Stage.TOKEN)
        return value + 0.5 if site == Site(Stage.NEW_Q, 1) and sum(calls) == 2 else value

    fault = Fault(
        name="second",
        breaks="the call after the crop",
        stages=frozenset({Stage.NEW_Q}),
        make=lambda place: Planting(lambda: tap),
    )
    found = localise(subject, scenario, fault=fault, until=tuple(sequence[:2])).divergence
    assert found is not None
    assert (found.stage, found.layer, found.position) == (Stage.NEW_Q, 1, 1)


def test_the_subject_in_float64_can_be_handed_in(subject: ReferenceSubject, monkeypatch: pytest.MonkeyPatch):
    top = subject.cast(torch.float64)
    monkeypatch.setattr(ReferenceSubject, "_cast", None)
    assert localise(subject, token_by_token(SEQUENCES[0]), top=top).divergence is None
    declared = localise(subject, token_by_token(SEQUENCES[0]), top=top, rung="declared")
    assert declared.divergence is None
    assert declared.num_values > 500


def test_a_subject_that_cannot_be_cast_is_not_compared_in_its_own_dtype(
    subject: ReferenceSubject, monkeypatch: pytest.MonkeyPatch
):
    info = subject.info
    abilities = tuple(ability for ability in info.abilities if ability is not Ability.CAST)
    fields = {name: getattr(info, name) for name in SubjectInfo.__dataclass_fields__}
    monkeypatch.setattr(subject, "_info", SubjectInfo(**{**fields, "abilities": abilities}))
    with pytest.raises(AbilityError, match="cast"):
        localise(subject, token_by_token(SEQUENCES[0]), rung="declared")
    assert localise(subject, token_by_token(SEQUENCES[0])).num_values > 500


def test_what_one_call_recorded_is_not_taken_for_the_next_ones(subject: ReferenceSubject):
    recorder = Recorder()
    subject.rows((1, 2), tap=recorder)
    assert Site(Stage.LOGITS) in recorder.take()
    assert recorder.values == {}


def _adding(site: Site, sizes: dict[tuple[int, int, int], float], call: int) -> Fault:
    """A fault that adds to a value, at (head, slot, entry) or (head, entry or slot, 0), in one call."""

    def plant() -> Tap:
        calls: list[int] = []

        def tap(at: Site, value: Tensor) -> Tensor:
            if at != site:
                return value
            calls.append(1)
            if len(calls) != call + 1:
                return value
            value = value.clone()
            for (head, slot, entry), size in sizes.items():
                place = (head, slot, entry) if site.stage in OVER_SLOTS else (head, 0, slot)
                value[0][place] += size
            return value

        return tap

    return Fault(
        name="adding", breaks=str(site), stages=frozenset({site.stage}), make=lambda place: Planting(plant)
    )


ALIKE = {
    "two slots": (Stage.CACHE_K, (1, 0, 1), (0, 2, 0), (1, 0)),
    "two heads": (Stage.CACHE_V, (0, 1, 1), (1, 1, 0), (0, 1)),
    "two entries": (Stage.CACHE_K, (1, 2, 0), (1, 2, 1), (1, 2)),
    "two slots of weights": (Stage.ATTN_WEIGHTS, (1, 0, 0), (0, 1, 0), (1, 0)),
    "two heads' weights": (Stage.ATTN_WEIGHTS, (0, 1, 0), (1, 1, 0), (0, 1)),
}


@pytest.mark.parametrize("later_is_larger", [False, True])
@pytest.mark.parametrize(("stage", "first", "second", "named"), ALIKE.values(), ids=ALIKE)
def test_of_equal_differences_the_earliest_slot_is_named_then_the_earliest_head(
    subject: ReferenceSubject,
    stage: Stage,
    first: tuple[int, int, int],
    second: tuple[int, int, int],
    named: tuple[int, int],
    later_is_larger: bool,
):
    """Equal by algebra and not in the last digit, which one processor rounds up and another down."""
    sizes = {first: 0.5, second: 0.5}
    sizes[second if later_is_larger else first] += 2.0**-49
    fault = _adding(Site(stage, 0), sizes, call=2)
    divergence = localise(subject, token_by_token(SEQUENCES[0]), fault=fault).divergence
    assert divergence is not None
    assert (divergence.stage, divergence.head, divergence.slot) == (stage, *named)


@pytest.mark.parametrize(("stage", "first", "second"), [(s, a, b) for s, a, b, _ in list(ALIKE.values())[1:]])
def test_of_different_differences_the_larger_is_named(
    subject: ReferenceSubject, stage: Stage, first: tuple[int, int, int], second: tuple[int, int, int]
):
    fault = _adding(Site(stage, 0), {first: 0.5, second: 0.5 + 1e-6}, call=2)
    divergence = localise(subject, token_by_token(SEQUENCES[0]), fault=fault).divergence
    assert divergence is not None
    assert (divergence.head, divergence.slot) == second[:2]
    assert abs(divergence.actual - divergence.expected) == pytest.approx(0.5 + 1e-6, rel=1e-9)


def test_of_wrong_slots_the_earliest_is_named_though_a_later_one_is_further_off(subject: ReferenceSubject):
    fault = _adding(Site(Stage.CACHE_K, 0), {(1, 1, 0): 0.25, (0, 2, 0): 0.5}, call=2)
    divergence = localise(subject, token_by_token(SEQUENCES[0]), fault=fault).divergence
    assert divergence is not None
    assert (divergence.head, divergence.slot, divergence.gap) == (1, 1, pytest.approx(0.25))
