"""Sweeps: many independent audits that can be interrupted and resumed, and that produce one table.

Every group that ends becomes a line of ``cells.jsonl``, written to disk before the next one counts. A sweep that
was killed resumes from there, and ``sweep.json`` and ``sweep.md`` hold the groups of all its runs.
"""

import dataclasses
import json
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from time import perf_counter

from kvproof._engine.audit import audit
from kvproof._engine.prompts import random_sequences
from kvproof._sweeping import JobOutcome, ProcessRunner, Runner, SerialRunner, Work
from kvproof._sweeping.store import open_store
from kvproof._system.files import write_whole
from kvproof._system.machine import environment, peak_mb, use_one_thread
from kvproof.contract.codec import from_plain, strict_loads, to_plain
from kvproof.contract.report import Report
from kvproof.contract.results import ScenarioResult, Verdict
from kvproof.contract.sentences import raise_sentence
from kvproof.contract.sweep_table import VERSION, Cell, Conditions, Ending, Group, Job, Sweep
from kvproof.errors import UsageError
from kvproof.render.sweep_markdown import render
from kvproof.scenarios import catalogue, select
from kvproof.subjects._adapter import LoadOptions
from kvproof.subjects._registry import find_entry
from kvproof.subjects._targets import load_target, preload


def list_jobs(
    targets: Iterable[str], *, dtypes: Iterable[str], attentions: Iterable[str], length: int, seed: int
) -> tuple[Job, ...]:
    """Return one job for each target at each dtype and attention, in that order, without duplicates."""
    attentions, dtypes = tuple(attentions), tuple(dtypes)
    jobs = (
        Job(target=target, dtype=dtype, attention=attention, length=length, seed=seed)
        for target in targets
        for dtype in dtypes
        for attention in attentions
    )
    return tuple(dict.fromkeys(jobs))


def list_all_types() -> tuple[str, ...]:
    """Return each causal type of the installed transformers as a target; raise `UsageError` if it is missing."""
    entry = find_entry("random:")
    assert entry is not None
    return entry.load_adapter("--all-types").list_targets()


def current_conditions(*, length: int, seed: int, only: Sequence[str], without: Sequence[str]) -> Conditions:
    """Return the conditions of a sweep on this machine; raise `UsageError` for an unknown scenario."""
    # The scenarios have the same names at any length.
    if not select(catalogue(range(8), range(8)), only=only, without=without):
        raise UsageError("a sweep needs at least one scenario, but all are skipped")
    return Conditions(
        kvproof=version("kvproof"),
        torch=version("torch"),
        transformers=_installed_version("transformers"),
        length=length,
        seed=seed,
        only=tuple(sorted(set(only))),
        without=tuple(sorted(set(without))),
    )


def _installed_version(library: str) -> str | None:
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
    """Load the target of one job and audit it in the selected scenarios, with one thread.

    Raises `UsageError` for a target that does not exist, cannot be built, or does not accept sequences this long.
    """
    # More threads do not help on small tensors, or when several jobs run at once.
    with use_one_thread():
        on_stage(f"loading {job.target}")
        subject = load_target(job.target, LoadOptions(dtype=job.dtype, seed=job.seed, attention=job.attention))
        programs = catalogue(*random_sequences(subject, job.length, job.seed), subject.boundaries)
        chosen = select(programs, only=only, without=without)
        return audit(subject, chosen, all_values=False, on_scenario=on_stage)


def audit_to_json(job: Job, *, only: Sequence[str] = (), without: Sequence[str] = ()) -> str:
    """Audit one job and return its cells as JSON."""
    timer = _Timer()
    report = audit_job(job, only=only, without=without, on_stage=timer.start)
    timer.start("")
    return json.dumps(to_plain([_make_cell(job, result, timer) for result in report.scenarios]), allow_nan=False)


class _Timer:
    """Measures how long each stage of an audit takes, and the memory peak at its end."""

    def __init__(self) -> None:
        self.stages: dict[str, tuple[float, float]] = {}
        self._name, self._start = "", perf_counter()

    def start(self, name: str) -> None:
        """End the running stage and start the next."""
        now = perf_counter()
        self.stages[self._name] = (round(now - self._start, 4), peak_mb())
        self._name, self._start = name, now


def _make_cell(job: Job, result: ScenarioResult, timer: _Timer) -> Cell:
    wall_s, peak = timer.stages.get(result.name, (0.0, peak_mb()))
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
        peak_mb=peak,
    )


