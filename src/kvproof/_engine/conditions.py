"""When a finding shows: the simplest condition that all wrong calls meet and no other call does.

A condition is one factor of a call, or two of them together, such as "the call feeds several tokens and starts at
position 8 (a window) or later". It is told only if it separates the wrong rows from the others exactly. What
separates most of them would be a guess.
"""

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from itertools import combinations

from kvproof._engine.call_conditions import Conditions, Observation, observe
from kvproof.contract.findings import finding_key
from kvproof.contract.results import ScenarioResult, Verdict
from kvproof.scenarios import Boundaries, Scenario

#: So few wrong or right calls are told apart by chance: nothing is said.
MIN_WRONG, MIN_RIGHT = 2, 3
#: Two factors together fit few wrong calls too easily.
MIN_WRONG_OF_TWO = 3
#: Two factors with odd thresholds fit anything: at most one of the two may have one.
MAX_COST_OF_TWO = 2
#: Another condition that fits as well is named, too, but no more than this.
_MAX_ALTERNATIVES = 1


class Scope(IntEnum):
    """What a factor is the same for, and what therefore counts as one observation."""

    ROW = 0
    BATCH_ROW = 1  #: all rows of one batch row in one call
    CALL = 2


@dataclass(frozen=True, slots=True)
class Clause:
    """One factor's part of a condition, in words, and which observations meet it: bit i is for the i-th."""

    subject: str
    predicate: str
    family: str  #: clauses of one family say nearly the same
    cost: int  #: 0 for what decoders are known to branch on; more for what is less likely a cause
    meets: int
    weight: int = 1  #: 2 if it says two things: that a call was the first one, and how wide it was


@dataclass(frozen=True, slots=True)
class _Number:
    """A factor that is a number: how to read it, and how to say ``==``, ``>=`` and ``<=``."""

    family: str
    subject: str
    read: Callable[[Conditions], int]
    exactly: str
    at_least: str
    at_most: str
    natural: str | None = None  #: words for being at least ``threshold``, where decoders are known to branch
    threshold: int = 1
    zero: str | None = None  #: words for 0
    one: str | None = None  #: words for exactly 1
    cost: int = 0
    weight: int = 1
    scope: Scope = Scope.CALL


_NUMBERS = (
    _Number(
        "width",
        "the call",
        lambda c: c.width,
        "feeds {} tokens",
        "feeds at least {} tokens",
        "feeds at most {} tokens",
        "feeds several tokens",
        2,
        one="feeds a single token",
    ),
    _Number(
        "position",
        "the call",
        lambda c: c.start,
        "starts at position {}",
        "starts at position {} or later",
        "starts at position {} or earlier",
        "is fed to a cache that holds tokens",
        zero="is the first one on its cache",
    ),
    _Number(
        "end",
        "the call",
        lambda c: c.start + c.width - 1,
        "ends at position {}",
        "ends at position {} or later",
        "ends at position {} or earlier",
        zero="feeds a single token to an empty cache",
    ),
    _Number(
        "position",
        "the row",
        lambda c: c.position,
        "is at position {}",
        "is at position {} or later",
        "is at position {} or earlier",
        scope=Scope.ROW,
    ),
    _Number(
        "batch",
        "the batch",
        lambda c: c.batch,
        "has {} rows",
        "has at least {} rows",
        "has at most {} rows",
        "has several rows",
        2,
        one="has a single row",
    ),
    _Number(
        "batch row",
        "the row",
        lambda c: c.batch_row,
        "is in batch row {}",
        "is in batch row {} or a later one",
        "is in batch row {} or an earlier one",
        "is not in batch row 0",
        scope=Scope.BATCH_ROW,
    ),
    _Number(
        "padding",
        "the batch row",
        lambda c: c.padding,
        "has {} columns of padding",
        "has at least {} columns of padding",
        "has at most {} columns of padding",
        "has padding before it",
        zero="has no padding before it",
        scope=Scope.BATCH_ROW,
    ),
    _Number(
        "padding",
        "the batch",
        lambda c: c.batch_padding,
        "has up to {} columns of padding",
        "has at least {} columns of padding in a row",
        "has at most {} columns of padding in a row",
        "has padding",
        zero="has no padding",
    ),
    _Number(
        "calls",
        "the session",
        lambda c: c.num_calls,
        "has had {} calls before",
        "has had at least {} calls before",
        "has had at most {} calls before",
        one="has had one call before",
        cost=1,
    ),
    _Number(
        "previous call",
        "the call before it",
        lambda c: c.previous_width,
        "fed {} tokens",
        "fed at least {} tokens",
        "fed at most {} tokens",
        "fed several tokens",
        2,
        one="fed a single token",
        cost=1,
    ),
    _Number(
        "first call",
        "the session",
        lambda c: c.first_width,
        "began with a call of {} tokens",
        "began with a call of at least {} tokens",
        "began with a call of at most {} tokens",
        "began with a call of several tokens",
        2,
        one="began with a call of a single token",
        cost=2,
        weight=2,
    ),
    *(
        _Number(
            done,
            "the session",
            read,
            f"was {done} exactly {{}} times",
            f"was {done} at least {{}} times",
            f"was {done} at most {{}} times",
            f"was {done} before",
            zero=f"was never {done}",
            one=f"was {done} exactly once",
        )
        for done, read in (
            ("cropped", lambda c: c.num_crops),
            ("reordered", lambda c: c.num_reorders),
            ("reset", lambda c: c.num_resets),
            ("forked from another", lambda c: c.num_forks),
        )
    ),
    _Number(
        "others",
        "the program",
        lambda c: c.num_others,
        "has {} other sessions open",
        "has at least {} other sessions open",
        "has at most {} other sessions open",
        "has another session open",
        zero="has no other session open",
        one="has one other session open",
        cost=1,
    ),
)

