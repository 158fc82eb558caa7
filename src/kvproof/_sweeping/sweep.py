"""Sweeps: many audits, each on its own, that can be stopped and gone on with, and end in one table.

Every group that ends is a line of ``cells.jsonl``, on the disk before the next one counts. So a sweep that is
killed goes on where it was, and ``sweep.json`` and ``sweep.md`` are made from what the groups of all its runs
came to.
"""

import dataclasses
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from time import perf_counter
from typing import IO, TypeVar

from kvproof._engine.audit import audit
from kvproof._engine.prompts import random_sequences
from kvproof._sweeping import Outcome, ProcessRunner, Runner, SerialRunner, Work
from kvproof._system.files import write_whole
from kvproof._system.machine import environment, one_thread, own_peak_mb
from kvproof.contract.codec import CodecError, from_plain, strict_loads, to_plain
from kvproof.contract.report import Report
from kvproof.contract.results import ScenarioResult
from kvproof.contract.sweep_table import TABLE_VERSION, Cell, Conditions, Ending, Group, Job, Sweep
from kvproof.errors import OutputError, UsageError
from kvproof.render.sweep_markdown import render
from kvproof.scenarios import catalogue, named
from kvproof.subjects._registry import find_entry
from kvproof.subjects._targets import LoadOptions, load_target, preload

T = TypeVar("T")

#: What a person types for a condition.
_OPTIONS = {"length": "--length", "seed": "--seed", "only": "--scenario", "without": "--skip"}


def jobs_for(
    targets: Iterable[str], *, dtypes: Iterable[str], attentions: Iterable[str], length: int, seed: int
) -> tuple[Job, ...]:
    """Return one job for each target at each dtype and attention, in that order, none twice."""
    attentions, dtypes = tuple(attentions), tuple(dtypes)
    jobs = (
        Job(target=target, dtype=dtype, attention=attention, length=length, seed=seed)
        for target in targets
        for dtype in dtypes
        for attention in attentions
    )
    return tuple(dict.fromkeys(jobs))


def every_type() -> tuple[str, ...]:
    """Return every causal type of the installed transformers as a target; raise `UsageError` without it."""
    entry = find_entry("random:")
    assert entry is not None
    return entry.load_adapter("every type").list_targets()


def conditions_now(*, length: int, seed: int, only: Sequence[str], without: Sequence[str]) -> Conditions:
    """Return what a sweep runs under here and now; raise `UsageError` for a scenario that is not there."""
    # The names are the same at any length.
    if not named(catalogue(range(8), range(8)), only=only, without=without):
        raise UsageError("a sweep needs at least one scenario, and all are left out")
    return Conditions(
        kvproof=version("kvproof"),
        torch=version("torch"),
        transformers=_version("transformers"),
        length=length,
        seed=seed,
        only=tuple(sorted(set(only))),
        without=tuple(sorted(set(without))),
    )


def _version(library: str) -> str | None:
    with suppress(PackageNotFoundError):
        return version(library)
    return None


def audit_job(
    job: Job,
    *,
    only: Sequence[str] = (),
    without: Sequence[str] = (),
    on_stage: Callable[[str], None] = lambda name: None,
) -> Report:
    """Load one job's target and audit it in the scenarios that are wanted, with one thread.

    Raises `UsageError` for a target that is not there, cannot be built, or accepts no sequence so long.
    """
    # More threads than one only wait for each other: on small tensors, and where jobs run side by side.
    with one_thread():
        on_stage(f"loading {job.target}")
        subject = load_target(job.target, LoadOptions(dtype=job.dtype, seed=job.seed, attention=job.attention))
        programs = catalogue(*random_sequences(subject, job.length, job.seed), subject.boundaries)
        chosen = named(programs, only=only, without=without)
        return audit(subject, chosen, all_values=False, on_scenario=on_stage)


def audited_cells(job: Job, *, only: Sequence[str] = (), without: Sequence[str] = ()) -> str:
    """Audit one job; return its cells as JSON."""
    watch = _Watch()
    report = audit_job(job, only=only, without=without, on_stage=watch.stage)
    watch.stage("")
    return json.dumps(to_plain([_cell(job, result, watch) for result in report.scenarios]), allow_nan=False)


class _Watch:
    """Notes how long each stage of an audit took, and the peak of memory at its end."""

    def __init__(self) -> None:
        self.spent: dict[str, tuple[float, float]] = {}
        self._name, self._start = "", perf_counter()

    def stage(self, name: str) -> None:
        """End the stage that was running and start the next."""
        now = perf_counter()
        self.spent[self._name] = (round(now - self._start, 4), own_peak_mb())
        self._name, self._start = name, now


