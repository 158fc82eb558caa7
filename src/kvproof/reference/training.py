"""The recipe that recreates the reference checkpoint, identical to the last bit on the same machine.

Training runs in float64, and the result is cast to float32 once. Rounding differences on another processor are
then ten orders of magnitude below the resolution of the checkpoint, so ties in the corpus are decided the same
way there.
"""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kvproof.errors import TrainingError, UsageError
from kvproof.reference.corpus import SEQUENCES, TARGETS
from kvproof.reference.decoder import Decoder, DecoderConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Full-batch Adam with cosine decay.

    Over seeds 0..23, 300 steps end within 1e-3 nats of the floor for 21 seeds with an MLP of width 32, and for 15
    with width 16. With seed 1, the largest gap is a fifth of the tolerance and B is above C by 1.6e-4; that order
    does not change if the initial weights change by one part in a million. ``max_loss_above_floor`` (nats) is the
    limit in spec R3; training that ends above it raises.
    """

    seed: int = 1
    num_steps: int = 300
    learning_rate: float = 0.04
    beta1: float = 0.9
    beta2: float = 0.95
    max_loss_above_floor: float = 1e-3

    def __post_init__(self) -> None:
        if not 0 <= self.seed < 2**63:
            raise UsageError(f"the training seed must lie in 0..2**63-1, not {self.seed}")


RECIPE = Recipe()


def train(
    recipe: Recipe = RECIPE,
    config: DecoderConfig | None = None,
    on_step: Callable[[int, float], None] = lambda step, loss: None,
) -> tuple[Decoder, float]:
    """Return the trained, frozen decoder in float32 and its loss, the mean cross-entropy in nats.

    ``on_step`` receives each finished step and the loss before it. No global state changes: initial weights are
    drawn with a forked generator. Raises `TrainingError` if the loss exceeds the recipe's limit.
    """
    decoder = initialised(config or DecoderConfig(), recipe.seed)
    adam = Adam(list(decoder.parameters()), recipe.beta1, recipe.beta2)
    for step in range(recipe.num_steps):
        decay = 0.5 * (1 + math.cos(math.pi * step / recipe.num_steps))
        loss = corpus_loss(decoder)
        adam.step(torch.autograd.grad(loss, adam.weights), recipe.learning_rate * decay)
        on_step(step + 1, float(loss.detach()))
    frozen = decoder.to(torch.float32).eval().requires_grad_(False)
    final = float(corpus_loss(frozen))
    if not final - entropy_floor() <= recipe.max_loss_above_floor:
        raise TrainingError(
            f"training ended at {final:.5f} nats, more than {recipe.max_loss_above_floor} above the corpus's "
            f"floor of {entropy_floor():.5f}: recipe {recipe}"
        )
    return frozen, final


class Adam:
    """Adam as published (Kingma and Ba, 2015), without weight decay.

    ``torch.optim`` computes the same (a test compares the two), but its first step imports the compiler stack,
    which takes longer than the whole training.
    """

    def __init__(self, weights: list[nn.Parameter], beta1: float, beta2: float, eps: float = 1e-8) -> None:
        self.weights = weights
        self.beta1, self.beta2, self.eps = beta1, beta2, eps
        self.first = [torch.zeros_like(w) for w in weights]
        self.second = [torch.zeros_like(w) for w in weights]
        self.num_steps = 0

    @torch.no_grad()
    def step(self, gradients: tuple[Tensor, ...], learning_rate: float) -> None:
        """Update every weight by one step."""
        self.num_steps += 1
        unbias1, unbias2 = 1 - self.beta1**self.num_steps, 1 - self.beta2**self.num_steps
        for weight, gradient, m, v in zip(self.weights, gradients, self.first, self.second, strict=True):
            m.lerp_(gradient, 1 - self.beta1)
            v.mul_(self.beta2).addcmul_(gradient, gradient, value=1 - self.beta2)
            weight.addcdiv_(m, (v / unbias2).sqrt_().add_(self.eps), value=-learning_rate / unbias1)


def initialised(config: DecoderConfig, seed: int) -> Decoder:
    """Return an untrained decoder in float64 whose weights depend only on the seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Decoder(config).to(torch.float64)


def corpus_loss(decoder: Decoder) -> Tensor:
    """Return the mean cross-entropy in nats over every position of the corpus."""
    ids, targets = torch.tensor(SEQUENCES), torch.tensor(TARGETS)
    positions = torch.arange(ids.shape[1]).expand_as(ids)
    logits: Tensor = decoder(ids, positions)
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def next_token_distribution() -> dict[tuple[int, ...], dict[int, float]]:
    """Return, for every prefix in the corpus, the frequency of each token that follows it."""
    followers: dict[tuple[int, ...], Counter[int]] = {}
    for inputs, targets in zip(SEQUENCES, TARGETS, strict=True):
        for length in range(1, len(inputs) + 1):
            followers.setdefault(inputs[:length], Counter())[targets[length - 1]] += 1
    return {
        prefix: {token: n / count.total() for token, n in count.items()} for prefix, count in followers.items()
    }


def entropy_floor() -> float:
    """Return the lowest mean cross-entropy in nats that any causal model can reach on the corpus."""
    table = next_token_distribution()
    terms = [
        -math.log(table[inputs[:length]][targets[length - 1]])
        for inputs, targets in zip(SEQUENCES, TARGETS, strict=True)
        for length in range(1, len(inputs) + 1)
    ]
    return sum(terms) / len(terms)


def largest_probability_error(decoder: Decoder) -> float:
    """Return the largest difference between the decoder's probabilities and the corpus's frequencies."""
    largest = 0.0
    for prefix, frequencies in next_token_distribution().items():
        ids = torch.tensor([prefix])
        probabilities = decoder(ids, torch.arange(len(prefix))[None])[0, -1].softmax(dim=-1)
        for token, p in enumerate(probabilities.tolist()):
            largest = max(largest, abs(p - frequencies.get(token, 0.0)))
    return largest
