"""What an audit found of rows, values, faults and scenarios, as frozen data that JSON holds without loss.

Nothing here is a tensor. Layers, positions, heads, slots and batch rows count from 0. Gaps, scales, noise and
errors are absolute differences of logits.
"""

from dataclasses import dataclass
from enum import StrEnum

from kvproof.contract.ledger import MarginVerdict
from kvproof.contract.stages import Stage
from kvproof.scenarios import Ability


class Verdict(StrEnum):
    """What the evidence says. Members stand from harmless to worst; joined, the worst wins."""

    NOT_CHECKED = "not-checked"  #: the subject lacks the ability; never counts as a pass
    MATCH = "match"  #: the gap lies within what the declared dtype allows
    ROUNDING = "rounding"  #: outside it, but shown to be regrouping noise
    VACUOUS = "vacuous"  #: the audit could not be shown able to fail
    INCONCLUSIVE = "inconclusive"  #: it ran, and the evidence cannot tell
    DIVERGED = "diverged"  #: a bug

    @property
    def exit_status(self) -> int:
        """The command line's exit status for this verdict."""
        return {"diverged": 1, "inconclusive": 3, "vacuous": 4}.get(self.value, 0)

    @property
    def passes(self) -> bool:
        """Whether the cached path was shown to compute what the uncached one does."""
        return self in (Verdict.MATCH, Verdict.ROUNDING)


def worst(verdicts: "list[Verdict]") -> Verdict:
    """Join verdicts: the worst wins, and of none at all nothing was checked."""
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
    """A number that decides an outcome, with where it comes from."""

    name: str
    value: float
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SubjectInfo:
    """What is under audit."""

    name: str
    digest: str  #: SHA-256 of the weights
    mode: str  #: "eval" or "train"
    dtype: str
    num_layers: int
    vocab_size: int
    context_len: int  #: positions 0..context_len - 1 are accepted
    abilities: tuple[Ability, ...]


class Comparison(StrEnum):
    """Which two computations of a row stand against each other."""

    CACHED = "cached"  #: the cached path against the uncached one
    CAUSALITY = "causality"  #: two uncached ways: the prefix alone, and within a longer sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactEvidence:
    """The same row at the top rung, float64, and how far the declared dtype is from it."""

    gap: float
    noise: float  #: gap between two uncached ways, running maximum over positions
    scale: float  #: the expected row's largest absolute logit
    uncached_error: float  #: declared uncached row against the float64 row, running maximum
    cached_error: float | None  #: declared cached row against the float64 row; None between two uncached ways


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceFlip:
    """A choice of experts that the cached path makes otherwise, though all before it were made alike."""

    position: int  #: of the token whose choice it is
    number: int  #: of the top-k within the forward
    taken: int  #: the candidate that the cached path takes
    rejected: int  #: the candidate that the uncached path takes instead
    margin: float  #: by which the uncached path's scores of the two differ
    error: float  #: how far rounding moves these scores


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceEvidence:
    """The row in the declared dtype once every choice of experts is the uncached path's."""

    gap: float
    uncached_error: float  #: against float64 with the same choices, running maximum
    cached_error: float
    sampled_error: float | None
    flip: ChoiceFlip | None  #: the clearest choice that the cached path makes otherwise, where there is one


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """All that is known of one row, in absolute differences of logits: its verdict follows from this alone."""

    comparison: Comparison = Comparison.CACHED
    gap: float  #: in the declared dtype
    allowed: float
    noise: float  #: gap between two uncached ways, running maximum over positions
    scale: float  #: the expected row's largest absolute logit
    exact: ExactEvidence | None  #: None where there is no top rung
    sampled_error: float | None = None  #: how far random rounding moves the row; measured only where it decides
    #: The tables that the model holds in a lower dtype, where computing them in float64 ends the float64 gap.
    rounded_tables: tuple[str, ...] = ()
    choices: ChoiceEvidence | None = None  #: measured only where a choice of experts may have moved the row


