"""The table of a sweep as Markdown, for an issue or a web page."""

import re
from collections.abc import Iterator, Sequence

from kvproof.contract.results import Verdict
from kvproof.contract.sweep_table import Cell, Ending, Group, Job, Sweep
from kvproof.contract.text import printable

#: What Markdown might act on within a line; an underscore inside a word it leaves alone.
_ACTIVE = re.compile(r"[\\`*\[\]<>|&~$]|(?<![^\W_])_|_(?![^\W_])")

_FINDINGS = (Verdict.DIVERGED, Verdict.INCONCLUSIVE, Verdict.VACUOUS)


def render(sweep: Sweep) -> str:
    """Return the whole table: conditions, counts, a line a target, and what was found in sentences."""
    return "\n".join(_blocks(sweep))


def plain(text: str) -> str:
    """Return text from elsewhere on one line, with what Markdown or HTML would act on escaped."""
    return _ACTIVE.sub(lambda match: "\\" + match[0], printable(text))


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
        yield from (f"- {_where(group.job)}: {plain(group.reason or 'no reason')}" for group in refused)
        yield ""


def _heading(sweep: Sweep) -> Iterator[str]:
    on, under = sweep.environment, sweep.conditions
    versions = f"kvproof {under.kvproof}, torch {under.torch}, transformers {under.transformers or 'none'}"
    yield "# kvproof sweep\n"
    yield f"{plain(sweep.summary)}\n"
    if sweep.partial:
        missing = sweep.num_groups_asked - len(sweep.groups)
        yield f"**Partial: {missing} of {sweep.num_groups_asked} groups have not run.**\n"
    yield f"- {plain(versions)}, Python {plain(on.python)}"
    yield f"- {plain(on.platform)}, {plain(on.processor)}; {plain(on.created)}"
    yield f"- {under.length} tokens a sequence, seed {under.seed}"
    yield f"- scenarios: {plain(', '.join(under.only) or 'all')}{_left_out(under.without)}"
    if sweep.groups:
        largest = max(sweep.groups, key=lambda group: group.peak_mb)
        total = sum(group.wall_s for group in sweep.groups)
        yield f"- {total:.0f} s in all processes together; the largest held {largest.peak_mb:.0f} MB"
    yield ""


def _left_out(names: Sequence[str]) -> str:
    return f", without {plain(', '.join(names))}" if names else ""


def _counts(sweep: Sweep) -> Iterator[str]:
    """Yield how many groups, and how many of their scenarios, came to each outcome."""
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
    yield f"| target | {' | '.join(plain(', '.join(column)) for column in columns)} |"
    yield "|---|" + "---|" * len(columns)
    for target in dict.fromkeys(group.job.target for group in sweep.groups):
        shown = (outcomes.get((target, *column), "") for column in columns)
        yield f"| {plain(target)} | " + " | ".join(_stressed(outcome) for outcome in shown) + " |"
    yield ""


def _stressed(outcome: str) -> str:
    return f"**{outcome}**" if outcome in (Verdict.DIVERGED, Ending.CRASHED, Ending.TIMED_OUT) else outcome


def _is_finding(group: Group) -> bool:
    return group.ending in (Ending.CRASHED, Ending.TIMED_OUT) or any(c.verdict in _FINDINGS for c in group.cells)


def _findings(groups: Sequence[Group]) -> Iterator[str]:
    for group in filter(_is_finding, groups):
        if group.ending is not Ending.FINISHED:
            yield f"- {_where(group.job)}: **{group.ending.value}**: {plain(group.reason or 'no reason')}"
        yield from (_finding(group.job, cell) for cell in group.cells if cell.verdict in _FINDINGS)
    yield ""


def _finding(job: Job, cell: Cell) -> str:
    advice = ", against the library's advice" if cell.advice else ""
    size = f"largest gap {cell.largest_gap:.1e} in {cell.num_rows} rows"
    sentence = f": {plain(cell.sentence)}" if cell.sentence else ""
    return f"- {_where(job)}, {plain(cell.scenario)}{advice}: **{cell.verdict.value}**, {size}{sentence}"


def _where(job: Job) -> str:
    return plain(str(job))
