"""Which side is wrong: one row computed in every way, of which some agree and share no trait, or none do."""

from collections.abc import Callable, Sequence

import pytest
import torch
from tests.strategies import random_subject

from kvproof import ReferenceSubject, Verdict, audit
from kvproof._engine.four_computations import four_ways
from kvproof._engine.uncached_rows import Uncached
from kvproof._numerics.taps import Tap
from kvproof.contract.results import FourWays
from kvproof.reference import Checkpoint, DecoderConfig
from kvproof.scenarios import chunked_prefill, token_by_token
from kvproof.subjects._base import Opening
from kvproof.subjects._reference import ReferenceSession

CONFIG = DecoderConfig(num_layers=2, num_heads=2, head_dim=4, mlp_width=8, context_len=12, vocab_size=16)
IDS = (3, 1, 4, 1, 5, 9, 2, 6)
PREFIX = IDS[:5]

LITERAL, ONE_PASS = "literal", "one-pass"
FRESH, STEPPING = "fresh cache in one call", "fresh cache in steps"
HALVES, PAIRS = "fresh cache in two parts", "fresh cache in parts of 2 or 3"
HERE = "this scenario"

#: Says whether a forward is wrong: of the uncached path by its length, of a session by start and new tokens.
WrongRows = Callable[[int], bool]
WrongCall = Callable[[int, int], bool]


