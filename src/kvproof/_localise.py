"""The first value that went wrong, in causal order.

A program runs on the cached path with every value recorded, and each value is held against the literal
uncached run of the same tokens. Calls come in the order in which they ran; within a call, stages come in
causal order and tokens in order of position. So the first mismatch is one that no other explains. The
search runs at the top rung where the subject can be cast: there, noise cannot mislead.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kvproof._compare import Gap, gap_between, largest
from kvproof._numerics import TOP_RUNG, value_limit
from kvproof._programs import Row, run_program
from kvproof._report import Divergence
from kvproof._stages import (
    LIKELY_CONTRACT,
    OVER_SLOTS,
    WRONG_KIND,
    WRONG_LAYER,
    WRONG_REQUEST,
    WRONG_SLOT,
    Site,
    Stage,
)
from kvproof._trace import Recorder, token_axis
from kvproof.faults import Fault, MakeTap, no_fault
from kvproof.scenarios import Ability, Scenario
from kvproof.subjects import Subject

Trace = dict[Site, Tensor]
_HAS_HEADS = frozenset({Stage.NEW_Q, Stage.NEW_K, Stage.NEW_V, Stage.ATTN_WEIGHTS}) | OVER_SLOTS


@dataclass(frozen=True, slots=True, kw_only=True)
class Localisation:
    """The first mismatch, or none, and how many values were compared to say so."""

    divergence: Divergence | None
    num_values: int


def localise(subject: Subject, scenario: Scenario, *, fault: Fault | None = None) -> Localisation:
    """Find the first value in ``scenario`` at which the cached path leaves the uncached one.

    ``fault`` is planted in the cached path alone. Without the ability to cast, what is found in a lower dtype
    is where to look first and no proof. Raises `AbilityError` for a subject without taps.
    """
    subject.require(Ability.TAP)
    top = subject.cast(TOP_RUNG) if Ability.CAST in subject.info.abilities else subject
    literal = _LiteralTraces(top)
    make_fault = fault.plant() if fault else no_fault
    num_values = 0
    first: _Mismatch | None = None
    logits_differ = False
    for rows, trace in _traced_calls(top, scenario, make_fault):
        for comparison in _comparisons(literal, rows, trace):
            num_values += comparison.actual.numel()
            first = first or _mismatch(literal, comparison)
        logits_differ |= any(literal.logits_differ(row) for row in rows)
    divergence = _describe(top, scenario, literal, first, logits_differ) if first else None
    return Localisation(divergence=divergence, num_values=num_values)


def _traced_calls(
    subject: Subject, scenario: Scenario, make_fault: MakeTap
) -> Iterator[tuple[tuple[Row, ...], Trace]]:
    """Run the program on the cached path and yield each call's rows and every value it computed."""
    for call in run_program(subject, scenario, lambda: Recorder(make_fault())):
        assert isinstance(call.tap, Recorder)
        yield call.rows, call.tap.values


class _LiteralTraces:
    """Every value of the uncached run over exactly a prefix, and the noise between such runs."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self.traces: dict[tuple[int, ...], Trace] = {}
        self._rows: dict[tuple[int, ...], Tensor] = {}
        self._noise: dict[tuple[Site, tuple[int, ...]], float] = {}

    def __getitem__(self, prefix: tuple[int, ...]) -> Trace:
        if prefix not in self.traces:
            recorder = Recorder()
            self._rows[prefix] = self.subject.rows(prefix, tap=recorder)[-1]
            self.traces[prefix] = recorder.values
        return self.traces[prefix]

    def logits_differ(self, row: Row) -> bool:
        """Return whether a cached row of logits is further from the uncached one than its dtype allows."""
        expected = self._rows[row.prefix]
        gap = gap_between(expected, row.logits)
        return not gap.size <= value_limit(expected.dtype, 0.0, gap.scale)

    def limit(self, site: Site, prefix: tuple[int, ...]) -> float:
        """Return the gap beyond which a value at a site is wrong; integers must be equal."""
        whole = self[prefix][site]
        if not whole.is_floating_point() or whole.numel() == 0:
            return 0.0
        return value_limit(whole.dtype, self._noise_at(site, prefix), float(whole.abs().max()))

    def _noise_at(self, site: Site, prefix: tuple[int, ...]) -> float:
        """Return what the uncached path itself differs by between a prefix and its continuation by one token.

        The largest over all tokens that both hold and over all shorter prefixes: noise grows with position.
        """
        axis = token_axis(site.stage)
        if axis is None or site.stage is Stage.ATTN_WEIGHTS or len(prefix) == 1:
            return 0.0
        if (site, prefix) not in self._noise:
            alone = self[prefix[:-1]][site]
            shared = self[prefix][site].narrow(axis, 0, alone.shape[axis])
            # A value whose size hangs on the length, as an index of selected tokens does, has no counterpart.
            own = gap_between(alone, shared).size if alone.shape == shared.shape else 0.0
            noise = largest((own, self._noise_at(site, prefix[:-1])))
            self._noise[site, prefix] = noise
        return self._noise[site, prefix]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Comparison:
    """One value of one token, both ways: without batch and token axes."""

    site: Site
    row: Row
    expected: Tensor
    actual: Tensor


def _comparisons(literal: _LiteralTraces, rows: tuple[Row, ...], trace: Trace) -> Iterator[_Comparison]:
    """Yield everything that can be compared in one call, in the order in which the uncached path computed it."""
    for site in _in_order(literal[rows[0].prefix]):
        for row in rows:
            pair = _values(site, row, literal[row.prefix], trace)
            if pair is not None:
                yield _Comparison(site=site, row=row, expected=pair[0], actual=pair[1])


def _in_order(trace: Trace) -> Iterator[Site]:
    """Yield a trace's sites as they were computed, each cache's length before its content."""
    for site in trace:
        if site.stage is Stage.CACHE_K:
            yield Site(Stage.CACHE_LEN, site.layer)
        yield site


def _values(site: Site, row: Row, literal: Trace, trace: Trace) -> tuple[Tensor, Tensor] | None:
    """Return the expected and the actual value of a row's newest token at a site, where there are both."""
    if site.stage is Stage.CACHE_LEN:
        keys = trace.get(Site(Stage.CACHE_K, site.layer))
        if keys is None or not row.is_last:
            return None
        return torch.tensor(len(row.prefix)), torch.tensor(keys.shape[-2])
    if site not in trace or site not in literal:
        return None
    expected, actual = literal[site][0], trace[site][row.batch_row]
    if site.stage in OVER_SLOTS:
        # A cache of another length has been named already, and its slots have no counterparts.
        return (expected, actual) if row.is_last and expected.shape == actual.shape else None
    axis = token_axis(site.stage)
    assert axis is not None
    expected, actual = expected.select(axis - 1, -1), actual.select(axis - 1, row.offset)
    if site.stage is Stage.ATTN_WEIGHTS:
        actual = actual[..., : len(row.prefix)]
    return (expected, actual) if expected.shape == actual.shape else None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Mismatch:
    comparison: _Comparison
    gap: Gap
    limit: float


