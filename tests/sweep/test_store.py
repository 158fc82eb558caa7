"""A sweep's folder: what has ended is on the disk, is not run again, and does not mix with another sweep's."""

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from kvproof._sweeping import ProcessRunner, SerialRunner
from kvproof._sweeping.sweep import current_conditions, list_jobs, sweep
from kvproof.contract.codec import from_plain, strict_loads, to_plain
from kvproof.contract.results import Verdict
from kvproof.contract.sweep_table import Conditions, Ending, Job, Sweep
from kvproof.errors import OutputError, UsageError

from .samples import CONDITIONS, ROOT, cell, job, matching

JOBS = tuple(job(f"random:{name}") for name in ("a", "b", "c"))


class Counted:
    """Work that knows for which targets it was called."""

    def __init__(self, work: Callable[[Job], str] = matching) -> None:
        self.targets: list[str] = []
        self.work = work

    def __call__(self, job: Job) -> str:
        self.targets.append(job.target)
        return self.work(job)


def swept(
    folder: Path,
    jobs: Iterable[Job] = JOBS,
    *,
    conditions: Conditions = CONDITIONS,
    work: Callable[[Job], str] = matching,
    **options: Any,
) -> tuple[Sweep, list[str], list[str]]:
    """Sweep in this process; return the table, the targets that were run, and what was noted."""
    counted, notes = Counted(work), []
    table = sweep(
        tuple(jobs),
        conditions,
        folder,
        runner=SerialRunner(),
        work=counted,
        on_note=notes.append,
        **options,
    )
    return table, counted.targets, notes


def read(folder: Path) -> Sweep:
    return from_plain(Sweep, strict_loads((folder / "sweep.json").read_text("utf-8")))


def test_a_sweep_makes_its_folder_and_writes_the_same_table_twice(tmp_path: Path):
    folder = tmp_path / "deep" / "out"
    table, ran, notes = swept(folder)
    assert ran == [j.target for j in JOBS]
    assert notes == []
    assert [g.job for g in table.groups] == list(JOBS)
    assert not table.partial
    assert read(folder) == table
    assert (folder / "sweep.md").read_text("utf-8").startswith("# kvproof sweep\n")
    assert sorted(path.name for path in folder.iterdir()) == ["cells.jsonl", "sweep.json", "sweep.md"]


def test_what_has_ended_is_not_run_again(tmp_path: Path):
    first, _, _ = swept(tmp_path)
    again, ran, notes = swept(tmp_path)
    assert (ran, notes) == ([], [])
    assert again.groups == first.groups


def test_further_jobs_are_added_and_the_table_holds_what_was_asked_for(tmp_path: Path):
    swept(tmp_path, JOBS[:2])
    table, ran, _ = swept(tmp_path, JOBS[1:])
    assert ran == ["random:c"]
    assert [g.job for g in table.groups] == list(JOBS[1:])


@pytest.mark.parametrize("num_bytes_cut", [1, 2, 60])
def test_a_last_line_that_was_cut_off_is_said_and_its_group_alone_run_again(tmp_path: Path, num_bytes_cut: int):
    whole, _, _ = swept(tmp_path)
    file = tmp_path / "cells.jsonl"
    lines = file.read_bytes()
    file.write_bytes(lines[:-num_bytes_cut])
    table, ran, notes = swept(tmp_path)
    assert ran == ["random:c"]
    assert notes == [f"{file} ends in a half-written line; that target will be run again"]
    assert [g.cells for g in table.groups] == [g.cells for g in whole.groups]
    assert file.read_bytes().count(b"\n") == lines.count(b"\n")
    assert swept(tmp_path)[1:] == ([], [])


