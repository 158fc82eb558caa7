"""The numbers of the lesson as frozen data: the reference decoder, token by token, with and without faults.

Layers, positions, heads and slots count from 0. There are no tensors: a value is a shape and numbers in
row-major order, with the axes of its stage for one token and without the batch axis.
"""

from dataclasses import dataclass

from kvproof.contract.environment import Environment
from kvproof.contract.results import Divergence
from kvproof.contract.stages import Stage


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbers:
    """One value: a shape, and numbers in row-major order."""

    shape: tuple[int, ...]
    values: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LessonValue:
    """What one stage computed for one token on the cached path."""

    stage: Stage
    layer: int | None
    cached: Numbers
    uncached: Numbers | None  #: None if it does not differ in the digits shown


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """A token that the policy may choose, and its probability."""

    token: str
    p: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LessonStep:
    """One consumed token: every intermediate value, and the token chosen from the logits."""

    token: str
    position: int
    values: tuple[LessonValue, ...]  #: in causal order
    gap: float  #: of the row of logits
    same_choice: bool  #: whether both paths have the same most likely token
    kept: tuple[Kept, ...]
    draw: int | None  #: index into ``kept``; None for a policy that draws nothing
    chosen: str
    stop: str | None  #: why the request ends here, if it does


@dataclass(frozen=True, slots=True, kw_only=True)
class Walk:
    """One run, with a fault or without; it consumes the tokens of the run without a fault."""

    run: str
    policy: str
    fault: str | None
    breaks: str | None
    steps: tuple[LessonStep, ...]
    first: Divergence | None  #: the first value that differs


@dataclass(frozen=True, slots=True, kw_only=True)
class Lesson:
    """Everything that the lesson's page shows."""

    environment: Environment
    seed: int
    loss: float
    num_parameters: int
    vocabulary: tuple[str, ...]
    context_len: int
    allowed: float  #: the largest gap of a row that is a match
    token_table: Numbers  #: (vocab, width), also the readout
    position_table: Numbers  #: (context, width)
    walks: tuple[Walk, ...]