def _mismatch(literal: _LiteralTraces, comparison: _Comparison) -> _Mismatch | None:
    site, row = comparison.site, comparison.row
    limit = 0.0 if site.stage is Stage.CACHE_LEN else literal.limit(site, row.prefix)
    gap = gap_between(comparison.expected, comparison.actual)
    if gap.size <= limit:
        return None
    if site.stage in OVER_SLOTS:
        gap = _first_wrong_slot(comparison, limit)
    return _Mismatch(comparison=comparison, gap=gap, limit=limit)


def _first_wrong_slot(comparison: _Comparison, limit: float) -> Gap:
    """Return the gap of the earliest wrong slot: later ones may be the same fault again."""
    for slot in range(comparison.expected.shape[1]):
        gap = gap_between(comparison.expected[:, slot], comparison.actual[:, slot])
        if not gap.size <= limit:
            return Gap(size=gap.size, index=(gap.index[0], slot, gap.index[1]), scale=gap.scale)
    raise AssertionError("a cache tensor beyond its limit has a slot beyond it")


def _describe(
    subject: Subject, scenario: Scenario, literal: _LiteralTraces, found: _Mismatch, logits_differ: bool
) -> Divergence:
    comparison, gap = found.comparison, found.gap
    site, prefix = comparison.site, comparison.row.prefix
    head = gap.index[0] if site.stage in _HAS_HEADS else None
    slot = gap.index[1] if site.stage in OVER_SLOTS | {Stage.ATTN_WEIGHTS} else None
    origin, contract = _origin(literal, comparison, slot, found.limit)
    expected, actual = (float(v[gap.index]) for v in (comparison.expected, comparison.actual))
    where = str(site)
    if head is not None:
        where += f", head {head}"
    if slot is not None:
        where += f", slot {slot}"
    sentence = (
        f"consuming {subject.token(prefix[-1])} at position {len(prefix) - 1}, the first value that differs is "
        f"{where}: {actual:.6g} where the uncached path has {expected:.6g}"
    )
    sentence += f"; the slot holds {origin}" if origin else ""
    sentence += "" if logits_differ else "; the logits agree because a later error cancels this one"
    return Divergence(
        scenario=scenario.name,
        ids=prefix,
        tokens=subject.decode(prefix),
        position=len(prefix) - 1,
        stage=site.stage,
        layer=site.layer,
        head=head,
        slot=slot,
        expected=expected,
        actual=actual,
        gap=gap.size,
        allowed=found.limit,
        origin=origin,
        contract=contract,
        logits_differ=logits_differ,
        sentence=sentence,
    )


def _origin(
    literal: _LiteralTraces, comparison: _Comparison, slot: int | None, limit: float
) -> tuple[str | None, str]:
    """Say what a wrong cache slot really holds, if that is another entry of a run we know."""
    site, prefix = comparison.site, comparison.row.prefix
    likely = LIKELY_CONTRACT[site.stage]
    if site.stage not in OVER_SLOTS or slot is None:
        return None, likely
    held = comparison.actual[:, slot]
    for ids, trace in sorted(literal.traces.items(), key=lambda item: item[0] != prefix):
        for other in (Site(stage, layer) for stage in (Stage.CACHE_K, Stage.CACHE_V) for layer in _layers(trace)):
            for place in range(trace[other].shape[2]):
                if not gap_between(trace[other][0, :, place], held).size <= limit:
                    continue
                kind = "key" if other.stage is Stage.CACHE_K else "value"
                origin = f"layer {other.layer}'s {kind} of position {place}"
                if ids[: place + 1] != prefix[: place + 1]:
                    return f"{origin} of another request", WRONG_REQUEST
                if other.stage is not site.stage:
                    return origin, WRONG_KIND
                return origin, WRONG_LAYER if other.layer != site.layer else WRONG_SLOT
    return None, likely


def _layers(trace: Trace) -> list[int]:
    return sorted(site.layer for site in trace if site.stage is Stage.CACHE_K and site.layer is not None)
