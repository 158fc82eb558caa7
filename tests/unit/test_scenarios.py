"""Programs of cache operations, and the token sequences that they consume."""

import pytest
import torch

from kvproof._engine.programs import Coverage, run_program
from kvproof.errors import AbilityError, SubjectError, UsageError
from kvproof.scenarios import (
    Ability,
    Boundaries,
    CacheKind,
    Claim,
    Crop,
    Extend,
    Fork,
    Generate,
    Method,
    Open,
    Operation,
    Poison,
    Refused,
    Reorder,
    Reset,
    Scenario,
    batch_of,
    beam_search,
    capacity,
    catalogue,
    chunked_prefill,
    compared_prefixes,
    context_end,
    fork,
    generation,
    interleaved_requests,
    isolation,
    longest_sequences,
    poisoned_buffer,
    prefill_and_steps,
    prompt_lookup,
    rollback,
    rollback_across_calls,
    token_by_token,
    window_crossing,
)
from kvproof.subjects import ReferenceSubject


def program(*operations: Operation, batch: int = 1) -> Scenario:
    return Scenario(name="p", exposes="nothing", operations=operations, batch=batch)


def feed(*rows: tuple[int, ...], session: int = 0) -> Extend:
    return Extend(ids=rows, session=session)


LONGEST = {
    "one call": (program(feed((1, 2))), {(1, 2)}),
    "calls add up": (program(feed((1, 2)), feed((3,))), {(1, 2, 3)}),
    "nothing consumed": (program(), set()),
    "batch rows": (program(feed((1,), (2,)), feed((3,), (4,)), batch=2), {(1, 3), (2, 4)}),
    "equal batch rows": (program(feed((1,), (1,)), feed((3,), (3,)), batch=2), {(1, 3)}),
    "one row starts with another": (program(feed((1, 2), (1, 2)), Crop(length=1), batch=2), {(1, 2)}),
    "a crop branches off": (program(feed((1, 2, 3)), Crop(length=1), feed((4,))), {(1, 2, 3), (1, 4)}),
    "a crop to nothing": (program(feed((1, 2)), Crop(length=0), feed((2,))), {(1, 2), (2,)}),
    "a crop and the same again": (program(feed((1, 2)), Crop(length=1), feed((2, 3))), {(1, 2, 3)}),
    "rows change places": (
        program(feed((1,), (2,)), Reorder(rows=(1, 0)), feed((3,), (4,)), batch=2),
        {(2, 3), (1, 4)},
    ),
    "a row is repeated and one left out": (
        program(feed((1,), (2,)), Reorder(rows=(0, 0)), feed((3,), (4,)), batch=2),
        {(1, 3), (1, 4), (2,)},
    ),
    "a fork continues both": (
        program(feed((1,)), Fork(), feed((2,)), feed((3,), session=1)),
        {(1, 2), (1, 3)},
    ),
    "a fork of a fork": (
        program(feed((1,)), Fork(), feed((2,), session=1), Fork(session=1), feed((3,), session=2)),
        {(1, 2, 3)},
    ),
    "a fork keeps what its parent forgets": (
        program(feed((1, 2)), Fork(), Crop(length=0), feed((3,), session=1)),
        {(1, 2, 3)},
    ),
    "a reset starts again": (program(feed((1, 2)), Reset(), feed((3,))), {(1, 2), (3,)}),
    "a reset keeps the batch": (
        program(feed((1,), (2,)), Reset(), feed((3,), (4,)), batch=2),
        {(1,), (2,), (3,), (4,)},
    ),
    "a token that is refused": (program(feed((1,)), Refused(ids=((2,),))), {(1,)}),
    "slots that are poisoned": (program(feed((1,)), Poison(), feed((2,))), {(1, 2)}),
    "generation, up to the last choice": (
        program(Generate(method=Method.GREEDY, prompts=((1, 2),), steps=(((0, 3),), ((0, 4),)))),
        {(1, 2, 3)},
    ),
    "beams that take each other's place": (
        program(
            Generate(
                method=Method.BEAM,
                prompts=((1,),),
                steps=(((0, 2), (0, 3)), ((1, 4), (1, 5)), ((0, 6), (1, 6))),
            )
        ),
        {(1, 2), (1, 3, 4), (1, 3, 5)},
    ),
    "a new session is empty": (program(feed((1,)), Open(), feed((2,), session=1)), {(1,), (2,)}),
    "a new session has its own batch": (
        program(Open(batch=2), feed((1,), (2,), session=1), feed((3,))),
        {(1,), (2,), (3,)},
    ),
}


@pytest.mark.parametrize(("scenario", "expected"), LONGEST.values(), ids=LONGEST)
def test_the_longest_sequences_are_those_that_no_other_continues(scenario: Scenario, expected: set):
    assert longest_sequences(scenario) == tuple(sorted(expected))


