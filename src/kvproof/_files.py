"""Writes a file whole or not at all."""

import os
import tempfile
from pathlib import Path

from kvproof._errors import OutputError


def write_whole(path: Path, data: bytes) -> None:
    """Write ``data`` under a temporary name in the same folder, then move it into place.

    Whatever ends the call half-way leaves an existing file as it was and no temporary one behind. Raises
    `OutputError` naming the path.
    """
    temporary = None
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
        temporary = None
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror}") from error
    finally:
        if temporary is not None and os.path.exists(temporary):
            os.unlink(temporary)


def _umask() -> int:
    """Return the process's file mode mask, which can only be read by setting it."""
    mask = os.umask(0o022)
    os.umask(mask)
    return mask
