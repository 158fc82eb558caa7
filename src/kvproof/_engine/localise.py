"""The first value that went wrong, in causal order.

A program runs on the cached path with every value recorded, and each value is held against the uncached run
of the same tokens. Calls come in the order in which they ran; within a call, stages come in causal order and
tokens in order of position. So the first mismatch is one that no other explains. The search runs at the top
rung where the subject can be cast: there, noise cannot mislead.

A finding is confirmed by another run, in which the suspected value is the uncached one (`_confirm`).

What float64 does not show has its cause in the declared dtype alone. There every value is off by some
rounding, so a search at that rung says where the cached path's error first outgrows the uncached one's: where
to look first, and no proof.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kvproof._engine.calls import Comparison, Layout, Token, TracedCall
from kvproof._engine.confirm import (
    MOST_CAUSES,
    Cause,
    Confirmation,
    Rerun,
    Script,
    ScriptedTap,
    cause_of,
    confirm,
)
from kvproof._engine.programs import Row, run_program
from kvproof._engine.rung import Prefix
from kvproof._engine.uncached_values import LiteralRuns, OnePassRuns, Trace, UncachedRun, UncachedRuns
from kvproof._engine.written_entries import WrittenEntries
from kvproof._numerics.dtypes import name_of
from kvproof._numerics.gaps import Gap, gap_beside_nan, gap_between, is_within, largest
from kvproof._numerics.taps import Recorder
from kvproof._numerics.tolerances import POINTER_FACTOR, TOP_RUNG, value_limit
from kvproof.contract.results import Divergence, Localisation
from kvproof.contract.stages import (
    AFTER_READOUT,
    LIKELY_CONTRACT,
    NOTHING_SHOWN,
    OVER_SLOTS,
    WRONG_DTYPE,
    WRONG_KIND,
    WRONG_LAYER,
    WRONG_REQUEST,
    WRONG_SLOT,
    Site,
    Stage,
)
from kvproof.faults import Fault, Planting, choose_place, plant
from kvproof.scenarios import Ability, Scenario, longest_sequences
from kvproof.subjects import Session, Subject

#: In which dtype values are compared: float64, or the subject's own.
ValueRung = Literal["top", "declared"]

#: What a decoder is fed: one that shows no other stage shows nothing of what it computes.
_FED = frozenset({Stage.TOKEN, Stage.POSITION, Stage.MASK})
_HAS_HEADS = frozenset({Stage.NEW_Q, Stage.NEW_K, Stage.NEW_V, Stage.ATTN_WEIGHTS, Stage.ATTN_MIX}) | OVER_SLOTS


def localise(
    subject: Subject,
    scenario: Scenario,
    *,
    fault: Fault | None = None,
    until: Prefix | None = None,
    one_pass: bool = False,
    rung: ValueRung = "top",
    top: Subject | None = None,
    confirmed: bool = True,
    compare_logits: bool = True,
) -> Localisation:
    """Find the first value in ``scenario`` at which the cached path leaves the uncached one.

    ``fault`` is planted in the cached path alone, where it is pinned or in the first place that ``subject``
    offers. ``until`` holds the ids of a row that is known to be wrong: the program then runs until a mismatch is
    found, rather than to its end. ``one_pass`` takes the uncached values of every prefix from one run over the
    longest sequence, which is right only for a causal subject. ``top`` is the subject in float64, where the
    caller has it already; else the subject is cast. ``confirmed`` runs the program again with uncached values in
    the wrong one's place, to tell a cause from what carries it on. ``compare_logits`` compares the
    rows that calls return, in float64 or where ``until`` is known to be wrong: they are the finding if no value
    before them differs.

    ``rung="declared"`` compares in the subject's own dtype and names the first value whose cached error, against
    float64, outgrows the uncached path's. That, and what is found in a subject that cannot be cast, is where to
    look first and no proof. Raises `AbilityError` for a subject without taps, or one to be compared in its own
    dtype that cannot be cast.
    """
    subject.require(Ability.TAP)
    fault = None if fault is None else choose_place(fault, subject, [scenario])
    if top is None:
        top = subject.cast(TOP_RUNG) if rung == "declared" or Ability.CAST in subject.info.abilities else subject
    runs, truth = (
        OnePassRuns(each, longest_sequences(scenario), until) if one_pass else LiteralRuns(each)
        for each in (subject, top)
    )
    judge = _AgainstTheTruth(runs, truth) if rung == "declared" else AgainstTheRun(truth)
    # Below the top rung every value is off by some rounding, and where to look is all that can be said.
    is_proof = rung == "top" and top.info.dtype == name_of(TOP_RUNG)
    search = _Search(judge, scenario, fault, until)
    search.compares_logits = compare_logits and rung == "top" and (is_proof or until is not None)
    first = search.first()
    divergence = None
    if first is not None:
        confirmation = search.confirm(first) if is_proof and confirmed else None
        divergence = _describe(judge, scenario, first.mismatch, search.logits_differ, confirmation)
    return Localisation(divergence=divergence, num_values=search.num_values)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    mismatch: "_Mismatch"
    cause: Cause
    call: int  #: the number of the call in which it was found


class _Search:
    """The runs of one program on the cached path: the first, and those with uncached values put in place."""

    def __init__(self, judge: "_Judge", scenario: Scenario, fault: Fault | None, until: Prefix | None) -> None:
        self.judge = judge
        self.scenario = scenario
        self.until = until
        self.num_values = 0
        self.logits_differ = until is not None
        self.compares_logits = False
        self._fault = fault
        self._written = WrittenEntries()
        self._script = Script(judge.runs)
        self._newest = 0  #: the call in which a mismatch was found last: before it there is none
        self._last: int | None = None  #: the call that holds the row known to be wrong

    def first(self) -> _Found | None:
        """Run the program, compare all its values and return the first mismatch.

        With a row that is known to be wrong, what comes after the mismatch is run as far as that row, so that it
        is known what another run must reach, and compared no more.
        """
        first: _Found | None = None
        for number, rows, call in self._calls(()):
            if first is None or self.until is None:
                num_values, mismatch = compared(self.judge, call, search=first is None)
                self.num_values += num_values
                if first is None:
                    mismatch = self._as_written(call, mismatch) or self._wrong_row(call, rows)
                    first = self._found(number, call, mismatch)
            if self.until is None:
                self.logits_differ |= any(map(self._differs, rows))
            elif first is not None:
                if isinstance(self.judge, _AgainstTheTruth):
                    break
                if any(row.prefix == self.until and self._differs(row) for row in rows):
                    self._last = number
                    break
        self._script.complete()
        return first

    def confirm(self, first: _Found) -> Confirmation:
        """Put uncached values where the first mismatch was found, and where else it takes them."""
        self._newest = first.call
        num_layers = self.judge.runs.subject.info.num_layers
        return confirm(first.cause, self._rerun, max(MOST_CAUSES, 2 * num_layers))

    def _rerun(self, causes: Sequence[Cause]) -> Rerun:
        """Run the program with uncached values put in place and say whether the cached path now agrees.

        The logits decide. Where they agreed from the start, because a later error cancels this one, every value
        that is not passed over must agree.
        """
        found: _Found | None = None
        differ = False
        for number, rows, call in self._calls(causes):
            if found is None and number >= self._newest:
                _, mismatch = compared(self.judge, call, search=True, without=causes)
                found = self._found(number, call, self._as_written(call, mismatch))
            differ = differ or any(map(self._differs, rows))
            if differ or (found is not None and not self.logits_differ) or number == self._last:
                break
        if differ or (found is not None and not self.logits_differ):
            self._newest = self._newest if found is None else found.call
            return Rerun(agrees=False, next_cause=None if found is None else found.cause)
        return Rerun(agrees=True)

    def _calls(self, causes: Sequence[Cause]) -> Iterator[tuple[int, tuple[Row, ...], TracedCall]]:
        """Run the program on the cached path and yield each call's number, rows, and every value it computed."""
        runs, is_first = self.judge.runs, not causes
        self._written = WrittenEntries()
        put_at = {site for cause in causes for site in cause.put_at}
        planting = plant(self._fault).under(self._script.wrapper(put_at))
        for number, call in enumerate(run_program(runs.subject, self.scenario, planting)):
            assert isinstance(call.tap, ScriptedTap)
            trace = call.tap.take()
            layout = Layout.of(call.rows, trace)
            if is_first:
                self._script.note(call.tap, layout)
            traced = TracedCall(runs, layout, trace)
            self._written.note(traced)
            yield number, call.rows, traced

    def _found(self, number: int, call: TracedCall, mismatch: "_Mismatch | None") -> _Found | None:
        if mismatch is None:
            return None
        comparison = mismatch.comparison
        run = self.judge.runs.over(comparison.token.prefix)
        return _Found(mismatch=mismatch, cause=cause_of(call, run, comparison), call=number)

    def _differs(self, row: Row) -> bool:
        return self.judge.runs.over(row.prefix).logits_differ(len(row.prefix), row.logits)

    def _as_written(self, call: TracedCall, found: "_Mismatch | None") -> "_Mismatch | None":
        """Return a wrong cache slot as a new key or value, if it did not change after it was written."""
        if found is None or found.comparison.site.stage not in OVER_SLOTS or self.judge.is_pointer:
            return found
        new = self._written.as_new_entry(call, found.comparison, found.gap.index[1], found.limit)
        if new is None:
            return found
        return _Mismatch(comparison=new, gap=gap_between(new.expected, new.actual), limit=found.limit)

    def _wrong_row(self, call: TracedCall, rows: Sequence[Row]) -> "_Mismatch | None":
        """Return the first row of logits that differs although no value on the way to it does."""
        for row in rows if self.compares_logits else ():
            if (self.until is not None and row.prefix != self.until) or not self._differs(row):
                continue
            expected = self.judge.runs.over(row.prefix).row(len(row.prefix))
            gap = gap_between(expected, row.logits)
            shows_more = any(site.stage not in _FED for site in call.trace)
            return _Mismatch(
                comparison=Comparison(
                    site=Site(Stage.LOGITS),
                    token=_token_of(row),
                    expected=expected,
                    actual=row.logits,
                ),
                gap=gap,
                limit=value_limit(expected.dtype, 0.0, gap.scale),
                contract=AFTER_READOUT if shows_more else NOTHING_SHOWN,
            )
        return None


