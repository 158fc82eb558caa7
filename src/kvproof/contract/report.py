"""The report: what one audit was asked and what it found. Nothing is a tensor, and JSON holds it without loss."""

from dataclasses import dataclass

from kvproof.contract.environment import Environment
from kvproof.contract.milestone import Milestone
from kvproof.contract.results import (
    Certificate,
    Constant,
    FaultResult,
    ScenarioResult,
    Spread,
    SubjectInfo,
    Tolerance,
    Verdict,
)
from kvproof.contract.sentences import brief, brief_html
from kvproof.contract.upgrades import report_from_version_1
from kvproof.contract.versions import Version

#: The major number rises when a member changes its meaning or goes away, the minor one when a member is added.
VERSION = Version(what="schema", major=2, minor=0, upgrades={1: report_from_version_1})


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditRequest:
    """What ``kvproof audit`` was asked: the subject and its programs can be made from it again."""

    target: str | None  #: as it was typed; None where ``config`` stands for it
    config: str | None  #: the configuration file of a random model
    dtype: str
    attention: str
    device: str
    trust_remote_code: bool
    seed: int  #: of random weights, random tokens and random programs
    sequences: tuple[tuple[int, ...], tuple[int, ...]]  #: the tokens that the catalogue was made over
    num_programs: int  #: random programs besides the catalogue's
    command: str | None  #: the line to type to run it again; None where no command line asked


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What one audit found."""

    schema_version: int
    schema_minor: int
    verdict: Verdict
    summary: str
    environment: Environment
    request: AuditRequest | None  #: None for the milestone, and where an audit was called from Python
    subject: SubjectInfo
    tolerance: Tolerance
    constants: tuple[Constant, ...]
    scenarios: tuple[ScenarioResult, ...]
    faults: tuple[FaultResult, ...]
    certificate: Certificate | None
    notes: tuple[str, ...]  #: what else a reader must know, as that there was no float64 rung
    partial: bool  #: interrupted, or stopped at the first finding: scenarios may be missing
    spreads: tuple[Spread, ...]  #: of the first finding, or of a program without one; then of each fault
    milestone: Milestone | None

    @property
    def exit_status(self) -> int:
        """The command line's exit status: the verdict's, or 1 where the milestone's gate fails."""
        if self.milestone is not None and not self.milestone.passed:
            return self.verdict.exit_status or 1
        return self.verdict.exit_status

    def __repr__(self) -> str:
        """Return the report on one screen: what a prompt shows."""
        return brief(self)

    __str__ = __repr__

    def _repr_html_(self) -> str:
        """Return the report on one screen: what a notebook shows."""
        return brief_html(self)
