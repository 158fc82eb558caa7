"""Introduced or propagated: the uncached value of a suspected site, put into the cached path.

A program is run again with every consumed token's value at the site replaced by the uncached one, in every
call. If the logits then agree, the error enters there and all else that differs only carries it on. If not,
another error enters after it: the next site that differs is replaced as well, and so on.

Which tokens a call consumes is known only after it ran, so the first run writes it down. A later run of the
same program makes the same taps in the same order, each of which sees the same calls.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import count

import torch
from torch import Tensor

from kvproof._engine.calls import Comparison, Layout, TracedCall, comparison_of
from kvproof._engine.uncached_values import UncachedRun, UncachedRuns
from kvproof._numerics.taps import Recorder, Tap, token_axis
from kvproof.contract.stages import Site, Stage
from kvproof.errors import SubjectError

#: So many places are given their uncached values at most, or two a layer; each costs one more cached run.
MOST_CAUSES = 16

#: What is shown and cannot be put back: a length is no value, and weights may be shown after they were used.
_SHOWN_ONLY = frozenset({Stage.CACHE_LEN, Stage.ATTN_WEIGHTS})
#: What attention's reading gives, or comes after it.
_AFTER_READING = frozenset(
    {Stage.ATTN_MIX, Stage.ATTN_OUT, Stage.ATTN_RESIDUAL, Stage.MLP_OUT, Stage.MLP_RESIDUAL, Stage.MODULE}
)
#: What later calls read of a new value. A cache may have kept it before the tap could replace it.
_KEPT_AS = {Stage.NEW_K: Stage.CACHE_K, Stage.NEW_V: Stage.CACHE_V}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """A site where an error enters, and the sites whose uncached values take it away."""

    site: Site
    put_at: frozenset[Site]  #: none where nothing that could be replaced comes after the site
    passed: frozenset[Site] = frozenset()  #: what lies between them, and counts no more
    is_readout: bool = False  #: whether the value is the logits, which agree once replaced, whatever is wrong

    def __str__(self) -> str:
        if self.site in self.put_at or not self.put_at:
            return str(self.site)
        return f"{self.site} (by way of {', '.join(sorted(map(str, self.put_at)))})"


def cause_of(call: TracedCall, run: UncachedRun, found: Comparison) -> Cause:
    """Return where the uncached value must be put to take away what was found at a site."""
    site = found.site
    if site.stage in _SHOWN_ONLY:
        later = call.sites[call.sites.index(site) :]
        fed = (
            other
            for other in later
            if other.layer == site.layer
            and other.stage in _AFTER_READING
            and (other.stage is Stage.MODULE or other.module == site.module)
            and call.comparison(run, other, found.token) is not None
        )
        stand_in = next(fed, None)
        if stand_in is None:
            return Cause(site=site, put_at=frozenset())
        passed = later[: later.index(stand_in)]
        return Cause(site=site, put_at=frozenset({stand_in}), passed=frozenset(passed))
    stages = {site.stage, _KEPT_AS.get(site.stage, site.stage)}
    put_at = {s for s in call.sites if s.stage in stages and (s.layer, s.module) == (site.layer, site.module)}
    return Cause(site=site, put_at=frozenset(put_at), is_readout=_is_readout(call, run, found))


def _is_readout(call: TracedCall, run: UncachedRun, found: Comparison) -> bool:
    """Return whether a value is the row of logits, holds it at its start, or is all that the row is made from.

    The last is the output of the last module, if it has an entry for each of the vocabulary: the row follows from
    it, by a softcap or a scale, whatever is wrong.
    """
    if found.site.stage is not Stage.MODULE:
        return found.site.stage is Stage.LOGITS
    row = run.row(len(found.token.prefix))
    value = found.expected
    if value.dim() != 1 or len(value) < len(row):
        return False
    return torch.equal(value[: len(row)].to(row.dtype), row) or found.site == call.sites[-1]


class Script:
    """Which tokens each call consumes, by the number of its tap and how often that was called before."""

    def __init__(self, runs: UncachedRuns) -> None:
        self.runs = runs
        self._layouts: dict[int, list[Layout]] = {}
        self._num_new: dict[int, int] = {}

    def wrapper(self, put_at: Iterable[Site] = ()) -> "Callable[[Tap], ScriptedTap]":
        """Return what wraps the taps of one run of the program, and puts uncached values at these sites."""
        sites, numbers = frozenset(put_at), count()
        return lambda tap: ScriptedTap(self, next(numbers), tap, sites)

    def note(self, tap: "ScriptedTap", layout: Layout) -> None:
        """Write down what a tap's newest call consumed; the next value that it sees is of the next call."""
        self._layouts.setdefault(tap.number, []).append(layout)

    def saw(self, number: int, num_new: int) -> None:
        """Write down how many columns a tap's first call had."""
        self._num_new.setdefault(number, num_new)

    def layout(self, number: int, num_calls: int) -> Layout | None:
        """Return what a tap's call consumes that comes after so many others, or None where that is not known."""
        layouts = self._layouts.get(number, [])
        return layouts[num_calls] if num_calls < len(layouts) else None

    def complete(self) -> None:
        """Give the chunks of a prompt that gave no row the tokens before those of the call after them."""
        waiting: list[int] = []
        for number in sorted(self._num_new):
            if number not in self._layouts:
                waiting.append(number)
                continue
            first = self._layouts[number][0]
            end = first.total - first.num_new
            if sum(self._num_new[chunk] for chunk in waiting) == end:
                for chunk in reversed(waiting):
                    self._layouts[chunk] = [first.before(end, self._num_new[chunk])]
                    end -= self._num_new[chunk]
            waiting = []


