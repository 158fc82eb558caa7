"""The first value that went wrong, in causal order.

A program runs on the cached path with every value recorded, and each value is held against the uncached run
of the same tokens. Calls come in the order in which they ran; within a call, stages come in causal order and
tokens in order of position. So the first mismatch is one that no other explains. The search runs at the top
rung where the subject can be cast: there, noise cannot mislead.

What float64 does not show has its cause in the declared dtype alone. There every value is off by some
rounding, so a search at that rung says where the cached path's error first outgrows the uncached one's: where
to look first, and no proof.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kvproof._compare import Gap, gap_between, largest
from kvproof._numerics import TOP_RUNG
from kvproof._programs import Row, run_program
from kvproof._report import Constant, Divergence
from kvproof._stages import (
    LIKELY_CONTRACT,
    OVER_SLOTS,
    WRONG_DTYPE,
    WRONG_KIND,
    WRONG_LAYER,
    WRONG_REQUEST,
    WRONG_SLOT,
    Site,
    Stage,
)
from kvproof._trace import Recorder, token_axis
from kvproof._values import LiteralRuns, OnePassRuns, Prefix, Trace, UncachedRun, UncachedRuns
from kvproof.faults import Fault, MakeTap, as_planting, no_fault
from kvproof.scenarios import Ability, Scenario, longest_sequences
from kvproof.subjects import Session, Subject

#: In which dtype values are compared: float64, or the subject's own.
ValueRung = Literal["top", "declared"]

#: In the declared dtype, how much larger than the uncached path's error a value's error must be to be named.
POINTER_FACTOR = Constant(
    name="pointer factor",
    value=16.0,
    source="four times the rounding factor, because a single value's error varies more than a row's largest",
)
_HAS_HEADS = frozenset({Stage.NEW_Q, Stage.NEW_K, Stage.NEW_V, Stage.ATTN_WEIGHTS, Stage.ATTN_MIX}) | OVER_SLOTS


@dataclass(frozen=True, slots=True, kw_only=True)
class Localisation:
    """The first mismatch, or none, and how many values were compared to say so."""

    divergence: Divergence | None
    num_values: int


def localise(
    subject: Subject,
    scenario: Scenario,
    *,
    fault: Fault | None = None,
    until: Prefix | None = None,
    one_pass: bool = False,
    rung: ValueRung = "top",
    top: Subject | None = None,
) -> Localisation:
    """Find the first value in ``scenario`` at which the cached path leaves the uncached one.

    ``fault`` is planted in the cached path alone. ``until`` holds the ids of a row that is known to be wrong:
    the program then runs until a mismatch is found, rather than to its end. ``one_pass`` takes the uncached
    values of every prefix from one run over the longest sequence, which is right only for a causal subject.
    ``top`` is the subject in float64, where the caller has it already; else the subject is cast.

    ``rung="declared"`` compares in the subject's own dtype and names the first value whose cached error, against
    float64, outgrows the uncached path's. That, and what is found in a subject that cannot be cast, is where to
    look first and no proof. Raises `AbilityError` for a subject without taps, or one to be compared in its own
    dtype that cannot be cast.
    """
    subject.require(Ability.TAP)
    if top is None:
        top = subject.cast(TOP_RUNG) if rung == "declared" or Ability.CAST in subject.info.abilities else subject
    runs, truth = (
        OnePassRuns(each, longest_sequences(scenario), until) if one_pass else LiteralRuns(each)
        for each in (subject, top)
    )
    judge = _AgainstTheTruth(runs, truth) if rung == "declared" else AgainstTheRun(truth)
    make_fault = fault.plant() if fault else no_fault
    num_values = 0
    first: _Mismatch | None = None
    logits_differ = until is not None
    for rows, trace in traced_calls(judge.runs.subject, scenario, make_fault):
        call = TracedCall(judge.runs, rows, trace)
        num_compared, found = compared(judge, call, search=first is None)
        num_values += num_compared
        first = first or found
        if first and until is not None:
            break
        logits_differ |= any(
            judge.runs.over(row.prefix).logits_differ(len(row.prefix), row.logits) for row in rows
        )
    divergence = _describe(judge, scenario, first, logits_differ) if first else None
    return Localisation(divergence=divergence, num_values=num_values)


def traced_calls(
    subject: Subject, scenario: Scenario, make_fault: MakeTap, prompted: Session | None = None
) -> Iterator[tuple[tuple[Row, ...], Trace]]:
    """Run the program on the cached path and yield each call's rows and every value it computed."""
    for call in run_program(subject, scenario, as_planting(make_fault).under(Recorder), prompted=prompted):
        assert isinstance(call.tap, Recorder)
        yield call.rows, call.tap.take()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Token:
    """One token that a call consumed: ``prefix`` ends with it."""

    prefix: Prefix
    batch_row: int
    offset: int  #: which of the call's new tokens
    is_last: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Comparison:
    """One value of one token, both ways: without batch and token axes.

    Over slots, both hold the slots that stand for tokens; the first of them has number ``first_slot`` in the
    cached path's tensor and stands for position ``first_position``.
    """

    site: Site
    token: _Token
    expected: Tensor
    actual: Tensor
    first_slot: int = 0
    first_position: int = 0


