"""The renderings of a report built by hand, letter by letter.

The golden files change only where ``KVPROOF_WRITE_GOLDEN=1`` is set.
"""

import dataclasses
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.small_report import DIVERGENCE, REPORT

from kvproof.contract.report import Report
from kvproof.contract.results import Verdict
from kvproof.render import json
from kvproof.render.terminal import Look, render

FOLDER = Path(__file__).parent
BOX_LINES = "─│╭╮╰╯├┤┬┴┼━┃╞╡═"
ESCAPE = "\x1b"


def golden(name: str, text: str) -> str:
    """Return what a golden file holds, after ``text`` was written to it if the variable asks for that."""
    path = FOLDER / name
    if os.environ.get("KVPROOF_WRITE_GOLDEN") == "1":
        path.write_text(text, "utf-8", newline="\n")
    return path.read_text("utf-8")


def uncoloured(text: str) -> str:
    """Return a text without the codes that colour it."""
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def words(text: str) -> str:
    """Return a text without its line ends and runs of spaces."""
    return " ".join(text.split())


def test_the_plain_text_is_the_golden_one():
    text = render(REPORT, width=100)
    assert text == golden("terminal.txt", text)


def test_the_json_is_the_golden_one_and_reads_back_equal():
    text = json.render(REPORT)
    kept = golden("report.json", text)
    assert text == kept
    assert json.parse(kept, "report.json") == REPORT


@pytest.mark.parametrize("look", Look)
@pytest.mark.parametrize("width", [40, 80, 200])
def test_no_line_is_wider_than_asked_or_ends_in_spaces(look: Look, width: int):
    for line in render(REPORT, width=width, look=look).splitlines():
        assert len(uncoloured(line)) <= width
        assert line == line.rstrip()


@pytest.mark.parametrize("look", Look)
@pytest.mark.parametrize("width", [40, 80, 200])
def test_a_dumb_terminal_changes_neither_the_width_nor_anything_else(
    look: Look, width: int, monkeypatch: pytest.MonkeyPatch
):
    """With TERM=dumb every text was 80 columns wide, whatever width was asked for."""
    monkeypatch.delenv("LINES", raising=False)  # with it, a height is known and TERM is not asked
    monkeypatch.setenv("TERM", "xterm-256color")
    expected = render(REPORT, width=width, look=look)
    monkeypatch.setenv("TERM", "dumb")
    assert render(REPORT, width=width, look=look) == expected
    widest = max(len(uncoloured(line)) for line in expected.splitlines())
    assert {40: 35, 80: 75, 200: 90}[width] <= widest <= width


OPERATING = "\x1b]0;title\x07\x1b[2J\r"
SHOWN = "\\x1b]0;title\\x07\\x1b[2J\\r"


def hostile(value: Any) -> Any:
    """Return contract data whose every text ends in what a terminal acts on."""
    if type(value) is str:
        return value + OPERATING
    if isinstance(value, tuple):
        return tuple(map(hostile, value))
    if not dataclasses.is_dataclass(value):
        return value
    members = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    # A policy's kind decides how it is shown; a reader takes no other text for it.
    return dataclasses.replace(value, **{k: hostile(v) for k, v in members.items() if k != "kind"})


@pytest.mark.parametrize("look", Look)
@pytest.mark.parametrize("report", [lambda: REPORT, lambda: diverged()], ids=["milestone", "diverged"])
def test_escape_codes_in_any_text_are_shown_and_not_obeyed(report: Callable[[], Report], look: Look):
    """A token's text could move the cursor, ring the bell and set the window's title."""
    text = render(hostile(report()), width=600, look=look)
    left = uncoloured(text) if look is Look.COLOUR else text
    assert all(line.isprintable() for line in left.split("\n"))
    if report() is REPORT:
        assert f"[red]<script>{SHOWN}" in left, "in the table of prefixes"
        assert f"greedy{SHOWN} (lowest id wins a tie): [red]<script> <eos>{SHOWN}; stop reason" in left
        assert f"[red]<script>{SHOWN} 0.2500  A{SHOWN} 0.7500" in left, "among the probabilities"
        assert f"seeded: [bold]not reproducible[/bold]{SHOWN}" in left, "in the gate"
    else:
        assert f"| {REPORT.scenarios[0].name}{SHOWN}" in left or f"│ {REPORT.scenarios[0].name}{SHOWN}" in left
        assert f"Likely cause: {DIVERGENCE.contract}{SHOWN}." in left


