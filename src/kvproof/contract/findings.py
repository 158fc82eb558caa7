"""One cause, one paragraph: scenarios that show the same finding are told together.

Scenarios show the same finding if the first wrong value is at the same place, with the same likely cause; if the
cached path raises the same kind of exception from the same lines; or if nothing was compared for the same reason.
The first scenario is told in full, and the others are listed after it. All renderers group in this way.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from kvproof.contract.results import Divergence, Raise, ScenarioResult, Verdict
from kvproof.contract.sentences import finding_of, side_sentence
from kvproof.contract.stages import Stage


@dataclass(frozen=True, slots=True, kw_only=True)
class FindingGroup:
    """A finding, and the scenarios that show it."""

    scenarios: tuple[ScenarioResult, ...]  #: at least one; the first is told in full

    @property
    def first(self) -> ScenarioResult:
        """The scenario that is told in full."""
        return self.scenarios[0]

    @property
    def text(self) -> str:
        """The finding in one or more sentences, and the other scenarios that show it."""
        return "\n".join((finding_of(self.first), *self.more))

    @property
    def more(self) -> tuple[str, ...]:
        """Sentences on the other scenarios: their names, and in what they differ from the first."""
        others = self.scenarios[1:]
        if not others:
            return ()
        names = ", ".join(other.name for other in others)
        count = f"{len(others)} more scenarios: {names}" if len(others) > 1 else names
        return (f"The same finding in {count}.", *self._other_sides(), *self._other_confirmations())

    def _other_sides(self) -> Iterable[str]:
        """Yield what other scenarios say about the wrong side, where the first says nothing or something else."""
        told = {_suspect(self.first)}
        for other in self.scenarios[1:]:
            if _suspect(other) is not None and _suspect(other) not in told:
                told.add(_suspect(other))
                yield f"In {other.name}, {side_sentence(other)}"

    def _other_confirmations(self) -> Iterable[str]:
        """Yield which scenarios do not share the first one's confirmation."""
        tried = [s for s in self.scenarios if s.divergence is not None and s.divergence.introduced]
        if not tried or self.first not in tried:
            return
        assert self.first.divergence is not None
        is_confirmed = self.first.divergence.confirmed
        unlike = [s.name for s in tried if s.divergence and s.divergence.confirmed is not is_confirmed]
        if unlike:
            yield f"{'Not confirmed' if is_confirmed else 'Confirmed'} in {', '.join(unlike)}."


def group_findings(scenarios: Iterable[ScenarioResult]) -> tuple[FindingGroup, ...]:
    """Return the findings of scenarios in their order, each once, with all scenarios that show it."""
    groups: dict[object, list[ScenarioResult]] = {}
    for scenario in scenarios:
        groups.setdefault(finding_key(scenario), []).append(scenario)
    return tuple(FindingGroup(scenarios=tuple(group)) for group in groups.values())


def finding_key(scenario: ScenarioResult) -> tuple[object, ...]:
    """Return a key that scenarios share exactly if they show the same finding."""
    own = (scenario.advice, scenario.verdict)
    divergence, raised = scenario.divergence, scenario.raised
    if divergence is not None or raised is not None:
        place = None if divergence is None else _place(divergence)
        return (*own, place, None if raised is None else _origin(raised), scenario.condition)
    if any(row.verdict is Verdict.DIVERGED for row in scenario.rows):
        return (*own, scenario.condition or scenario.name)  # rows alone do not tell one cause from another
    return (*own, scenario.reason or scenario.name)


def _place(divergence: Divergence) -> tuple[object, ...]:
    site: object = divergence.site or divergence.introduced[:1]
    if not site and divergence.stage is Stage.MODULE:  # an older report does not say which module it was
        site = divergence.sentence
    # Rows of one scenario may agree although a value is wrong: in another, the same value reaches the logits.
    return (divergence.stage, divergence.layer, site, divergence.contract)


def _origin(raised: Raise) -> tuple[object, ...]:
    """Return the exception's type and the decoder's own lines: its message may hold lengths."""
    frames = tuple(re.findall(r'File ".*?", line \d+', raised.traceback or ""))
    kind = raised.error.partition(":")[0] if frames else raised.error
    return (kind, frames, raised.layer)


def _suspect(scenario: ScenarioResult) -> str | None:
    """Return which path is the suspect, in words; None if that is open."""
    ways = scenario.four_ways
    return None if ways is None or ways.suspect is None else ways.sentence.partition(":")[0]
