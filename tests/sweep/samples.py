"""Jobs, cells and conditions to build tables of."""

import json
from pathlib import Path

from kvproof.contract.codec import to_plain
from kvproof.contract.environment import Environment
from kvproof.contract.results import Verdict
from kvproof.contract.sweep_table import VERSION, Cell, Conditions, Ending, Group, Job, Sweep

#: From where processes find these samples.
ROOT = Path(__file__).parents[2]

CONDITIONS = Conditions(
    kvproof="0.1.0", torch="2.13.0", transformers="5.17.0", length=8, seed=0, only=("fork",), without=()
)
ENVIRONMENT = Environment(
    kvproof="0.1.0",
    python="3.11.7",
    torch="2.13.0",
    platform="Linux",
    processor="x86_64, 2 cores",
    num_threads=1,
    created="2026-01-02T03:04:05+00:00",
)


def job(target: str, dtype: str = "float32", attention: str = "eager") -> Job:
    return Job(target=target, dtype=dtype, attention=attention, length=8, seed=0)


def cell(of: Job, verdict: Verdict = Verdict.MATCH, **changes: object) -> Cell:
    members = {
        "target": of.target,
        "dtype": of.dtype,
        "attention": of.attention,
        "scenario": "fork",
        "advice": False,
        "verdict": verdict,
        "largest_gap": 1.5e-6,
        "num_rows": 10,
        "sentence": None,
        "wall_s": 0.25,
        "peak_mb": 300.0,
    }
    return Cell(**{**members, **changes})


def group(of: Job, *cells: Cell, ending: Ending = Ending.FINISHED, reason: str | None = None) -> Group:
    return Group(job=of, ending=ending, reason=reason, wall_s=1.5, peak_mb=320.0, cells=cells)


def table(*groups: Group, num_groups_asked: int | None = None) -> Sweep:
    return Sweep(
        schema_version=VERSION.major,
        schema_minor=VERSION.minor,
        environment=ENVIRONMENT,
        conditions=CONDITIONS,
        num_groups_asked=len(groups) if num_groups_asked is None else num_groups_asked,
        groups=groups,
    )


def matching(of: Job) -> str:
    """Do the work of a job whose one scenario matches."""
    return json.dumps(to_plain([cell(of)]))
