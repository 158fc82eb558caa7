"""What the programs of one scenario have shown so far, and what checking them gives besides."""

import dataclasses
from collections import Counter

from kvproof._engine.conclusion import empty_result, scenario_result
from kvproof._engine.verdict_rules import judge_scenario
from kvproof.contract.results import Divergence, ErrorRatio, FourWays, Raise, RowResult, ScenarioResult, Verdict
from kvproof.faults import Fault
from kvproof.scenarios import RANDOM_PROGRAMS, Scenario


@dataclasses.dataclass(slots=True)
class SideResults:
    """What checking scenarios gives besides their results."""

    #: The first finding, and each fault's.
    found: dict[Fault | None, tuple[Scenario, Divergence]] = dataclasses.field(default_factory=dict)
    without_exact: dict[str, str] = dataclasses.field(default_factory=dict)  #: why, by scenario
    made: Counter[str] = dataclasses.field(default_factory=Counter)  #: by all random programs together

    def __iadd__(self, later: "SideResults") -> "SideResults":
        self.found = later.found | self.found
        self.without_exact |= later.without_exact
        self.made += later.made
        return self


@dataclasses.dataclass(slots=True)
class ScenarioCheck:
    """What the programs of one scenario have shown so far."""

    rows: list[RowResult] = dataclasses.field(default_factory=list)
    num_values: int = 0
    errors: ErrorRatio | None = None
    divergence: Divergence | None = None
    four_ways: FourWays | None = None
    raised: Raise | None = None  #: the first time that the cached path raised
    undecided: str | None = None  #: why a program could not be run to its end, where that proves nothing
    refused: str | None = None  #: which operation the decoder cannot carry out at its place, by design
    unreached: str | None = None  #: what a program was meant to reach or do, and did not

    def result(self, scenario: Scenario, *, is_proof: bool) -> ScenarioResult:
        """Return the scenario's result; ``is_proof`` says that a wrong value on the way is a bug by itself."""
        # The other random programs show what they show; a scenario of the catalogue is what it says, or nothing.
        is_cut = self.refused is not None and (scenario.name != RANDOM_PROGRAMS or not self.rows)
        verdict = judge_scenario(
            self.rows,
            errors=self.errors,
            wrong_value=is_proof and self.divergence is not None,
            raised=self.raised is not None,
            undecided=self.undecided is not None,
            unreached=self.unreached is not None,
            refused=is_cut,
        )
        if verdict is Verdict.NOT_CHECKED and self.refused is not None:
            return empty_result(scenario.name, verdict, self.refused, advice=scenario.advice)
        reasons = [reason for reason in (self.undecided, self.unreached, self.refused) if reason is not None]
        return dataclasses.replace(
            scenario_result(scenario.name, verdict, tuple(self.rows), reason="; ".join(reasons) or None),
            advice=scenario.advice,
            num_values_compared=self.num_values,
            divergence=self.divergence,
            four_ways=self.four_ways,
            errors=self.errors,
            raised=self.raised,
        )
