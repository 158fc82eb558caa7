"""Discrete choices: what each top-k of a forward takes, noted, and forced to be what another forward took.

A router takes the experts with the best scores. Where two scores nearly tie, rounding decides, and what follows
moves by a large part of its scale although nothing is wrong: only with the same choices can two forwards in a low
dtype be compared.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from kvproof._numerics.true_float64 import stable_top_k

_TOP_K = frozenset({torch.topk, torch.Tensor.topk, stable_top_k})


@dataclass(frozen=True, slots=True)
class Choice:
    """One top-k along the last axis, its other axes made one: (token × group, candidate), and (…, k)."""

    scores: Tensor
    taken: Tensor  #: the numbers of the candidates that it went on with
    own: Tensor  #: of those with the best scores, which are the same unless it was forced
    error: float = 0.0  #: how far rounding moves the scores, where that was measured

    def is_of_the_same_kind(self, other: "Choice") -> bool:
        """Return whether it takes as many of as many candidates."""
        ours, theirs = ((each.scores.shape[1], each.taken.shape[1]) for each in (self, other))
        return ours == theirs


class Choices(TorchFunctionMode):
    """While it is entered, each top-k along a last axis is noted, in the order in which they run.

    ``forced`` holds, for each of them, what it takes instead, (…, k), or None; where that is not as many as the
    top-k takes, it takes its own.
    """

    def __init__(self, forced: Sequence[Tensor | None] = ()) -> None:
        super().__init__()
        self.made: list[Choice] = []
        self._forced = forced

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run one torch function; of a top-k, note what it takes."""
        options = kwargs or {}
        result = func(*args, **options)
        if func not in _TOP_K or not args or "out" in options:
            return result
        scores, dim = args[0], args[2] if len(args) > 2 else options.get("dim", -1)
        if scores.dim() < 2 or dim not in (-1, scores.dim() - 1):
            return result
        return self._noted(scores, result)

    def _noted(self, scores: Tensor, result: Any) -> Any:
        own = taken = result[1]
        number = len(self.made)
        forced = self._forced[number] if number < len(self._forced) else None
        if forced is not None and forced.numel() == own.numel() and forced.shape[-1] == own.shape[-1]:
            taken = forced.reshape(own.shape)
            result = torch.return_types.topk((scores.gather(-1, taken), taken))
        self.made.append(Choice(scores=_flat(scores), taken=_flat(taken), own=_flat(own)))
        return result


def _flat(value: Tensor) -> Tensor:
    """Return a copy with all axes but the last made one."""
    return value.detach().flatten(0, -2).clone()
