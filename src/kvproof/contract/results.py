"""The results of an audit as frozen data: rows, values, faults and scenarios. JSON holds it without loss.

Nothing here is a tensor. Layers, positions, heads, slots and batch rows count from 0. Gaps, scales, noise and
errors are absolute differences of logits.
"""

from dataclasses import dataclass
from enum import StrEnum

from kvproof.contract.codec import added_in
from kvproof.contract.ledger import MarginVerdict
from kvproof.contract.stages import Stage
from kvproof.scenarios import Ability


class Verdict(StrEnum):
    """The conclusion from the evidence. Members are ordered from harmless to worst; a group has its worst one."""

    NOT_CHECKED = "not-checked"  #: the subject lacks the ability that this needs; not a pass
    MATCH = "match"  #: the gap is within what the declared dtype allows
    ROUNDING = "rounding"  #: the gap is larger, but was shown to be rounding
    VACUOUS = "vacuous"  #: nothing showed that this audit could have failed
    INCONCLUSIVE = "inconclusive"  #: it ran, but the evidence does not decide
    RAISED = "raised"  #: the cached path raises, or gives a malformed row, where the uncached path gives a row
    DIVERGED = "diverged"  #: a bug

    @property
    def exit_status(self) -> int:
        """The command line's exit status for this verdict."""
        statuses = {"diverged": 1, "raised": 6, "inconclusive": 3, "vacuous": 4, "not-checked": 5}
        return statuses.get(self.value, 0)

    @property
    def passes(self) -> bool:
        """Whether the audit showed that the cached path computes what the uncached one does."""
        return self in (Verdict.MATCH, Verdict.ROUNDING)


