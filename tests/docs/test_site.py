"""The site builds without a warning, from the code as it is, needs no network, and its links lead somewhere."""

import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from sphinx.util.inventory import InventoryFile
from tests.architecture.test_structure import PUBLIC

import kvproof
from kvproof._numerics.tolerances import CONSTANTS
from kvproof.cli import cli
from kvproof.scenarios import catalogue

from .shown import ROOT, environment

#: One process builds it, once.
pytestmark = pytest.mark.xdist_group("site")

#: What a page loads by itself, as against what a reader may follow.
LOADED = {"script": "src", "img": "src", "iframe": "src", "link": "href", "source": "src"}


@dataclass
class Page(HTMLParser):
    """What a page names: its anchors, what it links and what it loads."""

    file: Path
    ids: set[str] = field(default_factory=set)
    links: list[str] = field(default_factory=list)
    loads: list[str] = field(default_factory=list)
    words: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()
        self.feed(self.file.read_text("utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        if "id" in given:
            self.ids.add(given["id"])
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        if tag in LOADED and LOADED[tag] in given:
            self.loads.append(given[LOADED[tag]])

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join("".join(self.words).split())


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site; building it as ``make docs`` does, without a network, is a test in itself."""
    folder = tmp_path_factory.mktemp("site")
    makefile = (ROOT / "Makefile").read_text("utf-8")
    (command,) = re.findall(r"^docs:.*\n\t\$\(BIN\)/sphinx-build (.*) build/docs$", makefile, flags=re.MULTILINE)
    blocked = dict.fromkeys(("http_proxy", "https_proxy", "HTTPS_PROXY", "HTTP_PROXY"), "http://127.0.0.1:9")
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", *command.split(), str(folder)],
        cwd=ROOT,
        env={**environment(), **blocked},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return folder


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[str, Page]:
    return {str(file.relative_to(site)): Page(file) for file in sorted(site.rglob("*.html"))}


def test_every_page_is_there(pages: dict[str, Page]):
    sources = {
        str(file.relative_to(ROOT / "docs").with_suffix(".html")) for file in (ROOT / "docs").rglob("*.md")
    }
    assert sources <= set(pages)


def test_nothing_is_loaded_from_elsewhere(site: Path, pages: dict[str, Page]):
    for name, page in pages.items():
        assert [address for address in page.loads if urlsplit(address).netloc] == [], name
    for style in site.rglob("*.css"):
        assert not re.search(r"(url\(|@import)\s*['\"]?(https?:)?//", style.read_text("utf-8")), style


def test_links_lead_somewhere(site: Path, pages: dict[str, Page]):
    broken = [
        f"{name}: {link}" for name, page in pages.items() for link in page.links if _is_broken(site, page, link)
    ]
    assert broken == []


def test_a_link_that_leads_nowhere_is_seen(tmp_path: Path):
    (tmp_path / "other.html").write_text('<p id="there">', "utf-8")
    page = tmp_path / "page.html"
    good = ["other.html", "other.html#there", "#here", "https://example.org/x"]
    bad = [
        "gone.html",
        "other.html#gone",
        "#gone",
        "..",
        "../outside.html",
        "http://example.org",
        "https://nowhere",
    ]
    page.write_text('<p id="here">' + "".join(f'<a href="{link}">' for link in (*good, *bad)), "utf-8")
    links = Page(page)
    assert [link for link in links.links if _is_broken(tmp_path, links, link)] == bad


def _is_broken(site: Path, page: Page, link: str) -> bool:
    """Return whether a link names no page, file or anchor; one to elsewhere is held to be an address alone."""
    parts = urlsplit(link)
    if parts.scheme or parts.netloc:
        return parts.scheme != "https" or not re.fullmatch(r"[\w-]+(\.[\w-]+)+", parts.netloc)
    file = (page.file.parent / unquote(parts.path)).resolve() if parts.path else page.file
    if not file.is_file() or not file.is_relative_to(site.resolve()):
        return True
    return bool(parts.fragment) and file.suffix == ".html" and unquote(parts.fragment) not in _ids(file)


@cache
def _ids(file: Path) -> set[str]:
    return Page(file).ids


def test_every_public_name_is_documented(site: Path):
    with (site / "objects.inv").open("rb") as file:
        inventory = InventoryFile.load(file, "", lambda base, path: path)
    known = {name for kind, names in inventory.items() if kind.startswith("py:") for name in names}
    assert [names for names in _public_names() if not names & known] == []


def _public_names() -> Iterator[set[str]]:
    """Yield each public name, and each name of a public module with the name of where it is defined."""
    for name in PUBLIC:
        yield {f"kvproof.{name}"}
        value = getattr(kvproof, name)
        for member in getattr(value, "__all__", ()) if inspect.ismodule(value) else ():
            inner = getattr(value, member)
            if inspect.isclass(inner) or inspect.isfunction(inner):
                yield {f"kvproof.{name}.{member}", f"kvproof.{member}", f"{inner.__module__}.{member}"}


def test_signatures_can_be_read(pages: dict[str, Page]):
    """A default that is no Python, as a function's repr, leaves a signature as one long line of raw names."""
    text = "".join(page.text for name, page in pages.items() if name.startswith("reference/"))
    assert "audit ( decoder" in text or "audit( decoder" in text
    assert "<function" not in text
    assert "~kvproof" not in text


def test_every_command_and_option_is_shown(pages: dict[str, Page]):
    page = pages["reference/command-line.html"]
    for name, command in cli.commands.items():
        for option in (option for param in command.params for option in param.opts if option.startswith("--")):
            assert f"cmdoption-kvproof-{name}-{option.removeprefix('--')}" in page.ids, f"{name} {option}"


def test_tables_hold_what_the_code_holds(pages: dict[str, Page]):
    scenarios = pages["reference/scenarios.html"].text
    for scenario in catalogue(range(8), range(8)):
        assert f"{scenario.name} {scenario.exposes}" in scenarios
    tolerances = pages["explanation/tolerances.html"].text
    for constant in CONSTANTS:
        assert f"{constant.name} {constant.value:g} {constant.source}" in tolerances
