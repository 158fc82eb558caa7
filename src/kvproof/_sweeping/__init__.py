"""Runners: where and how many at a time the jobs of a sweep are run. A new one is one file."""

from kvproof._sweeping.processes import ProcessRunner
from kvproof._sweeping.runner import Outcome, Runner, Work
from kvproof._sweeping.serial import SerialRunner

__all__ = ["Outcome", "ProcessRunner", "Runner", "SerialRunner", "Work"]
