"""Each planted error is named at its stage, and turned into the contract that it breaks (spec R14, R15)."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.strategies import sequences, subjects

from kvproof import (
    Greedy,
    ReferenceSubject,
    Sample,
    Stops,
    UsageError,
    Verdict,
    audit,
    faults,
    generate,
    localise,
)
from kvproof._generation.requests import first_difference
from kvproof._reference_system.milestone import TOLERANCE
from kvproof.contract.stages import (
    IN_LAYER,
    LIKELY_CONTRACT,
    SHOWN_BY_ADAPTERS,
    WRONG_KIND,
    WRONG_LAYER,
    WRONG_REQUEST,
    WRONG_SLOT,
    Site,
    Stage,
)
from kvproof.faults import Fault, Planting
from kvproof.reference.corpus import BOS_ID, EOS_ID, SEQUENCES
from kvproof.scenarios import chunked_prefill, interleaved_requests, token_by_token

DISTURBED = [s for s in Stage if s not in (Stage.TOKEN, Stage.CACHE_LEN, *SHOWN_BY_ADAPTERS, Stage.POLICY)]
PLACES = [(s, layer) for s in DISTURBED for layer in ((0, 1) if s in IN_LAYER else (None,))]


@pytest.mark.parametrize(("stage", "layer"), PLACES, ids=lambda value: str(value))
@pytest.mark.parametrize("position", [0, 1, 3])
def test_an_error_planted_at_a_stage_is_named_at_that_stage(
    subject: ReferenceSubject, stage: Stage, layer: int | None, position: int
):
    fault = faults.disturbed(stage, layer, position=position)
    found = localise(subject, token_by_token(SEQUENCES[0]), fault=fault).divergence
    assert found is not None
    assert (found.stage, found.layer, found.position) == (stage, layer, position)
    assert found.ids == SEQUENCES[0][: position + 1]
    assert str(Site(stage, layer)) in found.sentence


def test_a_healthy_path_has_no_first_difference(subject: ReferenceSubject):
    for sequence in SEQUENCES:
        located = localise(subject, token_by_token(sequence))
        assert located.divergence is None
        assert located.num_values > 500


R15 = [
    (faults.wrong_position(), Stage.POSITION, LIKELY_CONTRACT[Stage.POSITION], "position index"),
    (faults.position_off_by_one(), Stage.POSITION, LIKELY_CONTRACT[Stage.POSITION], "position index"),
    (faults.find("token-fed-twice"), Stage.TOKEN, LIKELY_CONTRACT[Stage.TOKEN], "token ownership"),
    (faults.find("heads-out-of-order"), Stage.NEW_K, LIKELY_CONTRACT[Stage.NEW_K], "axis order"),
    (faults.disturbed(Stage.NEW_V, 0), Stage.NEW_V, LIKELY_CONTRACT[Stage.NEW_V], "projection"),
    (
        faults.find("missing-append"),
        Stage.CACHE_LEN,
        LIKELY_CONTRACT[Stage.CACHE_LEN],
        "missing or duplicate append",
    ),
    (faults.find("duplicate-append"), Stage.CACHE_LEN, LIKELY_CONTRACT[Stage.CACHE_LEN], "missing or duplicate"),
    (faults.wrong_layer(), Stage.CACHE_K, WRONG_LAYER, "wrong layer's cache"),
    (faults.find("stale-slot"), Stage.CACHE_K, WRONG_SLOT, "stale"),
    (faults.find("swapped-kv"), Stage.CACHE_K, WRONG_KIND, "swapped"),
    (faults.find("lower-dtype"), Stage.CACHE_K, LIKELY_CONTRACT[Stage.CACHE_K], "cache content"),
    (faults.mask_off_by_one(), Stage.ATTN_WEIGHTS, LIKELY_CONTRACT[Stage.ATTN_WEIGHTS], "mask"),
]


@pytest.mark.parametrize(("fault", "stage", "contract", "words"), R15, ids=[row[0].name for row in R15])
def test_the_first_difference_is_turned_into_the_likely_contract(
    uncounted: ReferenceSubject, fault: Fault, stage: Stage, contract: str, words: str
):
    report = audit(uncounted, list(map(token_by_token, SEQUENCES)), faults=[fault], tolerance=TOLERANCE)
    assert report.verdict is Verdict.MATCH
    (result,) = report.faults
    assert result.caught
    assert result.right_stage
    assert result.divergence is not None
    assert (result.divergence.stage, result.divergence.contract) == (stage, contract)
    assert words in contract
    assert result.num_rows_beyond > 0
    assert result.margin > 100


def test_the_wrong_layer_finding_says_what_the_slot_really_holds(subject: ReferenceSubject):
    found = localise(subject, token_by_token(SEQUENCES[0]), fault=faults.wrong_layer()).divergence
    assert found is not None
    assert (found.layer, found.slot, found.origin) == (1, 0, "layer 0's key of position 0")


def test_one_request_that_changes_another_is_named_as_contamination(subject: ReferenceSubject):
    program = interleaved_requests(SEQUENCES[0], SEQUENCES[2])
    report = audit(subject, [program], faults=[faults.find("shared-between-requests")])
    assert report.verdict.passes
    found = report.faults[0].divergence
    assert found is not None
    assert found.contract == WRONG_REQUEST
    assert found.origin == "layer 0's key of position 1 of another request"


def test_contamination_is_invisible_to_a_request_alone(subject: ReferenceSubject):
    """What only two requests can show must not be looked for in one."""
    report = audit(subject, [token_by_token(SEQUENCES[0])], faults=[faults.find("shared-between-requests")])
    assert not report.faults[0].caught


def test_equal_logits_and_another_token_point_to_the_policy(subject: ReferenceSubject):
    stops = Stops(eos_id=EOS_ID)
    cached = generate(subject, (BOS_ID,), Sample(top_k=3, seed=1), stops, path="cached")
    uncached = generate(subject, (BOS_ID,), Sample(top_k=3, seed=41), stops, path="uncached")
    assert cached.returned != uncached.returned
    found = first_difference(cached, uncached, TOLERANCE)
    assert found is not None
    assert found.stage is Stage.POLICY
    assert "tie rule, or generator state" in found.contract
    assert "the logits match" in found.sentence


def test_equal_runs_have_no_first_difference(subject: ReferenceSubject):
    stops = Stops(eos_id=EOS_ID)
    runs = [generate(subject, (BOS_ID,), Greedy(), stops, path=path) for path in ("cached", "uncached")]
    assert first_difference(runs[0], runs[1], TOLERANCE) is None


def shifted(site: Site, by: float) -> Fault:
    """Add a constant to every component, which a layer norm right after it takes off again."""

    def tap(at: Site, value: torch.Tensor) -> torch.Tensor:
        return value + by if at == site else value

    return Fault(
        name="shifted", breaks="a shift", stages=frozenset({site.stage}), make=lambda place: Planting(lambda: tap)
    )


@pytest.mark.parametrize(
    "fault",
    [faults.cancelling_pair(), faults.cancelling_pair(layer=0), shifted(Site(Stage.MLP_RESIDUAL, 1), 0.5)],
)
def test_errors_that_cancel_in_the_logits_are_found(subject: ReferenceSubject, fault: Fault):
    report = audit(subject, [token_by_token(SEQUENCES[0])], faults=[fault], tolerance=TOLERANCE)
    (result,) = report.faults
    assert result.num_rows_beyond == 0, "the logits were meant to agree"
    assert result.caught
    assert result.right_stage
    assert result.divergence is not None
    assert not result.divergence.logits_differ
    assert "a later error cancels" in result.divergence.sentence


def test_cancelling_errors_are_missed_by_logits_alone(subject: ReferenceSubject):
    report = audit(subject, [token_by_token(SEQUENCES[0])], faults=[faults.cancelling_pair()], all_values=False)
    assert not report.faults[0].caught


def test_a_fault_inside_a_chunk_is_named_in_the_first_layer(subject: ReferenceSubject):
    """Looking at the last row alone would name layer 1: the wrong token is an earlier one of the chunk."""
    fault = faults.disturbed(Stage.NEW_V, 0, position=1)
    found = localise(subject, chunked_prefill(SEQUENCES[0], 3), fault=fault).divergence
    assert found is not None
    assert (found.stage, found.layer, found.position) == (Stage.NEW_V, 0, 1)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: faults.wrong_layer(0, 0), "must lie before layer 0"),
        (lambda: faults.disturbed(Stage.NEW_K), "stage new_k needs a layer"),
        (lambda: faults.disturbed(Stage.LOGITS, 0), "stage logits has no layer"),
        (lambda: faults.disturbed(Stage.TOKEN), "cannot be disturbed"),
    ],
)
def test_a_fault_that_cannot_be_planted_says_why(build: Callable[[], Fault], message: str):
    with pytest.raises(UsageError, match=message):
        build()


@st.composite
def planted(draw: st.DrawFn, num_layers: int, length: int) -> Fault:
    """Draw a fault anywhere in a decoder of these sizes."""
    layer = draw(st.integers(0, num_layers - 1))
    position = draw(st.integers(1, length - 1))
    stage = draw(st.sampled_from(DISTURBED))
    later, late = max(layer, 1), draw(st.integers(2, length - 1))
    makers: list[Callable[[], Fault]] = [
        faults.wrong_position,
        faults.position_off_by_one,
        lambda: faults.wrong_layer(later, draw(st.integers(0, later - 1))),
        lambda: faults.find("duplicate-append").at(layer=layer, position=position),
        lambda: faults.find("missing-append").at(layer=layer, position=position),
        lambda: faults.find("swapped-kv").at(layer=layer, position=position),
        lambda: faults.find("stale-slot").at(layer=layer, position=late),
        lambda: faults.find("heads-out-of-order").at(layer=layer, position=position),
        lambda: faults.mask_off_by_one(layer),
        lambda: faults.find("lower-dtype").at(layer=layer, position=position),
        lambda: faults.find("token-fed-twice").at(position=position),
        lambda: faults.disturbed(stage, layer if stage in IN_LAYER else None, position),
        lambda: faults.cancelling_pair(layer, position),
    ]
    return draw(st.sampled_from(makers))()


@settings(max_examples=50)
@given(st.data())
def test_every_fault_is_found_at_its_stage_in_any_decoder(data: st.DataObject):
    """Random sizes, weights, tokens, layer and position: a single miss fails."""
    drawn = data.draw(subjects(min_layers=2, min_heads=2, min_context=3))
    subject = ReferenceSubject(drawn.checkpoint, counts_entries=False)
    ids = data.draw(sequences(subject, min_len=3))
    fault = data.draw(planted(subject.info.num_layers, len(ids)))
    found = localise(subject, token_by_token(ids), fault=fault).divergence
    assert found is not None, f"{fault.breaks}: missed"
    assert fault.must_show_at(found.stage, found.layer), f"{fault.breaks}: {found.sentence}"
    # Right logits in the place of wrong ones agree whatever is wrong, and confirm nothing.
    assert found.confirmed is (found.stage is not Stage.LOGITS), f"{fault.breaks}: {found.introduced}"
