"""Writes files completely or not at all, and appends complete lines."""

import os
import tempfile
from contextlib import suppress
from pathlib import Path

from kvproof.errors import OutputError


def write_whole(path: Path, data: bytes) -> None:
    """Write ``data`` to a temporary file in the same folder, then move it into place.

    If the call fails or is interrupted, an existing file stays unchanged and no temporary file is left. Raises
    `OutputError`, which names the path.
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


class LineFile:
    """A file that grows by complete lines. Each goes to the system at once, so a kill loses no earlier line."""

    def __init__(self, path: Path) -> None:
        """Create the file or empty it; raise `OutputError`, which names the path, if that fails."""
        self.path = path
        self._num_bytes = 0
        try:
            self._file = path.open("wb", buffering=0)
        except OSError as error:
            raise OutputError(f"cannot write {path}: {error.strerror}") from error

    def write(self, line: str) -> None:
        """Append a line; if the disk is full, remove the partial line and raise `OutputError`."""
        data = memoryview(f"{line}\n".encode())
        done = 0
        try:
            while done < len(data):
                done += self._file.write(data[done:]) or 0
        except OSError as error:
            with suppress(OSError):
                self._file.truncate(self._num_bytes)
            problem = f"cannot write {self.path}: {error.strerror}; the lines that it holds are complete"
            raise OutputError(problem) from error
        self._num_bytes += done

    def close(self) -> None:
        """Close the file; closing it again does nothing."""
        self._file.close()


def _umask() -> int:
    """Return the file mode mask of the process, which can only be read by setting it."""
    mask = os.umask(0o022)
    os.umask(mask)
    return mask