class TracedCall:
    """One call on the cached path: the tokens that it consumed, also those whose logits it did not give.

    The lengths after it, of each batch row and of the longest, say which slot stands for which position.
    """

    def __init__(self, runs: UncachedRuns, rows: tuple[Row, ...], trace: Trace) -> None:
        self.trace = trace
        num_new = _num_new(trace) or max(row.offset for row in rows) + 1
        ends = {row.batch_row: row for row in sorted(rows, key=lambda row: row.offset)}
        self.lengths = {b: len(row.prefix) + num_new - 1 - row.offset for b, row in ends.items()}
        self.total = max(self.lengths.values())  # with the padding that stands before shorter rows
        runs.prepare(row.prefix for row in ends.values())
        self.tokens = tuple(
            _Token(
                prefix=row.prefix[: len(row.prefix) - row.offset + offset],
                batch_row=batch_row,
                offset=offset,
                is_last=offset == num_new - 1,
            )
            for offset in range(num_new)
            for batch_row, row in sorted(ends.items())
            if offset <= row.offset and len(row.prefix) - row.offset + offset > 0
        )
        self.sites = tuple(_in_order(runs.over(self.tokens[0].prefix).values))

    def comparison(self, run: UncachedRun, site: Site, token: _Token) -> _Comparison | None:
        """Return the expected and the actual value of a token at a site, where there are both."""
        if site.stage is Stage.CACHE_LEN:
            return self._cache_len(run, site, token) if token.is_last else None
        if site not in self.trace or site not in run.values or site.stage is Stage.MASK:
            return None
        expected, actual = run.values[site][0], self.trace[site][token.batch_row]
        if site.stage in OVER_SLOTS:
            return self._over_slots(run, site, token, expected, actual) if token.is_last else None
        axis = token_axis(site.stage)
        assert axis is not None
        expected, actual = expected.select(axis - 1, len(token.prefix) - 1), actual.select(axis - 1, token.offset)
        if site.stage is Stage.ATTN_WEIGHTS:
            return self._over_slots(run, site, token, expected, actual)
        return _comparable(_Comparison(site=site, token=token, expected=expected, actual=actual))

    def _cache_len(self, run: UncachedRun, site: Site, token: _Token) -> _Comparison | None:
        """Compare a cache's length: the one that is shown, or where none is, that of the keys."""
        if site not in run.values:
            keys = self.trace.get(Site(Stage.CACHE_K, site.layer))
            actual = None if keys is None else torch.tensor(keys.shape[-2])
        elif int(run.values[site][0]) == len(run.ids) and site in self.trace:
            actual = self.trace[site][token.batch_row]
        else:
            return None
        if actual is None:
            return None
        return _Comparison(site=site, token=token, expected=torch.tensor(self.total), actual=actual)

    def _over_slots(
        self, run: UncachedRun, site: Site, token: _Token, expected: Tensor, actual: Tensor
    ) -> _Comparison | None:
        """Pair slots, which axis 1 counts, by the position that they stand for.

        A window holds the last tokens, so it is aligned at its end; a buffer that is not full, at its start.
        """
        num_slots = actual.shape[1]
        if expected.shape[1] != len(run.ids):  # slots that are no tokens have counterparts all or none
            return _comparable(_Comparison(site=site, token=token, expected=expected, actual=actual))
        shift = self.lengths[token.batch_row] - min(num_slots, self.total)
        first_slot, first_position = max(0, -shift), max(0, shift)
        num = min(num_slots - first_slot, len(token.prefix) - first_position)
        if num <= 0:
            return None
        return _comparable(
            _Comparison(
                site=site,
                token=token,
                expected=expected.narrow(1, first_position, num),
                actual=actual.narrow(1, first_slot, num),
                first_slot=first_slot,
                first_position=first_position,
            )
        )


