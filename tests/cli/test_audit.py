"""``kvproof audit``: what it prints, its exit statuses, and what it refuses."""

import html
import json
import re
import sys
from pathlib import Path

import pytest
from tests.hf.folders import saved_model, saved_tokenizer

from kvproof._engine.audit import Auditor
from kvproof.contract.report import Report
from kvproof.contract.results import RowResult, ScenarioResult, Verdict
from kvproof.faults import Fault
from kvproof.render.json import parse, read
from kvproof.scenarios import Scenario, catalogue

from .running import run

SHORT = ("--length", 12, "--scenario", "token-by-token", "--scenario", "fork", "--no-certificate")


def test_a_clean_model_passes_and_shows_a_line_a_scenario():
    outcome = run("audit", "random:llama", *SHORT)
    assert outcome.status == 0
    lines = [line.split("|")[1].strip() for line in outcome.out.split("\n") if line.startswith("| ")]
    assert lines == ["scenario", "causality", "token-by-token", "fork"]
    assert "computes the same logits" in outcome.out


def test_a_pass_is_certified_unless_that_is_left_out():
    certified = run("audit", "random:gpt2", "--length", 8, "--scenario", "fork")
    assert certified.status == 0
    assert re.search(r"certificate: of \d+ planted faults \(float64\) \d+ changed a row", certified.out)
    left_out = run("audit", "random:gpt2", "--length", 8, "--scenario", "fork", "--no-certificate")
    assert left_out.status == 0
    assert "note: no certificate (--no-certificate): no faults were planted" in left_out.out


def test_the_faults_are_listed_with_their_stages():
    listed = run("faults", "--json")
    assert {"name": "stale-slot", "stages": ["cache_k", "cache_v"]}.items() <= next(
        entry for entry in json.loads(listed.out) if entry["name"] == "stale-slot"
    ).items()
    assert len(run("faults").out.splitlines()) == len(json.loads(listed.out))


def test_a_faulty_model_fails_and_names_the_module_and_the_contract():
    outcome = run("audit", "random:mamba", "--length", 12, "--scenario", "chunked prefill")
    assert outcome.status == 1
    assert "mixer" in outcome.out
    assert "Likely cause:" in outcome.out
    assert "The cached path diverges" in outcome.out
    assert "Which side: the cached path is the suspect: 4 other ways of computing" in outcome.out
    again = "kvproof audit random:mamba --length 12 --scenario 'chunked prefill'"
    assert outcome.out.endswith(f"To repeat the first finding alone: {again}\n")


def test_a_report_says_what_to_type_to_repeat_the_audit(tmp_path: Path):
    asked = ("--seed", 3, "--scenario", "fork", "--scenario", "chunked prefill", "--no-certificate")
    outcome = run("audit", "random:gpt2", "--length", 8, *asked, "--report", tmp_path, "--quiet")
    assert outcome.status == 0
    report = read(tmp_path / "report.json")
    words = "--length 8 --seed 3 --scenario fork --scenario 'chunked prefill' --no-certificate"
    assert report.request.command == f"kvproof audit random:gpt2 {words}"
    assert report.request.command in html.unescape((tmp_path / "report.html").read_text("utf-8"))
    (spread,) = report.spreads
    assert not any(slot.wrong for slot in spread.kept)


def test_a_subject_that_looks_ahead_is_named_as_such():
    outcome = run("audit", "random:big_bird", *SHORT)
    assert outcome.status == 1
    assert "The uncached path is not causal: the row after 1 tokens changes" in outcome.out
    assert "Against literal rows the cached path diverges, too" in " ".join(outcome.out.split())
    assert outcome.out.endswith("kvproof audit random:big_bird --length 12\n")


def test_fail_fast_stops_after_the_first_finding():
    several = ("--length", 12, "--scenario", "chunked prefill", "--scenario", "multi-turn")
    outcome = run("audit", "random:mamba", *several, "--fail-fast", "--json")
    assert outcome.status == 1
    report = parse(outcome.out, "stdout")
    assert [s.name for s in report.scenarios] == ["causality", "chunked prefill"]
    assert report.partial


