"""Taps: how a value on the way to the logits is seen, recorded or replaced.

A decoder that can be tapped hands each intermediate value to its tap and goes on with what the tap
returns. Recording returns the value as it is; planting a fault returns another one.

Axes by stage: ``token`` and ``position`` are (batch, new); ``new_q``, ``new_k``, ``new_v`` are
(batch, head, new, head_dim); ``cache_len`` is (batch,), ``cache_k`` and ``cache_v`` (batch, head, slot,
head_dim); ``mask`` (batch, column) of the caller's, or in a layer (batch, 1 or head, new, slot), true or 0 where
a slot may be read; ``attn_weights`` (batch, head, new, slot); ``attn_mix`` (batch, new, head, head_dim); every
other stage (batch, new, …), ``logits`` (batch, new, vocab).
"""

from collections.abc import Callable

from torch import Tensor

from kvproof.contract.stages import OVER_SLOTS, Site, Stage

#: Sees the value at a site and returns the value to go on with.
Tap = Callable[[Site, Tensor], Tensor]


def untouched(site: Site, value: Tensor, /) -> Tensor:
    """Return the value as it is: the tap of an ordinary run."""
    return value


class Recorder:
    """A tap that keeps a copy of every value, in the order in which they were computed.

    ``inner`` acts first, so that a run with a planted fault records what the decoder went on with.
    """

    def __init__(self, inner: Tap = untouched) -> None:
        self.values: dict[Site, Tensor] = {}
        self._inner = inner

    def take(self) -> dict[Site, Tensor]:
        """Return what was recorded since the last time, and forget it: a call must not show an earlier one's."""
        values, self.values = self.values, {}
        return values

    def __call__(self, site: Site, value: Tensor, /) -> Tensor:
        value = self._inner(site, value)
        self.values[site] = value.detach().clone()
        return value


_AFTER_HEADS = frozenset({Stage.NEW_Q, Stage.NEW_K, Stage.NEW_V, Stage.ATTN_WEIGHTS})


def token_axis(stage: Stage) -> int | None:
    """Return the axis along which a stage's value has one entry for each new token, or none."""
    if stage in OVER_SLOTS or stage in (Stage.CACHE_LEN, Stage.MASK):
        return None
    return 2 if stage in _AFTER_HEADS else 1
