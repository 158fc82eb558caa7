"""Looks at the processes of this machine through ``/proc``."""

from pathlib import Path


def list_children() -> set[int]:
    """Return the processes that this one started and has not reaped, zombies among them."""
    files = Path("/proc/self/task").glob("*/children")
    return {int(child) for file in files for child in file.read_text().split()}


def is_running(pid: int) -> bool:
    """Return whether a process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