def _num_new(trace: Trace) -> int | None:
    """Return how many tokens a call consumed, padding included, by the values that it computed."""
    for site, value in trace.items():
        axis = token_axis(site.stage)
        if axis is not None:
            return value.shape[axis]
    return None


def _comparable(comparison: _Comparison) -> _Comparison | None:
    """Return the comparison, or None where the shapes differ: then one side has no counterpart."""
    return comparison if comparison.expected.shape == comparison.actual.shape else None


def _in_order(trace: Trace) -> Iterator[Site]:
    """Yield a trace's sites as they were computed; a cache's length that is not shown stands before its keys."""
    for site in trace:
        length = Site(Stage.CACHE_LEN, site.layer, site.module)
        if site.stage is Stage.CACHE_K and length not in trace:
            yield length
        yield site


@dataclass(frozen=True, slots=True, kw_only=True)
class _Mismatch:
    comparison: _Comparison
    gap: Gap  #: from the uncached path's value, or from float64's where that is the judge
    limit: float


class AgainstTheRun:
    """Holds each value against the uncached one, within the noise between uncached runs."""

    def __init__(self, runs: UncachedRuns) -> None:
        self.runs = runs

    def mismatch(self, call: TracedCall, comparison: _Comparison, run: UncachedRun) -> _Mismatch | None:
        """Return what is wrong with a value, or None."""
        limit = 0.0 if comparison.site.stage is Stage.CACHE_LEN else run.limit(comparison.site)
        return _beyond(comparison, limit)

    def sentence(self, found: _Mismatch, where: str, consuming: str, actual: float, expected: float) -> str:
        """Return the finding in words."""
        return (
            f"{consuming}, the first value that differs is {where}: {actual:.6g} where the uncached path has "
            f"{expected:.6g}"
        )


class _AgainstTheTruth:
    """Holds each value's error, against float64, to the largest that the uncached path has made there so far."""

    def __init__(self, runs: UncachedRuns, truth: UncachedRuns) -> None:
        self.runs = runs
        self.truth = truth
        self._errors: dict[Site, float] = {}

    def mismatch(self, call: TracedCall, comparison: _Comparison, run: UncachedRun) -> _Mismatch | None:
        """Return a value whose error outgrows the uncached path's, or None."""
        site, token = comparison.site, comparison.token
        exact = self.truth.over(token.prefix)
        against = call.comparison(exact, site, token)
        if against is None or against.expected.shape != comparison.expected.shape:
            return None
        if not comparison.actual.is_floating_point() or comparison.actual.numel() == 0:
            return _beyond(against, 0.0)
        error = gap_between(against.expected, comparison.expected).size
        self._errors[site] = largest((error, self._errors.get(site, 0.0)))
        resolution = torch.finfo(comparison.actual.dtype).eps * exact.scale(site)
        return _beyond(against, POINTER_FACTOR.value * largest((self._errors[site], resolution)))

    def sentence(self, found: _Mismatch, where: str, consuming: str, actual: float, expected: float) -> str:
        """Return the pointer in words."""
        return (
            f"{consuming}, look first at {where}: {actual:.6g} where float64 has {expected:.6g}, off by "
            f"{found.gap.size:.2e} where the uncached path's own error allows {found.limit:.2e}"
        )


