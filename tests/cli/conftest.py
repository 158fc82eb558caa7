"""What the command line's tests share: a saved checkpoint, reports and ledgers, each made once."""

import dataclasses
import json
import os
import stat
from collections.abc import Callable
from pathlib import Path

import jaxtyping
import pytest

from kvproof._generation.requests import generate
from kvproof._reference_system.milestone import milestone
from kvproof._system.machine import use_one_thread
from kvproof.contract.ledger import ledger_lines
from kvproof.contract.report import Report
from kvproof.policies import Greedy, Policy, Sample, Stops
from kvproof.reference import Checkpoint, save_checkpoint
from kvproof.reference.corpus import BOS_ID, EOS_ID
from kvproof.subjects import ReferenceSubject

from .ledgers import Lines, text_of
from .running import Outcome, run


@pytest.fixture(autouse=True)
def no_shape_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shapes are not checked here, as in a user's process: wrong types must meet kvproof's own checks."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)


@pytest.fixture
def full_device(tmp_path: Path) -> Path:
    """A device that is always full, in a folder of its own: a mistake in a test must not harm the machine's."""
    return make_device(tmp_path / "devices" / "full", minor=7)


@pytest.fixture
def null_device(tmp_path: Path) -> Path:
    """A device that takes everything, in a folder of its own."""
    return make_device(tmp_path / "devices" / "null", minor=3)


def make_device(path: Path, minor: int) -> Path:
    """Make one of Linux's memory devices."""
    path.parent.mkdir(exist_ok=True)
    try:
        os.mknod(path, 0o600 | stat.S_IFCHR, os.makedev(1, minor))
        path.open("wb").close()
    except OSError:
        pytest.skip("making a device takes rights that this user does not have here")
    return path


@pytest.fixture(scope="session")
def saved(checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with the trained checkpoint."""
    path = tmp_path_factory.mktemp("checkpoint") / "reference.safetensors"
    save_checkpoint(checkpoint, path)
    return path


@pytest.fixture(scope="session")
def report(checkpoint: Checkpoint) -> Report:
    """The milestone's report."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jaxtyping.config, "jaxtyping_disable", True)
        return milestone(checkpoint)


@pytest.fixture
def ready(report: Report, monkeypatch: pytest.MonkeyPatch) -> Report:
    """Let the command print and write a report that was made before."""
    return stand_in(report, monkeypatch)


@pytest.fixture
def ready_failing(report: Report, monkeypatch: pytest.MonkeyPatch) -> Report:
    """The same with a gate whose last line does not hold."""
    *held, last = report.milestone.gate
    gate = (*held, dataclasses.replace(last, passed=False))
    failing = dataclasses.replace(report.milestone, gate=gate)
    return stand_in(dataclasses.replace(report, milestone=failing), monkeypatch)


def stand_in(report: Report, monkeypatch: pytest.MonkeyPatch) -> Report:
    def made_before(weights, *, source, without, on_stage):
        on_stage("a stage")
        return report

    monkeypatch.setattr("kvproof._reference_system.milestone.milestone", made_before)
    return report


@dataclasses.dataclass(frozen=True)
class Trained:
    """A whole run that trained its checkpoint, and what it wrote."""

    outcome: Outcome
    checkpoint: Path
    folder: Path


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """``kvproof milestone`` with every output asked for."""
    folder = tmp_path_factory.mktemp("trained")
    saved, written = folder / "saved.safetensors", folder / "new" / "report"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jaxtyping.config, "jaxtyping_disable", True)
        outcome = run("milestone", "--save-checkpoint", saved, "--report", written)
    return Trained(outcome, saved, written)


#: Every ledger's policy, stop rules and path.
PLANS: dict[str, tuple[Policy, Stops, str]] = {
    "greedy": (Greedy(), Stops(eos_id=EOS_ID), "cached"),
    "seeded": (Sample(top_k=3, seed=41), Stops(eos_id=EOS_ID), "cached"),
    "unseeded": (Sample(top_k=3, seed=None), Stops(eos_id=None, max_tokens=3), "cached"),
    "filling": (Greedy(), Stops(eos_id=None), "cached"),
    "limited": (Greedy(), Stops(eos_id=EOS_ID, max_tokens=2), "cached"),
    "refused": (Greedy(), Stops(eos_id=None, context=False), "cached"),
    "uncached": (Sample(top_k=3, seed=41), Stops(eos_id=EOS_ID), "uncached"),
}


@pytest.fixture(scope="session")
def ledgers(checkpoint: Checkpoint) -> dict[str, str]:
    """A fresh ledger's text for every plan."""
    subject = ReferenceSubject(checkpoint)
    texts = {}
    for name, (policy, stops, path) in PLANS.items():
        with use_one_thread():  # as the command records them, whatever these tests run with
            made = generate(subject, (BOS_ID,), policy, stops, path=path)
        texts[name] = "".join(f"{line}\n" for line in ledger_lines(made))
        assert json.loads(texts[name].splitlines()[-1])["kind"] == "end"
    return texts


@pytest.fixture(scope="session")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file to write a ledger to."""
    return tmp_path_factory.mktemp("ledgers") / "ledger.jsonl"


@pytest.fixture
def replayed(
    scratch: Path, saved: Path, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str | bytes | Lines], Outcome]:
    """Replay a ledger's text, bytes or lines with the checkpoint that it was made with, which is read once."""
    monkeypatch.setattr("kvproof.reference.load_checkpoint", {saved: checkpoint}.__getitem__)

    def replay(ledger: str | bytes | Lines) -> Outcome:
        if isinstance(ledger, list):
            ledger = text_of(ledger)
        scratch.write_bytes(ledger if isinstance(ledger, bytes) else ledger.encode())
        return run("replay", scratch, "--checkpoint", saved)

    return replay