def _cell(job: Job, result: ScenarioResult, watch: _Watch) -> Cell:
    wall_s, peak_mb = watch.spent.get(result.name, (0.0, own_peak_mb()))
    return Cell(
        target=job.target,
        dtype=job.dtype,
        attention=job.attention,
        scenario=result.name,
        advice=result.advice,
        verdict=result.verdict,
        largest_gap=result.largest_gap,
        num_rows=len(result.rows),
        sentence=None if result.verdict.passes else _sentence(result),
        wall_s=wall_s,
        peak_mb=peak_mb,
    )


def _sentence(result: ScenarioResult) -> str | None:
    """Say what was found: where it went wrong, or the first row that is no pass, or why nothing was compared."""
    found = result.divergence
    if found is not None:
        ways = f" {result.four_ways.sentence}" if result.four_ways is not None else ""
        return f"{found.sentence}. Likely contract: {found.contract}.{ways}"
    row = next((row for row in result.rows if row.verdict is result.verdict), None)
    return result.reason if result.reason is not None or row is None else f"after {row.tokens}: {row.reason}"


def sweep_targets(
    targets: Sequence[str],
    folder: Path,
    *,
    all_types: bool = False,
    dtypes: Sequence[str] = ("float32",),
    attentions: Sequence[str] = ("eager",),
    length: int = 28,
    seed: int = 0,
    only: Sequence[str] = (),
    without: Sequence[str] = (),
    num_jobs: int | None = None,
    limit_s: float = 120,
    fresh: bool = False,
    on_group: Callable[[int, int], None] = lambda num_ended, total: None,
    on_note: Callable[[str], None] = lambda text: None,
) -> Sweep:
    """Audit targets, and with ``all_types`` every causal type, each in a process of its own; see `sweep`.

    ``num_jobs`` processes run at a time, by default one for each core. A system that cannot fork runs one
    after another in this process, and cuts none off.
    """
    conditions = conditions_now(length=length, seed=seed, only=only, without=without)
    targets = (*targets, *(every_type() if all_types else ()))
    preload(targets)  # so that forked processes share what they import
    num_jobs = num_jobs or os.cpu_count() or 2
    forks = hasattr(os, "fork")
    return sweep(
        jobs_for(targets, dtypes=dtypes, attentions=attentions, length=length, seed=seed),
        conditions,
        folder,
        runner=ProcessRunner(num_jobs=num_jobs, limit_s=limit_s) if forks else SerialRunner(),
        limit_s=limit_s,
        fresh=fresh,
        on_group=on_group,
        on_note=on_note,
    )


def sweep(
    jobs: Sequence[Job],
    conditions: Conditions,
    folder: Path,
    *,
    runner: Runner,
    limit_s: float | None = None,
    work: Work | None = None,
    fresh: bool = False,
    on_group: Callable[[int, int], None] = lambda num_ended, total: None,
    on_note: Callable[[str], None] = lambda text: None,
) -> Sweep:
    """Run the jobs that ``folder`` holds no group of, and write the table of all of them there.

    ``on_group`` is told how many groups of how many have ended, at the start and at each one's end. A group
    that timed out is run again where ``limit_s`` grants it more than it had. ``fresh`` forgets what the folder
    holds; ``on_note`` is told what was wrong with it. ``work`` defaults to an audit.

    Raises `UsageError` where the folder holds a sweep under other conditions or is in use, and `OutputError`
    where it cannot be written to. On Ctrl-C the table holds what has ended, and `KeyboardInterrupt` goes on.
    """
    if not jobs:
        raise UsageError("a sweep needs at least one target, dtype and attention")
    work = work or partial(audited_cells, only=conditions.only, without=conditions.without)
    with opened_store(folder, conditions, fresh=fresh, on_note=on_note) as store:
        done = {job: store.groups[job] for job in jobs if job in store.groups}
        done = {job: group for job, group in done.items() if not _deserves_more(group, limit_s)}
        left = [job for job in jobs if job not in done]
        try:
            on_group(len(done), len(jobs))
            # Closed at once, so that an interrupt ends what is running before the table is written.
            with closing(runner.run(left, work)) as outcomes:
                for outcome in outcomes:
                    group = done[outcome.job] = _group(outcome)
                    store.append(group)
                    on_group(len(done), len(jobs))
        finally:
            table = _table(jobs, conditions, done)
            _write_table(table, folder)
    return table


def _deserves_more(group: Group, limit_s: float | None) -> bool:
    return group.ending is Ending.TIMED_OUT and limit_s is not None and group.wall_s < limit_s


