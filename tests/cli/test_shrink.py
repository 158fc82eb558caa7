"""``kvproof shrink``: what it writes, its exit statuses, and what it refuses."""

import dataclasses
from pathlib import Path

import pytest
from tests.small_report import REPORT

from kvproof.contract.report import AuditRequest, Report
from kvproof.contract.results import ScenarioResult, Verdict
from kvproof.render.json import parse, render

from .running import run

REQUEST = AuditRequest(
    target="random:llama",
    config=None,
    dtype="float32",
    attention="eager",
    device="cpu",
    trust_remote_code=False,
    seed=0,
    sequences=(tuple(range(3, 11)), tuple(range(20, 28))),
    num_programs=0,
    command=None,
)


def diverged(name: str, **request: object) -> Report:
    """A report in which one scenario diverged."""
    result: ScenarioResult = dataclasses.replace(
        REPORT.scenarios[0], name=name, verdict=Verdict.DIVERGED, advice=False
    )
    return dataclasses.replace(
        REPORT, scenarios=(result, REPORT.scenarios[1]), request=dataclasses.replace(REQUEST, **request)
    )


def saved(folder: Path, report: Report) -> Path:
    (folder / "report.json").write_text(render(report), "utf-8")
    return folder / "report.json"


def test_a_finding_becomes_a_file_that_shows_it_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("kvproof._shrinking.reproduce.MOST_TRIES", 12)
    audited = run("audit", "random:mamba", "--length", 8, "--scenario", "chunked prefill", "--report", tmp_path)
    report = tmp_path / "report.json"
    assert audited.out.endswith(f"To shrink it to one file that needs no kvproof: kvproof shrink {report}\n")
    out = tmp_path / "alone" / "found.py"
    out.parent.mkdir()
    outcome = run("shrink", report, "--out", out)
    assert outcome.status == 0, outcome.err
    assert "it was run and reproduces it: logit" in outcome.out
    assert outcome.out.startswith(
        "chunked prefill: 4 operations, 8 tokens, 52672 weights, shrunk to 2 operations"
    )
    assert [path.name for path in out.parent.iterdir()] == ["found.py"]
    text = out.read_text("utf-8")
    assert text.count("\n") < 60
    assert "import kvproof" not in text
    with pytest.raises(SystemExit) as left:
        exec(compile(text, out, "exec"), {})
    assert left.value.code == 1


def test_a_report_says_what_was_asked(tmp_path: Path):
    asked = ("--length", 9, "--seed", 3, "--programs", 2, "--scenario", "random programs", "--no-certificate")
    run("audit", "random:gpt2", *asked, "--report", tmp_path)
    request = parse((tmp_path / "report.json").read_text("utf-8"), "report.json").request
    assert request is not None
    assert (request.target, request.config, request.seed, request.num_programs) == ("random:gpt2", None, 3, 2)
    assert [len(sequence) for sequence in request.sequences] == [9, 9]


def test_a_file_that_does_not_reproduce_is_said_to_be_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("kvproof._shrinking.reproduce.MOST_TRIES", 0)
    monkeypatch.setattr("kvproof._shrinking.reproduce._run", lambda file: (0, "relative gap 0"))
    report = saved(tmp_path, diverged("chunked prefill", target="random:mamba"))
    outcome = run("shrink", report)
    assert (outcome.status, outcome.out) == (1, "")
    assert outcome.err == (
        f"kvproof: {tmp_path / 'reproduction.py'} was run and does NOT reproduce it: relative gap 0\n"
    )


def test_a_file_that_cannot_be_written_is_no_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("kvproof._shrinking.reproduce.MOST_TRIES", 0)
    report = saved(tmp_path, diverged("chunked prefill", target="random:mamba"))
    outcome = run("shrink", report, "--out", tmp_path / "gone" / "x.py")
    assert outcome.status == 73
    assert "gone/x.py" in outcome.err


MATCHED = dataclasses.replace(REPORT, request=REQUEST)
REFUSED: dict[str, tuple[str | Report, tuple[str, ...], tuple[str, ...]]] = {
    "not a report": ("[]", (), ("report.json is not a report",)),
    "not JSON": ("{", (), ("report.json: not JSON",)),
    "a later schema": (
        '{"schema_version": 9}',
        (),
        ("schema version 9, written by a newer kvproof",),
    ),
    "no request": (
        dataclasses.replace(diverged("fork"), request=None),
        (),
        ("does not say how its audit was made", "kvproof audit --report"),
    ),
    "nothing diverged": (MATCHED, (), ("nothing diverged in", "report.json")),
    "another scenario": (
        diverged("rollback"),
        ("--scenario", "fork"),
        ("no scenario 'fork' diverged", "rollback"),
    ),
    "a target that is gone": (diverged("fork", target="nowhere"), (), ("'nowhere' is neither a folder",)),
    "a configuration that is gone": (
        diverged("fork", target=None, config="gone.json"),
        (),
        ("no such configuration: gone.json",),
    ),
    "through generate()": (
        diverged("generate greedy"),
        (),
        ("'generate greedy' goes through generate()", "not written out"),
    ),
    "what is healthy here": (
        diverged("fork"),
        (),
        ("'fork' does not fail in float64 on random:llama",),
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_shrunk_is_refused_in_one_line(name: str, tmp_path: Path):
    made, options, words = REFUSED[name]
    (tmp_path / "report.json").write_text(made if isinstance(made, str) else render(made), "utf-8")
    assert run("shrink", tmp_path / "report.json", *options).refused(*words)
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]


def test_a_report_that_is_not_there_or_not_text_is_refused(tmp_path: Path):
    assert run("shrink", tmp_path / "gone.json").refused("no such report", "gone.json")
    (tmp_path / "report.json").write_bytes(b"\xff\xfe")
    assert run("shrink", tmp_path / "report.json").refused("cannot read", "report.json")