A, B = (0, 2, 3, 5), (0, 6, 7, 6)
FEEDS = {
    "token by token": (token_by_token(A), (feed((0,)), feed((2,)), feed((3,)), feed((5,)))),
    "prefill and steps": (prefill_and_steps(A, 2), (feed((0, 2)), feed((3,)), feed((5,)))),
    "prefill of everything": (prefill_and_steps(A, 4), (feed(A),)),
    "chunks": (chunked_prefill(A, 2), (feed((0, 2)), feed((3, 5)))),
    "a last chunk that is shorter": (chunked_prefill(A, 3), (feed((0, 2, 3)), feed((5,)))),
    "rollback": (rollback(A, 2, (6, 7)), (feed(A), Crop(length=2), feed((6,)), feed((7,)))),
    "fork": (
        fork(A[:2], (3, 5), (6, 7)),
        (
            feed((0, 2)),
            Fork(),
            feed((3,)),
            feed((6,), session=1),
            feed((5,)),
            feed((7,), session=1),
        ),
    ),
    "interleaved": (
        interleaved_requests(A[:2], B[:2]),
        (Open(), feed((0,)), feed((0,), session=1), feed((2,)), feed((6,), session=1)),
    ),
}


@pytest.mark.parametrize(("scenario", "operations"), FEEDS.values(), ids=FEEDS)
def test_a_program_feeds_what_its_name_says(scenario: Scenario, operations: tuple[Operation, ...]):
    assert scenario.operations == operations


@pytest.mark.parametrize("scenario", [scenario for scenario, _ in FEEDS.values()], ids=FEEDS)
def test_a_program_run_on_a_decoder_consumes_its_longest_sequences(scenario: Scenario, subject: ReferenceSubject):
    """The slow twin: what the sessions' own ledgers say was consumed."""
    prefixes = {row.prefix for call in run_program(subject, scenario) for row in call.rows}
    longest = {p for p in prefixes if not any(o != p and o[: len(p)] == p for o in prefixes)}
    assert longest == set(longest_sequences(scenario))


@pytest.mark.parametrize(
    ("scenario", "needs"),
    [
        (token_by_token(A), set()),
        (prefill_and_steps(A, 2), set()),
        (chunked_prefill(A, 2), set()),
        (interleaved_requests(A, B), set()),
        (rollback(A, 2, (6,)), {Ability.CROP}),
        (fork(A[:2], (3,), (6,)), {Ability.FORK}),
    ],
    ids=lambda value: value.name if isinstance(value, Scenario) else "",
)
def test_a_program_needs_the_abilities_of_its_operations(scenario: Scenario, needs: set[Ability]):
    assert scenario.needs == needs


@pytest.mark.parametrize("size", [0, -1])
def test_a_chunk_without_a_token_is_refused(size: int):
    """A size of 0 was an error of Python's own, and a negative one made a program that feeds nothing."""
    with pytest.raises(UsageError, match=f"^a chunk holds at least 1 token, not {size}$"):
        chunked_prefill(A, size)


@pytest.mark.parametrize("split", [0, -1, 5, 100])
def test_a_prompt_of_no_token_or_of_more_than_there_are_is_refused(split: int):
    """Such a program fed an empty prompt, or left out its steps without a word."""
    with pytest.raises(UsageError, match=f"^cannot split 4 tokens after {split}$"):
        prefill_and_steps(A, split)


@pytest.mark.parametrize(
    "make",
    [lambda: fork((0,), (1,), (2, 3)), lambda: interleaved_requests((1, 2), (3,))],
    ids=["fork", "interleaved"],
)
def test_turns_of_unequal_length_are_refused(make):
    with pytest.raises(ValueError, match=r"^zip\(\)"):
        make()


ROLLED = rollback_across_calls(range(6), 4, 3, (7, 8))


@pytest.mark.parametrize(
    ("scenario", "operations"),
    [
        (ROLLED, (feed((0, 1, 2, 3)), feed((4, 5)), Crop(length=3), feed((7,)), feed((8,)))),
        (
            isolation((0, 1, 2), ((3, 4, 5), (6, 7, 8)), 1),
            (
                Open(batch=2),
                feed((0, 1), (3, 4)),
                feed((0, 1), (6, 7), session=1),
                feed((2,), (5,)),
                feed((2,), (8,), session=1),
            ),
        ),
        (
            batch_of("b", "e", ((0,), (1,)), ((2, 3, 4), (5, 6, 7)), size=2),
            (feed((0,), (1,)), feed((2, 3), (5, 6)), feed((4,), (7,))),
        ),
        (
            poisoned_buffer((0, 1, 2), (3, 4, 5), 2),
            (feed((0, 1)), Poison(), feed((2,)), Reset(), Poison(), feed((3, 4)), feed((5,))),
        ),
        (
            context_end(range(5)),
            (
                Extend(ids=((0, 1, 2),), last_only=True),
                Refused(ids=((3, 4, 0),)),
                feed((3,)),
                feed((4,)),
                Refused(ids=((0,),)),
            ),
        ),
    ],
    ids=lambda value: value.name if isinstance(value, Scenario) else "",
)
def test_a_program_of_several_sessions_or_slots_feeds_what_it_says(
    scenario: Scenario, operations: tuple[Operation, ...]
):
    assert scenario.operations == operations


