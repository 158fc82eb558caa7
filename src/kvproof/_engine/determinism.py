"""Is it a function? The same call, made twice, must give the same rows, or no difference says anything."""

import random
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from kvproof._engine.conclusion import scenario_result
from kvproof._engine.rung import Prefix, fed_to_fresh_cache
from kvproof._engine.verdict_rules import DETERMINISM, judge, judge_margin, judge_scenario
from kvproof._numerics.gaps import gap_of_rows
from kvproof.contract.results import Comparison, Evidence, RowResult, ScenarioResult, Tolerance, Verdict
from kvproof.errors import KvproofError
from kvproof.subjects import Subject

#: The cached program's last calls are so many single steps: a decoder may take nothing else on a warm cache.
_STEPS = 8
#: The calls are made over at most so many tokens.
_LENGTH = 256
#: More parts that change are counted, and not named.
_NAMED = 3


def check_determinism(
    subject: Subject, sequence: Prefix, tolerance: Tolerance, repeats: int
) -> tuple[ScenarioResult | None, tuple[str, ...]]:
    """Make one uncached call and one cached program ``repeats`` times; return a result where rows differ.

    Also return the names of what the decoder keeps in itself and changes.

    The two take turns, so that what one leaves behind shows in the other. Rows that differ by no more than the
    declared tolerance, as from kernels that add in no fixed order, are let pass.
    """
    ids = sequence[:_LENGTH]
    calls: dict[str, Callable[[], Tensor]] = {
        "uncached call": lambda: subject.rows(ids),
        "cached program": lambda: _cached(subject, ids),
    }
    first: dict[str, Tensor] = {}
    state, drawn, rows = subject.state(), _random_states(), dict[str, RowResult]()
    changed: dict[str, None] = {}
    for _ in range(repeats):
        for name, call in calls.items():
            try:
                logits = call()
            except KvproofError:
                continue  # it raises again where it is looked at
            worst = _worst(subject, ids, first.setdefault(name, logits), logits, tolerance)
            if worst is not None and name not in rows:
                rows[name] = worst
            later = subject.state()
            changed |= dict.fromkeys(
                part for part, mark in later.items() if part in state and state[part] != mark
            )
            state = later
    if not rows:
        return None, tuple(changed)
    found = tuple(rows.values())
    reason = f"the same {' and the same '.join(rows)} twice give{'s' if len(rows) == 1 else ''} other rows"
    likely = [*_random(subject, drawn), *_changes(list(changed))]
    reason += f": {'; '.join(likely)}" if likely else "; what changes between the calls could not be seen"
    return scenario_result(DETERMINISM, judge_scenario(found), found, reason=reason), tuple(changed)


def _cached(subject: Subject, ids: Prefix) -> Tensor:
    num_steps = min(_STEPS, len(ids) // 2)
    return torch.cat(list(fed_to_fresh_cache(subject, ids, [len(ids) - num_steps, *[1] * num_steps])))


def _worst(subject: Subject, ids: Prefix, first: Tensor, again: Tensor, tolerance: Tolerance) -> RowResult | None:
    """Return the first row that differs by more than is allowed, judged."""
    for number, (row, other) in enumerate(zip(first, again, strict=True)):
        gap = gap_of_rows(row, other)
        evidence = Evidence(
            comparison=Comparison.REPEATED,
            gap=gap.size,
            allowed=tolerance.allowed(gap.scale),
            noise=0.0,
            scale=gap.scale,
            exact=None,
        )
        verdict, reason = judge(evidence)
        if verdict is Verdict.MATCH:
            continue
        margin, margin_verdict = judge_margin(row, other, gap.size)
        prefix = ids[: len(ids) - len(first) + number + 1]  # a cached call may give its last row alone
        return RowResult(
            ids=prefix,
            tokens=subject.decode(prefix),
            evidence=evidence,
            worst_id=gap.index[0],
            margin=margin,
            margin_verdict=margin_verdict,
            verdict=verdict,
            reason=reason,
            expected=None,
        )
    return None


def _random_states() -> dict[str, object]:
    return {
        "torch": torch.get_rng_state().numpy().tobytes(),
        "NumPy": repr(np.random.get_state(legacy=False)),
        "Python": random.getstate(),
    }


def _random(subject: Subject, before: dict[str, object]) -> Iterator[str]:
    """Yield who drew random numbers, and why that may be."""
    after = _random_states()
    drew = [name for name, state in before.items() if after[name] != state]
    if drew:
        parts = list(_short(subject.random_parts()))
        because = f" ({', '.join(parts)})" if parts else ""
        yield f"it draws random numbers from {' and '.join(drew)}{because}"


def _changes(changed: Sequence[str]) -> Iterator[str]:
    if changed:
        yield f"{', '.join(_short(changed))} change{'s' if len(changed) == 1 else ''} from call to call"


def _short(names: Iterable[str]) -> Iterator[str]:
    listed = list(names)
    yield from listed[:_NAMED]
    if len(listed) > _NAMED:
        yield f"{len(listed) - _NAMED} more"
