"""Renders the table of a sweep as Markdown, for an issue or a web page."""

import re
from collections.abc import Iterator, Sequence

from kvproof.contract.results import Verdict
from kvproof.contract.sweep_table import Cell, Ending, Group, Job, Sweep
from kvproof.contract.text import printable

#: Characters that Markdown may interpret within a line. It leaves an underscore inside a word alone.
_SPECIAL = re.compile(r"[\\`*\[\]<>|&~$]|(?<![^\W_])_|_(?![^\W_])")

_FINDINGS = (Verdict.DIVERGED, Verdict.RAISED, Verdict.INCONCLUSIVE, Verdict.VACUOUS)
_EMPHASISED = (Verdict.DIVERGED, Verdict.RAISED, Ending.CRASHED, Ending.TIMED_OUT)


def render(sweep: Sweep) -> str:
    """Return the whole table: conditions, counts, one line per target, and one sentence per finding."""
    return "\n".join(_blocks(sweep))


def escape(text: str) -> str:
    """Return untrusted text on one line, with each character escaped that Markdown or HTML may interpret."""
    return _SPECIAL.sub(lambda match: "\\" + match[0], printable(text))


def _blocks(sweep: Sweep) -> Iterator[str]:
    yield from _heading(sweep)
    yield "## Counts\n"
    yield from _counts(sweep)
    yield "## Worst verdict of each target\n"
    yield from _targets(sweep)
    yield "## Findings\n"
    yield from _findings(sweep.groups) if any(map(_is_finding, sweep.groups)) else ["None.\n"]
    refused = [group for group in sweep.groups if group.ending is Ending.REFUSED]
    if refused:
        yield "## Refused\n"
        yield from (f"- {_format_job(group.job)}: {escape(group.reason or 'no reason')}" for group in refused)
        yield ""


def _heading(sweep: Sweep) -> Iterator[str]:
    environment, conditions = sweep.environment, sweep.conditions
    transformers = conditions.transformers or "none"
    versions = f"kvproof {conditions.kvproof}, torch {conditions.torch}, transformers {transformers}"
    yield "# kvproof sweep\n"
    yield f"{escape(sweep.summary)}\n"
    if sweep.partial:
        missing = sweep.num_groups_asked - len(sweep.groups)
        yield f"**Partial: {missing} of {sweep.num_groups_asked} groups have not run.**\n"
    yield f"- {escape(versions)}, Python {escape(environment.python)}"
    yield f"- {escape(environment.platform)}, {escape(environment.processor)}; {escape(environment.created)}"
    yield f"- {conditions.length} tokens per sequence, seed {conditions.seed}"
    yield f"- scenarios: {escape(', '.join(conditions.only) or 'all')}{_format_skipped(conditions.without)}"
    if sweep.groups:
        largest = max(sweep.groups, key=lambda group: group.peak_mb)
        total = sum(group.wall_s for group in sweep.groups)
        yield f"- {total:.0f} s in total over all processes; the largest used {largest.peak_mb:.0f} MB"
    yield ""


def _format_skipped(names: Sequence[str]) -> str:
    return f", without {escape(', '.join(names))}" if names else ""


def _counts(sweep: Sweep) -> Iterator[str]:
    """Yield the number of groups, and of their scenarios, with each outcome."""
    verdicts = [cell.verdict.value for cell in sweep.cells]
    yield "| outcome | groups | scenarios |\n|---|---:|---:|"
    for outcome in [*Verdict, Ending.REFUSED, Ending.TIMED_OUT, Ending.CRASHED]:
        num_groups, num_cells = sweep.counts.get(outcome.value, 0), verdicts.count(outcome.value)
        if num_groups or num_cells:
            yield f"| {outcome.value} | {num_groups} | {num_cells} |"
    yield ""


def _targets(sweep: Sweep) -> Iterator[str]:
    """Yield one line for each target, with a column for each dtype and attention."""
    columns = list(dict.fromkeys((group.job.dtype, group.job.attention) for group in sweep.groups))
    outcomes = {(g.job.target, g.job.dtype, g.job.attention): g.outcome for g in sweep.groups}
    yield f"| target | {' | '.join(escape(', '.join(column)) for column in columns)} |"
    yield "|---|" + "---|" * len(columns)
    for target in dict.fromkeys(group.job.target for group in sweep.groups):
        row = (outcomes.get((target, *column), "") for column in columns)
        yield f"| {escape(target)} | " + " | ".join(_emphasise(outcome) for outcome in row) + " |"
    yield ""


def _emphasise(outcome: str) -> str:
    return f"**{outcome}**" if outcome in _EMPHASISED else outcome


def _is_finding(group: Group) -> bool:
    return group.ending in (Ending.CRASHED, Ending.TIMED_OUT) or any(c.verdict in _FINDINGS for c in group.cells)


def _findings(groups: Sequence[Group]) -> Iterator[str]:
    for group in filter(_is_finding, groups):
        if group.ending is not Ending.FINISHED:
            yield f"- {_format_job(group.job)}: **{group.ending.value}**: {escape(group.reason or 'no reason')}"
        yield from (_finding(group.job, cell) for cell in group.cells if cell.verdict in _FINDINGS)
    yield ""


def _finding(job: Job, cell: Cell) -> str:
    advice = ", against the library's advice" if cell.advice else ""
    size = f"largest gap {cell.largest_gap:.1e} in {cell.num_rows} rows"
    sentence = f": {escape(cell.sentence)}" if cell.sentence else ""
    return f"- {_format_job(job)}, {escape(cell.scenario)}{advice}: **{cell.verdict.value}**, {size}{sentence}"


def _format_job(job: Job) -> str:
    return escape(str(job))
