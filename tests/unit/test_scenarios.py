"""Programs of cache operations, and the token sequences that they consume."""

import pytest

from kvproof._errors import UsageError
from kvproof._programs import run_program
from kvproof.scenarios import (
    Ability,
    Crop,
    Extend,
    Fork,
    Open,
    Operation,
    Reorder,
    Reset,
    Scenario,
    chunked,
    fork,
    interleaved,
    longest_sequences,
    prefill_and_steps,
    rollback,
    token_by_token,
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
    "chunks": (chunked(A, 2), (feed((0, 2)), feed((3, 5)))),
    "a last chunk that is shorter": (chunked(A, 3), (feed((0, 2, 3)), feed((5,)))),
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
        interleaved(A[:2], B[:2]),
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
        (chunked(A, 2), set()),
        (interleaved(A, B), set()),
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
        chunked(A, size)


@pytest.mark.parametrize("split", [0, -1, 5, 100])
def test_a_prompt_of_no_token_or_of_more_than_there_are_is_refused(split: int):
    """Such a program fed an empty prompt, or left out its steps without a word."""
    with pytest.raises(UsageError, match=f"^cannot split 4 tokens after {split}$"):
        prefill_and_steps(A, split)


@pytest.mark.parametrize(
    "make", [lambda: fork((0,), (1,), (2, 3)), lambda: interleaved((1, 2), (3,))], ids=["fork", "interleaved"]
)
def test_turns_of_unequal_length_are_refused(make):
    with pytest.raises(ValueError, match=r"^zip\(\)"):
        make()
