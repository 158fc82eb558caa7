"""Generation policies as plain values: how the next token is chosen from a row of logits.

A policy knows no model and holds no state. The generator that a seeded policy draws from belongs to the
request, and its state is recorded at every step.

The transformations stand in one order, which is that of transformers:

1. ``repetition_penalty``: the logit of each token that the prompt or the returned tokens hold is divided by it
   where it is positive, and multiplied where it is negative;
2. ``temperature``: logits are divided by it;
3. ``top_k``: the ``top_k`` largest logits stay; of equal ones at the border, those with the lowest ids;
4. ``top_p``: the most likely tokens stay, as few as together reach this probability; of equal ones at the
   border, those of the lowest ids;
5. ``min_p``: what is less likely than this part of the most likely token's probability goes;
6. ``typical_p``: the tokens stay whose surprise (minus the log of their probability) is nearest to the entropy,
   as few as together reach this probability, and all that are as near as the last of them;
7. softmax in float32.

Each of the rules 4 to 6 sees the probabilities of what the rules before it left. All of them keep the most
likely token, but for ``typical_p``, which keeps the most typical one.
"""

from dataclasses import dataclass
from typing import Literal

from kvproof.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Greedy:
    """Take the most likely token.

    ``tie`` names the rule for equal logits: the lowest token id wins. None leaves the penalty out.
    """

    kind: Literal["greedy"] = "greedy"
    tie: Literal["lowest-id"] = "lowest-id"
    repetition_penalty: float | None = None

    def __post_init__(self) -> None:
        _check_penalty(self.repetition_penalty)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Draw one token of those that the transformations leave, in the order that the module's page gives.

    What is left is put in order of token id and drawn from once with ``torch.multinomial``, by the request's own
    generator on the CPU. The order of token id makes the draw independent of which of two near-equal logits
    ended a hair higher. None leaves a rule out.

    ``seed`` starts the request's generator. Without one, the system's entropy does, and the run cannot be
    repeated from its policy.
    """

    kind: Literal["sample"] = "sample"
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    seed: int | None

    def __post_init__(self) -> None:
        # Beyond this range float32 logits divided by the temperature are all equal, or none but the largest is 0.
        if not 1e-30 <= self.temperature <= 1e30:
            raise UsageError(f"temperature must lie in 1e-30..1e30, not {self.temperature}; or use Greedy()")
        if self.top_k is not None and self.top_k < 1:
            raise UsageError(f"top_k must be at least 1, not {self.top_k}")
        for name in ("top_p", "min_p", "typical_p"):
            value = getattr(self, name)
            if value is not None and not 0 < value <= 1:
                raise UsageError(f"{name} must lie above 0 and not above 1, not {value}")
        _check_penalty(self.repetition_penalty)
        if self.seed is not None and not 0 <= self.seed < 2**63:
            raise UsageError(f"seed must lie in 0..2**63-1, not {self.seed}")


def _check_penalty(value: float | None) -> None:
    if value is not None and not 0.01 <= value <= 100:
        raise UsageError(f"repetition_penalty must lie in 0.01..100, not {value}")


Policy = Greedy | Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class Stops:
    """When a request ends.

    ``eos_id`` ends it when that token, or one of several, is returned, and ``stop_ids`` when one of these is;
    ``stop_texts`` when the text of the returned tokens holds one of these, across the borders of tokens;
    ``context`` when the last position is consumed, so that the token returned there cannot be fed back;
    ``max_tokens`` counts returned tokens. When several apply at once, the one that stands first here is recorded.
    """

    eos_id: int | tuple[int, ...] | None = None
    stop_ids: tuple[int, ...] = ()
    stop_texts: tuple[str, ...] = ()
    context: bool = True
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.max_tokens is not None and self.max_tokens < 1:
            raise UsageError(f"max_tokens must be at least 1, not {self.max_tokens}")
        if "" in self.stop_texts:
            raise UsageError("a stop text is empty, which every text holds: give at least one character")

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """The end tokens."""
        if self.eos_id is None:
            return ()
        return (self.eos_id,) if isinstance(self.eos_id, int) else self.eos_id