#: What tells one observation from another, in each scope.
_UNITS: dict[Scope, Callable[[Observation], Hashable]] = {
    Scope.ROW: id,
    Scope.BATCH_ROW: lambda observation: (observation.call, observation.conditions.batch_row),
    Scope.CALL: lambda observation: observation.call,
}


def add_conditions(
    programs: Iterable[Scenario], results: Sequence[ScenarioResult], boundaries: Boundaries
) -> list[ScenarioResult]:
    """Return the results of an audit, with the condition of each finding where there is an exact one.

    All wrong rows are tried together. If they have no condition in common, they may have several causes, and each
    finding's rows are tried apart from the rows of the others.
    """
    observed = observe(programs, results)
    findings: dict[Hashable, set[str]] = {}
    for result in results:
        if result.verdict is Verdict.DIVERGED and not result.advice:
            findings.setdefault(finding_key(result), set()).add(result.name)
    everything = set().union(*findings.values())
    common = describe_condition(observed, boundaries)
    told = dict.fromkeys(everything, common)
    for names in findings.values() if common is None and len(findings) > 1 else ():
        own = [o for o in observed if not o.is_wrong or o.call[0] in names]
        told |= dict.fromkeys(names, describe_condition(own, boundaries))
    shown = {o.call[0] for o in observed if o.is_wrong}
    return [
        replace(result, condition=told[result.name]) if result.name in told and result.name in shown else result
        for result in results
    ]


def describe_condition(observed: Sequence[Observation], boundaries: Boundaries) -> str | None:
    """Return the simplest exact condition in words, without a full stop; None if there is none to be sure of."""
    exact: list[_Exact] = []
    for scope, unit_of in _UNITS.items():
        units = _merge(observed, unit_of)
        if sum(u.is_wrong for u in units) >= MIN_WRONG and sum(not u.is_wrong for u in units) >= MIN_RIGHT:
            count = _count(units, "rows" if scope is Scope.ROW else "calls")
            exact += (_Exact(found, scope, count) for found in _exact(units, boundaries, scope))
    if not exact:
        return None
    exact.sort(key=lambda each: each.rank)
    best = exact[0]
    said, alternatives = {best.families}, list[str]()
    for other in exact[1:]:
        if other.rank[:2] == best.rank[:2] and other.families not in said:
            said.add(other.families)
            alternatives.append(f", or where {_phrase(other.clauses)}, which no compared call tells apart")
    also = "".join(alternatives[:_MAX_ALTERNATIVES])
    return f"exactly where {_phrase(best.clauses)}{also} ({best.count})"


@dataclass(frozen=True, slots=True)
class _Exact:
    """Clauses that the wrong observations of a scope meet together, and no other observation does."""

    clauses: tuple[Clause, ...]
    scope: Scope
    count: str  #: how many observations are wrong, in words

    @property
    def families(self) -> frozenset[str]:
        """The factors, where those that say nearly the same count as one."""
        return frozenset(clause.family for clause in self.clauses)

    @property
    def rank(self) -> tuple[int, int, int, int]:
        """What makes it less simple: factors, unlikely ones, the scope, and words."""
        words = sum(len(clause.predicate.split()) for clause in self.clauses)
        weight = sum(clause.weight for clause in self.clauses)
        return weight, sum(clause.cost for clause in self.clauses), self.scope, words


def _merge(observed: Sequence[Observation], unit_of: Callable[[Observation], Hashable]) -> list[Observation]:
    """Return one observation for each unit, wrong if a row of it is, with the conditions of its first row."""
    units: dict[Hashable, Observation] = {}
    for each in observed:
        key = unit_of(each)
        first = units.setdefault(key, each)
        if each.is_wrong and not first.is_wrong:
            units[key] = replace(first, is_wrong=True)
    return list(units.values())


