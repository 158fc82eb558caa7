"""What a certificate shows, in sentences."""

from collections import Counter
from collections.abc import Iterator

from kvproof.contract.results import Certificate, FaultResult, Outcome, SmallestChange, SmallestStep

#: A sentence names at most this many faults.
_MAX_NAMES = 3
#: If a larger part of the caught faults first shows elsewhere, localisation is weak on this subject.
MOST_MISPLACED = 0.2


def reach_sentence(certificate: Certificate) -> str | None:
    """Return how far the programs with planted faults go, and how far the audit went; None if unknown."""
    reached, planted = certificate.reached, certificate.planted_in
    if reached is None or planted is None:
        return None
    parts = [
        f"sequences of up to {planted.num_tokens} tokens (the audit: {reached.num_tokens})",
        f"blocks of up to {planted.block_len} on a warm cache ({reached.block_len})",
    ]
    if reached.num_rows > 1:
        parts.append(f"batches of up to {planted.num_rows} rows ({reached.num_rows})")
    return f"planted in {', '.join(parts)}"


def unseen_sentence(certificate: Certificate) -> str | None:
    """Return which planted errors no row of logits showed, or None; there is no full stop."""
    hidden = [result for result in certificate.faults if result.outcome is Outcome.HIDDEN]
    parts = []
    if hidden:
        places = list(dict.fromkeys(map(_place, hidden)))
        more = f" and {len(places) - _MAX_NAMES} more" if len(places) > _MAX_NAMES else ""
        parts.append(
            f"{len(hidden)} of {len(certificate.faults)} planted faults changed no row (hidden): "
            f"{', '.join(places[:_MAX_NAMES])}{more}"
        )
    unseen = [change for change in certificate.smallest_changes if change.value is None]
    parts += [f"in {change.dtype} even doubling {describe_entry(change)} is not seen" for change in unseen]
    steps = (step for step in certificate.smallest_steps if not step.seen)
    parts += [f"in {step.dtype} {_step(step)}: not seen" for step in steps]
    return "; ".join(parts) or None


def misplaced_sentence(certificate: Certificate) -> str | None:
    """Return why so many caught faults first showed at a place that is not theirs, or None if few did."""
    caught = [result for result in certificate.faults if result.caught]
    wrong = [result for result in caught if not result.right_stage]
    if len(wrong) <= MOST_MISPLACED * len(caught):
        return None
    (where, num), *_ = Counter(result.where for result in wrong).most_common(1)
    shown = certificate.shown_stages
    expected = dict.fromkeys(stage for result in wrong for stage in result.expected_stages)
    unseen = [stage.value for stage in expected if stage not in shown]
    hides = f", and not {', '.join(unseen)}" if unseen else ""
    return (
        f"{len(wrong)} of {len(caught)} caught faults first showed at another stage than theirs, most often "
        f"({num}) at {where or 'the logits'}. This subject's taps show "
        f"{', '.join(stage.value for stage in shown)}{hides}. "
        "So a finding may name a later value than the one that went wrong"
    )


def describe_entry(change: SmallestChange) -> str:
    """Return which entry was changed."""
    name = {"k": "newest key", "v": "newest value"}.get(change.tensor, change.tensor)
    return f"layer {change.layer}'s {name}"


def step_sentences(certificate: Certificate) -> Iterator[str]:
    """Yield, for each dtype, whether the smallest whole steps are seen."""
    for dtype in dict.fromkeys(step.dtype for step in certificate.smallest_steps):
        own = (step for step in certificate.smallest_steps if step.dtype == dtype)
        yield f"in {dtype} alone, " + "; ".join(f"{_step(s)}: {'seen' if s.seen else 'not seen'}" for s in own)


def _step(step: SmallestStep) -> str:
    if step.what == "mask":
        return f"a mask that hides one slot{'' if step.layer is None else f' of layer {step.layer}'}"
    return "positions off by one"


def _place(result: FaultResult) -> str:
    layer = "" if result.layer is None else f" in layer {result.layer}"
    position = "" if result.position is None else f" after {result.position} tokens"
    row = "" if result.batch_row is None else f" in batch row {result.batch_row}"
    return f"{result.name}{layer}{row}{position}"
