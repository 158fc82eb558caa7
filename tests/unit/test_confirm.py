"""Introduced and propagated error are told apart: with the right values put right, the paths agree."""

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.strategies import programs, random_subject, subjects
from torch import Tensor

from kvproof import ReferenceSubject, audit, faults, localise
from kvproof._engine.calls import Layout, TracedCall
from kvproof._engine.confirm import MOST_CAUSES, Cause, Confirmation, Rerun, cause_of, confirm
from kvproof._engine.uncached_values import LiteralRuns
from kvproof._numerics.taps import Tap
from kvproof.contract.results import Divergence
from kvproof.contract.stages import IN_LAYER, SHOWN_BY_ADAPTERS, Site, Stage
from kvproof.faults import Fault, Place, Planting
from kvproof.faults._plantings import EditOnce
from kvproof.reference import DecoderConfig
from kvproof.reference.corpus import SEQUENCES
from kvproof.scenarios import (
    Scenario,
    beam_reorder,
    chunked_prefill,
    fork,
    interleaved_requests,
    rollback,
    token_by_token,
)
from kvproof.subjects import Session
from kvproof.subjects._reference import ReferenceSession

IDS = (1, 5, 3, 2, 7, 9, 4)
#: What the tap hands on at any of these goes into everything after it. Nothing comes after the logits.
ACTING = [
    s for s in Stage if s not in (Stage.TOKEN, Stage.CACHE_LEN, *SHOWN_BY_ADAPTERS, Stage.LOGITS, Stage.POLICY)
]


@pytest.fixture(scope="module")
def deep() -> ReferenceSubject:
    """A random decoder with room for more than four tokens."""
    return random_subject(DecoderConfig(num_layers=4, context_len=12, vocab_size=16), seed=0)


def found(subject: ReferenceSubject, scenario: Scenario, fault: Fault, **options: object) -> Divergence:
    divergence = localise(subject, scenario, fault=fault, **options).divergence
    assert divergence is not None
    return divergence


def wrong_at(*sites: Site) -> Fault:
    """Change every token's value at these sites, in every call."""

    def tap(site: Site, value: Tensor) -> Tensor:
        if site not in sites:
            return value
        return value * 1.5 + 0.25 if value.is_floating_point() else torch.zeros_like(value)

    return Fault(
        name="wrong", breaks="sites", stages=frozenset({sites[0].stage}), make=lambda place: Planting(lambda: tap)
    )


ONE_PLACE = [
    (faults.wrong_position(), "position"),
    (faults.find("token-fed-twice"), "token"),
    (faults.find("heads-out-of-order"), "new_k of layer 0"),
    (faults.find("missing-append").at(layer=0), "cache_len of layer 0 (by way of attn_out of layer 0)"),
    (faults.find("duplicate-append").at(layer=1), "cache_len of layer 1 (by way of attn_out of layer 1)"),
    (faults.mask_off_by_one(), "attn_weights of layer 0 (by way of attn_out of layer 0)"),
    (faults.disturbed(Stage.FINAL_NORM), "final_norm"),
]


@pytest.mark.parametrize("one_pass", [False, True])
@pytest.mark.parametrize(("fault", "place"), ONE_PLACE, ids=lambda value: getattr(value, "name", ""))
def test_a_fault_at_one_place_is_confirmed_there_alone(
    uncounted: ReferenceSubject, fault: Fault, place: str, one_pass: bool
):
    divergence = found(uncounted, token_by_token(SEQUENCES[0]), fault, one_pass=one_pass)
    assert (divergence.confirmed, divergence.introduced) == (True, (place,))


@pytest.mark.parametrize("one_pass", [False, True])
def test_the_logits_confirm_nothing(subject: ReferenceSubject, one_pass: bool):
    """Replaced by the right ones they agree, whatever is wrong."""
    divergence = found(subject, token_by_token(SEQUENCES[0]), faults.disturbed(Stage.LOGITS), one_pass=one_pass)
    assert divergence.stage is Stage.LOGITS
    assert (divergence.confirmed, divergence.introduced) == (False, ())
    before = found(subject, token_by_token(SEQUENCES[0]), faults.disturbed(Stage.FINAL_NORM), one_pass=one_pass)
    assert (before.confirmed, before.introduced) == (True, ("final_norm",))


def test_logits_that_are_wrong_besides_another_value_are_named_and_not_replaced(subject: ReferenceSubject):
    fault = wrong_at(Site(Stage.MLP_OUT, 0), Site(Stage.LOGITS))
    divergence = found(subject, token_by_token(SEQUENCES[0]), fault)
    assert (divergence.confirmed, divergence.introduced) == (False, ("mlp_out of layer 0", "logits"))


