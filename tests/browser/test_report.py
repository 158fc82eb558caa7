"""The report's page, in a real browser: what it shows first, every control, untrusted text, its looks."""

import dataclasses
import json
from pathlib import Path

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page
from tests.browser.conftest import Watched, in_look
from tests.browser.screens import assert_looks_as_before
from tests.small_report import RAISED, REPORT

from kvproof.contract.codec import from_plain, to_plain
from kvproof.contract.report import Report
from kvproof.contract.results import Verdict
from kvproof.render import json as report_json
from kvproof.render.html import render

pytestmark = [pytest.mark.xdist_group("browser"), pytest.mark.no_cover]

CONTROLS = {
    *("pick-scenario", "pick-row", "worst-row"),
    *("pick-spread", "pick-layer", "pick-call", "step-back", "step-on", "step-first"),
}


def in_first_screen(page: Page, text: str) -> bool:
    """Say whether a text stands where a reader sees it without scrolling."""
    box = page.locator("#verdict").get_by_text(text).first.bounding_box(timeout=2000)
    return box is not None and box["y"] + box["height"] <= page.viewport_size["height"]


@in_look("light", "phone")
def test_a_failed_audit_tells_in_its_first_screen_what_broke_and_where(
    watched: Watched, failing_page: Path, failing: Report
):
    page = watched.open(failing_page)
    (found, *_) = [s.divergence for s in failing.scenarios if s.divergence]
    assert page.locator("h1").inner_text() == failing.summary
    assert (found.stage, found.layer) == ("cache_k", 1)
    place = f"cache_k of layer 1, head {found.head}, slot {found.slot}"
    for text in ("✗ diverged", place, f"position {found.position}, consuming"):
        assert in_first_screen(page, text), text
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "wider than its screen"


def test_the_sections_are_reached_from_the_bar(watched: Watched, passing_page: Path):
    page = watched.open(passing_page)
    page.keyboard.press("Tab")
    assert page.locator("a.skip").evaluate("node => node === document.activeElement"), "the first stop"
    links = page.locator("nav a")
    assert links.count() == 9
    for link in links.all():
        link.press("Enter")
        assert page.locator(link.get_attribute("href")).is_visible()


def test_no_control_is_without_a_test(watched: Watched, passing_page: Path):
    page = watched.open(passing_page)
    ids = page.eval_on_selector_all("button, select, input", "nodes => nodes.map(node => node.id)")
    assert set(ids) == CONTROLS


def test_every_row_of_every_scenario_can_be_looked_at(watched: Watched, failing_page: Path, failing: Report):
    page = watched.open(failing_page)
    slider, readout = page.locator("#pick-row"), page.locator("#row-readout")
    shown = [s for s in failing.scenarios if s.rows]
    for scenario in shown:
        page.select_option("#pick-scenario", label=f"{scenario.name} ({scenario.verdict.value})")
        slider.press("Home")
        seen = set()
        for row in scenario.rows:
            assert row.reason in readout.inner_text()
            assert row.verdict.value in readout.inner_text()
            seen.add(readout.inner_text())
            slider.press("ArrowRight")
        assert len(seen) == len(scenario.rows)
        page.locator("#worst-row").press("Enter")
        worst = max(scenario.rows, key=lambda row: row.gap)
        assert worst.reason in readout.inner_text()
        marks = page.locator("#gap-chart [data-mark=dot] circle, #gap-chart [data-mark=dot] path").count()
        assert marks >= 2 * len(scenario.rows), "a mark for each gap and each float64 gap"


def test_a_mark_that_is_pointed_at_is_the_row_that_is_shown(watched: Watched, failing_page: Path):
    page = watched.open(failing_page)
    marks = page.locator("#gap-chart [data-mark=dot]").nth(1).locator("circle, path")
    before = page.locator("#row-readout").inner_text()
    for index in (0, marks.count() - 1):
        marks.nth(index).hover(force=True)
    page.wait_for_function("text => document.getElementById('row-readout').innerText !== text", arg=before)


def test_one_steps_through_the_calls_and_sees_where_the_error_starts(watched: Watched, failing_page: Path):
    page = watched.open(failing_page)
    readout, cache = page.locator("#call-readout"), page.locator("#cache-readout")
    assert "Call 2 of 4" in readout.inner_text(), "it opens at the first mismatch"
    assert "cache_k of layer 1" in readout.inner_text()
    assert "layer 1, slot 0 must hold <bos> of position 0 and holds layer 0's" in cache.inner_text()
    page.locator("#step-back").press("Enter")
    assert "Nothing is beyond what is allowed" in readout.inner_text()
    assert "All 2 slots hold what they must." in cache.inner_text()
    assert page.locator("#step-back").is_disabled()
    for number in (2, 3, 4):
        page.locator("#step-on").press("Enter")
        assert f"Call {number} of 4" in readout.inner_text()
    assert page.locator("#step-on").is_disabled()
    assert "3 of 8 slots do not hold what they must" in cache.inner_text()
    page.locator("#step-first").click()
    assert "Call 2 of 4" in readout.inner_text()
    page.locator("#pick-call").press("End")
    assert "Call 4 of 4" in readout.inner_text()


def test_the_faults_of_a_passing_run_can_be_picked(watched: Watched, passing_page: Path):
    page = watched.open(passing_page)
    readout = page.locator("#call-readout")
    assert "Nothing is beyond" in readout.inner_text()
    assert page.locator("#step-first").is_hidden()
    page.select_option("#pick-spread", label="token-by-token, with the fault wrong-position")
    assert "The first value beyond what is allowed is position" in readout.inner_text()
    page.select_option("#pick-spread", label="token-by-token, with the fault wrong-layer")
    assert "is cache_k of layer 1" in readout.inner_text()