@pytest.mark.parametrize("look", Look)
def test_a_report_without_scenarios_or_cache_trace_is_rendered(look: Look):
    """Both were taken for granted, and a report without them ended in an error of Python's own."""
    bare = dataclasses.replace(REPORT.milestone, cache_trace=())
    report = dataclasses.replace(REPORT, scenarios=(), faults=(), milestone=bare)
    text = uncoloured(render(report, look=look))
    assert "cached against uncached" not in text
    assert "cache trace: (batch, head, slot, head_dim) after each consumed token" in words(text)
    assert text.endswith(f"{REPORT.summary}\n")


@pytest.mark.parametrize("look", Look)
@pytest.mark.parametrize("name", ["[bold]rollback[/bold]", "rollback[/]", "[link=x]rollback", ":warning: [red]"])
def test_a_table_s_title_that_looks_like_markup_is_shown_literally(name: str, look: Look):
    first = dataclasses.replace(REPORT.scenarios[0], name=name)
    pair = dataclasses.replace(REPORT.milestone.runs[0], name=name)
    report = dataclasses.replace(
        REPORT,
        scenarios=(first,),
        milestone=dataclasses.replace(REPORT.milestone, runs=(pair,)),
    )
    lines = uncoloured(render(report, width=300, look=look)).splitlines()
    assert f"{name}: cached against uncached, whole rows" in lines
    assert any(line.startswith(f"{name} (lowest id wins a tie): [red]<script> <eos>; ") for line in lines)


@pytest.mark.parametrize("look", Look)
def test_text_that_looks_like_markup_is_shown_literally(look: Look):
    text = render(REPORT, width=300, look=look)
    assert "[red]<script> A" in text, "in the table of prefixes"
    assert "greedy (lowest id wins a tie): [red]<script> <eos>; stop reason eos" in text, "in a title"
    assert "[red]<script> 0.2500  A 0.7500" in text, "among the probabilities"
    assert "seeded: [bold]not reproducible[/bold]" in text, "in the gate"


def test_plain_text_draws_its_boxes_in_ascii():
    assert not set(render(REPORT)) & set(BOX_LINES)
    assert set(render(REPORT, look=Look.MONO)) & set(BOX_LINES)


def test_only_the_coloured_look_holds_escape_codes():
    assert ESCAPE in render(REPORT, look=Look.COLOUR)
    assert ESCAPE not in render(REPORT, look=Look.MONO)
    assert ESCAPE not in render(REPORT, look=Look.PLAIN)


def test_the_environment_decides_nothing(monkeypatch: pytest.MonkeyPatch):
    looks = {look: render(REPORT, look=look) for look in Look}
    for name, value in {
        "NO_COLOR": "1",
        "FORCE_COLOR": "1",
        "COLUMNS": "40",
        "LINES": "5",
        "TERM": "dumb",
    }.items():
        monkeypatch.setenv(name, value)
    assert {look: render(REPORT, look=look) for look in Look} == looks


def diverged() -> Report:
    scenario = dataclasses.replace(REPORT.scenarios[0], verdict=Verdict.DIVERGED, divergence=DIVERGENCE)
    return dataclasses.replace(
        REPORT,
        verdict=Verdict.DIVERGED,
        summary=f"The cached path diverges: {DIVERGENCE.sentence}.",
        scenarios=(scenario, *REPORT.scenarios[1:]),
        faults=(),
        milestone=None,
    )