def test_a_window_is_crossed_by_steps_by_a_prompt_and_by_a_block():
    steps, prompt, block = window_crossing(range(9), 4)
    assert [len(operation.ids[0]) for operation in steps.operations] == [3, 1, 1, 1, 1, 1, 1]
    assert [len(operation.ids[0]) for operation in prompt.operations] == [5, 1, 1]
    assert [len(operation.ids[0]) for operation in block.operations] == [2, 5, 1]
    assert steps.crosses == (3, 4, 5, 9)
    assert {len(prefix) for prefix in compared_prefixes(steps)} >= set(steps.crosses)


@pytest.mark.parametrize(("length", "window"), [(8, 4), (9, 1), (9, 0)])
def test_a_window_that_is_not_crossed_is_refused(length: int, window: int):
    with pytest.raises(UsageError, match=f"^{length} tokens do not cross a window of {window}$"):
        window_crossing(range(length), window)


def test_only_the_last_row_of_a_call_may_be_compared():
    scenario = context_end(range(5))
    assert compared_prefixes(scenario) == {(0, 1, 2), (0, 1, 2, 3), (0, 1, 2, 3, 4)}
    assert longest_sequences(scenario) == ((0, 1, 2, 3, 4),)


@pytest.mark.parametrize(
    ("scenario", "room"),
    [
        (program(), 0),
        (program(feed((1, 2)), feed((3,))), 3),
        (program(feed((1, 2, 3)), Crop(length=1), feed((4,))), 3),
        (program(feed((1, 2, 3), (4,)), feed((5,), (6,)), batch=2), 4),
        (program(Open(), feed((1,)), feed((1, 2, 3), session=1)), 3),
        (program(feed((1, 2)), Refused(ids=((1, 2, 3, 4),))), 2),
    ],
)
def test_capacity_is_what_the_longest_row_ever_holds(scenario: Scenario, room: int):
    assert capacity(scenario) == room


def by_name(boundaries: Boundaries | None, length: int = 28) -> dict[str, list[Scenario]]:
    names: dict[str, list[Scenario]] = {}
    for scenario in catalogue(range(length), range(length, 2 * length), boundaries):
        names.setdefault(scenario.name, []).append(scenario)
    return names


def test_every_window_that_fits_is_crossed():
    found = by_name(Boundaries(context_len=128, windows=(8, 4, 8, 1, 1000)))["window crossing"]
    assert len(found) == 6
    assert {max(map(len, longest_sequences(scenario))) for scenario in found} == {7, 8, 9, 11, 12, 17}


@pytest.mark.parametrize(
    ("boundaries", "name", "reason"),
    [
        (None, "window crossing", "the boundaries of the subject are unknown"),
        (None, "context end", "the boundaries of the subject are unknown"),
        (None, "rollback across calls", "the boundaries of the subject are unknown"),
        (Boundaries(context_len=64), "window crossing", "the subject has no window"),
        (Boundaries(context_len=64, windows=(1,)), "window crossing", "the subject has no window"),
        (
            Boundaries(context_len=64, windows=(32,)),
            "window crossing",
            "crossing the window of 32 takes 65 tokens, and the context ends at 64",
        ),
        (
            Boundaries(context_len=2000, windows=(512,)),
            "window crossing",
            "crossing the window of 512 takes 1025 tokens, and sequences of 28 tokens allow at most 112",
        ),
        (Boundaries(context_len=2), "context end", "a context of 2 tokens is too short"),
        (Boundaries(context_len=513), "context end", "filling the context takes 513 tokens"),
        (Boundaries(context_len=64, windows=(4,)), "rollback across calls", "has left the window of 4"),
    ],
)
def test_a_boundary_that_is_not_crossed_is_listed_with_the_reason(
    boundaries: Boundaries | None, name: str, reason: str
):
    (scenario,) = by_name(boundaries)[name]
    assert scenario.operations == ()
    assert reason in scenario.skipped


