"""``kvproof lesson``: the page as a file, and served to this machine alone."""

import http.client
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.cli.running import run

from kvproof.cli import serving as _serve
from kvproof.contract.lesson import Lesson, Numbers


@pytest.fixture
def walked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lesson without a walk: what is tested here is where its page goes."""
    from tests.small_report import ENVIRONMENT

    none = Numbers(shape=(0,), values=())
    lesson = Lesson(
        environment=ENVIRONMENT,
        seed=7,
        loss=0.5,
        num_parameters=30,
        vocabulary=("<bos>",),
        context_len=4,
        allowed=1e-5,
        token_table=none,
        position_table=none,
        walks=(),
    )
    monkeypatch.setattr("kvproof._reference_system.lesson_steps.walk", lambda weights, on_stage: lesson)


def test_out_writes_the_page(walked: None, saved: Path, tmp_path: Path):
    file = tmp_path / "lesson.html"
    assert run("lesson", "--checkpoint", saved, "--out", file).status == 0
    text = file.read_text("utf-8")
    assert text.startswith("<!doctype html>")
    assert "trained from seed 7" in text


def test_a_folder_that_is_not_there_is_told(walked: None, saved: Path, tmp_path: Path):
    outcome = run("lesson", "--checkpoint", saved, "--out", tmp_path / "no" / "lesson.html")
    assert outcome.status == 73
    assert "cannot write" in outcome.err


def served(monkeypatch: pytest.MonkeyPatch, visit: Callable[[str], None]) -> None:
    """Let a visit stand in for the browser, and Ctrl-C come after it."""

    class Visited(_serve.ThreadingHTTPServer):
        def serve_forever(self, poll_interval: float = 0.5) -> None:
            import threading

            thread = threading.Thread(target=super().serve_forever, args=(0.01,))
            thread.start()
            try:
                visit(f"http://127.0.0.1:{self.server_port}/")
            finally:
                self.shutdown()
                thread.join()
            raise KeyboardInterrupt

    monkeypatch.setattr(_serve, "ThreadingHTTPServer", Visited)


def test_it_is_served_and_opened_on_this_machine(walked: None, saved: Path, monkeypatch: pytest.MonkeyPatch):
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    pages = []

    def visit(address: str) -> None:
        with urllib.request.urlopen(address) as answer:
            pages.append((answer.headers["Content-Type"], answer.read().decode()))

    served(monkeypatch, visit)
    outcome = run("lesson", "--checkpoint", saved)
    assert outcome.status == 0
    (address,) = opened
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/", address)
    assert f"The lesson: {address}" in outcome.out
    ((kind, page),) = pages
    assert kind == "text/html; charset=utf-8"
    assert "A KV cache, one token at a time" in page


@pytest.mark.parametrize(
    ("path", "host", "status"), [("/", "evil.example", 403), ("/other", None, 404), ("/", None, 200)]
)
def test_other_pages_and_other_hosts_get_nothing(
    path: str, host: str | None, status: int, monkeypatch: pytest.MonkeyPatch
):
    seen = []

    def visit(address: str) -> None:
        name = address.split("/")[2]
        connection = http.client.HTTPConnection(name)
        connection.request("GET", path, headers={"Host": host or name})
        seen.append(connection.getresponse().status)
        connection.close()

    served(monkeypatch, visit)
    with pytest.raises(KeyboardInterrupt):
        _serve.serve("page", 0, lambda address: None)
    assert seen == [status]


def test_a_port_that_is_taken_is_told(walked: None, saved: Path):
    with _serve.ThreadingHTTPServer(("127.0.0.1", 0), _serve.BaseHTTPRequestHandler) as other:
        outcome = run("lesson", "--checkpoint", saved, "--no-browser", "--port", other.server_port)
    assert outcome.status == 2
    assert f"port {other.server_port}" in outcome.err


def test_ctrl_c_ends_a_served_lesson_as_it_should():
    program = (
        "from kvproof.cli import serving; serving.serve('page', 0, lambda address: print(address, flush=True))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout.readline().startswith("http://127.0.0.1:")
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=20)
    assert "KeyboardInterrupt" in err
