"""The contract: reports, ledgers and tables as frozen data. Standard library only."""

from kvproof.contract.environment import Environment
from kvproof.contract.ledger import End, Entry, Header, LedgerFile, MarginVerdict, Run, Source, Step, StopReason
from kvproof.contract.milestone import Milestone
from kvproof.contract.report import AuditRequest, Report
from kvproof.contract.results import (
    Certificate,
    ChoiceEvidence,
    ChoiceFlip,
    Comparison,
    Constant,
    Divergence,
    Evidence,
    ExactEvidence,
    FaultResult,
    FourWays,
    Mutant,
    NotPlanted,
    Outcome,
    RowResult,
    ScenarioResult,
    SmallestChange,
    Spread,
    SubjectInfo,
    Tolerance,
    Verdict,
)
from kvproof.contract.stages import Site, Stage
from kvproof.contract.sweep_table import Sweep

__all__ = [
    "AuditRequest",
    "Certificate",
    "ChoiceEvidence",
    "ChoiceFlip",
    "Comparison",
    "Constant",
    "Divergence",
    "End",
    "Entry",
    "Environment",
    "Evidence",
    "ExactEvidence",
    "FaultResult",
    "FourWays",
    "Header",
    "LedgerFile",
    "MarginVerdict",
    "Milestone",
    "Mutant",
    "NotPlanted",
    "Outcome",
    "Report",
    "RowResult",
    "Run",
    "ScenarioResult",
    "Site",
    "SmallestChange",
    "Source",
    "Spread",
    "Stage",
    "Step",
    "StopReason",
    "SubjectInfo",
    "Sweep",
    "Tolerance",
    "Verdict",
]
