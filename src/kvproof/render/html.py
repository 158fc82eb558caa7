"""Renders a report as one HTML file: the verdict first, then interactive views of the evidence."""

import math
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvproof.contract.findings import group_findings
from kvproof.contract.milestone import RunPair
from kvproof.contract.report import Report
from kvproof.contract.results import (
    Certificate,
    Divergence,
    FaultResult,
    Outcome,
    RowResult,
    ScenarioResult,
    Verdict,
)
from kvproof.contract.sentences import confirmation, finding_of, found, traceback_of
from kvproof.render.html_data import data_of
from kvproof.render.page import CHARTS, number, page

#: The verdicts that a reader must see first, worst first.
_FINDINGS = (Verdict.DIVERGED, Verdict.RAISED, Verdict.INCONCLUSIVE, Verdict.VACUOUS)


def render(report: Report) -> str:
    """Return the page; the same report gives the same bytes."""
    first = _first(report)
    chosen = first if first is not None and first.rows else next((s for s in report.scenarios if s.rows), None)
    has_top = any(row.top_gap is not None for s in report.scenarios for row in s.rows)
    if chosen is not None and chosen.name == "causality":
        chosen = next((s for s in report.scenarios if s.rows and s.name != "causality"), chosen)
    return page(
        "report.html.jinja",
        title=f"{report.verdict.value}: {report.subject.name}, kvproof report",
        version=report.environment.kvproof,
        data=data_of(report),
        scripts=(*CHARTS, "charts.js", "report.js"),
        styles=("page.css", "report.css"),
        report=report,
        first=first,
        chosen=chosen,
        has_top=has_top,
        rungs=list(dict.fromkeys((report.subject.dtype, *(("float64",) if has_top else ())))),
        sections=list(_sections(report)),
        tiles=list(_tiles(report)),
        ways=[s for s in report.scenarios if s.four_ways is not None],
        matrix=None if report.certificate is None else _matrix(report.certificate),
        commands=list(_commands(report, first)),
        facts=list(_facts(report)),
        largest=_largest,
        findings=group_findings(
            scenario for scenario in report.scenarios if scenario is first or found(scenario)
        ),
        finding_of=finding_of,
        confirmation=confirmation,
        traceback_of=traceback_of,
        site_of=_site,
        policy_of=_policy,
        symbol=_symbol,
        cell_class=_cell_class,
    )


def _first(report: Report) -> ScenarioResult | None:
    """Return the scenario whose finding is shown first: the first with the worst verdict, ignoring advice."""
    counted = [s for s in report.scenarios if not s.advice]
    return next((s for verdict in _FINDINGS for s in counted if s.verdict is verdict), None)


def _sections(report: Report) -> Iterator[tuple[str, str]]:
    yield "verdict", "Verdict"
    if report.milestone:
        yield "gate", "Gate"
    yield "scenarios", "Scenarios"
    yield "positions", "Gap at every prefix"
    if report.spreads:
        yield "spread", "Every value"
    if any(s.four_ways for s in report.scenarios):
        yield "ways", "Which side"
    if report.certificate or report.faults:
        yield "certificate", "Certificate"
    if report.milestone:
        yield "generation", "Generation"
        yield "trace", "Cache"
    yield "repeat", "How to repeat"


def _tiles(report: Report) -> Iterator[tuple[str, str, str]]:
    """Yield the numbers next to the verdict: name, value, and what the value is compared with."""
    rows = [row for s in report.scenarios if not s.advice and s.name != "causality" for row in s.rows]
    if rows:
        worst = max(rows, key=lambda row: _order(row.gap))
        yield "Prefixes compared", str(len(rows)), f"{report.subject.vocab_size} logits each"
        yield f"Largest {report.subject.dtype} gap", number(worst.gap), f"of {number(worst.allowed)} allowed"
        top = _largest(rows, "top_gap")
        if top is not None:
            yield "Largest float64 gap", number(top), ""
    if report.certificate is not None:
        caught, num = report.certificate.number(Outcome.CAUGHT), len(report.certificate.faults)
        equivalent = report.certificate.number(Outcome.EQUIVALENT)
        yield "Planted faults caught", f"{caught} of {num - equivalent}", ""
    num_unchecked = sum(s.verdict is Verdict.NOT_CHECKED for s in report.scenarios)
    if num_unchecked:
        yield "Scenarios not checked", str(num_unchecked), "the subject lacks an ability"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Matrix:
    """The certificate's faults by layer."""

    layers: list[int | None]
    rows: list[tuple[str, list[list[FaultResult]], float | None]]
    tiles: list[tuple[str, str, str]]


