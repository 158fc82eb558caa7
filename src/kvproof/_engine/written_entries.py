"""What the cached path wrote: whether a wrong cache slot was written wrong, or changed after it was written.

The two are different findings. A slot that holds what was written into it is a wrong new key or value, at the
position of its own token, although the first comparison that shows it may be one of the whole cache: where two
uncached runs disagree about a token, no comparison of its new key counts.
"""

from torch import Tensor

from kvproof._engine.calls import Comparison, Token, TracedCall
from kvproof._engine.rung import Prefix
from kvproof._numerics.gaps import gap_between
from kvproof.contract.stages import OVER_SLOTS, Site, Stage

_WRITTEN_AS = {Stage.CACHE_K: Stage.NEW_K, Stage.CACHE_V: Stage.NEW_V}


class WrittenEntries:
    """The new keys and values of every call so far, by the tokens that they stand for."""

    def __init__(self) -> None:
        self._entries: dict[tuple[Site, Prefix], list[Tensor]] = {}

    def note(self, call: TracedCall) -> None:
        """Keep what a call computes as new keys and values, as far as it shows them."""
        sites = [site for site in call.trace if site.stage in _WRITTEN_AS.values()]
        for token in call.layout.tokens if sites else ():
            for site in sites:
                new = call.trace[site][token.batch_row].select(1, token.offset)
                self._entries.setdefault((site, token.prefix), []).append(new)

    def as_new_entry(self, call: TracedCall, found: Comparison, place: int, limit: float) -> Comparison | None:
        """Return a wrong slot as a new key or value, or None if it changed after it was written.

        ``found`` compares the slots of a cache, and ``place`` is the wrong one of them. A decoder that does not
        show its new keys and values wrote the slots of a call's own tokens in that call.
        """
        if found.site.stage not in OVER_SLOTS:
            return None
        token, position = found.token, found.first_position + place
        if position >= len(token.prefix):  # a slot that stands for no token
            return None
        site = Site(_WRITTEN_AS[found.site.stage], found.site.layer, found.site.module)
        prefix, held = token.prefix[: position + 1], found.actual[:, place]
        offset = token.offset - (len(token.prefix) - 1 - position)
        if site in call.trace:
            written = self._entries.get((site, prefix), [])
            is_unchanged = any(
                new.shape == held.shape and gap_between(new, held).size <= limit for new in written
            )
        else:
            is_unchanged = offset >= 0
        if not is_unchanged:
            return None
        return Comparison(
            site=site,
            token=Token(prefix=prefix, batch_row=token.batch_row, offset=max(0, offset), is_last=offset >= 0),
            expected=found.expected[:, place],
            actual=held,
        )