def _sentence(result: ScenarioResult) -> str | None:
    """Return what went wrong and where, or which row decided the verdict, or why nothing was compared."""
    if result.verdict is Verdict.RAISED and result.raised is not None:
        return f"{raise_sentence(result.raised)}."
    divergence = result.divergence
    if divergence is not None:
        ways = f" {result.four_ways.sentence}" if result.four_ways is not None else ""
        return f"{divergence.sentence}. Likely cause: {divergence.contract}.{ways}"
    row = next((row for row in result.rows if row.verdict is result.verdict), None)
    return result.reason if result.reason is not None or row is None else f"after {row.tokens}: {row.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepOptions:
    """What a sweep covers and how it runs."""

    all_types: bool = False  #: add every causal type of the installed transformers to the targets
    dtypes: Sequence[str] = ("float32",)
    attentions: Sequence[str] = ("eager",)
    length: int = 28  #: tokens per sequence
    seed: int = 0  #: for weights and tokens
    only: Sequence[str] = ()  #: scenarios to run; if empty, all
    without: Sequence[str] = ()  #: scenarios to skip
    num_jobs: int | None = None  #: processes at a time; by default one per core
    limit_s: float = 120  #: the time limit of each audit
    fresh: bool = False  #: discard what the folder holds


def sweep_targets(
    targets: Sequence[str],
    folder: Path,
    options: SweepOptions,
    *,
    on_group: Callable[[int, int], None] = lambda num_ended, total: None,
    on_note: Callable[[str], None] = lambda text: None,
) -> Sweep:
    """Audit targets, each in its own process; see `sweep`.

    On a system that cannot fork, audits run one after another in this process, without a time limit.
    """
    conditions = current_conditions(
        length=options.length, seed=options.seed, only=options.only, without=options.without
    )
    targets = (*targets, *(list_all_types() if options.all_types else ()))
    preload(targets)  # so that forked processes share what they import
    num_jobs = options.num_jobs or os.cpu_count() or 2
    forks = hasattr(os, "fork")
    return sweep(
        list_jobs(
            targets,
            dtypes=options.dtypes,
            attentions=options.attentions,
            length=options.length,
            seed=options.seed,
        ),
        conditions,
        folder,
        runner=ProcessRunner(num_jobs=num_jobs, limit_s=options.limit_s) if forks else SerialRunner(),
        limit_s=options.limit_s,
        fresh=options.fresh,
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
    """Run the jobs that have no group in ``folder`` yet, and write the table of all jobs there.

    ``on_group`` receives the number of groups that have ended and the total, at the start and whenever a group
    ends. A group that timed out is run again if ``limit_s`` gives it more time than before. ``fresh`` discards
    the contents of the folder; ``on_note`` receives problems with them. ``work`` defaults to an audit.

    Raises `UsageError` if the folder holds a sweep under other conditions or is in use, and `OutputError` if it
    cannot be written to. On Ctrl-C the table holds the groups that have ended, and `KeyboardInterrupt` is raised.
    """
    if not jobs:
        raise UsageError("a sweep needs at least one target, dtype and attention")
    work = work or partial(audit_to_json, only=conditions.only, without=conditions.without)
    with open_store(folder, conditions, fresh=fresh, on_note=on_note) as store:
        done = {job: store.groups[job] for job in jobs if job in store.groups}
        done = {job: group for job, group in done.items() if not _needs_more_time(group, limit_s)}
        remaining = [job for job in jobs if job not in done]
        try:
            on_group(len(done), len(jobs))
            # Closed at once, so that an interrupt ends the running jobs before the table is written.
            with closing(runner.run(remaining, work)) as outcomes:
                for outcome in outcomes:
                    group = done[outcome.job] = _make_group(outcome)
                    store.append(group)
                    on_group(len(done), len(jobs))
        finally:
            table = _make_table(jobs, conditions, done)
            _write_table(table, folder)
    return table


def _needs_more_time(group: Group, limit_s: float | None) -> bool:
    return group.ending is Ending.TIMED_OUT and limit_s is not None and group.wall_s < limit_s


def _make_group(outcome: JobOutcome) -> Group:
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


def _make_table(jobs: Sequence[Job], conditions: Conditions, done: dict[Job, Group]) -> Sweep:
    return Sweep(
        schema_version=VERSION.major,
        schema_minor=VERSION.minor,
        environment=dataclasses.replace(environment(), num_threads=1),  # as in the jobs
        conditions=conditions,
        num_groups_asked=len(jobs),
        groups=tuple(done[job] for job in jobs if job in done),
    )


def _write_table(table: Sweep, folder: Path) -> None:
    text = json.dumps(to_plain(table), indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    write_whole(folder / "sweep.json", text.encode())
    write_whole(folder / "sweep.md", render(table).encode())
