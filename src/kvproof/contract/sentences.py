"""What an audit found, in sentences."""

from kvproof.contract.results import Divergence, Raise, ScenarioResult, Verdict
from kvproof.contract.text import one_line

#: A sentence shows at most this many tokens, and at most this many characters of an exception.
_MAX_TOKENS, _MAX_ERROR = 12, 300


def finding_of(scenario: ScenarioResult) -> str:
    """Return the reason for a scenario's verdict, in one or more sentences."""
    return found(scenario) or scenario.reason or f"largest gap {scenario.largest_gap:.4g}"


def found(scenario: ScenarioResult) -> str | None:
    """Return what a scenario found, and whether it is only advice.

    That is where it went wrong, which path is the suspect, and what the cached path raised.
    """
    bad = next((row for row in scenario.rows if row.verdict is Verdict.DIVERGED), None)
    lines = []
    if scenario.divergence is not None:
        lines.append(finding(scenario.divergence))
    elif bad is not None:
        lines.append(f"after {bad.tokens}: {bad.reason}.")
    if scenario.condition is not None and lines:
        lines.append(f"When: {scenario.condition}.")
    if scenario.four_ways is not None:
        lines.append(f"Which side: {side_sentence(scenario)}")
    if scenario.raised is not None:
        sentence = raise_sentence(scenario.raised)
        lines.append(f"{sentence[:1].upper()}{sentence[1:]}." if lines else f"{sentence}.")
    if lines and scenario.advice:
        lines.append("This is advice, and no part of the verdict: the caller chose what leads to it.")
    return "\n".join(lines) or None


def side_sentence(scenario: ScenarioResult) -> str:
    """Return which side of a scenario is wrong, in words, or nothing if it was not asked."""
    return "" if scenario.four_ways is None else f"{scenario.four_ways.sentence}."


def finding(divergence: Divergence) -> str:
    """Return where a path first went wrong, which contract that breaks, and whether it was confirmed."""
    lines = [f"{divergence.sentence}.", f"Likely cause: {divergence.contract}."]
    if divergence.introduced:
        lines.append(confirmation(divergence))
    return "\n".join(lines)


def confirmation(divergence: Divergence) -> str:
    """Return whether replacing values with the uncached ones made the paths agree, and which values."""
    places = divergence.introduced
    agree, made = "the logits agree", "the logits agree"
    if not divergence.logits_differ:
        agree, made = "every value agrees", "every value agree"
    if not divergence.confirmed:
        more = f" and {len(places) - 1} more value{'s' if len(places) > 2 else ''}" if len(places) > 1 else ""
        return f"Not confirmed: replacing {places[0]}{more} with uncached values does not show that {agree}."
    if len(places) == 1:
        return f"Confirmed: replacing {places[0]} with the uncached value makes {made}."
    return (
        f"Confirmed: replacing these {len(places)} values with the uncached ones makes {made}. Each is wrong "
        f"independently of the ones before it: {'; '.join(places)}."
    )


def raise_sentence(raised: Raise, scenario: str | None = None) -> str:
    """Return what the cached path raised, in which call, which tokens that call was fed, and after which tokens.

    ``scenario`` is its name, if the sentence must say it. There is no full stop.
    """
    what = "raises" if raised.traceback is not None else "gives a malformed row"
    call = f"call {raised.call + 1}"
    if raised.operation not in ("extend", "generate"):
        call = f"{raised.operation} before {call}"
    parts = [call if scenario is None else f"{call} of {scenario}"]
    fed, after = _tokens(raised.fed_text, raised.fed), _tokens(raised.consumed_text, raised.consumed)
    at = "" if raised.position is None else f" at position {raised.position}"
    verb = "generating from" if raised.operation == "generate" else "fed"
    tokens = " ".join(filter(None, (f"{verb} {fed}{at}" if fed else "", f"after {after}" if after else "")))
    parts += [tokens] if tokens else []
    parts += [] if raised.layer is None else [f"in layer {raised.layer}"]
    error = one_line(raised.error, _MAX_ERROR).rstrip(".")
    return (
        f"the cached path {what} in {', '.join(parts)}: {error}; the uncached path gives a row for these tokens"
    )


def traceback_of(scenario: ScenarioResult) -> str | None:
    """Return the decoder's own traceback, if the cached path raised; it has several lines."""
    raised = scenario.raised
    return None if raised is None or raised.traceback is None else raised.traceback.rstrip("\n")


def _tokens(text: str, ids: tuple[tuple[int, ...], ...]) -> str:
    num = sum(map(len, ids))
    return text if num <= _MAX_TOKENS else f"{num} tokens"
