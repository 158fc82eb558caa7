"""An audit as an assertion: it passes in silence, or its message is the finding."""

from collections.abc import Iterable
from typing import Any

from kvproof._engine.audit import audit
from kvproof.contract.report import Report
from kvproof.contract.sentences import brief
from kvproof.scenarios import Scenario


class MismatchError(AssertionError):
    """The audit did not pass; ``report`` says all of it, and the message what led to that."""

    def __init__(self, report: Report) -> None:
        super().__init__(brief(report))
        self.report = report


def assert_match(decoder: object, scenarios: Iterable[Scenario | str] | None = None, **options: Any) -> Report:
    """Return the report of an audit that passes; raise `MismatchError`, an `AssertionError`, for any other.

    Takes what `audit` takes. Values on the way are compared only where logits diverge, unless ``all_values`` says
    otherwise. What the decoder lacks the ability for is not checked, and no failure; where nothing was checked at
    all, that is one.
    """
    report = audit(decoder, scenarios, **{"all_values": False, **options})
    if not report.verdict.passes:
        raise MismatchError(report)
    return report
