"""Describes the machine and process that a record is made on."""

import os
import platform
from datetime import UTC, datetime
from importlib.metadata import version

import torch

from kvproof._environment import Environment


def environment() -> Environment:
    """Return what this process runs on."""
    return Environment(
        kvproof=version("kvproof"),
        python=platform.python_version(),
        torch=torch.__version__,
        platform=platform.platform(terse=True),
        processor=f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}, {os.cpu_count()} cores",
        num_threads=torch.get_num_threads(),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
    )
