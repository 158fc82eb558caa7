"""The table as Markdown: its content, and untrusted text that cannot break it."""

import dataclasses

import pytest

from kvproof.contract.results import Verdict
from kvproof.contract.sweep_table import Ending
from kvproof.render.sweep_markdown import escape, render

from .samples import CONDITIONS, cell, group, job, table

GPT2, LLAMA = job("random:gpt2"), job("random:gpt_neox", "bfloat16", "sdpa")


def section(text: str, heading: str) -> list[str]:
    """Return the lines of a section that are not empty."""
    _, _, rest = text.partition(f"## {heading}\n")
    return [line for line in rest.partition("\n## ")[0].splitlines() if line]


def test_the_heading_names_versions_date_and_conditions():
    text = render(table(group(GPT2, cell(GPT2))))
    for words in (
        "# kvproof sweep\n",
        "kvproof 0.1.0, torch 2.13.0, transformers 5.17.0, Python 3.11.7",
        "2026-01-02T03:04:05+00:00",
        "- 8 tokens per sequence, seed 0\n",
        "- scenarios: fork\n",
        "1 group: 1 match.",
    ):
        assert words in text
    assert "Partial" not in text
    assert text.endswith("\n")


def test_scenarios_that_are_all_or_left_out_are_named():
    conditions = dataclasses.replace(CONDITIONS, only=(), without=("batch", "fork"), transformers=None)
    text = render(dataclasses.replace(table(), conditions=conditions))
    assert "- scenarios: all, without batch, fork\n" in text
    assert "transformers none" in text


def test_each_target_has_a_line_and_each_dtype_and_attention_a_column_with_the_worst_verdict():
    other = job("random:gpt2", "bfloat16", "sdpa")
    text = render(
        table(
            group(GPT2, cell(GPT2), cell(GPT2, Verdict.DIVERGED), cell(GPT2, Verdict.ROUNDING)),
            group(other, cell(other, Verdict.ROUNDING), cell(other, Verdict.NOT_CHECKED)),
            group(LLAMA, ending=Ending.TIMED_OUT, reason="cut off after 9 s"),
        )
    )
    assert section(text, "Worst verdict of each target") == [
        "| target | float32, eager | bfloat16, sdpa |",
        "|---|---|---|",
        "| random:gpt2 | **diverged** | rounding |",
        "| random:gpt_neox |  | **timed-out** |",
    ]


@pytest.mark.parametrize("verdict", [Verdict.RAISED, Verdict.DIVERGED], ids=str)
def test_what_is_wrong_with_a_decoder_stands_out(verdict: Verdict):
    lines = section(render(table(group(GPT2, cell(GPT2, verdict)))), "Worst verdict of each target")
    assert lines[2:] == [f"| random:gpt2 | **{verdict.value}** |"]


def test_counts_are_of_groups_and_of_scenarios():
    text = render(
        table(
            group(GPT2, cell(GPT2), cell(GPT2, Verdict.DIVERGED)),
            group(LLAMA, ending=Ending.REFUSED, reason="no"),
        )
    )
    assert section(text, "Counts")[2:] == ["| match | 0 | 1 |", "| diverged | 1 | 1 |", "| refused | 1 | 0 |"]


@pytest.mark.parametrize("verdict", Verdict, ids=str)
def test_what_is_neither_a_pass_nor_unchecked_is_a_finding(verdict: Verdict):
    lines = section(render(table(group(GPT2, cell(GPT2, verdict, sentence="what it says")))), "Findings")
    if verdict.passes or verdict is Verdict.NOT_CHECKED:
        assert lines == ["None."]
    else:
        found = f"**{verdict.value}**, largest gap 1.5e-06 in 10 rows: what it says"
        assert lines == [f"- random:gpt2, float32, eager, fork: {found}"]


@pytest.mark.parametrize("ending", [Ending.CRASHED, Ending.TIMED_OUT], ids=str)
def test_what_did_not_finish_is_a_finding_with_its_reason(ending: Ending):
    lines = section(render(table(group(GPT2, ending=ending, reason="killed by SIGKILL"))), "Findings")
    assert lines == [f"- random:gpt2, float32, eager: **{ending.value}**: killed by SIGKILL"]


def test_what_was_refused_is_listed_apart():
    text = render(table(group(GPT2, ending=Ending.REFUSED, reason="it needs mamba-ssm")))
    assert section(text, "Findings") == ["None."]
    assert section(text, "Refused") == ["- random:gpt2, float32, eager: it needs mamba-ssm"]


def test_what_goes_against_advice_is_a_finding_and_no_part_of_the_verdict():
    advised = cell(GPT2, Verdict.DIVERGED, advice=True, sentence="s")
    text = render(table(group(GPT2, cell(GPT2), advised)))
    assert "| random:gpt2 | match |" in text
    assert section(text, "Findings")[0].startswith(
        "- random:gpt2, float32, eager, fork, against the library's advice: **diverged**"
    )


def test_a_partial_table_says_so():
    text = render(table(group(GPT2, cell(GPT2)), num_groups_asked=4))
    assert "**Partial: 3 of 4 groups have not run.**" in text
    assert "1 of 4 groups: 1 match." in text


def test_a_table_of_nothing_renders():
    assert "0 of 4 groups: none has ended." in render(table(num_groups_asked=4))


@pytest.mark.parametrize(
    ("text", "escaped"),
    [
        ("a|b", r"a\|b"),
        ("a\nb\r\n|", r"a\\nb\\r\\n\|"),
        ("self_attn.k_proj", "self_attn.k_proj"),
        ("_init_ __x__", r"\_init\_ \_\_x\_\_"),
        ("<script>&amp;", r"\<script\>\&amp;"),
        ("*b* `c` [d](e) ~f~ $g$ \\", r"\*b\* \`c\` \[d\](e) \~f\~ \$g\$ " + "\\\\"),
        ("\x1b[31m\u2028\u202e", r"\\x1b\[31m\\u2028\\u202e"),
        ("größe 日本 ×", "größe 日本 ×"),
    ],
    ids=["pipe", "newline", "word", "underscores", "html", "inline", "control", "letters"],
)
def test_text_from_elsewhere_is_escaped(text: str, escaped: str):
    assert escape(text) == escaped


def test_no_text_from_elsewhere_adds_a_line_or_a_column():
    evil = "x | y\n## Findings\n| z"
    bad = dataclasses.replace(job(evil), dtype=evil, attention=evil)
    crashed = group(dataclasses.replace(bad, seed=1), ending=Ending.CRASHED, reason=evil)
    refused = group(dataclasses.replace(bad, seed=2), ending=Ending.REFUSED, reason=evil)
    good = render(table(group(GPT2, cell(GPT2, Verdict.DIVERGED, sentence="s")), crashed, refused))
    finding = cell(bad, Verdict.DIVERGED, scenario=evil, sentence=evil)
    text = render(table(group(bad, finding), crashed, refused))
    assert text.count("\n## Findings\n") == 1
    assert "\n| z" not in text
    rows = [line for line in text.splitlines() if line.startswith("| x")]
    assert len(rows) == 1
    assert rows[0].replace(r"\|", "").count("|") == 3
    assert good.count("\n## ") == text.count("\n## ")