def _group(outcome: Outcome) -> Group:
    cells: tuple[Cell, ...] = ()
    if outcome.text is not None:
        cells = from_plain(tuple[Cell, ...], strict_loads(outcome.text))
    return Group(
        job=outcome.job,
        ending=outcome.ending,
        reason=outcome.reason,
        wall_s=round(outcome.wall_s, 3),
        peak_mb=outcome.peak_mb,
        cells=cells,
    )


def _table(jobs: Sequence[Job], conditions: Conditions, done: dict[Job, Group]) -> Sweep:
    return Sweep(
        schema_version=TABLE_VERSION,
        environment=dataclasses.replace(environment(), num_threads=1),  # as the jobs ran
        conditions=conditions,
        num_groups_asked=len(jobs),
        groups=tuple(done[job] for job in jobs if job in done),
    )


def _write_table(table: Sweep, folder: Path) -> None:
    text = json.dumps(to_plain(table), indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    write_whole(folder / "sweep.json", text.encode())
    write_whole(folder / "sweep.md", render(table).encode())


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """The first line of ``cells.jsonl``."""

    schema_version: int
    conditions: Conditions


class Store:
    """The file of finished groups: one header line, then one line for each group, the newest last."""

    def __init__(self, file: IO[bytes], path: Path, groups: dict[Job, Group]) -> None:
        self.file = file
        self.path = path
        self.groups = groups

    def append(self, record: Header | Group) -> None:
        """Write one line and have it on the disk before this returns; raise `OutputError` if it cannot be."""
        line = json.dumps(to_plain(record), allow_nan=False).encode() + b"\n"
        try:
            # In one unbuffered call: a signal falls before or after it, and no half is left to be written later.
            written = self.file.write(line)
            os.fsync(self.file.fileno())
        except OSError as error:
            raise OutputError(f"cannot write {self.path}: {error.strerror}") from error
        if written != len(line):
            raise OutputError(f"cannot write {self.path}: only {written} of {len(line)} bytes were taken")


@contextmanager
def opened_store(
    folder: Path, conditions: Conditions, *, fresh: bool, on_note: Callable[[str], None]
) -> Iterator[Store]:
    """Open the folder's file of groups, making both where they are missing, and keep other sweeps out.

    A last line that was cut off is removed, and ``on_note`` is told. Raises `UsageError` and `OutputError` as
    `sweep` does.
    """
    path = folder / "cells.jsonl"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = path.open("a+b", buffering=0)
    except OSError as error:
        raise OutputError(f"cannot keep a sweep in {folder}: {error.strerror}") from error
    with file:
        _lock(file, folder)
        file.seek(0)
        text = b"" if fresh else file.read()
        whole = text[: text.rfind(b"\n") + 1]
        groups = _parsed(whole, path, conditions) if whole else {}
        if len(whole) < len(text):
            on_note(f"{path} ends in half a line; the group that it was of is run again")
        file.truncate(len(whole))
        store = Store(file, path, groups)
        if not whole:
            store.append(Header(schema_version=TABLE_VERSION, conditions=conditions))
        yield store


def _lock(file: IO[bytes], folder: Path) -> None:
    """Refuse a folder that another sweep writes to. The lock is this process's: children do not hold it."""
    try:
        import fcntl
    except ImportError:  # a system without such locks
        return
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError) as error:
        raise UsageError(f"{folder} is being written by another sweep; give each its own --out") from error
    except OSError:  # a file system without locks
        return


def _parsed(text: bytes, path: Path, conditions: Conditions) -> dict[Job, Group]:
    """Return the groups of whole lines, the newest of each job; raise `UsageError` for another sweep's."""
    first, *rest = text.decode("utf-8", "replace").splitlines()
    header = _line(Header, first, path, 1)
    if header.schema_version != TABLE_VERSION:
        raise UsageError(
            f"{path} has schema version {header.schema_version}; this kvproof writes {TABLE_VERSION}; "
            "--fresh starts again"
        )
    for member in dataclasses.fields(Conditions):
        there, here = getattr(header.conditions, member.name), getattr(conditions, member.name)
        if there != here:
            raise UsageError(
                f"{path} holds a sweep with {_OPTIONS.get(member.name, member.name)} {_shown(there)}, and this "
                f"one has {_shown(here)}: "
                "give another --out, or --fresh to start again"
            )
    groups = [_line(Group, line, path, number) for number, line in enumerate(rest, 2)]
    return {group.job: group for group in groups}


def _line(kind: type[T], text: str, path: Path, number: int) -> T:
    try:
        return from_plain(kind, strict_loads(text))
    except CodecError as error:
        raise UsageError(f"{path}, line {number}: {error}; --fresh starts again") from error


def _shown(value: object) -> str:
    text = ", ".join(map(str, value)) if isinstance(value, tuple) else value
    return "none" if text is None or text == "" else str(text)
