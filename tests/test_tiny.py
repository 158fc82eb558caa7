"""The whole product in a few seconds."""

from kvproof._reference_system.milestone import milestone
from kvproof.reference import Checkpoint


def test_the_reference_system_holds_its_gate(checkpoint: Checkpoint):
    report = milestone(checkpoint)
    assert report.exit_status == 0, report.summary
    assert [item.passed for item in report.milestone.gate] == [True] * 5
