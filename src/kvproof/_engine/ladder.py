"""The ladder of rungs above the declared dtype: float64, float32, or none, and the truth from elsewhere.

What a rung can tell apart from rounding follows from what it is: it proves itself before it judges.
"""

import math
from collections.abc import Callable, Iterator

import torch

from kvproof._engine.rung import Prefix, Rung
from kvproof._engine.rung_proof import (
    Inside,
    exact_dtypes,
    inner_rounding,
    look_inside,
    mean_squares,
    noise_of_all_ways,
)
from kvproof._numerics.dtypes import dtype_of, name_of
from kvproof._numerics.tolerances import FLOAT64_NOISE, HIDDEN_UNITS, NOISE_FACTOR, SAME_FUNCTION_UNITS, TOP_RUNG
from kvproof.errors import SubjectError, UsageError
from kvproof.scenarios import Ability
from kvproof.subjects import Subject


class Ladder:
    """The most exact rung that a subject has, what is known of it, and the truth where one was given."""

    def __init__(self, declared: Rung, *, wanted: bool) -> None:
        self.declared = declared
        self._dtype = dtype_of(declared.subject.info.dtype)
        self.top: Rung | None = None
        self.no_top_reason: str | None = None if wanted else "left out as asked"
        self.truth: Rung | None = None  #: the same weights in another implementation, which has float64
        self.problem: str | None = None  #: why the exact rung is none, where that is a mistake to be mended
        self.inside: Inside | None = None  #: what the most exact rung computes in, or else the declared one
        #: How far what the exact rung computes in a coarser dtype may move a row, as a part of its scale.
        self.inner_rounding = 0.0
        if wanted and Ability.CAST in declared.subject.info.abilities:
            self._climb()
        elif wanted and self._dtype is TOP_RUNG:
            self.top = declared
        elif wanted:
            self.no_top_reason = "the subject cannot be cast"

    @property
    def dtype(self) -> str:
        """The most exact rung's dtype."""
        return (self.top or self.declared).subject.info.dtype

    def set_truth(self, truth: Subject) -> None:
        """Take errors from another implementation of the same weights, for a subject without float64.

        Raises `UsageError` for a truth that is not needed, has another vocabulary or cannot compute in float64.
        """
        own, other = self.declared.subject.info, truth.info
        if self.top is not None:
            raise UsageError(f"{own.name} can be run in {self.top.subject.info.dtype} itself: it needs no truth")
        if own.vocab_size != other.vocab_size:
            raise UsageError(
                f"the truth {other.name} has {other.vocab_size} logits, and {own.name} {own.vocab_size}: they "
                "are not of the same weights"
            )
        if other.dtype != name_of(TOP_RUNG):
            if Ability.CAST not in other.abilities:
                raise UsageError(
                    f"the truth {other.name} computes in {other.dtype} and cannot be cast to float64"
                )
            truth = truth.cast(TOP_RUNG)
        self.truth = Rung(truth)

    def _climb(self) -> None:
        """Take the most exact dtype that the subject can be cast to."""
        for dtype in exact_dtypes(self._dtype):
            try:
                self.top = Rung(self.declared.subject.cast(dtype))
            except SubjectError as error:
                self.no_top_reason = self.no_top_reason or str(error).splitlines()[0]
            else:
                return

    def drop_top(self, error: SubjectError | str) -> None:
        """Go on without a more exact rung, and remember why."""
        self.top, self.no_top_reason, self.inner_rounding = None, str(error).splitlines()[0], 0.0

    def give_up_looking(self, error: SubjectError) -> None:
        """Go on without what a look inside would have shown, because the decoder raised."""
        if self.top is not None and self.top is not self.declared:
            self.drop_top(error)
        self.inside = Inside(coarsest=None, lowered=(), unseen=str(error).splitlines()[0])

    @property
    def can_sample(self) -> bool:
        """Whether random rounding reaches everything that the exact rung computes."""
        return self.top is not None and self.inside is not None and self.inside.unseen is None

    @property
    def is_exact(self) -> bool:
        """Whether there is a rung that computes in float64 throughout, so that a value that differs is a bug."""
        if self.top is None or self.inside is None or self.top.subject.info.dtype != name_of(TOP_RUNG):
            return False
        return self.inner_rounding == 0.0

    def prove(self, sequence: Prefix, is_explained: Callable[[Prefix], bool]) -> None:
        """Look inside the most exact rung, and give it up where it is another function.

        ``is_explained`` says whether random rounding moves the exact rows of a sequence about as far as the
        declared dtype's are from them. Raises `SubjectError` where the decoder does, and `UsageError` for a truth
        that is another function.
        """
        if self.top is None:
            self._look_at_declared(sequence)
            return
        self.inside = look_inside(self.top, sequence)
        if self.top is self.declared and self.inside.is_float64:
            return
        self.inner_rounding = self._rounding_inside(self.top, self.inside, sequence)
        if self.top is self.declared or self._is_near(self.top, sequence):
            return
        if not (self.can_sample and is_explained(sequence)):
            problem = (
                f"the {self.dtype} run computes another function: its uncached rows differ from those in "
                f"{self.declared.subject.info.dtype} by more than rounding explains"
            )
            self.drop_top(problem)
            self.problem = problem
            self._look_at_declared(sequence)

    def notes(self) -> Iterator[str]:
        """Yield what the rungs that there are cannot show."""
        if self.top is None:
            by = "noise alone decides" if self.truth is None else f"{self.truth.subject.info.name} is the truth"
            if self.no_top_reason is not None:
                yield f"no float64 rung, so {by}: {self.no_top_reason}"
        elif self.inside is not None and self.inner_rounding:
            why = self.inside.unseen or f"inside, {', '.join(self.inside.lowered[:3])}"
            if self.dtype != name_of(TOP_RUNG):
                why = self.no_top_reason or "float64 was not to be had"
            yield (
                f"the {self.dtype} rung is no better than {self.inner_rounding:.1e} of a row's scale ({why}): a "
                f"gap is called a bug from {NOISE_FACTOR.value * self.inner_rounding:.1e} on"
            )

    def _look_at_declared(self, sequence: Prefix) -> None:
        self.inside = look_inside(self.declared, sequence)
        if self.truth is not None and not self._is_near(self.truth, sequence):
            raise UsageError(
                f"the truth {self.truth.subject.info.name} computes another function: its uncached rows differ "
                "by more than rounding explains"
            )

    def _rounding_inside(self, top: Rung, inside: Inside, sequence: Prefix) -> float:
        """Measure how far what a rung computes in a coarser dtype may move a row, or assume it."""
        unit = torch.finfo(torch.float32).eps
        assumed = HIDDEN_UNITS.value * unit
        if self.dtype != name_of(TOP_RUNG):
            return assumed
        if inside.unseen is not None:
            # Ways that agree to the unit of float64 may hold a float32 result: it rounds alike in all. And
            # what parts them by more than float32 could do is no rounding.
            noise = noise_of_all_ways(top, sequence)
            return unit / 2 if not FLOAT64_NOISE.value < noise <= assumed else assumed
        return inner_rounding(top, sequence) if inside.lowered else 0.0

    def _is_near(self, exact: Rung, sequence: Prefix) -> bool:
        """Return whether the declared dtype's rows are as near to more exact ones as its unit lets them be.

        Of an engine whose logits are float32 the activations may be quantised: half of the rows' size is near.
        """
        error, size = mean_squares(self.declared, exact, sequence)
        part = SAME_FUNCTION_UNITS.value * torch.finfo(self._dtype).eps
        part = 0.5 if exact is self.truth else min(part, 0.5)
        # What is not finite is judged row by row.
        return not (math.isfinite(error) and math.isfinite(size)) or error <= part**2 * size
