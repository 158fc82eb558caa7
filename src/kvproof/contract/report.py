"""The report: the request for an audit and its results, without tensors. JSON holds it without loss."""

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

#: The major number rises when a member changes its meaning or is removed, the minor one when a member is added.
VERSION = Version(what="schema", major=2, minor=0, upgrades={1: report_from_version_1})


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditRequest:
    """The request to ``kvproof audit``, from which the subject and its programs can be created again."""

    target: str | None  #: as typed; None if there is a ``config`` instead
    config: str | None  #: configuration file of a random model
    dtype: str
    attention: str
    device: str
    trust_remote_code: bool
    seed: int  #: for random weights, tokens and programs
    sequences: tuple[tuple[int, ...], tuple[int, ...]]  #: the tokens that the scenarios consume
    num_programs: int  #: number of random programs, in addition to the catalogue
    command: str | None  #: the command that repeats the audit; None without a command line


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The results of one audit."""

    schema_version: int
    schema_minor: int
    verdict: Verdict
    summary: str
    environment: Environment
    request: AuditRequest | None  #: None for the milestone and for audits from Python
    subject: SubjectInfo
    tolerance: Tolerance
    constants: tuple[Constant, ...]
    scenarios: tuple[ScenarioResult, ...]
    faults: tuple[FaultResult, ...]
    certificate: Certificate | None
    notes: tuple[str, ...]  #: anything else that a reader must know, such as that there was no float64 run
    partial: bool  #: interrupted or stopped at the first finding, so scenarios may be missing
    spreads: tuple[Spread, ...]  #: of the first finding, or else of a passing program; then of each planted fault
    milestone: Milestone | None

    @property
    def exit_status(self) -> int:
        """The command line's exit status: the verdict's, or 1 if the milestone's gate fails."""
        if self.milestone is not None and not self.milestone.passed:
            return self.verdict.exit_status or 1
        return self.verdict.exit_status

    def __repr__(self) -> str:
        """Return the report on one screen, for an interactive prompt."""
        return brief(self)

    __str__ = __repr__

    def _repr_html_(self) -> str:
        """Return the report on one screen, for a notebook."""
        return brief_html(self)
