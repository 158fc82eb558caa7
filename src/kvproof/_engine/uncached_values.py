"""The uncached values: what every value on the way to a prefix's logits must equal, and its noise.

Literal: each prefix is run on its own. One-pass: a prefix's values come from the run over a longer sequence
that starts with it, which is right only for a causal subject. Runs are kept whole while there is room; of the
others the keys and values of each sequence remain, which say what a wrong cache slot really holds.
"""

import math
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterable

from torch import Tensor

from kvproof._engine.rung import Prefix, Rung
from kvproof._engine.verdict_rules import are_equal_in_float64
from kvproof._numerics.gaps import gap_beside_nan, gap_between, largest
from kvproof._numerics.taps import Recorder, token_axis
from kvproof._numerics.tolerances import TOP_RUNG, value_limit
from kvproof.contract.stages import OVER_SLOTS, Site, Stage
from kvproof.subjects import Subject

Trace = dict[Site, Tensor]

#: So many runs are kept whole at least: the rows of one call, and those one token shorter, for the noise.
_KEPT_RUNS = 12
#: More are kept while they hold fewer bytes than this, so that what is confirmed by another run finds them there.
KEPT_BYTES = 2**28


class UncachedRun:
    """Every value of one uncached run over ``ids``, the noise at each site, and its rows in blocks."""

    def __init__(self, ids: Prefix, values: Trace, rung: Rung, noise: dict[Site, float]) -> None:
        self.ids = ids
        self.values = values
        self.num_bytes = sum(value.nbytes for value in values.values())
        self._rung = rung
        self._noise = noise
        self._scales: dict[Site, float] = {}

    def row(self, length: int) -> Tensor:
        """Return the row (vocab,) that follows the first ``length`` tokens."""
        return self._rung.one_pass(self.ids, length)

    def logits_differ(self, length: int, cached: Tensor) -> bool:
        """Return whether a cached row is further from the one after ``length`` tokens than its dtype allows."""
        expected = self.row(length)
        gap = gap_beside_nan(expected, cached)
        return not gap.size <= value_limit(expected.dtype, 0.0, gap.scale)

    def limit(self, site: Site) -> float:
        """Return the gap beyond which a value at a site is wrong; what is no float must be equal."""
        value = self.values[site]
        if not value.is_floating_point() or value.numel() == 0:
            return 0.0
        return value_limit(value.dtype, self._noise.get(site, 0.0), self.scale(site))

    def scale(self, site: Site) -> float:
        """Return the largest magnitude at a site, of what is not NaN."""
        if site not in self._scales:
            self._scales[site] = float(self.values[site].abs().nan_to_num(nan=0.0, posinf=math.inf).max())
        return self._scales[site]


