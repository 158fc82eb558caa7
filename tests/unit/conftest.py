"""A real report, made once."""

import pytest

import kvproof
from kvproof.contract.report import Report
from kvproof.reference import Checkpoint


@pytest.fixture(scope="session")
def report(checkpoint: Checkpoint) -> Report:
    """A real report of the reference system."""
    return kvproof.milestone(checkpoint)