def test_a_header_that_was_cut_off_is_an_empty_folder(tmp_path: Path):
    (tmp_path / "cells.jsonl").write_bytes(b'{"schema_ver')
    _, ran, notes = swept(tmp_path)
    assert len(ran) == 3
    assert len(notes) == 1
    assert swept(tmp_path)[1:] == ([], [])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kvproof": "0.0.9"}, "kvproof 0.1.0, but this one has 0.0.9"),
        ({"torch": "2.6"}, "torch 2.13.0, but this one has 2.6"),
        ({"transformers": None}, "transformers 5.17.0, but this one has none"),
        ({"length": 12}, "--length 8, but this one has 12"),
        ({"seed": 1}, "--seed 0, but this one has 1"),
        ({"only": ()}, "--scenario fork, but this one has none"),
        ({"without": ("batch", "fork")}, "--skip none, but this one has batch, fork"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "says",
)
def test_a_sweep_under_other_conditions_is_refused_and_left_alone(tmp_path: Path, changes: Any, words: str):
    swept(tmp_path)
    before = (tmp_path / "cells.jsonl").read_bytes()
    other = dataclasses.replace(CONDITIONS, **changes)
    with pytest.raises(UsageError) as refused:
        swept(tmp_path, conditions=other)
    assert words in str(refused.value)
    assert "--fresh" in str(refused.value)
    assert (tmp_path / "cells.jsonl").read_bytes() == before
    table, ran, _ = swept(tmp_path, conditions=other, fresh=True)
    assert len(ran) == 3
    assert table.conditions == other
    assert swept(tmp_path, conditions=other)[1] == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("not JSON\n", "line 1: not JSON"),
        ('{"kind": "header"}\n', "line 1: $ has unknown key"),
        ("\n", "line 1: not JSON"),
        ("\x00\x00\n", "line 1: not JSON"),
    ],
    ids=["text", "a ledger", "an empty line", "zeros"],
)
def test_a_file_that_is_no_sweep_is_refused(tmp_path: Path, text: str, words: str):
    (tmp_path / "cells.jsonl").write_text(text, "utf-8")
    with pytest.raises(UsageError) as refused:
        swept(tmp_path)
    assert words in str(refused.value)
    assert "--fresh" in str(refused.value)
    assert (tmp_path / "cells.jsonl").read_text("utf-8") == text


def test_a_damaged_line_in_the_middle_is_refused_by_its_number(tmp_path: Path):
    swept(tmp_path)
    lines = (tmp_path / "cells.jsonl").read_text("utf-8").splitlines()
    lines[2] = lines[2].replace('"finished"', '"fine"')
    (tmp_path / "cells.jsonl").write_text("".join(f"{line}\n" for line in lines), "utf-8")
    with pytest.raises(UsageError, match=r"line 3: .*ending must be one of"):
        swept(tmp_path)


@pytest.mark.parametrize(
    "other", [{"conditions": to_plain(CONDITIONS)}, {"colour": "red"}], ids=["same", "other"]
)
def test_a_file_of_a_later_version_is_refused(tmp_path: Path, other: dict[str, Any]):
    """Whatever keys that version has: the version is what is wrong."""
    (tmp_path / "cells.jsonl").write_text(json.dumps({"schema_version": 99, **other}) + "\n", "utf-8")
    with pytest.raises(UsageError, match=r"schema version 99, written by a newer kvproof; .*--fresh"):
        swept(tmp_path)


def test_a_file_without_a_minor_version_is_resumed(tmp_path: Path):
    swept(tmp_path)
    file = tmp_path / "cells.jsonl"
    first, *rest = file.read_text("utf-8").splitlines(keepends=True)
    header = json.loads(first)
    del header["schema_minor"]
    file.write_text(f"{json.dumps(header)}\n{''.join(rest)}", "utf-8")
    assert swept(tmp_path)[1] == []


def test_a_group_that_timed_out_is_run_again_only_with_more_time(tmp_path: Path):
    def sleeps(job: Job) -> str:
        import time

        time.sleep(600)
        return ""

    cut = sweep(JOBS[:1], CONDITIONS, tmp_path, runner=ProcessRunner(num_jobs=1, limit_s=0.2), work=sleeps)
    assert cut.groups[0].ending is Ending.TIMED_OUT
    assert cut.verdict is Verdict.INCONCLUSIVE
    assert swept(tmp_path, JOBS[:1], limit_s=0.2)[1] == []
    table, ran, _ = swept(tmp_path, JOBS[:1], limit_s=600)
    assert ran == ["random:a"]
    assert table.groups[0].ending is Ending.FINISHED
    assert swept(tmp_path, JOBS[:1], limit_s=6000)[1] == []


def test_a_refused_and_a_crashed_group_are_kept_with_their_reasons(tmp_path: Path):
    def work(job: Job) -> str:
        if job.target == "random:a":
            raise UsageError("it needs mamba-ssm")
        if job.target == "random:b":
            raise ValueError("boom")
        return matching(job)

    table, _, _ = swept(tmp_path, work=work)
    assert [(g.ending.value, g.reason) for g in table.groups] == [
        ("refused", "it needs mamba-ssm"),
        ("crashed", "ValueError: boom"),
        ("finished", None),
    ]
    assert read(tmp_path) == table
    assert swept(tmp_path)[1] == []