class ScriptedTap(Recorder):
    """Records what calls compute, after ``inner`` changed it and uncached values were put in its place."""

    def __init__(self, script: Script, number: int, inner: Tap, put_at: frozenset[Site]) -> None:
        super().__init__(self._replaced)
        self.number = number
        self.num_calls = 0
        self._script, self._changed, self._put_at = script, inner, put_at

    def take(self) -> dict[Site, Tensor]:
        """Return what was recorded of one call; the next is another one."""
        self.num_calls += 1
        return super().take()

    def _replaced(self, site: Site, value: Tensor, /) -> Tensor:
        axis = token_axis(site.stage)
        if axis is not None:
            self._script.saw(self.number, value.shape[axis])
        value = self._changed(site, value)
        layout = self._script.layout(self.number, self.num_calls) if site in self._put_at else None
        return value if layout is None else self._put(layout, site, value)

    def _put(self, layout: Layout, site: Site, value: Tensor) -> Tensor:
        """Return a copy in which the tokens of a call have their uncached values; padding keeps its own."""
        value = value.clone()
        for token in layout.tokens:
            both = comparison_of(layout, {site: value}, self._script.runs.over(token.prefix), site, token)
            if both is not None:
                both.actual.copy_(both.expected)
        return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Rerun:
    """What a run with uncached values in place showed."""

    agrees: bool
    next_cause: Cause | None = None  #: where it first leaves the uncached path all the same


@dataclass(frozen=True, slots=True, kw_only=True)
class Confirmation:
    """Whether putting uncached values in place made the paths agree, and where that was needed."""

    confirmed: bool
    introduced: tuple[Cause, ...]


def confirm(first: Cause, rerun: Callable[[Sequence[Cause]], Rerun], most: int = MOST_CAUSES) -> Confirmation:
    """Replace values at the site found first, and at the next, until the paths agree or nothing more is found.

    ``most`` is how many places may be tried. ``rerun`` runs the program with the uncached values that causes call
    for. Where it raises `SubjectError`, nothing is confirmed and what was found stands. The logits themselves are
    never replaced: that would make them agree whatever is wrong.
    """
    if first.is_readout:
        return Confirmation(confirmed=False, introduced=())
    causes = [first]
    while causes[-1].put_at and not causes[-1].is_readout:
        try:
            outcome = rerun(causes)
        except SubjectError:
            break
        if outcome.agrees:
            return Confirmation(confirmed=True, introduced=tuple(causes))
        found = outcome.next_cause
        if found is None or found.site in {cause.site for cause in causes} or len(causes) == most:
            break
        causes.append(found)
    return Confirmation(confirmed=False, introduced=tuple(causes))
