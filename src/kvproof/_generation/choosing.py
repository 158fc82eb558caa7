"""Applies a policy to one row of logits: which tokens it keeps, their probabilities, and which one it draws.

`kvproof.policies` defines the order of the transformations. Each computes the same as the processor of that name
in transformers, except that ties follow a documented rule instead of the order of the sort.
"""

import base64
import hashlib
import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from kvproof.errors import SubjectError, UsageError
from kvproof.policies import Greedy, Policy, Sample

#: The number of largest logits that a step records, and of most likely tokens that a greedy step shows.
NUM_TOP = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The result of applying a policy to a row."""

    ids: Tensor  #: (kept,) int64, in the policy's own order
    probabilities: Tensor  #: (kept,) float32
    draw: int | None  #: index into both, for a policy that draws

    @property
    def chosen(self) -> int:
        """The id of the chosen token."""
        return int(self.ids[self.draw or 0])

    def digest(self) -> str:
        """Return the SHA-256, in hexadecimal, of the kept ids and their probabilities."""
        parts = (self.ids.numpy().tobytes(), self.probabilities.numpy().tobytes())
        return hashlib.sha256(b"".join(parts)).hexdigest()


def ranked(row: Tensor, num: int) -> Tensor:
    """Return the ids (num,) of the largest logits, largest first; equal logits are in order of id."""
    if num >= len(row):
        return row.argsort(descending=True, stable=True)
    values, ids = row.topk(num + 1)
    least = values[num - 1]
    if values[num] < least:  # no tie at the cutoff, so nothing else to check
        ids = ids[:num].sort().values
        return ids[row[ids].argsort(descending=True, stable=True)]
    candidates = (row >= least).nonzero()[:, 0]  # in order of id, including ties at the cutoff
    return candidates[row[candidates].argsort(descending=True, stable=True)][:num]


def choose(policy: Policy, row: Tensor, generator: torch.Generator | None, history: Iterable[int] = ()) -> Choice:
    """Return what the policy keeps of a row (vocab,), and the index that it draws.

    ``history`` holds the ids of the prompt and of the returned tokens, which a repetition penalty makes less
    likely. Greedy keeps the most likely ids in order of rank, draws nothing, and chooses the first. `Sample`
    keeps the ids that pass its rules in order of id and draws an index with ``generator``, whose state advances.
    Raises `SubjectError` for a row from which nothing can be chosen: it holds NaN or infinity, or no finite
    value. Entries of minus infinity, such as masked vocabulary entries, have probability 0.
    """
    row = row.detach().to("cpu", torch.float32)
    if not math.isfinite(float(row.max())):  # NaN if any entry is NaN
        raise SubjectError("the logits hold NaN, infinity or nothing finite, so no token can be chosen from them")
    if policy.repetition_penalty is not None:
        row = _penalised(row, history, policy.repetition_penalty)
    if isinstance(policy, Greedy):
        ids = ranked(row, NUM_TOP)
        return Choice(ids=ids, probabilities=row.softmax(dim=-1)[ids], draw=None)
    ids, scores = _kept(policy, row)
    probabilities = scores.softmax(dim=-1)
    draw = int(torch.multinomial(probabilities, 1, generator=generator))
    return Choice(ids=ids, probabilities=probabilities, draw=draw)


def _penalised(row: Tensor, history: Iterable[int], penalty: float) -> Tensor:
    seen = torch.tensor(sorted(set(history)), dtype=torch.int64)
    weakened = torch.where(row[seen] < 0, row[seen] * penalty, row[seen] / penalty)
    return row.index_put((seen,), weakened)


def _kept(policy: Sample, row: Tensor) -> tuple[Tensor, Tensor]:
    """Return the ids that pass the rules, in order of id, and their scaled logits; both (kept,)."""
    scaled = (row - row.max()) / policy.temperature  # the shift prevents overflow and does not change the softmax
    # Rank the unscaled logits: after division by a temperature, they may overflow or become equal.
    ids = torch.arange(len(row)) if policy.top_k is None else ranked(row, policy.top_k).sort().values
    rules = ((_top_p, policy.top_p), (_min_p, policy.min_p), (_typical_p, policy.typical_p))
    for rule, value in rules:
        if value is not None:
            ids = ids[rule(scaled[ids], value)]
    return ids, scaled[ids]


def _top_p(scores: Tensor, top_p: float) -> Tensor:
    """Return a mask (kept,): drop the least likely tokens while their total is at most 1 - ``top_p``."""
    order = scores.argsort(descending=True, stable=True).flip(0)
    goes = scores[order].softmax(dim=-1).cumsum(dim=-1) <= 1 - top_p
    goes[-1] = False
    return torch.empty_like(goes).index_put((order,), ~goes)


def _min_p(scores: Tensor, min_p: float) -> Tensor:
    probabilities = scores.softmax(dim=-1)
    return probabilities >= min_p * probabilities.max()


def _typical_p(scores: Tensor, typical_p: float) -> Tensor:
    logs = scores.log_softmax(dim=-1)
    entropy = -(logs * logs.exp()).nansum()
    distance = (-logs - entropy).abs()
    order = distance.argsort(stable=True)
    cumulative = scores[order].softmax(dim=-1).cumsum(dim=-1)
    last = min(int((cumulative < typical_p).sum()), len(order) - 1)
    return distance <= distance[order[last]]


def new_generator(policy: Policy) -> torch.Generator | None:
    """Return a new generator for a policy that draws, seeded from entropy if the policy has no seed, or None."""
    if isinstance(policy, Greedy):
        return None
    generator = torch.Generator()
    if policy.seed is None:
        generator.seed()
    else:
        generator.manual_seed(policy.seed)
    return generator


def state_of(generator: torch.Generator | None) -> str | None:
    """Return a generator's state in base64, or None without one."""
    if generator is None:
        return None
    return base64.b64encode(generator.get_state().numpy().tobytes()).decode("ascii")


def generator_at(state: str) -> torch.Generator:
    """Return a generator in a recorded state; raise `UsageError` if the state is invalid."""
    generator = torch.Generator()
    try:
        raw = base64.b64decode(state, validate=True)
        generator.set_state(torch.tensor(list(raw), dtype=torch.uint8))
    except (ValueError, RuntimeError) as error:
        raise UsageError(f"not a generator state: {error}") from error
    return generator
