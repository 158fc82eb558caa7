"""Writing files: whole or not at all, and never in place of what is no regular file."""

import os
import re
import threading
from pathlib import Path

import pytest

from kvproof._system.files import LineFile, is_regular, write_whole
from kvproof.errors import OutputError


def read_in_background(pipe: Path) -> tuple[threading.Thread, list[bytes]]:
    received: list[bytes] = []
    reader = threading.Thread(target=lambda: received.append(pipe.read_bytes()), daemon=True)
    reader.start()
    return reader, received


def test_a_pipe_receives_what_is_written_and_stays_a_pipe(tmp_path: Path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader, received = read_in_background(pipe)
    write_whole(pipe, b"x" * 100_000)
    reader.join(timeout=20)
    assert received == [b"x" * 100_000]
    assert pipe.is_fifo()
    assert os.listdir(tmp_path) == ["pipe"]


def test_a_link_to_a_pipe_reaches_the_pipe(tmp_path: Path):
    pipe, link = tmp_path / "pipe", tmp_path / "link"
    os.mkfifo(pipe)
    link.symlink_to(pipe)
    reader, received = read_in_background(pipe)
    write_whole(link, b"through")
    reader.join(timeout=20)
    assert received == [b"through"]
    assert link.is_symlink()
    assert pipe.is_fifo()


@pytest.mark.parametrize("exists", [True, False])
def test_through_a_link_its_target_is_written(exists: bool, tmp_path: Path):
    (tmp_path / "kept").mkdir()
    target, link, second = tmp_path / "kept" / "target", tmp_path / "link", tmp_path / "second"
    if exists:
        target.write_bytes(b"old")
    link.symlink_to("kept/target")
    second.symlink_to("link")
    write_whole(second, b"new")
    assert (link.is_symlink(), second.is_symlink(), target.is_symlink()) == (True, True, False)
    assert target.read_bytes() == b"new"
    assert os.listdir(tmp_path / "kept") == ["target"]


def test_links_in_a_loop_are_refused_and_stay(tmp_path: Path):
    first, second = tmp_path / "first", tmp_path / "second"
    first.symlink_to(second)
    second.symlink_to(first)
    with pytest.raises(OutputError, match=r"cannot write .*first: "):
        write_whole(first, b"new")
    assert first.is_symlink()


def test_a_folder_and_a_missing_folder_are_refused(tmp_path: Path):
    for path in (tmp_path, tmp_path / "missing" / "file"):
        with pytest.raises(OutputError, match=re.escape(f"cannot write {path}: ")):
            write_whole(path, b"new")
    assert os.listdir(tmp_path) == []


def test_an_open_stream_is_written_to_after_what_it_holds(tmp_path: Path):
    if not Path("/proc/self/fd").is_dir():
        pytest.skip("this system does not show open files as /proc/self/fd")
    with (tmp_path / "log").open("wb") as log:
        log.write(b"before ")
        log.flush()
        number = (tmp_path / "log").stat().st_ino
        write_whole(Path(f"/proc/self/fd/{log.fileno()}"), b"after")
    assert (tmp_path / "log").read_bytes() == b"before after"
    assert (tmp_path / "log").stat().st_ino == number


def test_a_line_file_goes_into_a_pipe(tmp_path: Path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert not is_regular(pipe)
    reader, received = read_in_background(pipe)
    lines = LineFile(pipe)
    lines.write("one")
    lines.close()
    reader.join(timeout=20)
    assert received == [b"one\n"]
    assert pipe.is_fifo()
