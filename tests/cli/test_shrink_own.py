"""``kvproof shrink`` for one's own decoders: a file that imports the factory and makes the calls that show it."""

import subprocess
import sys
from pathlib import Path

import pytest

from .running import run

ROOT = Path(__file__).parents[2]

PAIR = """
import numpy as np

table = np.random.default_rng(0).normal(size=(11, 11)).astype({dtype!r})

def full(ids):
    return table[ids].cumsum(axis=0)

def step(ids, cache):
    logits = (0 if cache is None else cache) + table[ids].cumsum(axis=0)
    return logits, logits[{kept}]

def make():
    return full, step
"""
LAST_ROW_ONLY = """
import numpy as np
import torch

table = torch.from_numpy(np.random.default_rng(0).normal(size=(11, 11)))

def full(ids):
    return table[ids].sum(0)

def step(ids, cache):
    logits = (0 if cache is None else cache) + table[ids].cumsum(0)
    return (logits[0] if len(ids) == 1 else logits[None]), logits[{kept}]

def make():
    return full, step
"""
MODULE = """
import sys
sys.path.insert(0, {root!r})
from tests.detection.condition_decoders import subject

def make():
    return subject(lambda call: float({bug}))
"""
#: How a decoder breaks, the scenario that shows it, and the calls that the file must make.
BROKEN: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "two functions": (PAIR.format(dtype="float64", kept=0), "chunked prefill", ("step(np.array([",)),
    "two functions in float32": (PAIR.format(dtype="float32", kept=0), "chunked prefill", ("<= 1e-03",)),
    "rows of any shape": (LAST_ROW_ONLY.format(kept=0), "chunked prefill", ("full(np.array([",)),
    "two sessions": (PAIR.format(dtype="float64", kept=0), "fork", ("step(np.array([",)),
    "a module": (MODULE.format(root=str(ROOT), bug="call.start > 2"), "token-by-token", ("session_0.extend",)),
    "crops": (
        MODULE.format(root=str(ROOT), bug="call.cache.num_crops > 0"),
        "rollback",
        (".crop(", "Ability('crop')"),
    ),
    "rows": (MODULE.format(root=str(ROOT), bug="call.batch > 1"), "batch", ("batch=2",)),
    "moved rows": (
        MODULE.format(root=str(ROOT), bug="call.cache.num_reorders"),
        "beam reorder",
        (".reorder([", "Ability('reorder')"),
    ),
    "forks": (MODULE.format(root=str(ROOT), bug="call.cache.is_fork"), "fork", (".fork()",)),
    "padding": (
        MODULE.format(root=str(ROOT), bug="bool((call.mask == 0).any())"),
        "left-padded batch",
        ("Ability('pad')",),
    ),
}


def shrink(folder: Path, text: str, scenario: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Audit a decoder, shrink what one scenario shows, and return the file's text."""
    monkeypatch.setattr("kvproof._shrinking.reproduce.MAX_TRIES", 60)
    target = folder / "decoder.py"
    target.write_text(text, "utf-8")
    asked = ("--length", 10, "--scenario", scenario, "--report", folder / "out")
    audited = run("audit", f"{target}:make", *asked)
    assert audited.status == 1
    report = folder / "out" / "report.json"
    assert audited.out.endswith(f"To shrink it to one file: kvproof shrink {report} --target {target}:make\n")
    outcome = run("shrink", report, "--target", f"{target}:make")
    assert outcome.status == 0, outcome.err
    assert "it was run and reproduces it: logit" in outcome.out
    return (folder / "out" / "reproduction.py").read_text("utf-8")


@pytest.mark.parametrize("name", BROKEN)
def test_a_finding_on_ones_own_decoder_becomes_a_file(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    text, scenario, calls = BROKEN[name]
    written = shrink(tmp_path, text, scenario, monkeypatch)
    assert all(call in written for call in calls)
    assert "audit(" not in written
    assert written.count("\n") < 50
    assert ("kvproof" in written.replace("kvproof shrink with kvproof", "")) == text.startswith("\nimport sys")


def test_the_file_passes_once_the_decoder_is_mended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    shrink(tmp_path, PAIR.format(dtype="float64", kept=0), "chunked prefill", monkeypatch)
    file = tmp_path / "out" / "reproduction.py"
    for kept, status in ((0, 1), (-1, 0)):
        (tmp_path / "decoder.py").write_text(PAIR.format(dtype="float64", kept=kept), "utf-8")
        done = subprocess.run([sys.executable, "-B", file], capture_output=True, text=True, check=False)
        assert done.returncode == status, done.stderr
        assert done.stdout.startswith("uncached: [")


def test_a_decoder_that_is_mended_since_the_audit_has_nothing_to_shrink(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    shrink(tmp_path, PAIR.format(dtype="float64", kept=0), "chunked prefill", monkeypatch)
    (tmp_path / "mended.py").write_text(PAIR.format(dtype="float64", kept=-1), "utf-8")
    outcome = run("shrink", tmp_path / "out" / "report.json", "--target", f"{tmp_path / 'mended.py'}:make")
    assert outcome.refused("'chunked prefill' does not fail")


def test_a_report_alone_has_no_code_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    shrink(tmp_path, PAIR.format(dtype="float64", kept=0), "chunked prefill", monkeypatch)
    (tmp_path / "decoder.py").write_text("raise SystemExit('it was run')", "utf-8")
    outcome = run("shrink", tmp_path / "out" / "report.json")
    assert outcome.refused("its decoder is made by a function: to run it, give --target", "decoder.py:make")


LOW = """
import torch
from kvproof.subjects import CallableSubject

table = torch.randn(11, 11, generator=torch.Generator().manual_seed(0)).bfloat16()

def full(ids):
    return table[ids].cumsum(0)

def step(ids, cache):
    logits = (0 if cache is None else cache) + table[ids].cumsum(0)
    return logits, logits[0] + 3000

def make():
    return CallableSubject(full, step)
"""


def test_a_decoder_of_low_precision_that_cannot_be_cast_is_refused(tmp_path: Path):
    target = tmp_path / "low.py"
    target.write_text(LOW, "utf-8")
    asked = ("--length", 10, "--scenario", "chunked prefill", "--report", tmp_path)
    assert run("audit", f"{target}:make", *asked).status in (1, 3)
    outcome = run("shrink", tmp_path / "report.json", "--target", f"{target}:make")
    assert outcome.refused("computes in bfloat16 and cannot be cast")
