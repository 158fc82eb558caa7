"""Defines the table of a sweep: the results of many audits, as frozen data that JSON stores without loss."""

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
    """How the run of one group ended."""

    FINISHED = "finished"  #: it was audited; its cells hold the results
    REFUSED = "refused"  #: it cannot be built or audited on this system: a library or an ability is missing
    TIMED_OUT = "timed-out"  #: it was stopped at its time limit
    CRASHED = "crashed"  #: it raised an exception, or its process died


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What one audit runs on: a target, its dtype and attention, and the seed of its weights and tokens."""

    target: str  #: as `load_target` accepts it
    dtype: str
    attention: str
    length: int  #: tokens per sequence
    seed: int

    def __str__(self) -> str:
        return f"{self.target}, {self.dtype}, {self.attention}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """The result of one scenario of one job."""

    target: str
    dtype: str
    attention: str
    scenario: str
    advice: bool  #: the library advises against this scenario, so the group's verdict ignores it
    verdict: Verdict
    largest_gap: float  #: the largest absolute difference of logits
    num_rows: int  #: the number of rows that were compared
    sentence: str | None  #: if the verdict is not a pass: what was found or what was missing
    wall_s: float  #: of this scenario alone
    peak_mb: float  #: the peak resident memory of the process up to the end of the scenario, in 10^6 bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The run of one job in its own process: how it ended, and a cell for each scenario if it finished."""

    job: Job
    ending: Ending
    reason: str | None  #: why it did not finish, on one line
    wall_s: float  #: from the start of its process to its end
    peak_mb: float  #: the peak resident memory of its process, in 10^6 bytes, including imports
    cells: tuple[Cell, ...]

    @property
    def verdict(self) -> Verdict:
        """The worst verdict of its scenarios; inconclusive if it crashed or timed out, not checked if refused."""
        if self.ending in (Ending.CRASHED, Ending.TIMED_OUT):
            return Verdict.INCONCLUSIVE
        return worst([cell.verdict for cell in self.cells if not cell.advice])

    @property
    def outcome(self) -> str:
        """The verdict of a group that finished; otherwise its ending."""
        return self.verdict.value if self.ending is Ending.FINISHED else self.ending.value


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """What must be equal for groups to be in the same table."""

    kvproof: str  #: its version
    torch: str  #: its version
    transformers: str | None  #: its version; None if it is not installed
    length: int  #: tokens per sequence
    seed: int
    only: tuple[str, ...]  #: the scenarios to run; if empty, all
    without: tuple[str, ...]  #: the scenarios to skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """The requested groups that have ended, in the order of the request."""

    schema_version: int
    schema_minor: int = added_in(1, default=0)
    environment: Environment
    conditions: Conditions
    num_groups_asked: int
    groups: tuple[Group, ...]

    @property
    def partial(self) -> bool:
        """Whether requested groups are missing."""
        return len(self.groups) < self.num_groups_asked

    @property
    def cells(self) -> Iterator[Cell]:
        """Every cell of every group."""
        return (cell for group in self.groups for cell in group.cells)

    @property
    def verdict(self) -> Verdict:
        """The worst verdict of all groups."""
        return worst([group.verdict for group in self.groups])

    def has_refused(self, targets: tuple[str, ...]) -> bool:
        """Return whether any of these targets was refused."""
        return any(group.ending is Ending.REFUSED and group.job.target in targets for group in self.groups)

    @property
    def counts(self) -> dict[str, int]:
        """The number of groups with each outcome that occurred, the most harmless outcome first."""
        outcomes = [group.outcome for group in self.groups]
        order = [*Verdict, Ending.REFUSED, Ending.TIMED_OUT, Ending.CRASHED]
        return {name.value: outcomes.count(name.value) for name in order if name.value in outcomes}

    @property
    def summary(self) -> str:
        """One sentence: the number of groups, and the number with each outcome."""
        counts = ", ".join(f"{count} {outcome}" for outcome, count in self.counts.items())
        num_groups = f"{len(self.groups)} of {self.num_groups_asked}" if self.partial else str(len(self.groups))
        noun = "group" if num_groups == "1" else "groups"
        return f"{num_groups} {noun}: {counts or 'none has ended'}."
