"""Renders a report for a terminal, or as plain text for a file or a pipe."""

import io
from collections import Counter
from collections.abc import Iterable, Iterator
from enum import StrEnum

from rich import box
from rich.console import Console, ConsoleRenderable
from rich.table import Table
from rich.text import Text as RichText

from kvproof.contract.certified import describe_entry, reach_sentence, step_sentences
from kvproof.contract.findings import group_findings
from kvproof.contract.ledger import MarginVerdict, Step
from kvproof.contract.milestone import Milestone, RunPair
from kvproof.contract.report import Report
from kvproof.contract.results import Certificate, FaultResult, Outcome, ScenarioResult, Verdict
from kvproof.contract.sentences import finding, found, traceback_of
from kvproof.contract.text import printable

_STYLE = {
    Verdict.MATCH: "green",
    Verdict.ROUNDING: "cyan",
    Verdict.DIVERGED: "bold red",
    Verdict.RAISED: "bold red",
    Verdict.INCONCLUSIVE: "yellow",
    Verdict.VACUOUS: "yellow",
    Verdict.NOT_CHECKED: "dim",
}


def Text(text: str = "", style: str = "") -> RichText:
    """Return text that cannot control the terminal, except by line ends, because tokens are untrusted."""
    return RichText("\n".join(map(printable, text.split("\n"))), style=style)


class Look(StrEnum):
    """How the text is styled."""

    PLAIN = "plain"  #: ASCII lines and no colour, for files and pipes
    MONO = "mono"  #: box lines and no colour
    COLOUR = "colour"


def render(report: Report, *, width: int = 100, look: Look = Look.PLAIN) -> str:
    """Return the report as text, ``width`` columns wide, with the verdict and the gate last."""
    buffer = io.StringIO()
    console = Console(
        file=buffer,
        width=width,
        height=100,  # rich reads the environment unless both are given
        force_terminal=look is Look.COLOUR,
        color_system="standard" if look is Look.COLOUR else None,
        no_color=look is not Look.COLOUR,
        highlight=False,
        emoji=False,
        markup=False,
        legacy_windows=False,
        safe_box=look is Look.PLAIN,
    )
    shape = box.ASCII2 if look is Look.PLAIN else box.ROUNDED
    for part in _parts(report):
        if isinstance(part, Table):
            part.box = shape
            part.title_justify = "left"
            part.title_style = "bold not italic"
        console.print(part)
        if isinstance(part, Table):
            console.print()
    lines = (line.rstrip() for line in buffer.getvalue().splitlines())
    return "\n".join(lines) + "\n"


def _parts(report: Report) -> Iterator[ConsoleRenderable]:
    yield from _opening(report)
    result = report.milestone
    if result is None:
        yield _overview(report.scenarios)
        yield from _reasons(report.scenarios)
        yield _arbiter(report.scenarios)
        yield from _together(report)
        yield _tokens(report.scenarios)
        yield Text()
    else:
        yield from map(_prefixes, report.scenarios[:1])
        for scenario in report.scenarios[1:]:
            yield Text(
                f"{scenario.name}: {len(scenario.rows)} rows, largest gap {scenario.largest_gap:.4e}, "
                f"{scenario.verdict.value}"
            )
    for group in group_findings(scenario for scenario in report.scenarios if found(scenario) is not None):
        style = "yellow" if group.first.advice else "bold red"
        yield Text(f"{group.first.name}: {group.text}\n", style=style)
        if (traceback := traceback_of(group.first)) is not None:
            yield Text(f"{traceback}\n")
    if result is not None:
        isolated = "bit-identical to" if result.requests_isolated else "NOT the same as"
        yield Text(f"two interleaved requests: rows {isolated} each alone\n")
        yield _cache_trace(result)
    if report.faults:
        yield _failures(report.faults)
    if report.certificate is not None:
        yield from _certificate(report.certificate)
    if result is not None:
        yield _refusals(result)
        yield _memory(result)
        for pair in result.runs:
            yield _policy(pair)
        yield _gate(result)
        for note in (result.checkpoint.tie, *result.notes):
            yield Text(note)
    for note in report.notes:
        yield Text(f"note: {note}")
    if report.partial:
        yield Text("This report is partial: the audit was stopped before its end.", style="yellow")
    passed = report.exit_status == 0 and not report.partial
    yield Text(report.summary, style=f"bold {'green' if passed else 'red'}")


