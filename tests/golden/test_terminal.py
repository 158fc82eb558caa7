"""The renderings of a report built by hand, letter by letter.

The golden files change only where ``KVPROOF_WRITE_GOLDEN=1`` is set.
"""

import dataclasses
import os
import re
from pathlib import Path

import pytest
from tests.small_report import DIVERGENCE, REPORT

from kvproof._report import Report, Verdict
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
        assert len(re.sub(r"\x1b\[[0-9;]*m", "", line)) <= width
        assert line == line.rstrip()


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
    for name, value in {"NO_COLOR": "1", "FORCE_COLOR": "1", "COLUMNS": "40", "LINES": "5"}.items():
        monkeypatch.setenv(name, value)
    assert {look: render(REPORT, look=look) for look in Look} == looks


def diverged() -> Report:
    scenario = dataclasses.replace(REPORT.scenarios[0], verdict=Verdict.DIVERGED, divergence=DIVERGENCE)
    return dataclasses.replace(
        REPORT,
        verdict=Verdict.DIVERGED,
        summary=f"The cached path diverges: {DIVERGENCE.sentence}.",
        scenarios=(scenario, *REPORT.scenarios[1:]),
        milestone=None,
    )


def test_a_diverged_report_names_the_stage_and_the_likely_contract():
    text = words(render(diverged(), width=300))
    assert f"{DIVERGENCE.sentence}." in text
    assert "cache_k of layer 0, head 1, slot 0" in text
    assert f"Likely contract: {DIVERGENCE.contract}." in text


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