def _token_of(row: Row) -> Token:
    return Token(prefix=row.prefix, batch_row=row.batch_row, offset=row.offset, is_last=row.is_last)


def traced_calls(
    subject: Subject, scenario: Scenario, planting: Planting, prompted: Session | None = None
) -> Iterator[tuple[tuple[Row, ...], Trace]]:
    """Run the program on the cached path and yield each call's rows and every value it computed."""
    for call in run_program(subject, scenario, planting.under(Recorder), prompted=prompted):
        assert isinstance(call.tap, Recorder)
        yield call.rows, call.tap.take()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Mismatch:
    comparison: Comparison
    gap: Gap  #: from the uncached path's value, or from float64's where that is the judge
    limit: float
    contract: str | None = None  #: the likely cause, where the stage alone does not give it


class AgainstTheRun:
    """Holds each value against the uncached one, within the noise between uncached runs."""

    is_pointer = False

    def __init__(self, runs: UncachedRuns) -> None:
        self.runs = runs

    def mismatch(self, call: TracedCall, comparison: Comparison, run: UncachedRun) -> _Mismatch | None:
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

    is_pointer = True  #: what it finds is where to look first, and no proof

    def __init__(self, runs: UncachedRuns, truth: UncachedRuns) -> None:
        self.runs = runs
        self.truth = truth
        self._errors: dict[Site, float] = {}

    def mismatch(self, call: TracedCall, comparison: Comparison, run: UncachedRun) -> _Mismatch | None:
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