def _opening(report: Report) -> Iterator[ConsoleRenderable]:
    subject, made = report.subject, report.environment
    yield Text(
        f"kvproof {made.kvproof}: {subject.name}, {subject.num_layers} layers, vocabulary {subject.vocab_size}, "
        f"positions 0..{subject.context_len - 1}, {subject.dtype}, {subject.mode} mode",
        style="bold",
    )
    yield Text(
        f"made with torch {made.torch}, Python {made.python}, {made.platform}, {made.processor}, "
        f"{made.num_threads} thread{'s' if made.num_threads != 1 else ''}, {made.created}"
    )
    tolerance = report.tolerance
    yield Text(
        f"allowed gap ({tolerance.dtype}): {tolerance.absolute:g} + {tolerance.relative:g} × scale; "
        f"{tolerance.source}"
    )
    if report.milestone is not None:
        info = report.milestone.checkpoint
        yield Text(
            f"checkpoint ({info.source}): seed {info.seed}, {info.num_parameters} weights, "
            f"loss {info.loss:.5f} nats (floor {info.entropy_floor:.5f}), largest probability error "
            f"{info.largest_probability_error:.1e}, digest {info.digest_before[:16]}, "
            f"{'unchanged' if info.digest_before == info.digest_after else 'CHANGED'} by this run"
        )
        if report.milestone.switched_off:
            yield Text(f"switched off: {', '.join(report.milestone.switched_off)}", style="yellow")
    yield Text()


def _overview(scenarios: tuple[ScenarioResult, ...]) -> Table:
    """Return a table with a line for each scenario that produced rows; the others are listed with reasons."""
    table = Table(title=Text("scenarios: cached against uncached, whole rows"))
    table.add_column("scenario", min_width=22)
    for name in ("rows", "gap", "allowed", "noise", "float64 gap"):
        table.add_column(name, justify="right")
    table.add_column("verdict", min_width=12)
    for scenario in scenarios:
        rows = scenario.rows
        if not rows:
            continue
        verdict = _verdict(scenario.verdict)
        if scenario.advice:
            verdict.append(" (advice)", style="default")
        table.add_row(
            Text(scenario.name),
            str(len(rows)),
            f"{scenario.largest_gap:.1e}",
            f"{min(row.allowed for row in rows):.1e}",
            f"{max(row.noise for row in rows):.1e}",
            _largest(row.top_gap for row in rows),
            verdict,
        )
    return table