class Broken(ReferenceSubject):
    """A random decoder whose forwards are off by one logit where they are told to be."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        rows: WrongRows = lambda length: False,
        call: WrongCall = lambda start, num_new: False,
        raises: WrongCall = lambda start, num_new: False,
    ) -> None:
        super().__init__(checkpoint)
        self.told = {"rows": rows, "call": call, "raises": raises}

    def _rows(self, ids: Sequence[int], tap: Tap) -> torch.Tensor:
        rows = super()._rows(ids, tap)
        return off(rows) if self.told["rows"](len(ids)) else rows

    def _session(self, opening: Opening) -> ReferenceSession:
        session = super()._session(opening)
        session.__class__ = _BrokenSession
        return session

    def _cast(self, dtype: torch.dtype) -> "Broken":
        return Broken(super()._cast(dtype).checkpoint, **self.told)


class _BrokenSession(ReferenceSession):
    def _extend(self, ids: Sequence[Sequence[int]], start: int) -> torch.Tensor:
        told, num_new = self.reference.told, len(ids[0])
        if told["raises"](start, num_new):
            raise RuntimeError("no such call")
        logits = super()._extend(ids, start)
        return off(logits) if told["call"](start, num_new) else logits


def off(rows: torch.Tensor) -> torch.Tensor:
    rows = rows.clone()
    rows[..., 0] += 0.25
    return rows


@pytest.fixture(scope="module")
def healthy() -> Checkpoint:
    return random_subject(CONFIG, seed=1).checkpoint


def found(subject: ReferenceSubject, *, scenario_is_wrong: bool, prefix: tuple[int, ...] = PREFIX) -> FourWays:
    uncached = Uncached(subject, "one-pass")
    uncached.measure([IDS])
    exact = ReferenceSubject(subject.checkpoint).cast(torch.float64).rows(prefix)[-1]
    ways = four_ways(uncached, prefix, off(exact) if scenario_is_wrong else exact)
    assert ways is not None
    assert ways.ids == prefix
    return ways


def test_where_nothing_is_wrong_all_ways_agree_and_none_is_suspect(healthy: Checkpoint):
    ways = found(ReferenceSubject(healthy), scenario_is_wrong=False)
    assert ways.groups == ((LITERAL, ONE_PASS, FRESH, HALVES, STEPPING, HERE),)
    assert ways.suspect is None
    assert ways.sentence.startswith("in float64 all ways of computing this row agree")


def test_a_scenario_that_alone_is_wrong_is_the_suspect(healthy: Checkpoint):
    ways = found(ReferenceSubject(healthy), scenario_is_wrong=True)
    assert ways.groups == ((LITERAL, ONE_PASS, FRESH, HALVES, STEPPING), (HERE,))
    assert ways.suspect == HERE
    assert ways.sentence.startswith("the cached path is the suspect: ")


def wrong_one_pass(length: int) -> bool:
    return length > len(PREFIX)


def wrong_literal(length: int) -> bool:
    return length == len(PREFIX)


def wrong_one_call(start: int, num_new: int) -> bool:
    return num_new == len(PREFIX)


def wrong_blocks(start: int, num_new: int) -> bool:
    return num_new > 1


def wrong_parts(start: int, num_new: int) -> bool:
    return start > 0 and num_new > 1


def wrong_steps(start: int, num_new: int) -> bool:
    return start > 0 and num_new == 1


WRONG = [
    pytest.param({"rows": wrong_one_pass}, False, (ONE_PASS,), "the uncached path", id="one-pass"),
    pytest.param({"rows": wrong_literal}, False, (LITERAL,), "the uncached path", id="literal"),
    pytest.param({"call": wrong_one_call}, False, (FRESH,), "the cached path", id="one call"),
    pytest.param({"call": wrong_blocks}, False, (FRESH, HALVES), "the cached path", id="blocks"),
    pytest.param({"call": wrong_blocks}, True, (FRESH, HALVES), "the cached path", id="blocks, in the scenario"),
    pytest.param({"call": wrong_parts}, False, (HALVES,), "the cached path", id="parts"),
    pytest.param({"call": wrong_parts}, True, (HALVES,), "the cached path", id="parts, in the scenario"),
    pytest.param({"call": wrong_steps}, False, (STEPPING,), "the cached path", id="steps"),
    pytest.param({"call": wrong_steps}, True, (STEPPING,), "the cached path", id="steps, in the scenario"),
]


@pytest.mark.parametrize(("told", "scenario_is_wrong", "wrong", "side"), WRONG)
def test_ways_that_disagree_with_independent_ones_are_the_suspect_and_name_their_path(
    healthy: Checkpoint,
    told: dict[str, Callable[..., bool]],
    scenario_is_wrong: bool,
    wrong: tuple[str, ...],
    side: str,
):
    ways = found(Broken(healthy, **told), scenario_is_wrong=scenario_is_wrong)
    assert ways.suspect == wrong[0]
    assert ways.sentence.startswith(f"{side} is the suspect: ")
    assert ways.groups[1] == (*wrong, *((HERE,) if scenario_is_wrong else ()))
    assert set(ways.groups[0]) >= {LITERAL, ONE_PASS, FRESH, HALVES, STEPPING} - set(wrong)


@pytest.mark.parametrize("prefix", [IDS[:n] for n in range(1, len(IDS) + 1)], ids=len)
def test_no_two_ways_make_the_same_calls(healthy: Checkpoint, prefix: tuple[int, ...]):
    made: list[tuple[int, ...]] = []

    class Watched(Broken):
        def _session(self, opening: Opening) -> ReferenceSession:
            made.append(())
            return super()._session(opening)

        def _cast(self, dtype: torch.dtype) -> "Watched":
            return Watched(ReferenceSubject._cast(self, dtype).checkpoint, **self.told)

    def note(start: int, num_new: int) -> bool:
        made[-1] = (*made[-1], num_new)
        return False

    ways = found(Watched(healthy, call=note), scenario_is_wrong=False, prefix=prefix)
    assert len(ways.groups) == 1
    assert len(made) == len(set(made))
    assert all(sum(sizes) == len(prefix) for sizes in made)
    assert (HALVES in ways.groups[0], PAIRS in ways.groups[0]) == (len(prefix) >= 4, len(prefix) >= 6)
    assert all(1 not in sizes for sizes in made if sizes != (1,) * len(prefix)), "a part would be a step"


class Forgetful(ReferenceSubject):
    """One function serves all blocks, with a cache or without: the rows after its first token forget that.

    Single steps are right.
    """

    forgets = True

    def _rows(self, ids: Sequence[int], tap: Tap) -> torch.Tensor:
        rows = super()._rows(ids, tap)
        return torch.cat([rows[:1], super()._rows(forget(ids), tap)[1:]]) if self.forgets else rows

    def _session(self, opening: Opening) -> ReferenceSession:
        session = super()._session(opening)
        session.__class__ = _ForgetfulSession if self.forgets else ReferenceSession
        return session

    def _cast(self, dtype: torch.dtype) -> "Forgetful":
        cast = type(self)(super()._cast(dtype).checkpoint)
        cast.forgets = self.forgets
        return cast


class _ForgetfulSession(ReferenceSession):
    def _extend(self, ids: Sequence[Sequence[int]], start: int) -> torch.Tensor:
        before = self.cache
        logits = super()._extend(ids, start)
        self.cache = before
        return torch.cat([logits[:, :1], super()._extend([forget(row) for row in ids], start)[:, 1:]], dim=1)


def forget(ids: Sequence[int]) -> list[int]:
    return [0, *ids[1:]] if len(ids) > 1 else list(ids)


@pytest.mark.parametrize("scenario_is_wrong", [False, True])
@pytest.mark.parametrize("length", [2, 3, 5, 8])
def test_a_forward_that_is_wrong_with_and_without_a_cache_does_not_outvote_single_steps(
    healthy: Checkpoint, length: int, scenario_is_wrong: bool
):
    """Literal, one pass and a fresh cache in one call ran the same code, and counted as three votes."""
    subject = Forgetful(healthy)
    ways = found(subject, scenario_is_wrong=scenario_is_wrong, prefix=IDS[:length])
    assert ways.suspect is None
    assert "do not tell which side is wrong" in ways.sentence
    assert "from one forward over all tokens, with or without a cache" in ways.sentence
    assert f"from single steps{'' if scenario_is_wrong else ' and this scenario'}" in ways.sentence
    subject.forgets = False
    assert found(subject, scenario_is_wrong=scenario_is_wrong, prefix=IDS[:length]).groups[0][:2] == (
        LITERAL,
        ONE_PASS if length < len(IDS) else FRESH,
    )


def test_an_audit_whose_forward_forgets_does_not_blame_the_cached_path(healthy: Checkpoint):
    report = audit(Forgetful(healthy), [token_by_token(IDS)], certificate=False)
    assert report.verdict is Verdict.DIVERGED
    (result,) = [result for result in report.scenarios if result.verdict is Verdict.DIVERGED]
    assert result.four_ways is not None
    assert (result.four_ways.suspect, len(result.four_ways.ids)) == (None, 2)
    assert "do not tell which side" in result.four_ways.sentence


@pytest.mark.parametrize("length", [2, 3])
def test_of_a_row_too_short_for_parts_one_form_of_call_stands_against_another(healthy: Checkpoint, length: int):
    ways = found(Broken(healthy, call=wrong_steps), scenario_is_wrong=True, prefix=IDS[:length])
    assert ways.groups == ((LITERAL, ONE_PASS, FRESH), (STEPPING, HERE))
    assert ways.suspect is None


def test_an_audit_asks_a_longer_row_where_the_first_is_too_short_to_tell(healthy: Checkpoint):
    report = audit(Broken(healthy, call=wrong_steps), [token_by_token(IDS)], certificate=False)
    result = report.scenarios[-1]
    assert next(len(row.ids) for row in result.rows if row.verdict is Verdict.DIVERGED) == 2
    assert result.four_ways is not None
    assert (result.four_ways.suspect, len(result.four_ways.ids)) == (STEPPING, 4)
    assert "4 other ways of computing the row after 4 tokens agree" in result.four_ways.sentence


def test_of_a_single_token_there_is_one_form_of_call(healthy: Checkpoint):
    ways = found(ReferenceSubject(healthy), scenario_is_wrong=True, prefix=IDS[:1])
    assert ways.groups == ((LITERAL, ONE_PASS, FRESH), (HERE,))
    assert ways.suspect == HERE


def always(*of: int) -> bool:
    return True


@pytest.mark.parametrize(
    ("told", "scenario_is_wrong"),
    [
        pytest.param({"rows": always}, False, id="uncached"),
        pytest.param({"call": always}, True, id="cached"),
    ],
)
def test_all_ways_with_a_cache_against_all_without_one_name_no_suspect(
    healthy: Checkpoint, told: dict[str, Callable[..., bool]], scenario_is_wrong: bool
):
    """Whether the cached or the uncached path is wrong, the groups look the same."""
    ways = found(Broken(healthy, **told), scenario_is_wrong=scenario_is_wrong)
    assert {frozenset(group) - {HERE} for group in ways.groups} == {
        frozenset({LITERAL, ONE_PASS}),
        frozenset({FRESH, HALVES, STEPPING}),
    }
    assert ways.suspect is None
    assert ways.sentence == (
        "the ways of computing this row do not tell which side is wrong: one result comes from every way of "
        "feeding a fresh cache and this scenario; another from one forward without a cache"
    )


def test_two_that_stand_alone_name_no_suspect(healthy: Checkpoint):
    """Stepping and the literal run are each off in its own place: what is left is two against one and one."""

    def twice(start: int, num_new: int) -> bool:
        return start == len(PREFIX) - 1

    class Both(Broken):
        def _rows(self, ids: Sequence[int], tap: Tap) -> torch.Tensor:
            rows = super()._rows(ids, tap)
            return off(off(rows)) if wrong_literal(len(ids)) else rows

        def _cast(self, dtype: torch.dtype) -> "Both":
            return Both(ReferenceSubject._cast(self, dtype).checkpoint, **self.told)

    ways = found(Both(healthy, call=twice), scenario_is_wrong=False)
    assert sorted(map(len, ways.groups)) == [1, 1, 4]
    assert ways.suspect is None


def test_without_a_top_rung_there_is_nothing_to_count(healthy: Checkpoint):
    subject = ReferenceSubject(healthy)
    uncached = Uncached(subject, "one-pass", top_rung=False)
    uncached.measure([IDS])
    assert four_ways(uncached, PREFIX, subject.rows(PREFIX)[-1]) is None


@pytest.mark.parametrize(
    ("raises", "left_out"),
    [
        pytest.param(wrong_one_call, FRESH, id="one call"),
        pytest.param(wrong_parts, HALVES, id="parts"),
        pytest.param(wrong_steps, STEPPING, id="stepping"),
    ],
)
def test_a_way_that_cannot_be_gone_is_left_out(healthy: Checkpoint, raises: WrongCall, left_out: str):
    ways = found(Broken(healthy, raises=raises), scenario_is_wrong=True)
    (agreed, alone) = ways.groups
    assert set(agreed) == {LITERAL, ONE_PASS, FRESH, HALVES, STEPPING} - {left_out}
    assert alone == (HERE,)
    assert ways.suspect == HERE


def test_the_last_row_of_all_has_no_longer_pass(healthy: Checkpoint):
    ways = found(ReferenceSubject(healthy), scenario_is_wrong=True, prefix=IDS)
    assert ways.groups == ((LITERAL, FRESH, HALVES, PAIRS, STEPPING), (HERE,))


def test_a_cached_path_that_is_wrong_at_the_last_row_is_not_blamed_on_the_uncached_one(healthy: Checkpoint):
    """Without a longer pass all cached ways stand against a single uncached one."""

    def at_the_end(start: int, num_new: int) -> bool:
        return start + num_new == len(IDS)

    report = audit(Broken(healthy, call=at_the_end), [token_by_token(IDS)])
    assert report.verdict is Verdict.DIVERGED
    ways = report.scenarios[-1].four_ways
    assert ways is not None
    assert ways.ids == IDS
    assert ways.suspect not in (LITERAL, ONE_PASS)
    assert "the uncached path" not in ways.sentence


def test_an_audit_names_the_suspect_of_the_first_row_that_diverged(healthy: Checkpoint):
    report = audit(
        Broken(healthy, call=lambda start, num_new: start == 3), [chunked_prefill(IDS, 3), token_by_token(IDS)]
    )
    assert report.verdict is Verdict.DIVERGED
    _, chunks, steps = report.scenarios
    assert chunks.four_ways.ids == IDS[:4]
    assert chunks.four_ways.suspect == STEPPING
    assert steps.four_ways.ids == IDS[:4]
    assert steps.four_ways.suspect == STEPPING
    assert steps.four_ways.groups[1] == (STEPPING, HERE)


def test_an_audit_that_passes_has_no_suspect(healthy: Checkpoint):
    report = audit(ReferenceSubject(healthy), [token_by_token(IDS)])
    assert [result.four_ways for result in report.scenarios] == [None, None]