@dataclass(frozen=True, slots=True, kw_only=True)
class RowResult:
    """One prefix: its uncached row against its cached row, over the whole vocabulary."""

    ids: tuple[int, ...]
    tokens: str
    evidence: Evidence  #: from which the verdict follows, and can be judged again
    worst_id: int  #: the vocabulary entry with the largest difference
    margin: float  #: the expected row's largest logit minus its second largest
    margin_verdict: MarginVerdict  #: whether the gap could change the most likely token
    verdict: Verdict
    reason: str
    expected: tuple[float, ...] | None  #: the uncached row itself, where the vocabulary is small

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
        """The gap between two uncached ways, running maximum over positions."""
        return self.evidence.noise

    @property
    def scale(self) -> float:
        """The expected row's largest absolute logit."""
        return self.evidence.scale

    @property
    def top_gap(self) -> float | None:
        """The gap in float64; None where there is no top rung."""
        return self.evidence.exact.gap if self.evidence.exact else None

    @property
    def top_noise(self) -> float | None:
        """The noise in float64; None where there is no top rung."""
        return self.evidence.exact.noise if self.evidence.exact else None

    @property
    def uncached_error(self) -> float | None:
        """The uncached row's error against float64, by the choices that were judged."""
        judged = self.evidence.choices or self.evidence.exact
        return judged.uncached_error if judged else None

    @property
    def cached_error(self) -> float | None:
        """The cached row's error against float64, by the choices that were judged."""
        judged = self.evidence.choices or self.evidence.exact
        return judged.cached_error if judged else None

    @property
    def sampled_error(self) -> float | None:
        """How far random rounding moves the row; None where nothing asked for it."""
        return self.evidence.choices.sampled_error if self.evidence.choices else self.evidence.sampled_error


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """The first value that went wrong, in causal order, and the contract that this likely breaks."""

    scenario: str
    ids: tuple[int, ...]  #: the tokens consumed when it happened
    tokens: str
    position: int  #: of the token that was being consumed
    batch_row: int  #: of the session in which it was
    stage: Stage
    layer: int | None
    head: int | None
    slot: int | None  #: cache slot, for the stages that cover slots
    expected: float  #: the uncached path's value where the two differ most
    actual: float  #: the cached path's value there
    gap: float
    allowed: float
    origin: str | None  #: what the wrong cache slot really holds, where that could be told
    contract: str
    logits_differ: bool  #: False where later errors cancel this one
    sentence: str
    confirmed: bool  #: with the uncached values of ``introduced`` put in their place, the two paths agree
    #: The sites at which an error enters, in words, in the order found and this finding's own first. Where it is
    #: confirmed, all else that differs carries an error on. Empty where nothing was put in any value's place.
    introduced: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Localisation:
    """The first mismatch, or none, and how many values were compared to say so."""

    divergence: Divergence | None
    num_values: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FourWays:
    """One row by every way to compute it, in float64, grouped by which agree; the largest group first."""

    ids: tuple[int, ...]
    groups: tuple[tuple[str, ...], ...]
    suspect: str | None  #: the one way that stands alone against all others, where there is one
    sentence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ScenarioResult:
    """All rows of one scenario."""

    name: str
    advice: bool  #: the caller did what the library's documentation says not to: no part of the verdict
    verdict: Verdict
    rows: tuple[RowResult, ...]
    largest_gap: float
    num_values_compared: int  #: intermediate values compared at the top rung
    reason: str | None  #: why nothing, or not everything, was compared
    divergence: Divergence | None
    four_ways: FourWays | None  #: of the first row that diverged


class Outcome(StrEnum):
    """What came of one planted fault."""

    CAUGHT = "caught"  #: the comparison rejects it: in the certificate, a row of logits differs
    RAISED = "raised"  #: the decoder itself refused to go on
    HIDDEN = "hidden"  #: something differs, and no row of logits proves it
    EQUIVALENT = "equivalent"  #: nothing differs: on this subject it is no fault


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultResult:
    """What came of one deliberate fault, planted in one place.

    The certificate plants faults in short programs of its own, in the certificate's dtype. A fault that a caller
    asked for is planted in the audit's own programs: from ``verdict`` on, the members say what the audit made of
    it. They are None in the certificate.
    """

    name: str
    breaks: str  #: the contract, in words
    expected_stages: tuple[Stage, ...]  #: the fault must first show at one of these
    layer: int | None  #: None for a fault outside the layers, or in all of them
    position: int | None  #: how many tokens the cache held when it first acted; None: from the first on
    outcome: Outcome
    where: str | None  #: the first value that differs
    right_stage: bool | None  #: whether the fault must first show there; None where nothing differs
    gap: float  #: of the first row that differs, relative to its largest logit; NaN where it is not known
    reason: str | None  #: what the decoder raised, or why not everything was compared
    verdict: Verdict | None
    largest_gap: float | None
    tolerance: float | None
    num_rows_beyond: int | None  #: rows whose gap exceeds the tolerance
    margin: float | None  #: largest faulty gap ÷ largest clean gap
    divergence: Divergence | None

    @property
    def caught(self) -> bool:
        """Whether the comparison rejects the fault."""
        return self.outcome is Outcome.CAUGHT


@dataclass(frozen=True, slots=True, kw_only=True)
class NotPlanted:
    """A fault that could not be planted, and why."""

    fault: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallestChange:
    """The smallest relative change of one entry of one layer that the audit sees, found by bisection."""

    dtype: str
    layer: int
    tensor: str
    position: int
    value: float | None  #: None where not even doubling the entry is seen


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """The evidence that this audit, on this subject, can fail."""

    dtype: str  #: in which the faults were planted
    sequence: tuple[int, ...]
    faults: tuple[FaultResult, ...]  #: one for each planted fault and place
    not_planted: tuple[NotPlanted, ...]
    clean_gap: float  #: the largest relative gap of the same programs without a fault
    margin: float | None  #: the smallest gap that was caught ÷ the largest clean one
    smallest_changes: tuple[SmallestChange, ...]
    problem: str | None  #: why the audit could not be shown able to fail, where it could not

    def number(self, outcome: Outcome) -> int:
        """Return how many faults came to an outcome."""
        return sum(result.outcome is outcome for result in self.faults)

    @property
    def num_right(self) -> int:
        """How many of the faults that were caught first show where they must."""
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
    """One place on the way to the logits: a row of a `Spread`."""

    name: str
    layer: int | None
    allowed: float  #: the gap beyond which a value is wrong here, as a part of the site's largest magnitude


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptSlot:
    """What one slot of a layer's cache held, from one call to another."""

    first_call: int
    last_call: int
    layer: int
    slot: int
    position: int  #: of the token that the slot must stand for
    token: str
    gap: float  #: the larger of the key's and the value's, as a part of their largest magnitude
    wrong: bool
    origin: str | None  #: what a wrong slot really holds, where that could be told


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Every value of one program, cached against uncached: where an error starts and what it reaches."""

    scenario: str
    fault: str | None  #: the deliberate fault, where one was planted
    dtype: str
    tokens: tuple[ConsumedToken, ...]  #: in the order in which they were consumed
    sites: tuple[SpreadSite, ...]  #: in causal order
    gaps: tuple[tuple[float | None, ...], ...]  #: [site][token], as parts; whole for what is no float
    kept: tuple[KeptSlot, ...]
    left_out: bool  #: the program consumes more tokens than are shown
