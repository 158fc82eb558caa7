"""How small an error an audit sees: by place and dtype, the error from which on 95 of 100 decoders are caught.

Run it as ``python tools/power.py [--seeds N]``. An error is planted in the cached path of a small decoder, a
relative one, once in every dtype and once in the declared dtype alone, where float64 is no help. The table
goes to stdout.
"""

import argparse
import math
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvproof import ModuleSubject, audit
from kvproof.scenarios import Ability, token_by_token

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.detection.small_decoders import HEAD_DIM, LAYERS, VOCAB, SmallDecoder

#: Relative errors, two to a factor of ten.
ERRORS = [10 ** (-7 + half / 2) for half in range(13)]
PLACES = ("K", "V", "angles", "softmax scale", "one head", "one position")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_LENGTH, _POSITION, _PART = 48, 3, 0.95


class Off(SmallDecoder):
    """A decoder whose cached path is off by a relative error in one place of its last layer."""

    def __init__(self, seed: int, place: str, error: float, *, everywhere: bool) -> None:
        super().__init__(seed)
        self.place, self.error, self.everywhere = place, error, everywhere
        self.number = -1  #: of the layer that is running

    def forward(self, ids: Tensor, past: Any = None) -> tuple[Tensor, Any]:
        self.number, self.is_cached = -1, past is not None
        return super().forward(ids, past)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, start: int) -> Tensor:
        self.number += 1
        exact = q.dtype is torch.float64
        if not self.is_cached or self.number < LAYERS - 1 or (exact and not self.everywhere):
            return super().attend(q, k, v, start)
        k, v = (k.clone(), v.clone())
        off = 1 + self.error
        if self.place == "K":
            k[:, :, :start] = _times(k[:, :, :start], off)
        elif self.place == "V":
            v[:, :, :start] = _times(v[:, :, :start], off)
        elif self.place == "angles":
            k[:, :, :start] = _turned(k[:, :, :start], self.error)
        elif self.place == "softmax scale":
            q = _times(q, off)
        elif self.place == "one head":
            k[:, 0, :start] = _times(k[:, 0, :start], off)
        elif start > _POSITION:
            k[:, :, _POSITION] = _times(k[:, :, _POSITION], off)
        return super().attend(q, k, v, start)


def _times(x: Tensor, factor: float) -> Tensor:
    """Return a product that is rounded once, to x's dtype."""
    return (x.double() * factor).to(x.dtype)


def _turned(k: Tensor, error: float) -> Tensor:
    """Return keys turned by angles that grow with their position: each position is off by a part of itself."""
    angles = error * torch.arange(k.shape[2], dtype=torch.float64)[:, None] * torch.ones(HEAD_DIM // 2)
    a, b = k.double().chunk(2, -1)
    return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], -1).to(k.dtype)


class _WithoutTaps(ModuleSubject):
    """A subject whose verdict alone is asked for: nothing is localised."""

    @property
    def info(self) -> Any:
        from dataclasses import replace

        info = super().info
        return replace(info, abilities=tuple(a for a in info.abilities if a is not Ability.TAP))


def _is_caught(place: str, dtype: torch.dtype, seed: int, error: float, *, everywhere: bool) -> bool:
    generator = torch.Generator().manual_seed(seed)
    ids = tuple(torch.randint(0, VOCAB, (_LENGTH,), generator=generator).tolist())
    decoder = Off(seed, place, error, everywhere=everywhere).to(dtype)
    subject = _WithoutTaps(decoder, cache="past", batch=False)
    return not audit(subject, [token_by_token(ids)], all_values=False, certificate=False).verdict.passes


def _smallest(place: str, dtype: torch.dtype, seed: int, *, everywhere: bool) -> float:
    """Return the smallest of `ERRORS` that is caught, by bisection, or infinity."""
    low, high = 0, len(ERRORS)
    while low < high:
        middle = (low + high) // 2
        if _is_caught(place, dtype, seed, ERRORS[middle], everywhere=everywhere):
            high = middle
        else:
            low = middle + 1
    return ERRORS[low] if low < len(ERRORS) else math.inf


def _cell(found: Sequence[float]) -> str:
    at = sorted(found)[math.ceil(_PART * len(found)) - 1]
    return "not seen" if math.isinf(at) else f"{at:.0e}"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=20)
    seeds = range(parser.parse_args().seeds)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    names = [str(dtype).removeprefix("torch.") for dtype in DTYPES]
    print(
        f"| error in | in every dtype: {' | '.join(names)} | in the declared dtype alone: {' | '.join(names)} |"
    )
    print("|---|" + "---|" * 2 * len(names))
    for place in PLACES:
        cells = [
            _cell([_smallest(place, dtype, seed, everywhere=everywhere) for seed in seeds])
            for everywhere in (True, False)
            for dtype in DTYPES
        ]
        print(f"| {place} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
