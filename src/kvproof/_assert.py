"""An audit as an assertion: it passes silently, or its message is the finding."""

from collections.abc import Callable, Collection, Iterable
from typing import TypedDict, Unpack

from kvproof._engine.audit import audit
from kvproof._engine.uncached_rows import Reference
from kvproof.contract.report import Report, brief
from kvproof.contract.results import Tolerance
from kvproof.faults import Fault
from kvproof.scenarios import Scenario


class AuditKeywords(TypedDict, total=False):
    """The keyword arguments of `audit`; a test compares the two."""

    length: int
    seed: int
    faults: Iterable[Fault]
    tolerance: Tolerance | None
    reference: Reference
    top_rung: bool
    all_values: bool
    certificate: bool | None
    spread: bool
    fail_fast: bool
    keep_partial: bool
    jobs: int | None
    repeats: int
    truth: object
    ids: Collection[int] | None
    avoid_ids: Collection[int]
    on_scenario: Callable[[str], None]


class MismatchError(AssertionError):
    """An audit did not pass. ``report`` is the whole report, and the message is the finding."""

    def __init__(self, report: Report) -> None:
        super().__init__(brief(report))
        self.report = report


def assert_match(
    decoder: object, scenarios: Iterable[Scenario | str] | None = None, **keywords: Unpack[AuditKeywords]
) -> Report:
    """Audit a decoder and return the report; raise `MismatchError`, an `AssertionError`, unless the audit passes.

    Takes the arguments of `audit`. Intermediate values are compared only where logits diverge, unless you set
    ``all_values``. Scenarios that the decoder cannot run are not checked, which is not a failure; an audit that
    checks nothing at all is one.
    """
    keywords.setdefault("all_values", False)
    report = audit(decoder, scenarios, **keywords)
    if not report.verdict.passes:
        raise MismatchError(report)
    return report