@pytest.mark.parametrize("look", Look)
def test_a_diverged_report_names_the_stage_and_the_likely_contract(look: Look):
    """Only a fault's finding was shown with its contract; what the audit itself found was not."""
    text = words(uncoloured(render(diverged(), width=300, look=look)))
    assert "cache_k of layer 0, head 1, slot 0" in DIVERGENCE.sentence
    assert f"token-by-token: {DIVERGENCE.sentence}. Likely cause: {DIVERGENCE.contract}." in text


def test_every_scenario_that_diverged_is_told_by_name():
    """The second scenario's finding stood nowhere, not even where it was the only one."""
    first, second = diverged().scenarios
    located = dataclasses.replace(DIVERGENCE, scenario="fork", contract="forks: a fork owns its cache")
    both = dataclasses.replace(second, verdict=Verdict.DIVERGED, divergence=located)
    text = words(render(dataclasses.replace(diverged(), scenarios=(first, both)), width=300))
    assert f"token-by-token: {DIVERGENCE.sentence}. Likely cause: {DIVERGENCE.contract}." in text
    assert f"fork: {DIVERGENCE.sentence}. Likely cause: forks: a fork owns its cache." in text


PLACES = ("new_q of layer 0", "cache_len of layer 1 (by way of attn_mix of layer 1)")


@pytest.mark.parametrize(
    ("confirmed", "introduced", "logits_differ", "line"),
    [
        (
            True,
            PLACES[:1],
            True,
            f"Confirmed: replacing {PLACES[0]} with the uncached value makes the logits agree.",
        ),
        (
            True,
            PLACES[:1],
            False,
            f"Confirmed: replacing {PLACES[0]} with the uncached value makes every value agree.",
        ),
        (
            True,
            PLACES,
            True,
            "Confirmed: replacing these 2 values with the uncached ones makes the logits agree. Each is wrong "
            f"independently of the ones before it: {PLACES[0]}; {PLACES[1]}.",
        ),
        (
            False,
            PLACES[:1],
            True,
            f"Not confirmed: replacing {PLACES[0]} with uncached values does not show that the",
        ),
        (
            False,
            PLACES,
            True,
            f"Not confirmed: replacing {PLACES[0]} and 1 more value with uncached values",
        ),
        (
            False,
            PLACES * 2,
            True,
            f"Not confirmed: replacing {PLACES[0]} and 3 more values with uncached values",
        ),
    ],
)
def test_a_finding_says_whether_it_was_confirmed(
    confirmed: bool, introduced: tuple[str, ...], logits_differ: bool, line: str
):
    located = dataclasses.replace(
        DIVERGENCE, confirmed=confirmed, introduced=introduced, logits_differ=logits_differ
    )
    scenario = dataclasses.replace(diverged().scenarios[0], divergence=located)
    text = words(render(dataclasses.replace(diverged(), scenarios=(scenario,)), width=300))
    assert line in text


def test_a_pointer_that_was_not_put_to_the_test_says_nothing_of_it():
    scenario = dataclasses.replace(
        diverged().scenarios[0], divergence=dataclasses.replace(DIVERGENCE, confirmed=False, introduced=())
    )
    text = words(render(dataclasses.replace(diverged(), scenarios=(scenario,)), width=300)).casefold()
    assert "confirmed" not in text
    assert DIVERGENCE.sentence.casefold() in text


def test_a_diverged_report_ends_in_its_summary():
    assert words(render(diverged(), width=300)).endswith(diverged().summary)


def test_a_fault_that_was_not_caught_stands_out():
    lines = [line for line in render(REPORT, width=300).splitlines() if "no-op" in line]
    assert len(lines) == 1
    assert "NO" in lines[0].split()
    assert "none found" in lines[0]


def test_a_row_without_a_top_rung_shows_a_dash():
    fork_first = dataclasses.replace(REPORT, scenarios=REPORT.scenarios[1:])
    line = next(line for line in render(fork_first).splitlines() if line.startswith("| A "))
    assert [cell.strip() for cell in line.strip("|").split("|")] == [
        "A",
        "1",
        "1.0000e-06",
        "1.0e-05",
        "-",
        "match",
    ]