_Judge = AgainstTheRun | _AgainstTheTruth


def compared(judge: _Judge, call: TracedCall, *, search: bool) -> tuple[int, _Mismatch | None]:
    """Compare one call; return how many values that took, and the first mismatch: by stage, then by position."""
    num_values, first, place = 0, None, len(call.sites)
    for token in call.tokens:
        run = judge.runs.over(token.prefix)
        for number, site in enumerate(call.sites):
            comparison = call.comparison(run, site, token)
            if comparison is None:
                continue
            num_values += comparison.actual.numel()
            found = judge.mismatch(call, comparison, run) if search and number < place else None
            if found is not None:
                first, place = found, number
    return num_values, first


def _beyond(comparison: _Comparison, limit: float) -> _Mismatch | None:
    gap = gap_between(comparison.expected, comparison.actual)
    if gap.size <= limit:
        return None
    if comparison.site.stage in OVER_SLOTS:
        gap = _first_wrong_slot(comparison, limit)
    return _Mismatch(comparison=comparison, gap=gap, limit=limit)


def _first_wrong_slot(comparison: _Comparison, limit: float) -> Gap:
    """Return the gap of the earliest wrong slot: later ones may be the same fault again."""
    for slot in range(comparison.expected.shape[1]):
        gap = gap_between(comparison.expected[:, slot], comparison.actual[:, slot])
        if not gap.size <= limit:
            return Gap(size=gap.size, index=(gap.index[0], slot, gap.index[1]), scale=gap.scale)
    raise AssertionError("a cache tensor beyond its limit has a slot beyond it")


def _describe(judge: _Judge, scenario: Scenario, found: _Mismatch, logits_differ: bool) -> Divergence:
    comparison, gap = found.comparison, found.gap
    site, prefix, subject = comparison.site, comparison.token.prefix, judge.runs.subject
    head = gap.index[0] if site.stage in _HAS_HEADS and len(gap.index) > 1 else None
    over_slots = site.stage in OVER_SLOTS | {Stage.ATTN_WEIGHTS}
    slot = comparison.first_slot + gap.index[1] if over_slots else None
    expected, actual = (float(v[gap.index]) for v in (comparison.expected, comparison.actual))
    if isinstance(judge, AgainstTheRun):
        origin, contract = _origin(judge.runs, found)
    else:
        origin, contract = None, WRONG_DTYPE
    where = str(site)
    if head is not None:
        where += f", head {head}"
    if slot is not None:
        position = comparison.first_position + gap.index[1]
        where += f", slot {slot}" + (f" (position {position})" if position != slot else "")
    consuming = f"consuming {subject.token(prefix[-1])} at position {len(prefix) - 1}"
    if scenario.batch > 1:
        consuming += f" of batch row {comparison.token.batch_row}"
    sentence = judge.sentence(found, where, consuming, actual, expected)
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


def _origin(runs: UncachedRuns, found: _Mismatch) -> tuple[str | None, str]:
    """Say what a wrong cache slot really holds, if that is another entry of a run we know."""
    site, prefix = found.comparison.site, found.comparison.token.prefix
    likely = LIKELY_CONTRACT[site.stage]
    if site.stage not in OVER_SLOTS:
        return None, likely
    held = found.comparison.actual[:, found.gap.index[1]]
    for ids, entries in sorted(runs.entries.items(), key=lambda item: item[0][: len(prefix)] != prefix):
        for other in sorted(entries, key=lambda other: (other.stage is Stage.CACHE_V, other.layer or 0)):
            for place in range(min(entries[other].shape[2], len(ids))):
                there = entries[other][0, :, place]
                if there.shape != held.shape or not gap_between(there, held).size <= found.limit:
                    continue
                kind = "key" if other.stage is Stage.CACHE_K else "value"
                origin = f"layer {other.layer}'s {kind} of position {place}"
                if ids[: place + 1] != prefix[: place + 1]:
                    return f"{origin} of another request", WRONG_REQUEST
                if other.stage is not site.stage:
                    return origin, WRONG_KIND
                return origin, WRONG_LAYER if other.layer != site.layer else WRONG_SLOT
    return None, likely
