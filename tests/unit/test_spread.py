"""How errors spread: every value of a program, against the localiser's finding and the cache's own length."""

import dataclasses

import pytest
import torch
from tests.small_report import DIVERGENCE

from kvproof import audit, faults
from kvproof._engine.spread import BEFORE, MOST_TOKENS, spread_of
from kvproof.contract.results import Divergence, Spread
from kvproof.faults import Fault
from kvproof.reference import Checkpoint, DecoderConfig
from kvproof.reference.corpus import SEQUENCES
from kvproof.reference.training import initialised
from kvproof.scenarios import Ability, Crop, Extend, Scenario, batch_of, token_by_token
from kvproof.subjects import ReferenceSubject

PLANTED = [
    faults.wrong_position(),
    faults.wrong_layer(),
    faults.find("duplicate-append").at(layer=0),
    faults.find("stale-slot"),
    faults.mask_off_by_one(),
    faults.find("heads-out-of-order"),
    faults.find("token-fed-twice").at(position=1),
]


def wrong(spread: Spread) -> list[tuple[int, int]]:
    """Return every wrong value's site and token, in causal order: by token, which here are one a call."""
    places = [
        (token, site)
        for token in range(len(spread.tokens))
        for site, gaps in enumerate(spread.gaps)
        if gaps[token] is not None and not gaps[token] <= spread.sites[site].allowed
    ]
    return [(site, token) for token, site in sorted(places)]


def test_a_healthy_program_has_no_wrong_value(subject: ReferenceSubject):
    spread = spread_of(subject.cast(torch.float64), token_by_token(SEQUENCES[0]))
    assert wrong(spread) == []
    assert [site.name for site in spread.sites][:3] == ["token", "position", "embedding"]
    assert [token.token for token in spread.tokens] == ["<bos>", "A", "B", "D"]
    assert not spread.left_out
    assert not any(slot.wrong for slot in spread.kept)
    assert {(s.layer, s.slot, s.first_call, s.last_call) for s in spread.kept} == {
        (layer, slot, slot, 3) for layer in range(2) for slot in range(4)
    }


@pytest.mark.parametrize("fault", PLANTED, ids=lambda fault: fault.name)
def test_the_first_wrong_value_is_the_one_that_the_audit_names(fault: Fault, uncounted: ReferenceSubject):
    program = token_by_token(SEQUENCES[0])
    report = audit(uncounted, [program], faults=[fault], spread=True)
    clean, spread = report.spreads
    assert (clean.fault, spread.fault) == (None, fault.name)
    assert wrong(clean) == []
    (site, token), *others = wrong(spread)
    found = report.faults[0].divergence
    assert spread.sites[site].name.startswith(found.stage)
    assert (spread.sites[site].layer, spread.tokens[token].position) == (found.layer, found.position)
    assert others, "and it is carried on"
    assert any(slot.origin == found.origin for slot in spread.kept)


def test_a_slot_that_is_taken_back_holds_two_things_in_turn(subject: ReferenceSubject):
    operations = (Extend(ids=((0, 2, 3),)), Crop(length=1), Extend(ids=((6,),)))
    program = Scenario(name="rollback", exposes="a crop", operations=operations)
    spread = spread_of(subject.cast(torch.float64), program)
    held = [(s.first_call, s.last_call, s.slot, s.token) for s in spread.kept if s.layer == 0]
    assert sorted(held) == [(0, 0, 1, "A"), (0, 0, 2, "B"), (0, 1, 0, "<bos>"), (1, 1, 1, "X")]
    assert wrong(spread) == []


def found_at(ids: tuple[int, ...]) -> Divergence:
    return dataclasses.replace(DIVERGENCE, ids=ids, position=len(ids) - 1)


def test_a_long_program_is_shown_around_its_first_mismatch(checkpoint: Checkpoint):
    decoder = initialised(DecoderConfig(context_len=80), 0).eval().requires_grad_(False)
    subject = ReferenceSubject(dataclasses.replace(checkpoint, decoder=decoder))
    ids = tuple(i % 8 for i in range(80))
    fault, at = faults.find("stale-slot").at(layer=0, position=60), 60
    clean = spread_of(subject, token_by_token(ids), one_pass=True)
    spread = spread_of(subject, token_by_token(ids), fault=fault, first=found_at(ids[: at + 1]), one_pass=True)
    first = at + BEFORE - MOST_TOKENS
    assert [t.position for t in clean.tokens] == list(range(MOST_TOKENS))
    assert [t.position for t in spread.tokens] == list(range(first, first + MOST_TOKENS))
    assert clean.left_out
    assert spread.left_out
    assert spread.tokens[wrong(spread)[0][1]].position == at
    assert {slot.position for slot in clean.kept} == set(range(MOST_TOKENS))
    assert {slot.position for slot in spread.kept} == set(range(first, first + MOST_TOKENS))


def test_a_wrong_slot_of_a_token_long_gone_is_shown(checkpoint: Checkpoint):
    decoder = initialised(DecoderConfig(context_len=80), 0).eval().requires_grad_(False)
    subject = ReferenceSubject(dataclasses.replace(checkpoint, decoder=decoder))
    ids = tuple((i * i + i) % 8 for i in range(60))
    fault = faults.find("stale-slot").at(layer=0, position=4)
    spread = spread_of(subject, token_by_token(ids), fault=fault, first=found_at(ids[:50]), one_pass=True)
    early = [slot for slot in spread.kept if slot.position < spread.tokens[0].position]
    assert {(slot.layer, slot.slot) for slot in early if slot.layer == 0} == {(0, 3)}
    assert all(slot.wrong for slot in early)


def test_of_a_batch_the_row_with_the_finding_is_shown(subject: ReferenceSubject):
    program = batch_of("batch", "", [SEQUENCES[0][:2], SEQUENCES[2][:2]], [SEQUENCES[0][2:], SEQUENCES[2][2:]])
    clean = spread_of(subject, program)
    second = spread_of(subject, program, first=found_at(SEQUENCES[2][:3]))
    assert [t.token for t in clean.tokens] == ["<bos>", "A", "B", "D"]
    assert [(t.batch_row, t.token) for t in second.tokens][2:] == [(1, "X"), (1, "Y"), (1, "X")]
    assert {t.token for t in second.tokens[:2]} == {"<bos>"}, "both rows start with it"


def test_a_decoder_that_shows_no_values_has_none(checkpoint: Checkpoint):
    class Mute(ReferenceSubject):
        @property
        def info(self):
            kept = tuple(a for a in super().info.abilities if a is not Ability.TAP)
            return dataclasses.replace(super().info, abilities=kept)

    report = audit(Mute(checkpoint), [token_by_token(SEQUENCES[0])], top_rung=False, spread=True)
    assert report.spreads == ()
