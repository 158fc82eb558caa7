"""The table of a sweep: many audits side by side, as frozen data that JSON holds without loss."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from kvproof.contract.codec import added_in
from kvproof.contract.environment import Environment
from kvproof.contract.results import Verdict, worst
from kvproof.contract.versions import Version

#: The major number rises when a member changes its meaning or goes away, the minor one when a member is added.
VERSION = Version(what="schema", major=1, minor=1, upgrades={})


class Ending(StrEnum):
    """How the run of one group came to its end."""

    FINISHED = "finished"  #: it was audited; what was found stands in its cells
    REFUSED = "refused"  #: it cannot be built or audited here: a library or an ability is missing
    TIMED_OUT = "timed-out"  #: it was cut off at its time limit
    CRASHED = "crashed"  #: it raised, or its process died


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What one audit runs on: a target at one dtype and attention, and the seed of its weights and tokens."""

    target: str  #: as `load_target` takes it
    dtype: str
    attention: str
    length: int  #: tokens a sequence
    seed: int

    def __str__(self) -> str:
        return f"{self.target}, {self.dtype}, {self.attention}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """What one scenario of one job came to."""

    target: str
    dtype: str
    attention: str
    scenario: str
    advice: bool  #: the scenario does what the library advises against: no part of the group's verdict
    verdict: Verdict
    largest_gap: float  #: absolute difference of logits
    num_rows: int  #: rows compared
    sentence: str | None  #: where the verdict is no pass, what was found or what was missing
    wall_s: float  #: of this scenario alone
    peak_mb: float  #: the process's peak of resident memory until its end, in 10^6 bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """One job's run in a process of its own: how it ended, and a cell for each scenario if it finished."""

    job: Job
    ending: Ending
    reason: str | None  #: why it did not finish, in one line
    wall_s: float  #: from the start of its process to its end
    peak_mb: float  #: of its process's resident memory, in 10^6 bytes, imports included
    cells: tuple[Cell, ...]

    @property
    def verdict(self) -> Verdict:
        """The worst of its scenarios; what crashed or timed out is inconclusive, what was refused not checked."""
        if self.ending in (Ending.CRASHED, Ending.TIMED_OUT):
            return Verdict.INCONCLUSIVE
        return worst([cell.verdict for cell in self.cells if not cell.advice])

    @property
    def outcome(self) -> str:
        """The verdict of a group that finished, and the ending of any other."""
        return self.verdict.value if self.ending is Ending.FINISHED else self.ending.value


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """What must be equal for the groups of one table to stand side by side."""

    kvproof: str  #: versions
    torch: str
    transformers: str | None  #: None where it is not installed
    length: int  #: tokens a sequence
    seed: int
    only: tuple[str, ...]  #: the scenarios that were asked for; empty: every one
    without: tuple[str, ...]  #: scenarios left out


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """The groups that were asked for and have ended, in the order in which they were asked for."""

    schema_version: int
    schema_minor: int = added_in(1, default=0)
    environment: Environment
    conditions: Conditions
    num_groups_asked: int
    groups: tuple[Group, ...]

    @property
    def partial(self) -> bool:
        """Whether groups that were asked for are missing."""
        return len(self.groups) < self.num_groups_asked

    @property
    def cells(self) -> Iterator[Cell]:
        """Every cell of every group."""
        return (cell for group in self.groups for cell in group.cells)

    @property
    def verdict(self) -> Verdict:
        """The worst verdict of all groups."""
        return worst([group.verdict for group in self.groups])

    def refused(self, targets: "tuple[str, ...]") -> bool:
        """Whether one of these targets was refused."""
        return any(group.ending is Ending.REFUSED and group.job.target in targets for group in self.groups)

    @property
    def counts(self) -> dict[str, int]:
        """How many groups had each outcome that occurred, harmless ones first."""
        outcomes = [group.outcome for group in self.groups]
        order = [*Verdict, Ending.REFUSED, Ending.TIMED_OUT, Ending.CRASHED]
        return {name.value: outcomes.count(name.value) for name in order if name.value in outcomes}

    @property
    def summary(self) -> str:
        """One sentence: how many groups, and how many had each outcome."""
        counts = ", ".join(f"{count} {outcome}" for outcome, count in self.counts.items())
        missing = f" of {self.num_groups_asked} asked for" if self.partial else ""
        return f"{len(self.groups)} groups{missing}: {counts or 'none has ended'}."
