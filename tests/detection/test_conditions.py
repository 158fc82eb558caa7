"""The condition under which a bug shows, derived from rows and calls; a sound decoder has none."""

import dataclasses

import pytest
import torch
from tests.detection.condition_decoders import Bug, Call, subject

from kvproof import Verdict, audit
from kvproof.contract.report import Report
from kvproof.scenarios import Crop, Extend, Fork, Reorder, Scenario

WINDOW = 8


def tokens(num: int, seed: int = 0) -> tuple[int, ...]:
    """Return random tokens."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(1, 23, (num,), generator=generator).tolist())


def calls(name: str, *widths: int, batch: int = 1) -> Scenario:
    """Return a program of calls of these widths, each batch row with tokens of its own."""
    rows, operations, start = [tokens(sum(widths), seed) for seed in range(batch)], [], 0
    for width in widths:
        operations.append(Extend(ids=tuple(row[start : start + width] for row in rows)))
        start += width
    return Scenario(name=name, exposes="", operations=tuple(operations), batch=batch)


def with_crops(name: str, num: int) -> Scenario:
    """Return a program that crops so many times, and feeds tokens again after each."""
    ids = tokens(12)
    operations: list[object] = [Extend(ids=(ids[:8],))]
    for _ in range(num):
        operations += [Crop(length=5), Extend(ids=(ids[5:8],))]
    return Scenario(name=name, exposes="", operations=(*operations, Extend(ids=(ids[8:],))))  # type: ignore[arg-type]


def padded(name: str, *lengths: int) -> Scenario:
    """Return a program whose rows are so long at first, followed by one token each."""
    rows = [tokens(length, seed) for seed, length in enumerate(lengths)]
    return Scenario(
        name=name,
        exposes="",
        operations=(Extend(ids=tuple(rows)), Extend(ids=tuple((seed + 1,) for seed in range(len(rows))))),
        batch=len(lengths),
    )


def forked(name: str, at: int) -> Scenario:
    """Return a program that goes on in a session and in a fork of it."""
    ids = tokens(10)
    operations = (
        Extend(ids=(ids[:at],)),
        Fork(),
        Extend(ids=(ids[at : at + 1],)),
        Extend(ids=(ids[at + 1 : at + 2],), session=1),
        Extend(ids=(ids[at + 2 : at + 4],), session=1),
        Extend(ids=(ids[at + 1 : at + 4],)),
    )
    return Scenario(name=name, exposes="", operations=operations)


def reordered(name: str) -> Scenario:
    """Return a program of three rows that swaps them after two calls."""
    first, second, third = (tokens(8, seed) for seed in range(3))
    operations = (
        Extend(ids=(first[:3], second[:3], third[:3])),
        Extend(ids=(first[3:4], second[3:4], third[3:4])),
        Reorder(rows=(2, 0, 1)),
        Extend(ids=(first[4:5], second[4:5], third[4:5])),
        Extend(ids=(first[5:8], second[5:8], third[5:8])),
    )
    return Scenario(name=name, exposes="", operations=operations, batch=3)


PROGRAMS = (
    calls("steps", *(1,) * 28),
    calls("a token and a block", 1, 9, 1),
    calls("prefill", 5, *(1,) * 20),
    calls("blocks of two", 1, *(2,) * 10),
    calls("blocks of three", 2, 3, 3, 1, 3, 3, 3, 3, 3, 3),
    calls("blocks of four", 3, 4, 4, 4, 1, 4, 4),
    calls("a long block", 12, 8, 1, 8),
    calls("two rows", 4, *(1,) * 6, 2, 2, 3, batch=2),
    calls("three rows", 3, *(1,) * 6, 2, 3, 4, batch=3),
    calls("five rows", 4, 1, 1, 5, 2, 5, batch=5),
    with_crops("one crop", 1),
    with_crops("three crops", 3),
    padded("padded", 3, 6, 1),
    padded("unpadded", 4, 4),
    forked("fork", 5),
    forked("early fork", 2),
    reordered("reorder"),
)


def rows_from(first: int) -> Bug:
    """Return a bug of batch rows from one on."""
    return lambda call: torch.arange(call.batch).ge(first)[:, None, None].to(call.cache.sums.dtype)


def late(call: Call) -> torch.Tensor:
    """Return an error of 1 at each position beyond 20."""
    places = torch.arange(call.start, call.start + call.width)
    return places.gt(20)[None, :, None].to(call.cache.sums.dtype)


def in_padded_rows(call: Call) -> torch.Tensor:
    """Return an error of 1 in each row that has padding."""
    return call.mask.eq(0).any(1)[:, None, None].to(call.cache.sums.dtype)


#: A bug, and what its condition must say.
BUGS: dict[str, tuple[Bug, str]] = {
    "T == B taken for a decode step": (
        lambda call: 1.0 if call.width == call.batch > 1 else 0.0,
        "the call feeds several tokens and feeds as many tokens as the batch has rows",
    ),
    "blocks": (lambda call: float(call.width > 1), "the call feeds several tokens"),
    "blocks on a warm cache": (
        lambda call: float(call.width > 1 and call.start > 0),
        "the call feeds several tokens to a cache that holds tokens",
    ),
    "block of width 3 only": (lambda call: float(call.width == 3), "the call feeds 3 tokens"),
    "single tokens": (lambda call: float(call.width == 1), "the call feeds a single token"),
    "block on a full window": (
        lambda call: float(call.width > 1 and call.start >= WINDOW),
        f"the call feeds several tokens and starts at position {WINDOW} (a window) or later",
    ),
    "warm block beyond the window": (
        lambda call: float(call.width > 1 and call.start > 0 and call.start + call.width > WINDOW),
        "the call feeds several tokens to a cache that holds tokens and ends at position 8 (a window) or later",
    ),
    "block across the window": (
        lambda call: float(call.start < WINDOW < call.start + call.width),
        f"the call crosses position {WINDOW} (a window)",
    ),
    "batch row 3 or later": (rows_from(3), "the row is in batch row 3 or a later one"),
    "any batch": (lambda call: float(call.batch > 1), "the batch has several rows"),
    "after the second crop": (
        lambda call: float(call.cache.num_crops >= 2),
        "the session was cropped at least 2 times",
    ),
    "after a crop": (lambda call: float(call.cache.num_crops >= 1), "the session was cropped before"),
    "left padding only": (in_padded_rows, "the batch row has padding before it"),
    "position > 20": (late, "the row is at position 21 or later"),
    "first call of one token only": (
        lambda call: float(call.width == 1 and call.start == 0),
        "the call feeds a single token to an empty cache",
    ),
    "after a block": (
        lambda call: float(call.cache.last_width > 1),
        "the call before it fed several tokens",
    ),
    "after a reordering": (lambda call: float(call.cache.num_reorders > 0), "the session was reordered before"),
    "in a fork": (lambda call: float(call.cache.is_fork), "the session was forked from another before"),
}


def run(bug: Bug, *, stays: bool = False, programs: tuple[Scenario, ...] = PROGRAMS) -> Report:
    """Audit the decoder with a bug, by these programs."""
    own = [dataclasses.replace(program, needs=frozenset()) for program in programs]
    return audit(subject(bug, stays=stays, windows=(WINDOW,)), own, certificate=False, all_values=False)


def conditions(report: Report) -> set[str | None]:
    """Return the conditions of what diverged."""
    return {each.condition for each in report.scenarios if each.verdict is Verdict.DIVERGED}


@pytest.mark.parametrize("stays", [False, True], ids=["in the row", "stays in the cache"])
@pytest.mark.parametrize("name", BUGS)
def test_the_condition_of_a_planted_bug_is_named(name: str, stays: bool):
    bug, words = BUGS[name]
    (condition,) = conditions(run(bug, stays=stays))
    assert condition is not None
    assert condition.startswith(f"exactly where {words}")


def test_a_sound_decoder_has_no_condition():
    report = run(lambda call: 0.0)
    assert report.verdict.passes
    assert {each.condition for each in report.scenarios} == {None}


def test_nothing_is_guessed_where_no_condition_is_exact():
    report = run(lambda call: float((call.start * 7 + call.width * 3) % 5 == 1))
    assert report.verdict is Verdict.DIVERGED
    assert conditions(report) == {None}


def test_nothing_is_said_where_every_row_is_wrong():
    assert conditions(run(lambda call: 1.0)) == {None}


def test_two_findings_have_conditions_of_their_own():
    programs = (
        *PROGRAMS[:4],
        calls("blocks of three", 2, 3, 3, 1, 3, 3),
        calls("blocks of four", 5, 4, 4, 1, 4),
        calls("two rows", 4, 1, 1, 2, 5, batch=2),
        calls("three rows", 2, 1, 4, 1, 2, batch=3),
    )
    own = subject(lambda call: float(call.width == 3), late=lambda call: float(call.batch > 1))
    report = audit(own, programs, certificate=False)
    found = {each.name: each for each in report.scenarios if each.verdict is Verdict.DIVERGED}
    assert set(found) == {"blocks of three", "two rows", "three rows"}
    assert str(found["blocks of three"].condition).startswith("exactly where the call feeds 3 tokens (")
    for name in ("two rows", "three rows"):
        assert str(found[name].condition).startswith("exactly where the batch has several rows (")
    text = str(report)
    assert text.count("the batch has several rows") == 1
    assert "The same finding in three rows." in text


def test_what_is_advice_or_on_a_quantised_cache_or_of_one_call_says_nothing():
    one = (calls("steps", *(1,) * 8), calls("a block", 1, 2, 1))
    assert conditions(run(lambda call: float(call.width > 1), programs=one)) == {None}
    advice = tuple(dataclasses.replace(each, advice=True) for each in PROGRAMS)
    report = run(lambda call: float(call.width > 1), programs=(calls("steps", *(1,) * 8), *advice))
    assert conditions(report) == {None}
