"""The reference system's own part of the report."""

from dataclasses import dataclass

from kvproof.contract.ledger import Run
from kvproof.contract.results import Divergence

#: The parts of the milestone that can be switched off, each of which must make its gate fail.
SWITCHES = ("wrong-position", "wrong-layer", "shape-assertions", "seed", "eos-stop", "context-stop")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointInfo:
    """The reference system's frozen weights and what they reached."""

    source: str  #: "trained" or the file's name
    seed: int
    num_parameters: int
    loss: float  #: mean cross-entropy, nats per position
    entropy_floor: float
    largest_probability_error: float
    digest_before: str
    digest_after: str
    tie: str  #: how the corpus's ties fell


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheTraceRow:
    """One layer's cache after one consumed token; shapes are (batch, head, slot, head_dim)."""

    tokens: str
    position: int
    layer: int
    k_shape: tuple[int, ...]
    v_shape: tuple[int, ...]
    expected_shape: tuple[int, ...]
    asserted: bool  #: whether the shapes were held against the expected one
    holds: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheMemory:
    """Bytes of K and V together, from elements × item size; ``measured`` is what the tensors hold."""

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
    """A call that breaks the cache's contract, and how it was refused."""

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
    """One policy run cached and uncached, and whether the record reproduces the run."""

    name: str
    cached: Run
    uncached: Run
    equal: bool  #: the two token traces and stop reasons
    difference: Divergence | None  #: where the two part, and whether logits or policy parted them
    reproduced: bool  #: replayed from its record, line by line, through both paths
    problem: str | None
    expected_trace: str | None  #: the checked trace, where there is one
    expected_stop: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Milestone:
    """The reference system's own part of the report."""

    checkpoint: CheckpointInfo
    vocabulary: tuple[str, ...]
    patterns: tuple[str, ...]
    switched_off: tuple[str, ...]
    cache_trace: tuple[CacheTraceRow, ...]
    memory: CacheMemory
    requests_isolated: bool  #: two interleaved requests give bit-identical rows to each alone
    refusals: tuple[Refusal, ...]
    runs: tuple[RunPair, ...]
    gate: tuple[GateItem, ...]
    notes: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """Whether every line of the gate holds."""
        return all(item.passed for item in self.gate)
