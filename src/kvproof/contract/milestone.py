"""The part of a report that only the reference system has."""

from dataclasses import dataclass

from kvproof.contract.ledger import Run
from kvproof.contract.results import Divergence

#: The parts of the milestone that can be switched off. Without any one of them, the gate must fail.
SWITCHES = ("wrong-position", "wrong-layer", "shape-assertions", "seed", "eos-stop", "context-stop")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointInfo:
    """The frozen weights of the reference system, and how well they are trained."""

    source: str  #: "trained" or the file's name
    seed: int
    num_parameters: int
    loss: float  #: mean cross-entropy, nats per position
    entropy_floor: float
    largest_probability_error: float
    digest_before: str
    digest_after: str
    tie: str  #: how ties in the corpus were decided


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheTraceRow:
    """The cache of one layer after one consumed token; shapes are (batch, head, slot, head_dim)."""

    tokens: str
    position: int
    layer: int
    k_shape: tuple[int, ...]
    v_shape: tuple[int, ...]
    expected_shape: tuple[int, ...]
    asserted: bool  #: whether the shapes were compared with the expected one
    holds: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheMemory:
    """Bytes of K and V together, from elements × item size; ``measured_bytes`` is the size of the tensors."""

    bytes_per_element: int
    bytes_per_token_and_layer: int
    bytes_per_token: int
    bytes_per_layer: int  #: at the full context
    bytes_per_request: int  #: after the run that was measured
    bytes_full_context: int
    num_tokens_measured: int
    measured_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A call that breaks the contract of the cache, and the response."""

    attempt: str
    message: str
    refused: bool
    unchanged: bool  #: the session is as it was before the call


@dataclass(frozen=True, slots=True, kw_only=True)
class GateItem:
    """One line of the acceptance gate."""

    name: str
    passed: bool
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPair:
    """A generation on both paths with one policy, and whether its record reproduces it."""

    name: str
    cached: Run
    uncached: Run
    equal: bool  #: whether tokens and stop reasons are equal
    difference: Divergence | None  #: the first difference, and whether the logits or the policy caused it
    reproduced: bool  #: whether every line of the record replays on both paths
    problem: str | None
    expected_trace: str | None  #: the tokens that are required, if any
    expected_stop: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Milestone:
    """The part of a report that only the reference system has."""

    checkpoint: CheckpointInfo
    vocabulary: tuple[str, ...]
    patterns: tuple[str, ...]
    switched_off: tuple[str, ...]
    cache_trace: tuple[CacheTraceRow, ...]
    memory: CacheMemory
    requests_isolated: bool  #: two interleaved requests give the same bits as each one alone
    refusals: tuple[Refusal, ...]
    runs: tuple[RunPair, ...]
    gate: tuple[GateItem, ...]
    notes: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """Whether every line of the gate passed."""
        return all(item.passed for item in self.gate)