def test_a_deep_model_opens_one_layer_at_a_time(watched: Watched, tmp_path: Path):
    plain = to_plain(REPORT)
    spread = plain["spreads"][0]
    spread["sites"] = [
        {
            "name": f"mlp_out of layer {layer}" if part else f"new_k of layer {layer}",
            "layer": layer,
            "allowed": 1e-9,
        }
        for layer in range(40)
        for part in range(2)
    ]
    spread["gaps"] = [[0.0, 0.5 if site >= 14 else 0.0] for site in range(80)]
    page = watched.open(page_of(from_plain(Report, plain), tmp_path))
    rows = page.locator("#spread-chart")
    assert "7 · new_k" in rows.inner_text(), "the layer of the first mismatch is open"
    assert "layer 8" in rows.inner_text()
    page.select_option("#pick-layer", label="layer 8")
    assert "8 · new_k" in rows.inner_text()
    assert "layer 7" in rows.inner_text()


def test_what_is_folded_opens_by_keyboard(watched: Watched, passing_page: Path):
    page = watched.open(passing_page)
    folded = page.locator("details")
    assert folded.count() >= 6
    for each in folded.all():
        each.locator("summary").press("Enter")
        assert each.get_attribute("open") is not None


HOSTILE = [
    "<!--<script>",
    "</script><script>window.ran = 1</script>",
    "\"'><img src=x onerror='window.ran = 1'>",
    "{{ 7 * 7 }}\u202e\u2028javascript:window.ran=1",
]


@pytest.mark.parametrize("token", HOSTILE)
def test_a_token_is_shown_and_never_run(token: str, watched: Watched, tmp_path: Path):
    text = json.dumps(to_plain(REPORT)).replace("[red]<script>", json.dumps(token)[1:-1])
    page = watched.open(page_of(from_plain(Report, json.loads(text)), tmp_path))
    for each in page.locator("details").all():
        each.locator("summary").press("Enter")
    page.locator("#pick-row").press("Home")
    page.locator("#pick-call").press("Home")
    assert page.evaluate("window.ran") is None
    shown = token.replace("\u202e", "\\u202e").replace("\u2028", "\\u2028")
    for place in ("#row-readout .token", "#call-readout .token", "#generation .token", "#trace td .token"):
        assert shown[-30:] in page.locator(place).first.inner_text(), place


@in_look("light", "dark", "phone")
def test_axe_finds_no_serious_fault(
    watched: Watched, failing_page: Path, passing_page: Path, request: pytest.FixtureRequest
):
    wide_and_light = request.node.callspec.params["watched"] == "light"
    for file in (failing_page, passing_page)[: 2 if wide_and_light else 1]:
        watched.page.goto(file.as_uri())
        watched.page.eval_on_selector_all("details", "nodes => nodes.forEach(node => { node.open = true; })")
        found = Axe().run(watched.page).response["violations"]
        serious = [each for each in found if each["impact"] in ("serious", "critical")]
        assert [(each["id"], each["nodes"][0]["html"][:200]) for each in serious] == []


@in_look("light", "dark", "phone")
def test_a_report_of_a_decoder_that_raised_shows_where_and_its_traceback(watched: Watched, tmp_path: Path):
    (first, *_) = REPORT.scenarios
    long_line = dataclasses.replace(RAISED, traceback=f"{RAISED.traceback}{'x' * 300}\n")
    raised = dataclasses.replace(first, verdict=Verdict.RAISED, four_ways=None, raised=long_line)
    report = dataclasses.replace(REPORT, verdict=Verdict.RAISED, scenarios=(raised,), milestone=None)
    file = tmp_path / "report.html"
    file.write_text(render(report), "utf-8")
    page = watched.open(file)
    for text in ("✗ raised", RAISED.error, "call 2, position 1, layer 0"):
        assert in_first_screen(page, text), text
    assert 'File "decoder.py", line 7, in forward' in page.locator("#verdict pre").inner_text()
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "wider than its screen"
    serious = [v for v in Axe().run(page).response["violations"] if v["impact"] in ("serious", "critical")]
    assert [each["id"] for each in serious] == []


@in_look("light", "dark", "phone")
def test_it_looks_as_before(watched: Watched, failing_page: Path, request: pytest.FixtureRequest):
    page = watched.open(failing_page)
    look = request.node.callspec.params["watched"]
    assert_looks_as_before(page, f"report-top-{look}")
    page.locator("#spread").evaluate("node => node.scrollIntoView()")
    assert_looks_as_before(page, f"report-spread-{look}")


def test_a_chart_that_is_missing_is_noticed(watched: Watched, failing_page: Path):
    """The comparison of pictures can fail."""
    page = watched.open(failing_page)
    page.locator("#spread").evaluate("node => node.scrollIntoView()")
    page.locator("#spread-chart svg").evaluate("node => { node.style.visibility = 'hidden'; }")
    with pytest.raises(AssertionError, match="differs by"):
        assert_looks_as_before(page, "report-spread-light", keep=False)


def test_it_prints_everything_on_white(watched: Watched, failing_page: Path):
    page = watched.open(failing_page)
    page.emulate_media(media="print", color_scheme="dark")
    page.evaluate("window.dispatchEvent(new Event('beforeprint'))")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert page.locator(".controls").first.is_hidden()
    assert page.locator("details:not([open])").count() == 0
    assert page.locator("#gap-chart svg").is_visible()


def test_the_saved_report_gives_the_same_page_to_the_last_byte(failing: Report):
    again = report_json.parse(report_json.render(failing), "report.json")
    assert render(again) == render(failing)


def page_of(report: Report, folder: Path) -> Path:
    file = folder / "report.html"
    file.write_text(render(report), "utf-8")
    return file
