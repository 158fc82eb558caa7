"""Upgrades reports from one major version to the next, as plain JSON."""

from typing import Any

#: Members of a row in version 1 that version 2 keeps in the row's evidence.
_DECLARED = ("gap", "allowed", "noise", "scale", "sampled_error")
_EXACT = ("top_gap", "top_noise", "uncached_error", "cached_error")


def report_from_version_1(plain: dict[str, Any]) -> dict[str, Any]:
    """Return a report of version 1 in the form of version 2; the reader reports what does not fit."""
    scenarios = plain.get("scenarios")
    upgraded = {**plain, "schema_version": 2, "schema_minor": 0}
    if isinstance(scenarios, list):
        upgraded["scenarios"] = [_scenario(scenario) for scenario in scenarios]
    return upgraded


def _scenario(plain: Any) -> Any:
    if not isinstance(plain, dict) or not isinstance(plain.get("rows"), list):
        return plain
    comparison = "causality" if plain.get("name") == "causality" else "cached"
    return {**plain, "rows": [_row(row, comparison) for row in plain["rows"]]}


def _row(plain: Any, comparison: str) -> Any:
    """Move a row's numbers into its evidence. Version 1 did not record why it excused tables and near-ties."""
    if not isinstance(plain, dict) or not plain.keys() >= {*_DECLARED, *_EXACT}:
        return plain
    kept = {name: value for name, value in plain.items() if name not in (*_DECLARED, *_EXACT)}
    exact = None
    if plain["top_gap"] is not None:
        exact = {
            "gap": plain["top_gap"],
            "noise": plain["top_noise"],
            "scale": plain["scale"],
            "uncached_error": plain["uncached_error"],
            "cached_error": plain["cached_error"],
        }
    evidence = {name: plain[name] for name in _DECLARED}
    evidence |= {"comparison": comparison, "exact": exact, "rounded_tables": [], "choices": None}
    return {**kept, "evidence": evidence}
