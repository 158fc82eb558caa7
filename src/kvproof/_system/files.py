"""Writes a file whole or not at all, or whole line by whole line."""

import os
import tempfile
from contextlib import suppress
from pathlib import Path

from kvproof.errors import OutputError


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


class LineFile:
    """A file that grows by whole lines, each handed to the system at once: a kill loses no line before it."""

    def __init__(self, path: Path) -> None:
        """Make the file, or empty it; raise `OutputError` naming the path where that cannot be."""
        self.path = path
        self._num_bytes = 0
        try:
            self._file = path.open("wb", buffering=0)
        except OSError as error:
            raise OutputError(f"cannot write {path}: {error.strerror}") from error

    def write(self, line: str) -> None:
        """Append a line; one that does not fit on the disk is cut away again, and `OutputError` raised."""
        data = memoryview(f"{line}\n".encode())
        done = 0
        try:
            while done < len(data):
                done += self._file.write(data[done:]) or 0
        except OSError as error:
            with suppress(OSError):
                self._file.truncate(self._num_bytes)
            raise OutputError(f"cannot write {self.path}: {error.strerror}; what it holds is whole") from error
        self._num_bytes += done

    def close(self) -> None:
        """Close the file; once more does nothing."""
        self._file.close()


def _umask() -> int:
    """Return the process's file mode mask, which can only be read by setting it."""
    mask = os.umask(0o022)
    os.umask(mask)
    return mask