def _largest(values: Iterable[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{max(known):.1e}" if known else "-"


def _reasons(scenarios: tuple[ScenarioResult, ...]) -> Iterator[RichText]:
    """Yield why scenarios were not compared, or only in part: one line for each reason."""
    names: dict[tuple[Verdict, str], list[str]] = {}
    for scenario in scenarios:
        if scenario.reason is not None:
            names.setdefault((scenario.verdict, scenario.reason), []).append(scenario.name)
    for (verdict, reason), which in names.items():
        yield Text(f"{verdict.value}: {', '.join(which)}: {reason}", style=_STYLE[verdict])


def _arbiter(scenarios: tuple[ScenarioResult, ...]) -> RichText:
    """Show the largest errors of the two paths side by side."""
    rows = [row for scenario in scenarios if not scenario.advice for row in scenario.rows]
    cached, uncached = _largest(r.cached_error for r in rows), _largest(r.uncached_error for r in rows)
    return Text(f"largest error against float64: {cached} cached, {uncached} uncached")


def _together(report: Report) -> Iterator[RichText]:
    """Show the scenario whose rows together have the largest errors, and what the audit can see."""
    errors = [(each.errors, each.name) for each in report.scenarios if each.errors and not each.advice]
    if errors:
        worst, name = max(errors, key=lambda pair: pair[0].lowest)
        yield Text(
            f"root mean square errors: the cached path's are at most {worst.ratio:.2f} times the uncached "
            f"path's, over {worst.num_rows} rows of {name}"
        )
    if report.smallest_bug is not None:
        yield Text(f"a gap is called a bug from {report.smallest_bug:.0e} of the row's scale on")


def _tokens(scenarios: tuple[ScenarioResult, ...]) -> RichText:
    """Return for how many rows rounding could change the most likely token."""
    counts = Counter(row.margin_verdict for scenario in scenarios for row in scenario.rows)
    known = ", ".join(f"{counts[verdict]} {verdict.value}" for verdict in MarginVerdict if counts[verdict])
    return Text(f"most likely token, by its margin: {known or 'no row'}")


def _prefixes(scenario: ScenarioResult) -> Table:
    table = Table(title=Text(f"{scenario.name}: cached against uncached, whole rows"))
    for name in ("prefix", "tokens", "gap", "allowed", "float64 gap", "verdict"):
        table.add_column(name, justify="left" if name in ("prefix", "verdict") else "right")
    for row in scenario.rows:
        table.add_row(
            Text(row.tokens),
            str(len(row.ids)),
            f"{row.gap:.4e}",
            f"{row.allowed:.1e}",
            "-" if row.top_gap is None else f"{row.top_gap:.1e}",
            _verdict(row.verdict),
        )
    return table


def _cache_trace(result: Milestone) -> Table:
    table = Table(title=Text("cache trace: (batch, head, slot, head_dim) after each consumed token"))
    num_layers = 1 + max((row.layer for row in result.cache_trace), default=0)
    for name in ("consumed", "position", *(f"layer {i}: K, V" for i in range(num_layers)), "as expected"):
        table.add_column(name, justify="right" if name == "position" else "left")
    for start in range(0, len(result.cache_trace), num_layers):
        rows = result.cache_trace[start : start + num_layers]
        asserted, holds = all(row.asserted for row in rows), all(row.holds for row in rows)
        table.add_row(
            Text(rows[0].tokens),
            str(rows[0].position),
            *(f"{row.k_shape}, {row.v_shape}" for row in rows),
            _pass(holds) if asserted else Text("not asserted", style="yellow"),
        )
    return table


def _failures(faults: tuple[FaultResult, ...]) -> Table:
    table = Table(title=Text("deliberate failures: the same comparison must reject them"), show_lines=True)
    for name in ("fault", "gap", "allowed", "rejected", "first difference and likely contract"):
        table.add_column(name, justify="right" if name in ("gap", "allowed") else "left")
    for fault in faults:
        text = Text("none found")
        if fault.divergence is not None:
            text = Text(finding(fault.divergence))
        table.add_row(
            Text(f"{fault.name}\n{fault.breaks}"),
            "" if fault.largest_gap is None else f"{fault.largest_gap:.4g}",
            "" if fault.tolerance is None else f"{fault.tolerance:.1e}",
            _pass(fault.caught and bool(fault.num_rows_beyond)),
            text,
        )
    return table


def _certificate(certificate: Certificate) -> Iterator[RichText]:
    """Yield which of the planted faults the audit caught."""
    num = {outcome: certificate.number(outcome) for outcome in Outcome}
    text = (
        f"certificate: of {len(certificate.faults)} planted faults ({certificate.dtype}) "
        f"{num[Outcome.CAUGHT]} changed a row and were caught, {certificate.num_right} of them at the right stage"
    )
    others = {
        Outcome.RAISED: "made the decoder raise",
        Outcome.HIDDEN: "changed values and no row",
        Outcome.EQUIVALENT: "changed nothing here",
    }
    text += "".join(f"; {num[outcome]} {words}" for outcome, words in others.items() if num[outcome])
    yield Text(f"{text}.")
    if (reach := reach_sentence(certificate)) is not None:
        yield Text(reach)
    if certificate.margin is not None:
        yield Text(f"the smallest gap caught is {certificate.margin:.0e} × the largest without a fault")
    for change in certificate.smallest_changes:
        seen = "not seen" if change.value is None else f"seen from {change.value:.0e} on"
        yield Text(f"a relative change of {describe_entry(change)}, in {change.dtype} alone: {seen}")
    yield from map(Text, step_sentences(certificate))
    if certificate.problem is not None:
        yield Text(f"vacuous: {certificate.problem}", style=_STYLE[Verdict.VACUOUS])
    yield Text()


def _refusals(result: Milestone) -> Table:
    table = Table(title=Text("calls that break the cache's contract"))
    for name in ("attempt", "refused", "session unchanged", "message"):
        table.add_column(name)
    for refusal in result.refusals:
        table.add_row(
            Text(refusal.attempt), _pass(refusal.refused), _pass(refusal.unchanged), Text(refusal.message)
        )
    return table


def _memory(result: Milestone) -> Table:
    memory = result.memory
    table = Table(title=Text("cache memory: K and V together, in bytes"))
    for name in ("token and layer", "token", "layer, full context", "request, full context", "measured"):
        table.add_column(name, justify="right")
    table.add_row(
        str(memory.bytes_per_token_and_layer),
        str(memory.bytes_per_token),
        str(memory.bytes_per_layer),
        str(memory.bytes_full_context),
        f"{memory.measured_bytes} at {memory.num_tokens_measured} tokens",
    )
    return table


def _policy(pair: RunPair) -> Table:
    policy = pair.cached.header.policy
    declared = "lowest id wins a tie"
    if policy.kind == "sample":
        declared = f"temperature {policy.temperature:g}, top-k {policy.top_k}, seed {policy.seed}"
    end = pair.cached.end
    reason = end.stop_reason.value if end and end.stop_reason else "none"
    same = "the same without the cache" if pair.equal else "ANOTHER without the cache"
    title = f"{pair.name} ({declared}): {end.tokens if end else ''}; stop reason {reason}; {same}"
    table = Table(title=Text(title))
    for name in ("consumed", "position", "probabilities", "chosen", "margin"):
        table.add_column(name, justify="right" if name == "position" else "left")
    for step in pair.cached.steps:
        table.add_row(
            Text(step.consumed_tokens),
            str(step.position),
            Text(_probabilities(step)),
            Text(step.chosen_token),
            f"{step.margin:.2g} {step.margin_verdict or 'not measured'}",
        )
    return table


def _probabilities(step: Step) -> str:
    return "  ".join(f"{entry.token} {entry.value:.4f}" for entry in step.probabilities[:4])


def _gate(result: Milestone) -> Table:
    table = Table(title=Text("acceptance gate"))
    for name in ("holds", "item", "evidence"):
        table.add_column(name)
    for item in result.gate:
        table.add_row(_pass(item.passed), Text(item.name), Text(item.detail))
    return table


def _verdict(verdict: Verdict) -> RichText:
    return Text(verdict.value, style=_STYLE[verdict])


def _pass(holds: bool) -> RichText:
    return Text("yes", style="green") if holds else Text("NO", style="bold red")
