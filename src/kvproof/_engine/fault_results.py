"""What a fault came to that was planted in an audit's own programs."""

from kvproof._numerics.gaps import largest
from kvproof.contract.results import Divergence, FaultResult, Outcome, ScenarioResult, Verdict
from kvproof.contract.stages import Site, Stage
from kvproof.faults import Fault


def fault_result(fault: Fault, result: ScenarioResult, clean_gap: float) -> FaultResult:
    """Return what a scenario with a planted fault shows; ``clean_gap`` is the largest gap without one."""
    beyond = [row for row in result.rows if not row.gap <= row.allowed]
    first = result.divergence
    reason = result.reason if result.raised is None else result.raised.error
    if result.verdict is Verdict.DIVERGED:
        outcome = Outcome.CAUGHT
    elif result.verdict in (Verdict.RAISED, Verdict.INCONCLUSIVE) and reason is not None:
        outcome = Outcome.RAISED
    else:
        outcome = Outcome.HIDDEN if first is not None or beyond else Outcome.EQUIVALENT
    return FaultResult(
        name=fault.name,
        breaks=fault.breaks,
        expected_stages=tuple(stage for stage in Stage if stage in fault.stages),
        layer=fault.place.layer,
        position=fault.place.position,
        outcome=outcome,
        where=None if first is None else _place_of(first),
        right_stage=None if first is None else fault.must_show_at(first.stage, first.layer),
        gap=largest(row.gap / row.scale if row.scale else row.gap for row in beyond[:1] or result.rows),
        reason=reason,
        verdict=result.verdict,
        largest_gap=result.largest_gap,
        tolerance=max((row.allowed for row in result.rows), default=0.0),
        num_rows_beyond=len(beyond),
        margin=result.largest_gap / clean_gap if clean_gap else float("inf"),
        divergence=first,
    )


def _place_of(divergence: Divergence) -> str:
    """Return the site of a divergence in words, as the certificate names it."""
    if divergence.introduced:
        return divergence.introduced[0].partition(" (by way of ")[0]
    return str(Site(divergence.stage, divergence.layer)) if divergence.stage is not Stage.MODULE else "a module"