def test_a_model_that_raises_exits_with_6_and_shows_its_own_traceback(tmp_path: Path):
    """Bloom's position bias is as long as the mask, so it raises on a static cache."""
    arguments = ("random:bloom", "--scenario", "static cache", "--scenario", "token-by-token")
    done = run("audit", *arguments, "--report", tmp_path)
    assert done.status == 6
    words = " ".join(done.out.split())
    assert "The cached path raises in call 1 of static cache, fed 14 tokens at position 0, in layer 0" in words
    assert "Traceback (most recent call last):" in words
    assert "modeling_bloom.py" in done.out.replace("\n", "")
    assert "To repeat the first finding alone: kvproof audit random:bloom --scenario 'static cache'" in words
    assert "kvproof shrink" not in words
    assert run("audit", *arguments, "--quiet", "--baseline", tmp_path / "report.json").status == 0
    assert run("audit", *arguments[:1], "--quiet", "--scenario", "token-by-token", "--no-certificate").status == 0


def test_ctrl_c_keeps_what_was_done(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    check = Auditor.check

    def interrupted(self: Auditor, programs: list[Scenario], fault: Fault | None = None) -> ScenarioResult:
        if programs[0].name == "fork":
            raise KeyboardInterrupt
        return check(self, programs, fault)

    monkeypatch.setattr(Auditor, "check", interrupted)
    outcome = run("audit", "random:gpt2", *SHORT, "--report", tmp_path)
    assert outcome.status == 130
    assert outcome.err == "kvproof: interrupted; the report holds what was done so far\n"
    assert "This report is partial" in outcome.out
    report = parse((tmp_path / "report.json").read_text("utf-8"), "report.json")
    assert [s.name for s in report.scenarios] == ["causality", "token-by-token"]
    assert report.partial


def test_json_is_one_strict_report_and_the_file_holds_the_same(tmp_path: Path):
    outcome = run("audit", "random:gpt2", *SHORT, "--json", "--report", tmp_path / "out")
    printed: Report = parse(outcome.out, "stdout")
    assert printed == parse((tmp_path / "out" / "report.json").read_text("utf-8"), "report.json")
    assert printed.verdict.passes
    assert printed.milestone is None
    assert printed.subject.name == "random:gpt2"


def test_the_same_seed_gives_the_same_rows():
    reports = [json.loads(run("audit", "random:gpt2", *SHORT, "--json", "--seed", s).out) for s in (3, 3, 4)]
    assert reports[0]["scenarios"] == reports[1]["scenarios"]
    assert reports[0]["scenarios"] != reports[2]["scenarios"]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux forks")
def test_the_number_of_processes_changes_nothing():
    outcomes = [run("audit", "random:gpt2", *SHORT, "--json", "--jobs", jobs) for jobs in (1, 2)]
    assert [outcome.status for outcome in outcomes] == [0, 0]
    one, two = (json.loads(outcome.out) for outcome in outcomes)
    assert one.pop("environment").keys() == two.pop("environment").keys()
    assert one == two
    assert "--jobs" not in one["request"]["command"]


def test_no_processes_are_refused():
    outcome = run("audit", "random:gpt2", "--jobs", 0)
    assert outcome.status == 2
    assert "Invalid value for '--jobs'" in outcome.err


def test_quiet_prints_the_verdict_alone():
    outcome = run("audit", "random:gpt2", *SHORT, "--quiet")
    assert outcome.out.count("\n") == 1
    assert outcome.out.startswith("The cached path computes the same logits")
    assert outcome.err == ""


def test_skip_leaves_a_scenario_out():
    outcome = run("audit", "random:gpt2", *SHORT, "--skip", "fork", "--json")
    assert [s.name for s in parse(outcome.out, "stdout").scenarios] == ["causality", "token-by-token"]


def test_what_is_not_checked_is_not_a_pass_where_it_is_required():
    options = ("audit", "random:mamba", "--length", 12, "--scenario", "rollback")
    named, required = run(*options, "--json"), run(*options, "--require", "rollback")
    assert (named.status, required.status) == (5, 5)
    assert parse(named.out, "stdout").verdict is Verdict.NOT_CHECKED
    assert named.err.startswith("kvproof: scenario 'rollback' was named and not checked: ")
    assert required.err.startswith("kvproof: scenario 'rollback' was required and not checked: ")


@pytest.mark.parametrize(
    ("options", "status", "said"),
    [
        (["--scenario", "fork", "--scenario", "rollback"], 5, "'rollback' was named and not checked: "),
        (["--scenario", "fork"], 0, ""),
        (["--scenario", "fork", "--require", "fork"], 0, ""),
        (["--scenario", "fork", "--require", "causality"], 0, ""),
        (["--scenario", "fork", "--require", "token-by-token"], 5, "'token-by-token' was required and not"),
        (["--scenario", "chunked prefill", "--scenario", "rollback"], 1, ""),  # a bug outranks it
    ],
    ids=str,
)
def test_a_scenario_that_is_named_must_be_checked(options: list[str], status: int, said: str):
    """With nothing compared, the audit exited with 0, and a gate passed."""
    outcome = run("audit", "random:mamba", "--length", 12, "--no-certificate", "--quiet", *options)
    assert outcome.status == status
    assert said in outcome.err if said else outcome.err == ""


def test_an_audit_that_compares_nothing_never_passes():
    names = [scenario.name for scenario in catalogue(range(8), range(8))]
    left = [word for name in names if name != "rollback" for word in ("--skip", name)]
    outcome = run("audit", "random:mamba", "--length", 8, "--quiet", *left)
    assert outcome.status == 5
    assert outcome.err == "kvproof: nothing was checked that counts for the verdict\n"


@pytest.mark.parametrize("option", ["--scenario", "--skip", "--require"])
def test_a_scenario_with_a_typo_is_refused_at_once_with_the_nearest_name(
    option: str, monkeypatch: pytest.MonkeyPatch
):
    """With --require, the audit ran to its end first, and ended as if the model lacked the scenario."""
    monkeypatch.setattr("kvproof.subjects._targets.load_target", None)
    outcome = run("audit", "random:gpt2", option, "chunked-prefil")
    assert outcome.refused(
        "no scenario 'chunked-prefil'. Did you mean 'chunked prefill'? There are: token-by-token"
    )
    assert run("audit", "random:gpt2", option, "xyz").refused("no scenario 'xyz'; there are: token-by-token")


def test_the_list_names_every_scenario_without_a_target():
    outcome = run("audit", "--list")
    assert outcome.status == 0
    names = {line[:38].strip() for line in outcome.out.strip().split("\n")}
    assert {"token-by-token", "chunked prefill", "left-padded batch", "beam reorder", "rollback"} <= names
    assert {"static cache", "window crossing", "generate beam search", "positions left out"} <= names


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([""], ["the target is empty: ''"]),
        ([" "], ["the target is empty: ' '"]),
        (["random:gpt2", "--truth", ""], ["the target is empty: ''"]),
        (["nowhere"], ["no such model: 'nowhere' is neither a folder", "random:TYPE nor module:factory"]),
        (["nobody/nothing"], ["nobody/nothing is neither a folder nor in the local hub cache", "--download"]),
        (["gone.gguf"], ["no such model: 'gone.gguf'"]),
        (["--config", "gone.json"], ["no such configuration: gone.json"]),
        (["random:llama", "--config", "x.json"], ["give a TARGET or --config FILE, and not both"]),
        (["random:llama", "--device", "cuda:9"], ["no such device: 'cuda:9'", "cpu"]),
        (["random:llama", "--prompt", "some text"], ["random:llama has no tokenizer"]),
        (["random:llama", "--prompt", ""], ["the prompt is empty"]),
        (["random:llama", "--prompt-file", "gone.txt"], ["no such prompt file: gone.txt"]),
        (["random:llama", "--prompt-file", "x", "--prompt", "x"], ["--prompt or --prompt-file, not both"]),
        (["random:lama"], ["lama", "llama"]),
        (["random:t5"], ["t5"]),
        (["random:blt", "--scenario", "fork"], ["random:blt cannot be audited", "patches"]),
        (["random:llama", "--scenario", "nonsense"], ["no scenario 'nonsense'", "token-by-token"]),
        (["random:llama", "--skip", "nonsense"], ["no scenario 'nonsense'"]),
        (["random:llama", "--length", "129"], ["129 tokens are more than the context of 128"]),
    ],
    ids=str,
)
def test_wrong_usage_is_refused_in_one_line(arguments: list[str], words: list[str]):
    assert run("audit", *arguments).refused(*words)


