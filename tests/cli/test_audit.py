"""``kvproof audit``: what it prints, its exit statuses, and what it refuses."""

import json
import sys
from pathlib import Path

import pytest

from kvproof._report import Report, Verdict
from kvproof.render.json import parse

from .running import run

SHORT = ("--length", 12, "--scenario", "token-by-token", "--scenario", "fork")


def test_a_clean_model_passes_and_shows_a_line_a_scenario():
    outcome = run("audit", "random:llama", *SHORT)
    assert outcome.status == 0
    lines = [line.split("|")[1].strip() for line in outcome.out.split("\n") if line.startswith("| ")]
    assert lines == ["scenario", "token-by-token", "fork"]
    assert "computes the same logits" in outcome.out


def test_a_faulty_model_fails_and_names_the_module_and_the_contract():
    outcome = run("audit", "random:mamba", "--length", 12, "--scenario", "chunked prefill")
    assert outcome.status == 1
    assert "mixer" in outcome.out
    assert "Likely contract:" in outcome.out
    assert "The cached path diverges" in outcome.out


def test_json_is_one_strict_report_and_the_file_holds_the_same(tmp_path: Path):
    outcome = run("audit", "random:gpt2", *SHORT, "--json", "--report", tmp_path / "r.json")
    printed: Report = parse(outcome.out, "stdout")
    assert printed == parse((tmp_path / "r.json").read_text("utf-8"), "r.json")
    assert printed.verdict.passes
    assert printed.milestone is None
    assert printed.subject.name == "random:gpt2"


def test_the_same_seed_gives_the_same_rows():
    reports = [json.loads(run("audit", "random:gpt2", *SHORT, "--json", "--seed", s).out) for s in (3, 3, 4)]
    assert reports[0]["scenarios"] == reports[1]["scenarios"]
    assert reports[0]["scenarios"] != reports[2]["scenarios"]


def test_quiet_prints_the_verdict_alone():
    outcome = run("audit", "random:gpt2", *SHORT, "--quiet")
    assert outcome.out.count("\n") == 1
    assert outcome.out.startswith("The cached path computes the same logits")
    assert outcome.err == ""


def test_skip_leaves_a_scenario_out():
    outcome = run("audit", "random:gpt2", *SHORT, "--skip", "fork", "--json")
    assert [s.name for s in parse(outcome.out, "stdout").scenarios] == ["token-by-token"]


def test_what_is_not_checked_is_not_a_pass_where_it_is_required():
    options = ("audit", "random:mamba", "--length", 12, "--scenario", "rollback")
    free, required = run(*options, "--json"), run(*options, "--require", "rollback")
    assert free.status == 0
    assert parse(free.out, "stdout").verdict is Verdict.NOT_CHECKED
    assert required.status == 5
    assert required.err == "kvproof: scenario 'rollback' was required and not checked\n"


def test_the_list_names_every_scenario_without_a_target():
    outcome = run("audit", "--list")
    assert outcome.status == 0
    names = {line[:20].strip() for line in outcome.out.strip().split("\n")}
    assert {"token-by-token", "chunked prefill", "left-padded batch", "beam reorder", "rollback"} <= names
    assert len(names) == 11


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere"], ["'nowhere' is neither a folder nor random:TYPE"]),
        (["random:lama"], ["lama", "llama"]),
        (["random:t5"], ["t5"]),
        (["random:blt", "--scenario", "fork"], ["random:blt cannot be audited", "num_hidden_layers"]),
        (["random:llama", "--scenario", "nonsense"], ["no scenario 'nonsense'", "token-by-token"]),
        (["random:llama", "--skip", "nonsense"], ["no scenario 'nonsense'"]),
        (["random:llama", "--length", "129"], ["129 tokens are more than the context of 128"]),
    ],
    ids=str,
)
def test_wrong_usage_is_refused_in_one_line(arguments: list[str], words: list[str]):
    assert run("audit", *arguments).refused(*words)


@pytest.mark.parametrize(
    "arguments", [[], ["x", "--dtype", "int8"], ["x", "--length", "7"], ["x", "--seed", "-1"]]
)
def test_a_wrong_option_is_refused(arguments: list[str]):
    outcome = run("audit", *arguments)
    assert outcome.status == 2
    assert "Traceback" not in outcome.err


def test_without_transformers_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    for name in [name for name in sys.modules if name.startswith("kvproof.subjects._transformers")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "transformers", None)
    import kvproof.subjects

    monkeypatch.delattr(kvproof.subjects, "_transformers", raising=False)
    assert run("audit", "random:llama").refused("pip install 'kvproof[transformers]'")