@pytest.mark.parametrize(
    ("fault", "places"),
    [
        (faults.wrong_layer(), ("cache_k of layer 1", "cache_v of layer 1")),
        (faults.find("stale-slot"), ("cache_k of layer 0", "cache_v of layer 0")),
        (wrong_at(Site(Stage.NEW_Q, 1), Site(Stage.MLP_OUT, 0)), ("mlp_out of layer 0", "new_q of layer 1")),
        (
            wrong_at(Site(Stage.ATTN_WEIGHTS, 0), Site(Stage.CACHE_K, 0), Site(Stage.FINAL_NORM)),
            ("cache_k of layer 0", "attn_weights of layer 0 (by way of attn_out of layer 0)", "final_norm"),
        ),
    ],
    ids=["wrong-layer", "stale-slot", "two layers", "three stages"],
)
def test_a_fault_at_several_places_is_confirmed_once_all_are_put_right(
    subject: ReferenceSubject, fault: Fault, places: tuple[str, ...]
):
    divergence = found(subject, token_by_token(SEQUENCES[0]), fault)
    assert (divergence.confirmed, divergence.introduced) == (True, places)


@pytest.mark.parametrize(
    "scenario",
    [
        fork(IDS[:3], IDS[3:5], IDS[5:7]),
        interleaved_requests(IDS[:3], IDS[3:6]),
        rollback(IDS[:5], 2, IDS[5:]),
        beam_reorder(IDS[:3], ((1, 0, 2), (2, 2, 0)), IDS[:5]),
        chunked_prefill(IDS, 3),
    ],
    ids=lambda scenario: scenario.name,
)
def test_values_are_put_in_their_place_in_every_session_call_and_batch_row(
    deep: ReferenceSubject, scenario: Scenario
):
    divergence = found(deep, scenario, wrong_at(Site(Stage.NEW_V, 1)))
    assert (divergence.confirmed, divergence.introduced) == (True, ("new_v of layer 1",))


def test_what_a_session_keeps_wrong_is_confirmed_where_it_is_read(subject: ReferenceSubject):
    """The fault acts between calls, and no tap sees it: what is read is put right in every call after it."""

    def change(layers: tuple[dict[str, Tensor], ...], session: Session) -> None:
        layers[1]["k"] = layers[1]["k"] + 0.5

    fault = Fault(
        name="kept",
        breaks="keys",
        stages=frozenset({Stage.CACHE_K}),
        make=lambda place: EditOnce(Place(position=1), change),
    )
    divergence = found(subject, token_by_token(SEQUENCES[0]), fault)
    assert (divergence.confirmed, divergence.introduced) == (True, ("cache_k of layer 1",))


def test_what_cancels_in_the_logits_is_confirmed_by_every_value(subject: ReferenceSubject):
    """With the first of two cancelling errors put right the logits differ, and with both every value agrees."""
    divergence = found(subject, token_by_token(SEQUENCES[0]), faults.cancelling_pair())
    assert not divergence.logits_differ
    assert divergence.confirmed
    assert divergence.introduced == ("mlp_out of layer 1", "mlp_residual of layer 1")


@pytest.mark.parametrize("amount", [1e-6, 0.5])
def test_what_no_tap_reaches_is_not_confirmed(
    subject: ReferenceSubject, monkeypatch: pytest.MonkeyPatch, amount: float
):
    """The first value is put right, and the logits still differ with no other value to name."""
    plain = ReferenceSession._extend
    monkeypatch.setattr(ReferenceSession, "_extend", lambda self, ids, start: plain(self, ids, start) + amount)
    fault = faults.disturbed(Stage.ATTN_NORM, 1, position=0)
    divergence = found(subject, token_by_token(SEQUENCES[0]), fault)
    assert divergence.stage is Stage.ATTN_NORM
    assert (divergence.confirmed, divergence.introduced) == (False, ("attn_norm of layer 1",))


def test_more_places_than_the_bound_are_not_confirmed(deep: ReferenceSubject):
    stages = [Stage.ATTN_NORM, Stage.NEW_Q, Stage.NEW_K, Stage.NEW_V, Stage.ATTN_OUT, Stage.MLP_OUT]
    sites = [Site(stage, layer) for layer in range(4) for stage in stages]
    divergence = found(deep, token_by_token(IDS[:4]), wrong_at(*sites))
    assert not divergence.confirmed
    assert divergence.introduced == tuple(map(str, sites[:MOST_CAUSES]))
    fewer = found(deep, token_by_token(IDS[:4]), wrong_at(*sites[:MOST_CAUSES]))
    assert (fewer.confirmed, fewer.introduced) == (True, divergence.introduced)


