"""Generation policies as plain values: how the next token is chosen from a row of logits.

A policy is independent of any model and holds no state. The generator that a policy draws from belongs to the
request, and its state is recorded at every step.

The transformations apply in a fixed order, the same as in transformers:

1. ``repetition_penalty``: for each token in the prompt or among the returned tokens, divide the logit by the
   penalty if it is positive, and multiply it if it is negative.
2. ``temperature``: divide the logits by it.
3. ``top_k``: keep the ``top_k`` largest logits. Among equal logits at the cutoff, keep those with the lowest ids.
4. ``top_p``: keep the smallest set of most likely tokens whose total probability reaches this value. Among equal
   ones at the cutoff, keep those with the lowest ids.
5. ``min_p``: drop tokens less likely than this fraction of the most likely token's probability.
6. ``typical_p``: keep the tokens whose surprise (minus the log of their probability) is nearest to the entropy:
   the smallest set whose total probability reaches this value, and all tokens as near as the last of them.
7. Softmax in float32.

Rules 4 to 6 each use the probabilities of the tokens that the previous rules kept. All of them keep the most
likely token, except ``typical_p``, which keeps the most typical one.
"""

from dataclasses import dataclass
from typing import Literal

from kvproof.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Greedy:
    """Take the most likely token.

    ``tie`` names the rule for equal logits: the lowest token id wins. None disables the penalty.
    """

    kind: Literal["greedy"] = "greedy"
    tie: Literal["lowest-id"] = "lowest-id"
    repetition_penalty: float | None = None

    def __post_init__(self) -> None:
        _check_penalty(self.repetition_penalty)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Draw one of the tokens that remain after the transformations, in the order that the module documents.

    The remaining tokens are sorted by id, and ``torch.multinomial`` draws once, with the request's own generator
    on the CPU. Sorting by id makes the draw independent of which of two nearly equal logits is slightly larger.
    None disables a rule.

    ``seed`` seeds the request's generator. Without it, the system's entropy does, and the run cannot be repeated
    from its policy.
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
        # Outside this range, float32 logits divided by the temperature are all equal, or only the largest is 0.
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

    ``eos_id`` ends the request when that token, or one of several, is returned, and ``stop_ids`` when one of
    these is returned; ``stop_texts`` when the text of the returned tokens contains one of these, even across
    tokens; ``context`` when the last position is consumed, so that the token returned there cannot be fed back;
    ``max_tokens`` when that many tokens are returned. If several apply at once, the record names the first of
    them in this order.
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