@pytest.mark.parametrize(
    "arguments",
    [[], ["x", "--dtype", "int8"], ["x", "--length", "7"], ["x", "--seed", "-1"], ["x", "--seed", str(2**63)]],
)
def test_a_wrong_option_is_refused(arguments: list[str]):
    outcome = run("audit", *arguments)
    assert outcome.status == 2
    assert "Traceback" not in outcome.err


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a tokenizer."""
    return saved_tokenizer(saved_model(tmp_path_factory.mktemp("audited") / "tiny"))


def rows_of(*arguments: object) -> tuple[RowResult, ...]:
    outcome = run("audit", *arguments, "--scenario", "token-by-token", "--no-certificate", "--json")
    assert (outcome.status, outcome.err) == (0, "")
    return parse(outcome.out, "stdout").scenarios[-1].rows


def test_a_prompt_is_what_is_audited_and_shows_as_text(folder: Path, tmp_path: Path):
    (tmp_path / "prompt.txt").write_text("the cached path agrees with every prefix here", "utf-8")
    typed = rows_of(folder, "--length", 9, "--prompt", "the cached path agrees with every prefix here")
    assert typed[7].ids == (1, 2, 3, 4, 5, 6, 7, 8)
    assert typed[2].tokens == "'the' 'cached' 'path'"
    read = rows_of(folder, "--length", 9, "--prompt-file", tmp_path / "prompt.txt")
    assert [row.ids for row in read] == [row.ids for row in typed]
    other = rows_of(folder, "--length", 9)
    assert len(other) == len(typed)
    assert other[8].ids[:8] != typed[8].ids[:8]


def test_a_prompt_file_that_is_not_text_is_refused(folder: Path, tmp_path: Path):
    (tmp_path / "prompt.txt").write_bytes(b"caf\xe9")
    assert run("audit", folder, "--prompt-file", tmp_path / "prompt.txt").refused("prompt.txt is not UTF-8")


def test_a_prompt_longer_than_the_context_is_refused(folder: Path):
    outcome = run("audit", folder, "--prompt", "the " * 200)
    assert outcome.refused("the prompt has 200 tokens, more than the context of 128")


def test_a_random_model_of_a_configuration_is_audited(folder: Path):
    outcome = run("audit", "--config", folder / "config.json", *SHORT, "--json", "--device", "cpu", "--seed", 3)
    report = parse(outcome.out, "stdout")
    assert report.verdict.passes
    assert report.subject.name == f"config:{folder / 'config.json'}"


def test_without_transformers_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    for name in [name for name in sys.modules if name.startswith("kvproof.subjects._transformers")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "transformers", None)
    import kvproof.subjects

    monkeypatch.delattr(kvproof.subjects, "_transformers", raising=False)
    assert run("audit", "random:llama").refused("pip install 'kvproof[transformers]'")


def test_token_ids_are_chosen_on_the_command_line(tmp_path: Path):
    file = tmp_path / "mine.py"
    file.write_text("from tests.unit.test_given import sums\n\n\ndef make():\n    return sums('float64')\n")
    found = run("audit", f"{file}:make", "--ids", "1,4-6", "--avoid-ids", "5", "--scenario", "token-by-token")
    assert found.status == 0, found
    assert "programs feed only token ids 1, 4, 6" in found.out
    assert (
        "--ids 1,4-6 --avoid-ids 5"
        in json.loads(
            run("audit", f"{file}:make", "--ids", "1,4-6", "--avoid-ids", "5", "--json", "--no-certificate").out
        )["request"]["command"]
    )
    assert run("audit", f"{file}:make", "--ids", "6-4").refused("'6-4' is no token id")
    assert run("audit", f"{file}:make", "--avoid-ids", "11").refused("token id 11 is not in the vocabulary 0..10")
