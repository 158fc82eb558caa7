"""Writes files completely or not at all, appends complete lines, and never replaces a device or a pipe."""

import os
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

from kvproof.errors import OutputError

#: Names that stand for a stream that is already open, whatever it leads to.
_OPEN_STREAMS = ("/dev/std", "/dev/fd/", "/proc/")


def write_whole(path: Path, data: bytes) -> None:
    """Write ``data`` to a temporary file in the same folder, then move it into place.

    If the call fails or is interrupted, an existing file stays unchanged and no temporary file is left. Through a
    symbolic link, the file that it leads to is written. A device, a pipe or an open stream such as
    ``/dev/stdout`` stays what it is and receives the data. Raises `OutputError`, which names the path.
    """
    temporary = None
    try:
        if not is_regular(path):
            _write_into(path, data)
            return
        target = Path(os.path.realpath(path))
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, target)
        temporary = None
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror}") from error
    finally:
        if temporary is not None and os.path.exists(temporary):
            os.unlink(temporary)


def is_regular(path: Path) -> bool:
    """Return whether a path is a regular file, or can become one; not a device, a pipe or an open stream.

    Raises `OSError` if the path cannot be looked up, for example because symbolic links form a loop.
    """
    if str(path.absolute()).startswith(_OPEN_STREAMS):
        return False
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except FileNotFoundError:  # nothing is there yet, or a link leads to nothing yet
        return True


def _write_into(path: Path, data: bytes) -> None:
    """Write to what exists already. Appending keeps what a redirected stream has received before."""
    rest = memoryview(data)
    handle = os.open(path, os.O_WRONLY | os.O_APPEND)
    try:
        while rest:
            rest = rest[os.write(handle, rest) :]
    finally:
        os.close(handle)


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
