"""``kvproof lesson``: the page as a file, and opened."""

from pathlib import Path

import pytest
from tests.cli.running import run

from kvproof.contract.lesson import Lesson, Numbers


@pytest.fixture
def walked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lesson without a walk: what is tested here is where its page goes."""
    from tests.small_report import ENVIRONMENT

    none = Numbers(shape=(0,), values=())
    lesson = Lesson(
        environment=ENVIRONMENT,
        seed=7,
        loss=0.5,
        num_parameters=30,
        vocabulary=("<bos>",),
        context_len=4,
        allowed=1e-5,
        token_table=none,
        position_table=none,
        walks=(),
    )
    monkeypatch.setattr("kvproof._reference_system.lesson_steps.walk", lambda weights, on_stage: lesson)


def test_out_writes_the_page(walked: None, saved: Path, tmp_path: Path):
    file = tmp_path / "lesson.html"
    assert run("lesson", "--checkpoint", saved, "--out", file).status == 0
    text = file.read_text("utf-8")
    assert text.startswith("<!doctype html>")
    assert "trained from seed 7" in text


def test_a_folder_that_is_not_there_is_told(walked: None, saved: Path, tmp_path: Path):
    outcome = run("lesson", "--checkpoint", saved, "--out", tmp_path / "no" / "lesson.html")
    assert outcome.status == 73
    assert "cannot write" in outcome.err


@pytest.mark.parametrize("opens", [True, False], ids=["in a browser", "where there is no browser"])
def test_without_out_the_page_is_a_file_that_stays_and_is_opened(
    opens: bool, walked: None, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", lambda address: bool(opened.append(address)) or opens)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    outcome = run("lesson", "--checkpoint", saved)
    (file,) = tmp_path.rglob("lesson.html")
    assert outcome.status == 0
    assert opened == [file.as_uri()]
    assert f"The lesson: {file}" in outcome.out
    assert ("open it in a browser" in outcome.out) != opens
    assert "A KV cache, one token at a time" in file.read_text("utf-8")