def worst(verdicts: "list[Verdict]") -> Verdict:
    """Return the worst of the verdicts, or `Verdict.NOT_CHECKED` if there are none."""
    order = list(Verdict)
    return max(verdicts, key=order.index, default=Verdict.NOT_CHECKED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """The declared tolerance of a dtype: ``absolute + relative × the row's largest absolute logit``."""

    dtype: str
    absolute: float
    relative: float
    source: str

    def allowed(self, scale: float) -> float:
        """Return the largest gap that counts as a match for a row of this scale."""
        return self.absolute + self.relative * scale


@dataclass(frozen=True, slots=True, kw_only=True)
class Constant:
    """A number that decides an outcome, and its origin."""

    name: str
    value: float
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SubjectInfo:
    """The decoder that was audited."""

    name: str
    digest: str  #: SHA-256 of the weights
    mode: str  #: "eval" or "train"
    dtype: str
    num_layers: int
    vocab_size: int
    context_len: int  #: positions 0..context_len - 1 are accepted
    abilities: tuple[Ability, ...]


class Comparison(StrEnum):
    """Which two computations of a row are compared."""

    CACHED = "cached"  #: the cached path against the uncached one
    CAUSALITY = "causality"  #: two uncached computations: the prefix alone, and within a longer sequence
    REPEATED = "repeated"  #: the same computation twice


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactEvidence:
    """The same row in float64, and how far the declared dtype is from it."""

    gap: float
    noise: float  #: gap between two uncached computations, running maximum over positions
    scale: float  #: the expected row's largest absolute logit
    uncached_error: float  #: declared uncached row against the float64 row, running maximum
    cached_error: (
        float | None
    )  #: declared cached row against the float64 row; None between two uncached computations
    #: declared uncached row against the float64 row, this row alone; None if random rounding cannot be tried
    own_error: float | None = added_in(1, None)
    uncached_rms: float | None = added_in(
        1, None
    )  #: root mean square of the uncached row's error, over its entries
    cached_rms: float | None = added_in(1, None)  #: the same for the cached row
    #: how far results that the float64 run computes in a lower dtype may move this row
    inner_rounding: float = added_in(1, 0.0)
    is_watched: bool = added_in(1, True)  #: whether every operation of the float64 run could be seen


@dataclass(frozen=True, slots=True, kw_only=True)
class TruthEvidence:
    """How far both rows are from the same weights' row in another implementation, which has float64."""

    uncached_error: float
    cached_error: float
    uncached_rms: float  #: root mean square over the row's entries
    cached_rms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceFlip:
    """A choice of experts on which the two paths differ, although they agree on every earlier one."""

    position: int  #: of the token that the choice belongs to
    number: int  #: which top-k of the forward it is
    taken: int  #: the candidate that the cached path takes
    rejected: int  #: the candidate that the uncached path takes
    margin: float  #: by which the uncached path's scores of the two differ
    error: float  #: how far rounding moves these scores


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceEvidence:
    """The row in the declared dtype, computed again with the uncached path's choices of experts."""

    gap: float
    uncached_error: float  #: against float64 with the same choices, running maximum
    cached_error: float
    sampled_error: float | None
    flip: ChoiceFlip | None  #: the clearest choice on which the paths differ, if any


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """The evidence on one row, in absolute differences of logits. It alone decides the verdict."""

    comparison: Comparison = Comparison.CACHED
    gap: float  #: in the declared dtype
    allowed: float
    noise: float  #: gap between two uncached computations, running maximum over positions
    scale: float  #: the expected row's largest absolute logit
    exact: ExactEvidence | None  #: None if there is no float64 run
    sampled_error: float | None = None  #: how far random rounding moves the row; measured only if it decides
    #: Tables that the model keeps in a lower dtype, if computing them in float64 closes the float64 gap.
    rounded_tables: tuple[str, ...] = ()
    choices: ChoiceEvidence | None = None  #: measured only if a choice of experts may have moved the row
    #: without a float64 run: unit in the last place of the coarsest dtype that the decoder computes in, if known
    coarsest_unit: float | None = added_in(1, None)
    #: of causality: how far the row moves if later tokens alone change, in a pass of the same length
    leak: float | None = added_in(1, None)
    #: without a float64 run: the errors against another implementation of the same weights, if one was given
    truth: TruthEvidence | None = added_in(1, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowResult:
    """One prefix: its uncached row against its cached row, over the whole vocabulary."""

    ids: tuple[int, ...]
    tokens: str
    evidence: Evidence  #: decides the verdict, and can be judged again
    worst_id: int  #: the vocabulary entry with the largest difference
    margin: float  #: the expected row's largest logit minus its second largest
    margin_verdict: MarginVerdict  #: whether rounding could change the most likely token
    verdict: Verdict
    reason: str
    expected: tuple[float, ...] | None  #: the uncached row itself, if the vocabulary is small

    @property
    def gap(self) -> float:
        """The gap in the declared dtype."""
        return self.evidence.gap

    @property
    def allowed(self) -> float:
        """The largest gap that counts as a match."""
        return self.evidence.allowed

    @property
    def noise(self) -> float:
        """The gap between two uncached computations, running maximum over positions."""
        return self.evidence.noise

    @property
    def scale(self) -> float:
        """The expected row's largest absolute logit."""
        return self.evidence.scale

    @property
    def top_gap(self) -> float | None:
        """The gap in float64; None if there is no float64 run."""
        return self.evidence.exact.gap if self.evidence.exact else None

    @property
    def top_noise(self) -> float | None:
        """The noise in float64; None if there is no float64 run."""
        return self.evidence.exact.noise if self.evidence.exact else None

    @property
    def uncached_error(self) -> float | None:
        """The uncached row's error against float64, with the choices that were judged."""
        judged = self.evidence.choices or self.evidence.exact
        return judged.uncached_error if judged else None

    @property
    def cached_error(self) -> float | None:
        """The cached row's error against float64, with the choices that were judged."""
        judged = self.evidence.choices or self.evidence.exact
        return judged.cached_error if judged else None

    @property
    def sampled_error(self) -> float | None:
        """How far random rounding moves the row; None if it was not needed."""
        return self.evidence.choices.sampled_error if self.evidence.choices else self.evidence.sampled_error


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """The first value that is wrong, in causal order, and the likely cause."""

    scenario: str
    ids: tuple[int, ...]  #: the tokens consumed when it happened
    tokens: str
    position: int  #: of the token that was being consumed
    batch_row: int  #: the row of the batch that the session belongs to
    stage: Stage
    layer: int | None
    head: int | None
    slot: int | None  #: cache slot, for stages that have slots
    expected: float  #: the uncached path's value at the largest difference
    actual: float  #: the cached path's value there
    gap: float
    allowed: float
    origin: str | None  #: what the wrong cache slot really holds, if that could be determined
    contract: str
    logits_differ: bool  #: False if later errors cancel this one
    sentence: str
    confirmed: bool  #: replacing the values of ``introduced`` with the uncached ones makes the paths agree
    #: The sites that introduce an error, in words, in the order found; the first is this finding's own. If it is
    #: confirmed, everything else that differs only propagates an error. Empty if no value was replaced.
    introduced: tuple[str, ...]
    #: the stage, layer or module in words, without head and slot; None in reports of version 2.0
    site: str | None = added_in(1, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Localisation:
    """The first mismatch, if any, and how many values were compared."""

    divergence: Divergence | None
    num_values: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FourWays:
    """One row, computed in every way in float64 and grouped by agreement; the largest group comes first."""

    ids: tuple[int, ...]
    groups: tuple[tuple[str, ...], ...]
    suspect: str | None  #: a way that is wrong, if the others agree and do not all make the same kind of call
    sentence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorRatio:
    """The errors of all rows of a scenario together: the cached path's beside the uncached path's."""

    num_rows: int
    uncached_rms: float  #: root mean square over all rows and entries
    cached_rms: float
    ratio: float  #: ``cached_rms / uncached_rms``
    lowest: float  #: the ratio that 199 of 200 resamples of the rows exceed
    median: float  #: of the rows' own ratios
    sampled_ratio: float | None  #: the ratio if every result is rounded at random; measured only if it decides


@dataclass(frozen=True, slots=True, kw_only=True)
class Raise:
    """Where the cached path raised, or gave a malformed row, although the uncached path gives a row."""

    call: int  #: how many calls of the program had returned before it, each forward of ``generate()`` included
    operation: str  #: its name: ``extend``, ``generate``, or an operation between calls, such as ``crop``
    consumed: tuple[tuple[int, ...], ...]  #: each batch row's tokens before it
    #: The tokens that each batch row was given, or the prompts of ``generate()``; empty for other operations.
    fed: tuple[tuple[int, ...], ...]
    consumed_text: str
    fed_text: str
    position: int | None  #: of the first token that it was given; None if it was given none, or in ``generate()``
    layer: int | None  #: None if the exception came from outside the layers, or the layer is not known
    error: str  #: the exception's type and message, or what was wrong with the row
    traceback: str | None  #: the decoder's own frames; None if it returned a malformed row


@dataclass(frozen=True, slots=True, kw_only=True)
class ScenarioResult:
    """All rows of one scenario."""

    name: str
    advice: bool  #: the library advises callers against this, so it does not affect the verdict
    verdict: Verdict
    rows: tuple[RowResult, ...]
    largest_gap: float
    num_values_compared: int  #: intermediate values compared in float64
    reason: str | None  #: why not everything was compared
    divergence: Divergence | None
    four_ways: FourWays | None  #: of the first row that diverged, or of a longer one if only that tells
    #: None without float64, or with too few rows
    errors: ErrorRatio | None = added_in(1, None)
    raised: Raise | None = added_in(1, default=None)  #: the first time that the cached path raised
    #: what the calls with wrong rows have in common and no other call has, in words; None if that is not known
    condition: str | None = added_in(1, None)


class Outcome(StrEnum):
    """The outcome of one planted fault."""

    CAUGHT = "caught"  #: the comparison rejects it: in the certificate, a row of logits differs
    RAISED = "raised"  #: the decoder itself refused to continue
    HIDDEN = "hidden"  #: something differs, but no row of logits shows it
    EQUIVALENT = "equivalent"  #: nothing differs: on this subject it is no fault


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultResult:
    """The result of one deliberate fault, planted in one place.

    The certificate plants faults in its own short programs, in the certificate's dtype. A fault that a caller
    requested is planted in the audit's programs: the members from ``verdict`` on give the audit's result for it.
    They are None in the certificate.
    """

    name: str
    breaks: str  #: the contract, in words
    expected_stages: tuple[Stage, ...]  #: the fault must first show at one of these
    layer: int | None  #: None for a fault outside the layers, or in all of them
    position: int | None  #: how many tokens the cache held when it first acted; None if it acts from the start
    outcome: Outcome
    where: str | None  #: the first value that differs
    right_stage: bool | None  #: whether the fault must first show there; None if nothing differs
    gap: float  #: of the first row that differs, relative to its largest logit; NaN if unknown
    reason: str | None  #: the decoder's error, or why not everything was compared
    verdict: Verdict | None
    largest_gap: float | None
    tolerance: float | None
    num_rows_beyond: int | None  #: rows whose gap exceeds the tolerance
    margin: float | None  #: largest faulty gap ÷ largest clean gap
    divergence: Divergence | None
    batch_row: int | None = added_in(1, None)  #: the only row of the batch that is broken; None for all of them
    block_len: int | None = added_in(1, None)  #: the most tokens that one call feeds to the warm cache

    @property
    def caught(self) -> bool:
        """Whether the comparison rejects the fault."""
        return self.outcome is Outcome.CAUGHT


@dataclass(frozen=True, slots=True, kw_only=True)
class NotPlanted:
    """A fault that could not be planted, and the reason."""

    fault: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallestChange:
    """The smallest relative change to one cache entry that the audit detects, found by bisection."""

    dtype: str
    layer: int
    tensor: str  #: "k", "v", or "state" for a recurrent layer's state
    position: int
    value: float | None  #: None if the audit does not even detect a doubled entry


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallestStep:
    """Whether the audit detects the smallest step there is: positions off by 1, or a mask that hides 1 slot."""

    dtype: str
    what: str  #: "position" or "mask"
    layer: int | None  #: None for positions, which belong to no layer
    seen: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """How far programs go."""

    num_tokens: int  #: of the longest sequence
    block_len: int  #: the most tokens in one call on a warm cache
    num_rows: int  #: of the largest batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """The evidence that this audit, on this subject, can fail."""

    dtype: str  #: of the runs with planted faults
    sequence: tuple[int, ...]
    faults: tuple[FaultResult, ...]  #: one for each planted fault and place
    not_planted: tuple[NotPlanted, ...]
    clean_gap: float  #: the largest relative gap of the same programs without a fault
    margin: float | None  #: the smallest gap that was caught ÷ the largest clean one
    smallest_changes: tuple[SmallestChange, ...]
    problem: str | None  #: why nothing showed that the audit can fail, if so
    reached: Reach | None = added_in(1, None)  #: by the audit's programs
    planted_in: Reach | None = added_in(1, None)  #: how far the programs with planted faults go
    smallest_steps: tuple[SmallestStep, ...] = added_in(1, ())
    shown_stages: tuple[Stage, ...] = added_in(1, ())  #: what the subject's taps show in a step

    def number(self, outcome: Outcome) -> int:
        """Return the number of faults with this outcome."""
        return sum(result.outcome is outcome for result in self.faults)

    @property
    def num_right(self) -> int:
        """How many of the caught faults first show at the expected place."""
        return sum(result.caught and bool(result.right_stage) for result in self.faults)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumedToken:
    """One token that a program consumed: a column of a `Spread`."""

    call: int
    batch_row: int
    position: int
    token: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SpreadSite:
    """One intermediate value: a row of a `Spread`."""

    name: str
    layer: int | None
    allowed: float  #: the largest gap that is not an error here, as a fraction of the site's largest magnitude


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptSlot:
    """The content of one slot of a layer's cache, from one call to another."""

    first_call: int
    last_call: int
    layer: int
    slot: int
    position: int  #: of the token that belongs in the slot
    token: str
    gap: float  #: the larger of the key's and the value's, as a fraction of their largest magnitude
    wrong: bool
    origin: str | None  #: what a wrong slot really holds, if that could be determined


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Every value of one program, cached against uncached: where an error starts, and how far it spreads."""

    scenario: str
    fault: str | None  #: the planted fault, if there is one
    dtype: str
    tokens: tuple[ConsumedToken, ...]  #: in the order in which they were consumed
    sites: tuple[SpreadSite, ...]  #: in causal order
    gaps: tuple[
        tuple[float | None, ...], ...
    ]  #: [site][token], as fractions; absolute for values that are not floats
    kept: tuple[KeptSlot, ...]
    left_out: bool  #: whether the program consumes more tokens than are shown