def compared(
    judge: _Judge, call: TracedCall, *, search: bool, without: Sequence[Cause] = ()
) -> tuple[int, _Mismatch | None]:
    """Compare one call; return how many values that took, and the first mismatch: by stage, then by position.

    ``without`` holds places that are passed over, with the sites between them and what they feed.
    """
    num_values, first, place = 0, None, len(call.sites)
    passed = {site for each in without for site in each.passed}
    for token in call.layout.tokens:
        run = judge.runs.over(token.prefix)
        for number, site in enumerate(call.sites):
            if site in passed:
                continue
            comparison = call.comparison(run, site, token)
            if comparison is None:
                continue
            num_values += comparison.actual.numel()
            found = judge.mismatch(call, comparison, run) if search and number < place else None
            if found is not None and not _is_right_in_its_call(judge, call, site, token):
                first, place = found, number
    return num_values, first


def _is_right_in_its_call(judge: _Judge, call: TracedCall, site: Site, token: Token) -> bool:
    """Return whether a value leads to no compared row but that of a longer prefix, whose uncached run it equals.

    Where the program leaves out the row after a token, the uncached run over the tokens up to there need not
    compute the same values: tokens of a bidirectional prefix also depend on later ones.
    """
    if token.is_compared:
        return False
    run = judge.runs.over(call.layout.ends[token.batch_row][0])
    comparison = call.comparison(run, site, token)
    return comparison is not None and judge.mismatch(call, comparison, run) is None


