"""A real browser, and the pages that it opens. What a page logs, raises or asks of a network fails its test."""

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import jaxtyping
import pytest
from playwright.sync_api import Browser, Page, sync_playwright
from tests.browser.failing import Failing

import kvproof
from kvproof.contract.report import Report
from kvproof.reference import Checkpoint
from kvproof.reference.corpus import SEQUENCES
from kvproof.render.html import render
from kvproof.scenarios import chunked_prefill, token_by_token

#: Debian's name, those of other systems, and whatever the variable names.
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
VARIABLE = "KVPROOF_BROWSER"


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    found = os.environ.get(VARIABLE) or next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        pytest.skip(f"no browser: `make chromium` installs Debian's, or let {VARIABLE} name one")
    with sync_playwright() as driver:
        # The sandbox needs rights that containers and root do not have; only our own pages are opened.
        yield driver.chromium.launch(executable_path=found, args=["--no-sandbox", "--font-render-hinting=none"])


@dataclass
class Watched:
    """A page in the browser, and what must not happen on it."""

    page: Page
    complaints: list[str] = field(default_factory=list)

    def open(self, file: Path) -> Page:
        self.page.on("console", lambda message: self.complaints.append(f"console: {message.text}"))
        self.page.on("pageerror", lambda error: self.complaints.append(f"raised: {error}"))
        self.page.on("request", lambda request: self._request(request.url, file))
        self.page.goto(file.as_uri())
        self.page.wait_for_selector("body[data-ready]")
        return self.page

    def _request(self, url: str, file: Path) -> None:
        if url.partition("#")[0] != file.as_uri():
            self.complaints.append(f"request: {url}")


@pytest.fixture(params=["light"])
def watched(request: pytest.FixtureRequest, browser: Browser) -> Iterator[Watched]:
    """A new page, as wide as a laptop's screen, or ``phone``; ``dark`` where the test asks for it."""
    size = (390, 844) if request.param == "phone" else (1200, 900)
    page = browser.new_page(
        viewport={"width": size[0], "height": size[1]},
        color_scheme="dark" if request.param == "dark" else "light",
    )
    seen = Watched(page)
    yield seen
    page.close()
    assert seen.complaints == []


def in_look(*looks: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("watched", looks, indirect=True)


@pytest.fixture(scope="session")
def failing(checkpoint: Checkpoint) -> Report:
    """The audit of a decoder whose second layer reads the first one's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jaxtyping.config, "jaxtyping_disable", True)
        programs = [token_by_token(SEQUENCES[0]), token_by_token(SEQUENCES[2]), chunked_prefill(SEQUENCES[0], 2)]
        report = kvproof.audit(Failing(checkpoint), programs, spread=True)
    return replace(report, environment=replace(report.environment, created="2026-01-02T03:04:05+00:00"))


@pytest.fixture(scope="session")
def passing(checkpoint: Checkpoint) -> Report:
    """The milestone's report."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jaxtyping.config, "jaxtyping_disable", True)
        return kvproof.milestone(checkpoint)


@pytest.fixture(scope="session")
def failing_page(failing: Report, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(failing, tmp_path_factory)


@pytest.fixture(scope="session")
def passing_page(passing: Report, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(passing, tmp_path_factory)


def written(report: Report, folders: pytest.TempPathFactory) -> Path:
    file = folders.mktemp("page") / "report.html"
    file.write_text(render(report), "utf-8")
    return file
