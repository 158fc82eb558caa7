"""The lesson's numbers, as frozen data: the reference decoder walked token by token, healthy and broken.

Layers, positions, heads and slots count from 0. Nothing here is a tensor: a value is its shape and its numbers in
row order, with axes as the stage has them for one token and without batch.
"""

from dataclasses import dataclass

from kvproof.contract.environment import Environment
from kvproof.contract.results import Divergence
from kvproof.contract.stages import Stage


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbers:
    """One value: its shape, and its numbers in row order."""

    shape: tuple[int, ...]
    values: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LessonValue:
    """What one stage computed for one token on the cached path."""

    stage: Stage
    layer: int | None
    cached: Numbers
    uncached: Numbers | None  #: the uncached path's, where it differs in the digits that are shown


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """One token that a policy may choose, with its probability."""

    token: str
    p: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LessonStep:
    """One consumed token: every value on the way, and what was chosen from the logits."""

    token: str
    position: int
    values: tuple[LessonValue, ...]  #: in causal order
    gap: float  #: of the row of logits
    same_choice: bool  #: the most likely token is the uncached row's
    kept: tuple[Kept, ...]
    draw: int | None  #: index into ``kept``, for a policy that draws
    chosen: str
    stop: str | None  #: why the request ends here, where it does


@dataclass(frozen=True, slots=True, kw_only=True)
class Walk:
    """One run with one fault, or none; the tokens that are consumed are the healthy run's."""

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
    allowed: float  #: the largest gap of a row that counts as a match
    token_table: Numbers  #: (vocab, width), also the readout
    position_table: Numbers  #: (context, width)
    walks: tuple[Walk, ...]
