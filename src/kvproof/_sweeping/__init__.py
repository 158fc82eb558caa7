"""Sweeps: many audits, and the runners that run them. A new runner is one new file."""

from kvproof._sweeping.processes import ProcessRunner
from kvproof._sweeping.runner import JobOutcome, Runner, Work
from kvproof._sweeping.serial import SerialRunner

__all__ = ["JobOutcome", "ProcessRunner", "Runner", "SerialRunner", "Work"]
