"""Runners: where and how many at a time the jobs of a sweep are run. A new one is one file."""

from kvproof.runners._base import Outcome, Runner, Work
from kvproof.runners._processes import ProcessRunner
from kvproof.runners._serial import SerialRunner

__all__ = ["Outcome", "ProcessRunner", "Runner", "SerialRunner", "Work"]
