"""How much memory a process has held at most."""

import resource
import sys

#: ``ru_maxrss`` is counted in bytes on macOS and in KiB elsewhere.
_UNIT = 1 if sys.platform == "darwin" else 1024


def own_peak_mb() -> float:
    """Return this process's peak of resident memory so far, in 10^6 bytes."""
    return peak_mb(resource.getrusage(resource.RUSAGE_SELF))


def peak_mb(usage: resource.struct_rusage) -> float:
    """Return the peak of resident memory that the system reports of a process, in 10^6 bytes."""
    return round(usage.ru_maxrss * _UNIT / 1e6, 1)
