"""The report: the request for an audit and its results, without tensors. JSON holds it without loss."""

from collections.abc import Iterator
from dataclasses import dataclass
from html import escape

from kvproof.contract.codec import added_in
from kvproof.contract.environment import Environment
from kvproof.contract.findings import group_findings
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
from kvproof.contract.sentences import traceback_of
from kvproof.contract.text import printable
from kvproof.contract.upgrades import report_from_version_1
from kvproof.contract.versions import Version

#: The major number rises when a member changes its meaning or is removed, the minor one when a member is added.
VERSION = Version(what="schema", major=2, minor=1, upgrades={1: report_from_version_1})


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
    #: the smallest change, as a part of a row's largest logit, that this audit calls a bug in every row
    smallest_bug: float | None = added_in(1, None)
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


def brief(report: Report) -> str:
    """Return the verdict, what led to it, and what was not checked."""
    return "\n".join(printable(line) for part in _parts(report) for line in part.split("\n"))


def brief_html(report: Report) -> str:
    """Return the same for a notebook; what tokens hold is shown and never run."""
    return f"<pre>{escape(brief(report))}</pre>"


def _parts(report: Report) -> Iterator[str]:
    subject = report.subject
    yield report.summary
    yield f"{subject.name}: {subject.num_layers} layers, vocabulary {subject.vocab_size}, {subject.dtype}"
    failed = (s for s in report.scenarios if not s.verdict.passes and s.verdict is not Verdict.NOT_CHECKED)
    for group in group_findings(failed):
        scenario, advice = group.first, ", advice" if group.first.advice else ""
        yield f"\n{scenario.name} ({scenario.verdict.value}{advice}): {group.text}"
        if (traceback := traceback_of(scenario)) is not None:
            yield traceback
    yield ""
    for verdict in Verdict:
        names = [s.name for s in report.scenarios if s.verdict is verdict]
        if names:
            yield f"{verdict.value} ({len(names)}): {', '.join(names)}"
    if report.certificate is not None:
        caught = sum(result.caught for result in report.certificate.faults)
        yield f"certificate: {caught} of {len(report.certificate.faults)} planted faults were caught"
    yield from (f"note: {note}" for note in report.notes)
