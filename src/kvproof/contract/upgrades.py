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
    if isinstance(plain.get("faults"), list):
        upgraded["faults"] = [_fault(fault) for fault in plain["faults"]]
    certificate = plain.get("certificate")
    if isinstance(certificate, dict) and isinstance(certificate.get("mutants"), list):
        kept = {name: value for name, value in certificate.items() if name != "mutants"}
        upgraded["certificate"] = {**kept, "faults": [_certified(fault) for fault in certificate["mutants"]]}
    return upgraded


def _fault(plain: Any) -> Any:
    """Add what version 1 lacks for a fault in the audit's programs: its outcome, and where it first shows.

    Where the fault was planted and its relative gap remain unknown.
    """
    if not isinstance(plain, dict) or not plain.keys() >= {"caught", "divergence", "expected_stage"}:
        return plain
    first = plain["divergence"]
    is_seen = isinstance(first, dict) or plain.get("num_rows_beyond")
    upgraded = {name: value for name, value in plain.items() if name not in ("caught", "expected_stage")}
    upgraded |= {
        "expected_stages": [plain["expected_stage"]],
        "layer": None,
        "position": None,
        "outcome": "caught" if plain["caught"] else "hidden" if is_seen else "equivalent",
        "where": _where(first),
        "gap": "nan",
        "reason": None,
    }
    if first is None:
        upgraded["right_stage"] = None
    return upgraded


def _where(divergence: Any) -> str | None:
    if not isinstance(divergence, dict):
        return None
    stage, layer = divergence.get("stage"), divergence.get("layer")
    return f"{stage}" if layer is None else f"{stage} of layer {layer}"


def _certified(plain: Any) -> Any:
    """Rename the members of a fault in the certificate. Version 1 did not record which contract it breaks."""
    if not isinstance(plain, dict) or "fault" not in plain:
        return plain
    kept = {name: value for name, value in plain.items() if name != "fault"}
    members = ("verdict", "largest_gap", "tolerance", "num_rows_beyond", "margin", "divergence")
    return {**kept, "name": plain["fault"], "breaks": "", "expected_stages": [], **dict.fromkeys(members)}


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