@pytest.mark.parametrize("length", [8, 9, 28, 40])
@pytest.mark.parametrize("windows", [(), (4, 8)])
def test_every_program_of_the_catalogue_is_whole_whatever_the_length(length: int, windows: tuple[int, ...]):
    names = by_name(Boundaries(context_len=100, windows=windows), length)
    assert len(names) == 27
    for scenario in (scenario for found in names.values() for scenario in found):
        assert scenario.exposes
        assert bool(scenario.operations) is (scenario.skipped is None)
        assert capacity(scenario) <= 100
        assert {len(prefix) for prefix in compared_prefixes(scenario)} >= set(scenario.crosses)
        for operation in scenario.operations:
            assert not isinstance(operation, Extend) or all(operation.ids), "no call feeds nothing"


def test_all_names_are_there_without_boundaries_too():
    assert list(by_name(None)) == list(by_name(Boundaries(context_len=100, windows=(8,))))


def test_scenarios_against_the_documentation_are_advice():
    advice = {name for name, found in by_name(None).items() if any(scenario.advice for scenario in found)}
    assert advice == {"positions left out", "positions left out, left-padded batch", "quantised cache"}


def test_each_kind_of_cache_has_its_ability():
    assert {kind: kind.ability for kind in CacheKind} == {
        CacheKind.DYNAMIC: None,
        CacheKind.STATIC: Ability.STATIC_CACHE,
        CacheKind.OFFLOADED: Ability.OFFLOADED_CACHE,
        CacheKind.QUANTISED: Ability.QUANTISED_CACHE,
    }
    for scenario in (scenario for found in by_name(None).values() for scenario in found):
        assert scenario.cache.ability is None or scenario.cache.ability in scenario.needs


def test_sequences_of_too_few_tokens_leave_out_what_needs_different_ones():
    scenarios = catalogue((1, 2, 3) * 4, (3, 2, 1) * 4)
    reasons = {scenario.name: scenario.skipped for scenario in scenarios if scenario.name.startswith("generate")}
    assert "four different tokens, and the sequences have only 3" in reasons["generate beam search"]
    assert "four different tokens" in reasons["generate prompt lookup"]
    assert reasons["generate greedy"] is None


def test_three_beams_need_three_tokens():
    with pytest.raises(UsageError, match="three different tokens"):
        beam_search((1, 2), (3, 3, 4))


def test_what_a_scenario_says_it_does_is_held_against_what_was_done(subject: ReferenceSubject):
    coverage = Coverage()
    list(run_program(subject, token_by_token(A), coverage=coverage))
    assert coverage.lengths == {1, 2, 3, 4}
    claiming = Scenario(
        name="p",
        exposes="nothing",
        operations=(),
        crosses=(4, 5, 9),
        claims=frozenset({Claim.POISONED, Claim.REJECTED}),
    )
    assert coverage.missing(token_by_token(A)) is None
    assert coverage.missing(claiming) == (
        "no row after 5, 9 tokens; no cache values overwritten with garbage; no proposed tokens rejected"
    )


def full_context(subject: ReferenceSubject) -> tuple[int, ...]:
    return tuple(i % subject.info.vocab_size for i in range(subject.info.context_len))


def test_the_last_position_works_and_the_next_is_refused(subject: ReferenceSubject):
    ids = full_context(subject)
    scenario, coverage = context_end(ids), Coverage()
    rows = [row for call in run_program(subject, scenario, coverage=coverage) for row in call.rows]
    assert coverage.missing(scenario) is None
    assert rows[-1].prefix == ids
    torch.testing.assert_close(rows[-1].logits, subject.rows(ids)[-1], atol=1e-5, rtol=0)


def test_a_session_that_takes_tokens_it_had_to_refuse_is_an_error(subject: ReferenceSubject):
    with pytest.raises(SubjectError, match="2 tokens were taken"):
        list(run_program(subject, program(feed((0,)), Refused(ids=((2,),)))))


@pytest.mark.parametrize(
    "scenario",
    [poisoned_buffer(A, A, 2), generation(Method.GREEDY, (A[:2],), (A[2:],)), prompt_lookup((0, 2, 3), 5)],
    ids=lambda scenario: scenario.name,
)
def test_what_the_subject_cannot_do_is_refused(scenario: Scenario, subject: ReferenceSubject):
    assert not scenario.needs <= set(subject.info.abilities)
    with pytest.raises(AbilityError, match="does not declare the ability"):
        list(run_program(subject, scenario))


@pytest.mark.parametrize("capacity", [0, -1, True, 10**6])
def test_a_capacity_that_is_none_is_refused(capacity: object, subject: ReferenceSubject):
    with pytest.raises(UsageError, match="capacity must be an integer from 1 to the context"):
        subject.session(capacity=capacity)


def test_options_that_need_an_ability_are_refused_without_it(subject: ReferenceSubject):
    with pytest.raises(AbilityError, match="'static-cache'"):
        subject.session(cache=CacheKind.STATIC)
    with pytest.raises(AbilityError, match="'omit-positions'"):
        subject.session(omit_positions=True)
    with pytest.raises(AbilityError, match="'poison'"):
        subject.session().poison()