def _matrix(certificate: Certificate) -> _Matrix:
    results = certificate.faults
    layers = sorted({r.layer for r in results}, key=lambda layer: -1 if layer is None else layer)
    rows = []
    for name in dict.fromkeys(r.name for r in results):
        own = [r for r in results if r.name == name]
        caught = [r.gap for r in own if r.caught]
        cells = [[r for r in own if r.layer == layer] for layer in layers]
        rows.append((name, cells, min(caught, key=_order, default=None)))
    tiles = [
        ("Planted", str(len(results)), f"in {certificate.dtype}"),
        ("Caught", str(certificate.number(Outcome.CAUGHT)), f"{certificate.num_right} at the right stage"),
    ]
    others = {
        Outcome.RAISED: "Refused by the decoder",
        Outcome.HIDDEN: "Changed values and no row",
        Outcome.EQUIVALENT: "Changed nothing here",
    }
    tiles += [(words, str(n), "") for outcome, words in others.items() if (n := certificate.number(outcome))]
    if (planted := certificate.planted_in) is not None:
        more = f"blocks of up to {planted.block_len}, {planted.num_rows} row{'s' if planted.num_rows > 1 else ''}"
        tiles.append(("Longest sequence", f"{planted.num_tokens} tokens", more))
    if certificate.margin is not None:
        tiles.append(("Smallest gap caught", number(certificate.margin), "× the largest without a fault"))
    return _Matrix(layers=layers, rows=rows, tiles=tiles)


def _symbol(result: FaultResult) -> str:
    if result.caught:
        return "✓" if result.right_stage else "✓·"
    return {Outcome.RAISED: "!", Outcome.HIDDEN: "○", Outcome.EQUIVALENT: "="}[result.outcome]


def _cell_class(results: Sequence[FaultResult]) -> str:
    """Return the CSS class of a cell, which is that of its worst outcome."""
    order = [Outcome.CAUGHT, Outcome.RAISED, Outcome.EQUIVALENT, Outcome.HIDDEN]
    worst = max((r.outcome for r in results), key=order.index)
    if worst is Outcome.CAUGHT and not all(r.right_stage for r in results):
        return "caught elsewhere"
    return "hidden-fault" if worst is Outcome.HIDDEN else worst.value


def _commands(report: Report, first: ScenarioResult | None) -> Iterator[tuple[str, str]]:
    """Yield commands to run, and what each does."""
    request = report.request
    if report.milestone is not None:
        off = "".join(f" --without {name}" for name in report.milestone.switched_off)
        yield f"kvproof milestone{off}", "The whole run:"
    elif request is not None and request.command is not None:
        yield request.command, "The whole audit:"
    if first is not None and first.verdict is Verdict.DIVERGED and request is not None:
        named = request.target is not None and ":" in request.target  # a report alone has no code run
        target = f" --target {shlex.quote(str(request.target))}" if named else ""
        yield f"kvproof shrink report.json{target}", "The first finding as one short file:"
    yield "kvproof render report.json --to html", "This page, from the saved report:"


def _facts(report: Report) -> Iterator[tuple[str, object]]:
    subject, made = report.subject, report.environment
    yield "Subject", subject.name
    yield "Size", f"{subject.num_layers} layers, vocabulary {subject.vocab_size}, context {subject.context_len}"
    yield "Dtype and mode", f"{subject.dtype}, {subject.mode}"
    yield "Weights, SHA-256", subject.digest
    yield "Abilities", ", ".join(a.value for a in subject.abilities)
    if report.request is not None:
        yield "Seed", report.request.seed
        yield "Device and attention", f"{report.request.device}, {report.request.attention}"
    if report.milestone is not None:
        info = report.milestone.checkpoint
        yield "Checkpoint", f"{info.source}, seed {info.seed}, {info.num_parameters} parameters"
        yield "Loss", f"{info.loss:.5f} nats, floor {info.entropy_floor:.5f}"
        yield "Weights after the run", "unchanged" if info.digest_before == info.digest_after else "CHANGED"
    yield "Made", made.created
    yield "Versions", f"kvproof {made.kvproof}, torch {made.torch}, Python {made.python}"
    yield "Machine", f"{made.platform}; {made.processor}; {made.num_threads} threads"


def _policy(pair: RunPair) -> str:
    policy = pair.cached.header.policy
    if policy.kind == "sample":
        return f"temperature {policy.temperature:g}, top-k {policy.top_k}, seed {policy.seed}"
    return "greedy, the lowest id wins a tie"


def _site(divergence: Divergence) -> str:
    """Return the place of the first wrong value, in the words of its sentence."""
    text = divergence.sentence
    for start in ("the first value that differs is ", "look first at "):
        if start in text:
            return text.partition(start)[2].partition(": ")[0]
    return divergence.stage.value


def _largest(rows: Sequence[RowResult], member: str) -> float | None:
    values = [value for row in rows if (value := getattr(row, member)) is not None]
    return max(values, key=_order, default=None)


def _order(value: float) -> float:
    """Return a sort key that puts NaN last, so that it counts as the largest."""
    return math.inf if math.isnan(value) else value