def test_an_interrupt_writes_a_partial_table_and_goes_on_up(tmp_path: Path):
    def work(job: Job) -> str:
        if job.target == "random:b":
            raise KeyboardInterrupt
        return matching(job)

    with pytest.raises(KeyboardInterrupt):
        swept(tmp_path, work=work)
    partial = read(tmp_path)
    assert [g.job.target for g in partial.groups] == ["random:a"]
    assert partial.partial
    assert "**Partial: 2 of 3 groups have not run.**" in (tmp_path / "sweep.md").read_text("utf-8")
    table, ran, _ = swept(tmp_path)
    assert ran == ["random:b", "random:c"]
    assert not table.partial


def test_numbers_that_are_not_finite_are_strict_json_and_come_back(tmp_path: Path):
    def work(job: Job) -> str:
        gap = {"random:a": float("nan"), "random:b": float("inf")}.get(job.target, 0.0)
        return json.dumps(to_plain([cell(job, largest_gap=gap)]), allow_nan=False)

    swept(tmp_path, work=work)
    for name in ("sweep.json", "cells.jsonl"):
        text = (tmp_path / name).read_text("utf-8")
        assert "NaN" not in text
        assert "Infinity" not in text
    gaps = [c.largest_gap for c in read(tmp_path).cells]
    assert [str(gap) for gap in gaps] == ["nan", "inf", "0.0"]
    assert swept(tmp_path)[1] == []


def test_progress_counts_from_what_is_there(tmp_path: Path):
    swept(tmp_path, JOBS[:1])
    seen: list[tuple[int, int]] = []
    swept(tmp_path, on_group=lambda ended, total: seen.append((ended, total)))
    assert seen == [(1, 3), (2, 3), (3, 3)]


def test_two_sweeps_do_not_write_to_one_folder(tmp_path: Path):
    code = (
        "import pathlib, sys\n"
        "from kvproof.errors import UsageError\n"
        "from kvproof._sweeping.store import open_store\n"
        "from tests.sweep.samples import CONDITIONS\n"
        "try:\n"
        "    with open_store(pathlib.Path(sys.argv[1]), CONDITIONS, fresh=True, on_note=print): pass\n"
        "except UsageError as error:\n"
        "    sys.stdout.write(str(error))\n"
    )

    def work(job: Job) -> str:
        command = [sys.executable, "-c", code, tmp_path]
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
        said.append(done.stdout)
        return matching(job)

    said: list[str] = []
    swept(tmp_path, JOBS[:1], work=work)
    assert said == [f"another sweep is writing to {tmp_path}; give each sweep its own --out"]
    assert swept(tmp_path, JOBS[:1])[1] == []


def test_a_folder_that_cannot_be_is_an_output_error(tmp_path: Path):
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(OutputError, match="cannot keep a sweep in"):
            swept(folder)


def test_a_disk_that_is_full_is_an_output_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OutputError, match=r"cannot write .*cells\.jsonl: No space left on device"):
        swept(tmp_path)


def test_jobs_are_every_combination_once_and_in_order():
    jobs = list_jobs(("b", "a", "b"), dtypes=("float32", "float16"), attentions=("eager",), length=8, seed=1)
    assert [str(j) for j in jobs] == [
        "b, float32, eager",
        "b, float16, eager",
        "a, float32, eager",
        "a, float16, eager",
    ]


def test_no_job_is_refused(tmp_path: Path):
    with pytest.raises(UsageError, match="at least one target"):
        swept(tmp_path / "out", ())
    assert not (tmp_path / "out").exists()


def test_conditions_hold_versions_and_sorted_scenarios():
    now = current_conditions(length=9, seed=2, only=("fork", "batch", "fork"), without=("rollback",))
    assert (now.length, now.seed, now.only, now.without) == (9, 2, ("batch", "fork"), ("rollback",))
    assert now.torch
    assert now.kvproof


@pytest.mark.parametrize(
    ("only", "without", "words"),
    [(("nonsense",), (), "no scenario 'nonsense'"), (("fork",), ("fork",), "at least one scenario")],
    ids=["unknown", "none left"],
)
def test_scenarios_are_checked_before_anything_runs(only: tuple[str, ...], without: tuple[str, ...], words: str):
    with pytest.raises(UsageError, match=words):
        current_conditions(length=8, seed=0, only=only, without=without)
