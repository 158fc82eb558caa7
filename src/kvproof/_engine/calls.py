"""One call on the cached path: which tokens it consumed, and what each of its values must equal."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from kvproof._engine.programs import Row
from kvproof._engine.rung import Prefix
from kvproof._engine.uncached_values import Trace, UncachedRun, UncachedRuns
from kvproof._numerics.taps import token_axis
from kvproof.contract.stages import OVER_SLOTS, Site, Stage


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """One token that a call consumed: ``prefix`` ends with it."""

    prefix: Prefix
    batch_row: int
    offset: int  #: which of the call's new tokens
    is_last: bool  #: of its batch row, as far as the tokens are known
    is_compared: bool = True  #: whether the program compares the row of logits after it


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One value of one token, both ways: without batch and token axes.

    Over slots, both hold the slots that stand for tokens; the first of them has number ``first_slot`` in the
    cached path's tensor and stands for position ``first_position``. ``actual`` is a view of the call's own value.
    """

    site: Site
    token: Token
    expected: Tensor
    actual: Tensor
    first_slot: int = 0
    first_position: int = 0


class Layout:
    """Where the tokens that a call consumed stand in its tensors, also those whose logits it did not give.

    ``ends`` holds, for each batch row, the newest prefix that is known and which of the new tokens ends it. The
    lengths after the call, of each batch row and of the longest, say which slot stands for which position.
    ``rows`` are the batch row and the offset of each row of logits that the program compares; None means all.
    """

    def __init__(
        self,
        ends: dict[int, tuple[Prefix, int]],
        num_new: int,
        total: int = 0,
        rows: frozenset[tuple[int, int]] | None = None,
    ) -> None:
        self.ends = ends
        self.num_new = num_new
        self.rows = rows
        self.lengths = {b: len(prefix) + num_new - 1 - offset for b, (prefix, offset) in ends.items()}
        self.total = total or max(self.lengths.values())  # with the padding that stands before shorter rows

    @classmethod
    def of(cls, rows: Sequence[Row], trace: Trace) -> "Layout":
        """Return the layout of a call that gave these rows and computed these values."""
        ends = {row.batch_row: (row.prefix, row.offset) for row in sorted(rows, key=lambda row: row.offset)}
        num_new = _num_new(trace) or max(row.offset for row in rows) + 1
        return cls(ends, num_new, rows=frozenset((row.batch_row, row.offset) for row in rows))

    @property
    def tokens(self) -> Iterator[Token]:
        """Every token that was consumed, in order of offset; padding is none."""
        for offset in range(self.num_new):
            for batch_row, (prefix, end) in sorted(self.ends.items()):
                length = len(prefix) - end + offset
                if offset <= end and length > 0:
                    yield Token(
                        prefix=prefix[:length],
                        batch_row=batch_row,
                        offset=offset,
                        is_last=offset == end,
                        is_compared=self.rows is None or (batch_row, offset) in self.rows,
                    )

    def before(self, total: int, num_new: int) -> "Layout":
        """Return the layout of an earlier call on the same rows, after which they were ``total`` columns long."""
        lengths = {b: total - (self.total - length) for b, length in self.lengths.items()}
        ends = {b: (self.ends[b][0][:length], num_new - 1) for b, length in lengths.items() if length > 0}
        return Layout(ends, num_new, total)


class TracedCall:
    """One call with the values that it computed."""

    def __init__(self, runs: UncachedRuns, layout: Layout, trace: Trace) -> None:
        self.layout = layout
        self.trace = trace
        self._runs = runs

    @cached_property
    def sites(self) -> tuple[Site, ...]:
        """The uncached path's sites in causal order."""
        self._runs.prepare(prefix for prefix, _ in self.layout.ends.values())
        return tuple(_in_order(self._runs.over(next(self.layout.tokens).prefix).values))

    def comparison(self, run: UncachedRun, site: Site, token: Token) -> Comparison | None:
        """Return the expected and the actual value of a token at a site, where there are both."""
        return comparison_of(self.layout, self.trace, run, site, token)


def comparison_of(layout: Layout, trace: Trace, run: UncachedRun, site: Site, token: Token) -> Comparison | None:
    """Return a token's value at a site both ways, uncached and as a call computed it, where there are both."""
    if site.stage is Stage.CACHE_LEN:
        return _cache_len(layout, trace, run, site, token) if token.is_last else None
    if site not in trace or site not in run.values or site.stage is Stage.MASK:
        return None
    expected, actual = run.values[site][0], trace[site][token.batch_row]
    if site.stage in OVER_SLOTS:
        return _over_slots(layout, run, site, token, expected, actual) if token.is_last else None
    axis = token_axis(site.stage)
    assert axis is not None
    expected, actual = expected.select(axis - 1, len(token.prefix) - 1), actual.select(axis - 1, token.offset)
    if site.stage is Stage.ATTN_WEIGHTS:
        return _over_slots(layout, run, site, token, expected, actual)
    return _comparable(Comparison(site=site, token=token, expected=expected, actual=actual))


def _cache_len(layout: Layout, trace: Trace, run: UncachedRun, site: Site, token: Token) -> Comparison | None:
    """Compare a cache's length: the one that is shown, or where none is, that of the keys."""
    if site not in run.values:
        keys = trace.get(Site(Stage.CACHE_K, site.layer))
        actual = None if keys is None else torch.tensor(keys.shape[-2])
    elif int(run.values[site][0]) == len(run.ids) and site in trace:
        actual = trace[site][token.batch_row]
    else:
        return None
    if actual is None:
        return None
    return Comparison(site=site, token=token, expected=torch.tensor(layout.total), actual=actual)


def _over_slots(
    layout: Layout, run: UncachedRun, site: Site, token: Token, expected: Tensor, actual: Tensor
) -> Comparison | None:
    """Pair slots, which axis 1 counts, by the position that they stand for.

    A window holds the last tokens, so it is aligned at its end; a buffer that is not full, at its start.
    """
    num_slots = actual.shape[1]
    if expected.shape[1] != len(run.ids):  # slots that are no tokens have counterparts all or none
        return _comparable(Comparison(site=site, token=token, expected=expected, actual=actual))
    shift = layout.lengths[token.batch_row] - min(num_slots, layout.total)
    first_slot, first_position = max(0, -shift), max(0, shift)
    num = min(num_slots - first_slot, len(token.prefix) - first_position)
    if num <= 0:
        return None
    return _comparable(
        Comparison(
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


def _comparable(comparison: Comparison) -> Comparison | None:
    """Return the comparison, or None where the shapes differ: then one side has no counterpart."""
    return comparison if comparison.expected.shape == comparison.actual.shape else None


def _in_order(trace: Trace) -> Iterator[Site]:
    """Yield a trace's sites as they were computed; a cache's length that is not shown stands before its keys."""
    for site in trace:
        length = Site(Stage.CACHE_LEN, site.layer, site.module)
        if site.stage is Stage.CACHE_K and length not in trace:
            yield length
        yield site
