"""The data for the charts on a report's page: small columns of numbers, limited to what a chart can show."""

import math
from typing import Any

from kvproof.contract.report import Report
from kvproof.contract.results import RowResult, ScenarioResult, Spread
from kvproof.contract.text import printable
from kvproof.render.page import tail

#: Non-finite numbers are drawn as this, above all others.
_BEYOND = 1e300


def data_of(report: Report) -> dict[str, Any]:
    """Return the data for the page's scripts."""
    milestone = report.milestone
    return {
        "dtype": report.subject.dtype,
        "scenarios": [_scenario(s) for s in report.scenarios],
        "spreads": [_spread(s) for s in report.spreads],
        "runs": [
            {
                "name": pair.name,
                "steps": [
                    {"token": printable(s.chosen_token), "margin": _drawn(s.margin), "error": _drawn(s.error)}
                    for s in pair.cached.steps
                ],
            }
            for pair in (milestone.runs if milestone else ())
        ],
    }


def _scenario(scenario: ScenarioResult) -> dict[str, Any]:
    return {
        "name": printable(scenario.name),
        "verdict": scenario.verdict.value,
        "rows": [_row(row) for row in scenario.rows],
    }


def _row(row: RowResult) -> dict[str, Any]:
    numbers = ("gap", "allowed", "noise", "top_gap", "uncached_error", "cached_error", "margin")
    return {
        "n": len(row.ids),
        "tokens": tail(row.tokens),
        "verdict": row.verdict.value,
        "reason": printable(row.reason),
        "choice": row.margin_verdict.value,
        **{name: _drawn(getattr(row, name)) for name in numbers},
    }


def _spread(spread: Spread) -> dict[str, Any]:
    return {
        "tokens": [[t.call, t.batch_row, t.position, tail(t.token)] for t in spread.tokens],
        "sites": [[printable(s.name), s.layer, s.allowed] for s in spread.sites],
        "gaps": [[_drawn(gap) for gap in row] for row in spread.gaps],
        "kept": [
            [
                k.first_call,
                k.last_call,
                k.layer,
                k.slot,
                k.position,
                tail(k.token),
                _drawn(k.gap),
                k.wrong,
                k.origin,
            ]
            for k in spread.kept
        ],
        "leftOut": spread.left_out,
    }


def _drawn(value: float | None) -> float | None:
    """Return a number rounded to four digits."""
    if value is None:
        return None
    return float(f"{value:.4g}") if math.isfinite(value) else _BEYOND