def _exact(units: Sequence[Observation], boundaries: Boundaries, scope: Scope) -> Iterator[tuple[Clause, ...]]:
    """Yield every clause that the wrong units alone meet; if there is no plain one, every pair, too."""
    wrong = sum(1 << number for number, unit in enumerate(units) if unit.is_wrong)
    clauses = [each for each in _clauses(units, boundaries, scope) if each.meets & wrong == wrong]
    single = [(clause,) for clause in clauses if clause.meets == wrong]
    yield from single
    if any(clause.weight == 1 for (clause,) in single) or wrong.bit_count() < MIN_WRONG_OF_TWO:
        return
    for pair in combinations(clauses, 2):
        if pair[0].meets & pair[1].meets == wrong and pair[0].cost + pair[1].cost <= MAX_COST_OF_TWO:
            yield pair


def _clauses(units: Sequence[Observation], boundaries: Boundaries, scope: Scope) -> Iterator[Clause]:
    """Yield clauses that the wrong units meet: the tightest of each factor, and those of known boundaries."""
    conditions = [unit.conditions for unit in units]
    wrong = [unit.conditions for unit in units if unit.is_wrong]

    def clause(
        met: Iterable[bool], subject: str, predicate: str, family: str, cost: int, weight: int = 1
    ) -> Clause:
        meets = sum(1 << number for number, yes in enumerate(met) if yes)
        return Clause(subject, predicate, family, cost, meets, weight)

    warm = (c.width > 1 and c.start > 0 for c in conditions)
    words = "feeds several tokens to a cache that holds tokens"
    yield clause(warm, "the call", words, "block on a warm cache", 0, 2)
    for factor in _NUMBERS:
        if factor.scope < scope or (factor.family == "previous call" and not all(map(factor.read, wrong))):
            continue  # of a first call there is nothing to say about the call before it
        values, among = list(map(factor.read, conditions)), list(map(factor.read, wrong))
        for low, high, words, cost in _ranges(factor, among, max(values), boundaries):
            met = (low <= value <= high for value in values)
            yield clause(met, factor.subject, words, factor.family, cost + factor.cost, factor.weight)
    for window in (window for window in boundaries.windows if window >= 2):
        crosses = (c.start < window < c.start + c.width for c in conditions)
        yield clause(crosses, "the call", f"crosses position {window} (a window)", f"window {window}", 0)
        aligned = (c.start > 0 and c.start % window == 0 for c in conditions)
        words = f"starts at a multiple of {window} (a window)"
        yield clause(aligned, "the call", words, f"multiples of {window}", 1)
    words = "feeds as many tokens as the batch has rows"
    yield clause((c.width == c.batch for c in conditions), "the call", words, "square", 1)
    words = "leaves the positions to the decoder"
    yield clause((c.omits_positions for c in conditions), "the call", words, "positions", 0)
    yield clause((not c.omits_positions for c in conditions), "the call", "gives the positions", "positions", 1)
    for kind in dict.fromkeys(c.cache for c in wrong):
        yield clause((c.cache is kind for c in conditions), "the cache", f"is {kind.value}", "cache", 0)


def _ranges(
    factor: _Number, wrong: Sequence[int], largest: int, boundaries: Boundaries
) -> Iterator[tuple[int, float, str, int]]:
    """Yield ranges of a factor that hold all values of wrong units, both ends included, in words, with a cost.

    The tightest ranges exclude most. Wider ones are tried only where decoders are known to change. ``largest`` is
    the largest value of any unit: beyond it, nothing tells a single value from all values from there on.
    """
    low, high = min(wrong), max(wrong)
    if factor.natural is not None and factor.threshold <= low:
        yield factor.threshold, math.inf, factor.natural, 0
    known = {**dict.fromkeys(boundaries.windows, "a window"), boundaries.context_len: "the context's length"}
    for least in sorted(known) if factor.family in ("position", "end", "width") else ():
        if 2 <= least <= low:
            yield least, math.inf, factor.at_least.format(f"{least} ({known[least]})"), 0
    if low == high:
        special = {0: factor.zero, 1: factor.one}.get(low)
        usual = 0 if special else 1
        yield low, low, special or factor.exactly.format(low), usual if high < largest else 3
    if low > 0:
        yield low, math.inf, factor.at_least.format(low), 2
    if high > 0:
        yield 0, high, factor.at_most.format(high), 3


def _phrase(clauses: Sequence[Clause]) -> str:
    """Return clauses in one sentence; a subject that they share is said once."""
    first, *rest = clauses
    text = f"{first.subject} {first.predicate}"
    for clause in rest:
        text += f" and {clause.predicate}" if clause.subject == first.subject else f", and {clause.subject} "
        text += "" if clause.subject == first.subject else clause.predicate
    return text


def _count(units: Sequence[Observation], what: str) -> str:
    return f"{sum(unit.is_wrong for unit in units)} wrong {what} of {len(units)}"