def test_a_run_that_raises_confirms_nothing_and_the_finding_stands(subject: ReferenceSubject):
    runs: list[int] = []

    def make(place: Place) -> Planting:
        runs.append(1)

        def tap(site: Site, value: Tensor) -> Tensor:
            if site != Site(Stage.NEW_Q, 1):
                return value
            if len(runs) > 1:
                raise RuntimeError("broke in the second run")
            return value + 0.5

        return Planting(lambda: tap)

    fault = Fault(name="raising", breaks="the second run", stages=frozenset({Stage.NEW_Q}), make=make)
    divergence = found(subject, token_by_token(SEQUENCES[0]), fault)
    assert len(runs) == 2
    assert divergence.stage is Stage.NEW_Q
    assert (divergence.confirmed, divergence.introduced) == (False, ("new_q of layer 1",))


class Counted:
    """Counts the cached sessions that are opened and the uncached runs of a subject's class."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sessions, self.calls = 0, 0
        self.uncached: list[tuple[int, ...]] = []
        session, rows, extend = ReferenceSubject._session, ReferenceSubject._rows, ReferenceSession._extend

        def counted_session(subject: ReferenceSubject, opening: object) -> object:
            self.sessions += 1
            return session(subject, opening)

        def counted_rows(subject: ReferenceSubject, ids: tuple[int, ...], tap: Tap) -> Tensor:
            self.uncached.append(tuple(ids))
            return rows(subject, ids, tap)

        def counted_extend(opened: ReferenceSession, ids: object, start: int) -> Tensor:
            self.calls += 1
            return extend(opened, ids, start)

        monkeypatch.setattr(ReferenceSubject, "_session", counted_session)
        monkeypatch.setattr(ReferenceSubject, "_rows", counted_rows)
        monkeypatch.setattr(ReferenceSession, "_extend", counted_extend)


@pytest.mark.parametrize("one_pass", [False, True])
def test_each_place_costs_one_cached_run_and_no_uncached_one(
    deep: ReferenceSubject, monkeypatch: pytest.MonkeyPatch, one_pass: bool
):
    ids = tuple(range(12))
    scenario = rollback(ids, 2, ids[:10][::-1])  # with more prefixes than few runs hold
    counted = Counted(monkeypatch)
    assert localise(deep, scenario, one_pass=one_pass).divergence is None
    clean = list(counted.uncached)
    assert counted.sessions == 1
    divergence = found(deep, scenario, faults.wrong_layer(), one_pass=one_pass)
    assert len(divergence.introduced) == 2
    assert counted.sessions == 1 + 3, "the first run, and one for each place"
    assert counted.uncached[len(clean) :] == clean
    assert len(clean) == len(set(clean))


def test_a_known_bad_row_is_as_far_as_another_run_goes(deep: ReferenceSubject, monkeypatch: pytest.MonkeyPatch):
    """Position 2 differs first, and what comes after the row that is known to be wrong is not looked at."""
    counted = Counted(monkeypatch)
    both = [faults.disturbed(Stage.NEW_Q, 0, position=p).plant()() for p in (2, 6)]

    def tap(site: Site, value: Tensor) -> Tensor:
        for each in both:
            value = each(site, value)
        return value

    fault = Fault(
        name="two", breaks="two tokens", stages=frozenset({Stage.NEW_Q}), make=lambda place: Planting(lambda: tap)
    )
    divergence = found(deep, token_by_token(IDS), fault, until=IDS[:3])
    assert (divergence.position, divergence.confirmed) == (2, True)
    assert counted.calls == 3 + 3
    extra = found(deep, token_by_token(IDS), faults.disturbed(Stage.NEW_V, 0, position=2), until=IDS[:5])
    assert (extra.position, extra.confirmed) == (2, True)
    assert counted.calls == 6 + 5 + 5


def test_a_pointer_in_the_declared_dtype_is_not_put_to_the_test(
    subject: ReferenceSubject, monkeypatch: pytest.MonkeyPatch
):
    def rounded(site: Site, value: Tensor) -> Tensor:
        lower = site == Site(Stage.CACHE_K, 0) and value.dtype is torch.float32
        return value.to(torch.bfloat16).to(value.dtype) if lower else value

    fault = Fault(
        name="low",
        breaks="float32 alone",
        stages=frozenset({Stage.CACHE_K}),
        make=lambda place: Planting(lambda: rounded),
    )
    counted = Counted(monkeypatch)
    divergence = found(subject, token_by_token(SEQUENCES[0]), fault, rung="declared")
    assert (divergence.confirmed, divergence.introduced) == (False, ())
    assert counted.sessions == 1


def test_an_audit_s_findings_are_confirmed(subject: ReferenceSubject):
    report = audit(subject, [token_by_token(SEQUENCES[0])], faults=[faults.wrong_position()])
    divergence = report.faults[0].divergence
    assert divergence is not None
    assert (divergence.confirmed, divergence.introduced) == (True, ("position",))


@settings(max_examples=15)
@given(st.data())
def test_a_value_that_is_always_wrong_is_confirmed_in_any_program(data: st.DataObject):
    """Random sizes, weights, sessions, forks, crops, batches and reorders."""
    subject = data.draw(subjects(min_heads=2))
    stage = data.draw(st.sampled_from(ACTING))
    layer = data.draw(st.integers(0, subject.info.num_layers - 1)) if stage in IN_LAYER else None
    divergence = localise(subject, data.draw(programs(subject)), fault=wrong_at(Site(stage, layer))).divergence
    assume(divergence is not None)  # the only token attended to has the same weight whatever its key
    assert divergence is not None
    assert divergence.confirmed, divergence.introduced
    assert divergence.introduced[0].split(" (by way of")[0] == str(Site(stage, layer))
    assert len(divergence.introduced) == 1


SITE, OTHER = Site(Stage.NEW_Q, 0), Site(Stage.NEW_Q, 1)


def place(site: Site) -> Cause:
    return Cause(site=site, put_at=frozenset({site}))


def test_a_place_that_is_found_again_ends_the_search():
    """A value that stays wrong where it was put right, as NaN on both sides does, would be found for ever."""
    asked: list[int] = []

    def rerun(places: object) -> Rerun:
        asked.append(1)
        return Rerun(agrees=False, next_cause=place(SITE))

    assert confirm(place(SITE), rerun) == Confirmation(confirmed=False, introduced=(place(SITE),))
    assert len(asked) == 1


def test_a_place_at_which_nothing_can_be_put_is_named_and_not_tried():
    nowhere = Cause(site=OTHER, put_at=frozenset())

    def rerun(places: list[Cause]) -> Rerun:
        if nowhere in places:
            raise AssertionError("there is nothing to run")
        return Rerun(agrees=False, next_cause=nowhere)

    assert confirm(place(SITE), rerun) == Confirmation(confirmed=False, introduced=(place(SITE), nowhere))
    assert str(nowhere) == "new_q of layer 1"


def test_a_length_that_feeds_nothing_shown_has_no_place(subject: ReferenceSubject):
    """A decoder that shows its cache and nothing after it."""
    ids = tuple(SEQUENCES[0])
    runs = LiteralRuns(subject)
    run = runs.over(ids)
    keys = run.values[Site(Stage.CACHE_K, 0)]
    trace = {Site(Stage.CACHE_K, 0): torch.cat([keys, keys[:, :, :1]], dim=2)}
    call = TracedCall(runs, Layout({0: (ids, 0)}, 1), trace)
    (token,) = call.layout.tokens
    comparison = call.comparison(run, Site(Stage.CACHE_LEN, 0), token)
    assert comparison is not None
    assert cause_of(call, run, comparison) == Cause(site=Site(Stage.CACHE_LEN, 0), put_at=frozenset())


def test_padding_is_no_token_and_an_earlier_chunk_ends_where_the_next_begins():
    """Rows of 5 and 2 tokens, the second behind 3 columns of padding, in chunks of 2, 2 and 1."""
    last = Layout({0: ((1, 2, 3, 4, 5), 0), 1: ((6, 7), 0)}, 1)
    assert (last.total, last.lengths) == (5, {0: 5, 1: 2})
    middle, first = last.before(4, 2), last.before(2, 2)
    assert [(t.prefix, t.batch_row, t.offset) for t in middle.tokens] == [
        ((1, 2, 3), 0, 0),
        ((1, 2, 3, 4), 0, 1),
        ((6,), 1, 1),
    ]
    assert [(t.prefix, t.batch_row, t.offset) for t in first.tokens] == [((1,), 0, 0), ((1, 2), 0, 1)]
    assert (middle.total, middle.lengths) == (4, {0: 4, 1: 1})
    assert (first.total, first.lengths) == (2, {0: 2})