def _beyond(comparison: Comparison, limit: float) -> _Mismatch | None:
    if is_within(comparison.expected, comparison.actual, limit):  # of thousands of values nearly all are
        return None
    # Of weights, which have heads before slots, the earliest slot is named, as in a cache.
    slots = 1 if comparison.site.stage is Stage.ATTN_WEIGHTS else 0
    gap = gap_beside_nan(comparison.expected, comparison.actual, first_axis=slots)
    if gap.size <= limit:
        return None
    if comparison.site.stage in OVER_SLOTS:
        gap = _first_wrong_slot(comparison, limit)
    return _Mismatch(comparison=comparison, gap=gap, limit=limit)


def _first_wrong_slot(comparison: Comparison, limit: float) -> Gap:
    """Return the gap of the earliest wrong slot: later ones may be the same fault again."""
    for slot in range(comparison.expected.shape[1]):
        gap = gap_beside_nan(comparison.expected[:, slot], comparison.actual[:, slot])
        if not gap.size <= limit:
            return Gap(size=gap.size, index=(gap.index[0], slot, gap.index[1]), scale=gap.scale)
    raise AssertionError("a cache tensor beyond its limit has a slot beyond it")


def _describe(
    judge: _Judge,
    scenario: Scenario,
    found: _Mismatch,
    logits_differ: bool,
    confirmation: Confirmation | None,
) -> Divergence:
    comparison, gap = found.comparison, found.gap
    site, prefix, subject = comparison.site, comparison.token.prefix, judge.runs.subject
    head = gap.index[0] if site.stage in _HAS_HEADS and len(gap.index) > 1 else None
    over_slots = site.stage in OVER_SLOTS | {Stage.ATTN_WEIGHTS}
    slot = comparison.first_slot + gap.index[1] if over_slots else None
    expected, actual = (float(v[gap.index]) for v in (comparison.expected, comparison.actual))
    origin, contract = (None, WRONG_DTYPE) if judge.is_pointer else _origin(judge.runs, found)
    where = f"the logits (token {subject.token(gap.index[0])})" if site.stage is Stage.LOGITS else str(site)
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
        batch_row=comparison.token.batch_row,
        stage=site.stage,
        layer=site.layer,
        site=str(site),
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
        confirmed=confirmation is not None and confirmation.confirmed,
        introduced=() if confirmation is None else tuple(map(str, confirmation.introduced)),
    )


def _origin(runs: UncachedRuns, found: _Mismatch) -> tuple[str | None, str]:
    """Say what a wrong value is: of a cache slot what it really holds, of others the likely contract alone."""
    site, token = found.comparison.site, found.comparison.token
    if site.stage not in OVER_SLOTS:
        return None, found.contract or LIKELY_CONTRACT[site.stage]
    held = found.comparison.actual[:, found.gap.index[1]]
    return origin_of(runs, site, token.prefix, held, found.limit)


def origin_of(
    runs: UncachedRuns, site: Site, prefix: Prefix, held: Tensor, limit: float
) -> tuple[str | None, str]:
    """Say what a wrong cache slot really holds, if that is another entry of a run we know, and the contract.

    ``held`` is (head, head_dim), and ``limit`` the gap within which two entries are the same.
    """
    for ids, entries in sorted(runs.entries.items(), key=lambda item: item[0][: len(prefix)] != prefix):
        for other in sorted(entries, key=lambda other: (other.stage is Stage.CACHE_V, other.layer or 0)):
            for place in range(min(entries[other].shape[2], len(ids))):
                there = entries[other][0, :, place]
                if there.shape != held.shape or not gap_between(there, held).size <= limit:
                    continue
                kind = "key" if other.stage is Stage.CACHE_K else "value"
                origin = f"layer {other.layer}'s {kind} of position {place}"
                if ids[: place + 1] != prefix[: place + 1]:
                    return f"{origin} of another request", WRONG_REQUEST
                if other.stage is not site.stage:
                    return origin, WRONG_KIND
                return origin, WRONG_LAYER if other.layer != site.layer else WRONG_SLOT
    return None, LIKELY_CONTRACT[site.stage]
