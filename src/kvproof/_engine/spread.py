"""How an error spreads: every value of one program, cached against uncached, and what the cache held.

`_localise` stops where it has proved its point; a person wants to see the rest. The program runs once more on the
cached path, every value is held against the uncached one, and what comes of it is small numbers: gaps as parts
of the largest magnitude at their site. A long program shows the tokens around its first mismatch.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress

import torch

from kvproof._engine.calls import Layout, Token, TracedCall
from kvproof._engine.localise import origin_of, traced_calls
from kvproof._engine.rung import Prefix
from kvproof._engine.uncached_rows import Uncached
from kvproof._engine.uncached_values import LiteralRuns, OnePassRuns, UncachedRun, UncachedRuns
from kvproof._numerics.gaps import gap_between, largest
from kvproof.contract.results import ConsumedToken, Divergence, KeptSlot, Spread, SpreadSite
from kvproof.contract.stages import OVER_SLOTS, Site, Stage
from kvproof.errors import SubjectError
from kvproof.faults import Fault, choose_place, plant
from kvproof.scenarios import Ability, Scenario, longest_sequences
from kvproof.subjects import Subject

#: So many tokens are shown, and so many of them before the first mismatch where not all can be.
MOST_TOKENS, BEFORE = 32, 8
#: For so many wrong slots it is looked up what they really hold; each is held against every entry known.
MOST_ORIGINS = 32
#: Slots of tokens that are not shown are reported where they are wrong, until so many entries are.
MOST_KEPT = 4096


def spreads_of(
    uncached: Uncached, found: Mapping[Fault | None, tuple[Scenario, Divergence]], clean: Iterable[Scenario]
) -> tuple[Spread, ...]:
    """Return how what was found spreads, each fault's last; without a finding, the first program that can run.

    ``found`` holds the first finding under None and each planted fault's under the fault; ``clean`` are programs
    without a finding. A subject that shows no values has none.
    """
    top = uncached.exact or uncached.top or uncached.declared
    able = set(top.subject.info.abilities)
    if Ability.TAP not in able:
        return ()
    shown: dict[Fault | None, tuple[Scenario, Divergence | None]] = {}
    plain = next((p for p in clean if p.skipped is None and not p.advice and p.needs <= able), None)
    if plain is not None:
        shown[None] = plain, None
    spreads = []
    for fault, (program, first) in (shown | dict(found)).items():
        with suppress(SubjectError):  # the findings stand without it
            one_pass = uncached.reference == "one-pass"
            spreads.append(spread_of(top.subject, program, fault=fault, first=first, one_pass=one_pass))
    return tuple(spreads)


def spread_of(
    subject: Subject,
    scenario: Scenario,
    *,
    fault: Fault | None = None,
    first: Divergence | None = None,
    one_pass: bool = False,
) -> Spread:
    """Run a program and return every value's gap; ``first`` is the mismatch around which tokens are shown.

    ``subject`` is at the rung at which values are to be compared. Of a batch, the row that holds ``first`` is
    shown, or the first row. Raises `AbilityError` for a subject without taps.
    """
    home = _home(scenario, first)
    start = 0 if first is None else max(0, first.position + BEFORE - MOST_TOKENS)
    until = home[: start + MOST_TOKENS]
    runs = OnePassRuns(subject, longest_sequences(scenario), until) if one_pass else LiteralRuns(subject)
    seen = _Seen(runs, start, until, in_first_row=first is None)
    fault = None if fault is None else choose_place(fault, subject, [scenario])
    left_out = start > 0
    for number, (rows, trace) in enumerate(traced_calls(subject, scenario, plant(fault))):
        if len(seen.tokens) >= MOST_TOKENS:
            left_out = True
            break
        seen.call(number, TracedCall(runs, Layout.of(rows, trace), trace))
    return Spread(
        scenario=scenario.name,
        fault=None if fault is None else fault.name,
        dtype=subject.info.dtype,
        tokens=tuple(seen.tokens),
        sites=tuple(seen.shown_sites()),
        gaps=tuple(seen.shown_gaps()),
        kept=tuple(seen.kept),
        left_out=left_out,
    )


def _home(scenario: Scenario, first: Divergence | None) -> Prefix:
    """Return the sequence whose tokens are shown."""
    sequences = longest_sequences(scenario)
    holding = [s for s in sequences if first is not None and s[: len(first.ids)] == first.ids]
    return max(holding or sequences, key=len)


class _Seen:
    """What was seen of a program so far."""

    def __init__(self, runs: UncachedRuns, start: int, shown: Prefix, *, in_first_row: bool) -> None:
        self.runs = runs
        self.start = start
        self.shown = shown
        self.in_first_row = in_first_row
        self.tokens: list[ConsumedToken] = []
        self.sites: dict[Site, float] = {}  #: with the largest gap allowed there, as a part
        self.gaps: dict[tuple[Site, int], float] = {}
        self.kept: list[KeptSlot] = []
        self._newest: dict[tuple[int, int], int] = {}  #: the entry of a layer's slot, by its number in ``kept``
        self._num_origins = 0
        self._call_before = 0  #: the newest call before this one in which something was kept

    def call(self, number: int, call: TracedCall) -> None:
        """Compare one call."""
        kept_now = self._call_before
        for token in call.layout.tokens:
            if not self._is_shown(token):
                continue
            run = self.runs.over(token.prefix)
            position = len(token.prefix) - 1
            text = self.runs.subject.token(token.prefix[-1])
            self.tokens.append(
                ConsumedToken(call=number, batch_row=token.batch_row, position=position, token=text)
            )
            for site in call.sites:
                self._compare(call, run, site, token)
            if token.is_last:
                self._keep(number, call, run, token)
                kept_now = number
        self._call_before = kept_now

    def shown_sites(self) -> Iterator[SpreadSite]:
        """Yield the sites at which something was compared."""
        for site, allowed in self._compared():
            yield SpreadSite(name=str(site), layer=site.layer, allowed=allowed)

    def shown_gaps(self) -> Iterator[tuple[float | None, ...]]:
        """Yield each site's gaps, one a token."""
        for site, _ in self._compared():
            yield tuple(self.gaps.get((site, column)) for column in range(len(self.tokens)))

    def _compared(self) -> Iterator[tuple[Site, float]]:
        with_gaps = {site for site, _ in self.gaps}
        return ((site, _short(allowed)) for site, allowed in self.sites.items() if site in with_gaps)

    def _is_shown(self, token: Token) -> bool:
        """Say whether a token is one of the sequence, or of the first row, whose tokens are shown."""
        length = len(token.prefix)
        if length <= self.start or len(self.tokens) >= MOST_TOKENS:
            return False
        if self.in_first_row:
            return token.batch_row == 0
        return self.shown[:length] == token.prefix[: len(self.shown)]

    def _compare(self, call: TracedCall, run: UncachedRun, site: Site, token: Token) -> None:
        scale = _scale(run, site)
        limit = 0.0 if site.stage is Stage.CACHE_LEN else run.limit(site) / scale
        self.sites[site] = max(limit, self.sites.get(site, 0.0))
        comparison = call.comparison(run, site, token)
        if comparison is not None:
            gap = gap_between(comparison.expected, comparison.actual).size / scale
            self.gaps[site, len(self.tokens) - 1] = _short(gap)

    def _keep(self, number: int, call: TracedCall, run: UncachedRun, token: Token) -> None:
        """Note what each layer's slots hold after a call."""
        for layer in dict.fromkeys(site.layer for site in call.sites if site.stage is Stage.CACHE_K):
            if layer is None:
                continue
            slots: dict[int, KeptSlot] = {}
            for site in (s for s in call.sites if s.layer == layer and s.stage in OVER_SLOTS):
                for slot in self._slots(number, call, run, site, token):
                    slots[slot.slot] = _both(slots[slot.slot], slot) if slot.slot in slots else slot
            for kept in slots.values():
                self._go_on(kept)

    def _slots(
        self, number: int, call: TracedCall, run: UncachedRun, site: Site, token: Token
    ) -> Iterator[KeptSlot]:
        """Yield what the slots of a layer's keys, or values, hold."""
        comparison = call.comparison(run, site, token)
        if comparison is None or site.layer is None:
            return
        gaps = (comparison.expected - comparison.actual).abs().nan_to_num(torch.inf).amax(dim=(0, 2))
        limit, scale = run.limit(site), _scale(run, site)
        for place, gap in enumerate(gaps.tolist()):
            position = comparison.first_position + place
            in_window = self.start <= position < self.start + MOST_TOKENS
            if not in_window and (gap <= limit or len(self.kept) >= MOST_KEPT):
                continue
            origin = None
            if gap > limit and self._num_origins < MOST_ORIGINS:
                self._num_origins += 1
                held = comparison.actual[:, place]
                origin, _ = origin_of(self.runs, site, token.prefix, held, limit)
            yield KeptSlot(
                first_call=number,
                last_call=number,
                layer=site.layer,
                slot=comparison.first_slot + place,
                position=position,
                token=self.runs.subject.token(token.prefix[position]),
                gap=_short(gap / scale),
                wrong=gap > limit,
                origin=origin,
            )

    def _go_on(self, new: KeptSlot) -> None:
        """Add what a slot holds, or let the entry of the call before go on where that holds the same."""
        key = (new.layer, new.slot)
        number = self._newest.get(key)
        if number is not None:
            old = self.kept[number]
            holds = (old.position, old.token, old.wrong) == (new.position, new.token, new.wrong)
            if holds and old.last_call >= self._call_before:
                self.kept[number] = dataclasses.replace(_both(old, new), last_call=new.last_call)
                return
        self._newest[key] = len(self.kept)
        self.kept.append(new)


def _both(first: KeptSlot, second: KeptSlot) -> KeptSlot:
    """Return what a slot holds by two of its tensors, or by one at two times."""
    gap, origin = largest((first.gap, second.gap)), first.origin or second.origin
    return dataclasses.replace(first, gap=gap, wrong=first.wrong or second.wrong, origin=origin)


def _scale(run: UncachedRun, site: Site) -> float:
    """Return what a gap at a site is a part of: the largest magnitude of floats, and 1 for what must be equal."""
    value = run.values.get(site)
    if value is None or not value.is_floating_point() or value.numel() == 0:
        return 1.0
    return run.scale(site) or 1.0


def _short(value: float) -> float:
    """Return a number with two significant digits, which is what a colour can show."""
    return float(f"{value:.1e}")