class UncachedRuns(ABC):
    """The uncached runs of one subject, made when they are asked for."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self._rung = Rung(subject)
        self.kept: OrderedDict[Prefix, UncachedRun] = OrderedDict()
        self.entries: dict[Prefix, Trace] = {}  #: the keys and values of every sequence that was run

    def prepare(self, prefixes: Iterable[Prefix]) -> None:  # noqa: B027
        """Take notice of prefixes that will be asked for, with the shorter ones that they start with."""

    @abstractmethod
    def over(self, prefix: Prefix) -> UncachedRun:
        """Return a run whose ids start with ``prefix``."""

    @abstractmethod
    def _noise(self, ids: Prefix, values: Trace) -> dict[Site, float]: ...

    def _run(self, ids: Prefix, length: int) -> UncachedRun:
        """Run these tokens; the row after ``length`` of them will be asked for first."""
        recorder = Recorder()
        self._rung.tapped(ids, length, recorder)
        values = recorder.take()
        run = UncachedRun(ids, values, self._rung, self._noise(ids, values))
        self.kept[ids] = run
        while len(self.kept) > _KEPT_RUNS and sum(each.num_bytes for each in self.kept.values()) > KEPT_BYTES:
            self.kept.popitem(last=False)
        self._keep_entries(ids, values)
        return run

    def _is_noise(self, shorter: Tensor, ids: Prefix) -> bool:
        """Return whether what a run differs by from one over a token less, which gave this last row, is rounding.

        In float64 the rows tell: where they differ, one of the runs computes something else.
        """
        gap = gap_between(self._rung.one_pass(ids, len(ids) - 1), shorter)
        return shorter.dtype is not TOP_RUNG or are_equal_in_float64(gap)

    def _keep_entries(self, ids: Prefix, values: Trace) -> None:
        if any(other[: len(ids)] == ids for other in self.entries):
            return
        for other in [other for other in self.entries if ids[: len(other)] == other]:
            del self.entries[other]
        self.entries[ids] = {site: value for site, value in values.items() if site.stage in OVER_SLOTS}


class LiteralRuns(UncachedRuns):
    """One run for each prefix. Noise is what it differs by from the run over one token less."""

    def __init__(self, subject: Subject) -> None:
        super().__init__(subject)
        self._known_noise: dict[Prefix, dict[Site, float]] = {}

    def over(self, prefix: Prefix) -> UncachedRun:
        """Return the run over exactly this prefix."""
        return self.kept.get(prefix) or self._run(prefix, len(prefix))

    def _noise(self, ids: Prefix, values: Trace) -> dict[Site, float]:
        """Return the largest noise over all tokens and all shorter prefixes: noise grows with position."""
        if len(ids) == 1:
            return {}
        if ids not in self._known_noise:
            shorter = self.over(ids[:-1])
            before = self._known_noise.get(shorter.ids, {})
            own = _noise_between(shorter.values, values)
            if self._is_noise(shorter.row(len(ids) - 1), ids):
                own = {site: largest((gap, before.get(site, 0.0))) for site, gap in own.items()}
            else:
                own = before
            self._known_noise[ids] = own
        return self._known_noise[ids]


class OnePassRuns(UncachedRuns):
    """One run for each of a few longest sequences, cut where nothing after it will be asked for.

    Noise is what a run differs by from one over one token less.
    """

    def __init__(self, subject: Subject, sequences: Iterable[Prefix], until: Prefix | None = None) -> None:
        super().__init__(subject)
        self._sequences = tuple(sequences)
        self._until = until

    def prepare(self, prefixes: Iterable[Prefix]) -> None:
        """Run what covers these prefixes, so that the shorter ones before them need no run of their own."""
        for prefix in prefixes:
            self.over(prefix)

    def over(self, prefix: Prefix) -> UncachedRun:
        """Return the run over the longest sequence that starts with this prefix."""
        length = len(prefix)
        sequence = next((s for s in self._sequences if s[:length] == prefix), prefix)
        # A run over another sequence may start alike and differ in the last digit: which one is taken must not
        # hang on what was asked for before.
        alike = (run for ids, run in self.kept.items() if len(ids) >= length and sequence[: len(ids)] == ids)
        known = next(alike, None)
        if known is not None:
            return known
        sequence = sequence if self._until is None else sequence[: max(length, len(self._until))]
        return self._run(sequence, length)

    def _noise(self, ids: Prefix, values: Trace) -> dict[Site, float]:
        if len(ids) == 1:
            return {}
        recorder = Recorder()
        row = self.subject.rows(ids[:-1], tap=recorder, keep=range(len(ids) - 2, len(ids) - 1))[-1]
        return _noise_between(recorder.take(), values) if self._is_noise(row, ids) else {}


def _noise_between(shorter: Trace, values: Trace) -> dict[Site, float]:
    """Return what two runs differ by at each site, over the tokens that both hold."""
    noise = {}
    for site, value in values.items():
        axis = token_axis(site.stage)
        if axis is None or site.stage is Stage.ATTN_WEIGHTS or site not in shorter:
            continue
        alone = shorter[site]
        shared = value.narrow(axis, 0, alone.shape[axis])
        # A value whose size depends on the length, as an index of selected tokens does, has no counterpart.
        noise[site] = gap_beside_nan(alone, shared).size if alone.shape == shared.shape else 0.0
    return noise
