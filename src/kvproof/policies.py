"""Generation policies as plain values: how the next token is chosen from a row of logits.

A policy knows no model and holds no state. The generator that a seeded policy draws from belongs to the
request, and its state is recorded at every step.
"""

from dataclasses import dataclass
from typing import Literal

from kvproof._errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Greedy:
    """Take the most likely token.

    ``tie`` names the rule for equal logits: the lowest token id wins.
    """

    kind: Literal["greedy"] = "greedy"
    tie: Literal["lowest-id"] = "lowest-id"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Draw one token from the ``top_k`` most likely ones.

    The transformations, in this order: divide by ``temperature``; keep the ``top_k`` largest logits (equal
    logits at the border: the lowest ids stay); put them in order of token id; softmax in float32; draw
    once with ``torch.multinomial`` from the request's own generator. The order of token id makes the draw
    independent of which of two near-equal logits ended a hair higher.

    ``seed`` starts the request's generator. Without one, the system's entropy does, and the run cannot be
    repeated from its policy.
    """

    kind: Literal["sample"] = "sample"
    temperature: float = 1.0
    top_k: int
    seed: int | None

    def __post_init__(self) -> None:
        # Beyond this range float32 logits divided by the temperature are all equal, or none but the largest is 0.
        if not 1e-30 <= self.temperature <= 1e30:
            raise UsageError(f"temperature must lie in 1e-30..1e30, not {self.temperature}; or use Greedy()")
        if self.top_k < 1:
            raise UsageError(f"top_k must be at least 1, not {self.top_k}")
        if self.seed is not None and not 0 <= self.seed < 2**63:
            raise UsageError(f"seed must lie in 0..2**63-1, not {self.seed}")


Policy = Greedy | Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class Stops:
    """When a request ends.

    ``eos_id`` ends it when that token is returned; ``context`` ends it when the last position is consumed,
    so that the token returned there cannot be fed back; ``max_tokens`` counts returned tokens. When two
    apply at once, the one that stands first here is recorded.
    """

    eos_id: int | None
    context: bool = True
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.max_tokens is not None and self.max_tokens < 1:
            raise UsageError(f"max_tokens must be at least 1, not {self.max_tokens}")
