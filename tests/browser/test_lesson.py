"""The lesson's page, in a real browser: steps, faults, checks, questions answered wrongly and rightly."""

import re
from pathlib import Path

import jaxtyping
import pytest
import torch
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page
from tests.browser.conftest import Watched, in_look
from tests.browser.screens import assert_looks_as_before

from kvproof._reference_system.lesson_steps import FAULTS, walk
from kvproof.contract.lesson import Lesson, Walk
from kvproof.reference import Checkpoint
from kvproof.render.lesson import QUESTIONS, STAGES, render

pytestmark = [pytest.mark.xdist_group("browser"), pytest.mark.no_cover]


@pytest.fixture(scope="session")
def lesson(checkpoint: Checkpoint) -> Lesson:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jaxtyping.config, "jaxtyping_disable", True)
        return walk(checkpoint)


@pytest.fixture(scope="session")
def lesson_page(lesson: Lesson, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("lesson") / "lesson.html"
    file.write_text(render(lesson), "utf-8")
    return file


def of(lesson: Lesson, run: str, fault: str | None) -> Walk:
    (found,) = [each for each in lesson.walks if (each.run, each.fault) == (run, fault)]
    return found


def show(page: Page, each: Walk) -> None:
    page.select_option("#pick-run", each.run)
    page.select_option("#pick-fault", each.fault or "")


def test_a_healthy_run_is_walked_token_by_token(watched: Watched, lesson_page: Path, lesson: Lesson):
    page = watched.open(lesson_page)
    for run in ("greedy", "seeded"):
        healthy = of(lesson, run, None)
        show(page, healthy)
        page.locator("#pick-step").press("Home")
        assert page.locator("#step-back").is_disabled()
        for number, step in enumerate(healthy.steps):
            assert f"{step.token} takes position {number}" in page.locator("#step-readout").inner_text()
            slots = page.locator('[data-stage="cache_k"] thead th')
            assert slots.count() == 2 * (number + 1), "a column more in each of two layers"
            assert f"Chosen: {step.chosen}" in page.locator("#choice").inner_text()
            assert page.locator(".differs").count() == 0
            if number < 3:
                page.locator("#step-on").press("Enter")
        assert page.locator("#step-on").is_disabled()
        assert "stop reason eos" in page.locator("#choice").inner_text()
        page.locator("#step-back").press("Enter")
        assert "Token 3 of 4" in page.locator("#step-readout").inner_text()


def test_every_number_on_the_page_is_the_decoders(watched: Watched, lesson_page: Path, checkpoint: Checkpoint):
    """The reference decoder is run here again, without kvproof's session, taps or walk."""
    page = watched.open(lesson_page)
    page.locator("#pick-step").press("End")
    ids = torch.tensor([[0, 2, 3, 5]])
    with torch.no_grad():
        logits = checkpoint.decoder(ids, torch.arange(4)[None])[0, -1]
    texts = page.locator('[data-stage="logits"] .n').all_inner_texts()
    numbers = [float(text.replace("−", "-")) for text in texts]
    assert numbers == pytest.approx(logits.tolist(), abs=6e-5)
    probabilities = page.locator("#choice-chart svg").get_attribute("aria-label")
    expected = [f"{p:.4f}" for p in logits.softmax(0).tolist()]
    assert re.findall(r"\d\.\d{4}", probabilities) == expected


def test_what_is_computed_by_hand_is_what_the_decoder_has(watched: Watched, lesson_page: Path):
    page = watched.open(lesson_page)
    page.locator("#pick-step").press("End")
    for layer in (0, 1):
        page.locator(f"#hand-{layer} summary").press("Enter")
        lines = page.locator(f"#hand-{layer} p").all_inner_texts()
        pairs = [re.findall(r"\d\.\d{4}", line) for line in lines if "the decoder has" in line]
        assert len(pairs) == 8, "four slots, two heads"
        assert all(abs(float(mine) - float(its)) <= 2e-4 for mine, its in pairs)
    page.locator("#hand-sum summary").press("Enter")
    total = re.findall(r"−?\d\.\d{4}", page.locator("#hand-sum p").last.inner_text())
    assert total == page.locator('[data-stage="embedding"] .n').all_inner_texts()
    page.locator("#step-back").press("Enter")
    assert page.locator("#hand-0").get_attribute("open") is not None, "it stays open while one steps"


def test_every_fault_shows_first_where_it_enters_and_names_the_contract(
    watched: Watched, lesson_page: Path, lesson: Lesson
):
    page = watched.open(lesson_page)
    names = page.locator("#pick-fault option").evaluate_all("all => all.map(each => each.value)")
    assert len(names) == len(FAULTS) + 2
    for name in filter(None, names):
        broken = of(lesson, "seeded", name)
        show(page, broken)
        readout = page.locator("#fault-readout").inner_text()
        assert broken.first.sentence in readout
        assert broken.first.contract in readout
        assert f"position {broken.first.position}" in page.locator("#step-readout").inner_text()
        page.locator("#pick-step").press("Home")
        page.locator("#to-first").press("Enter")
        marked = page.locator(".value.first")
        if name == "other-generator-state":
            assert "The healthy run chooses Y" in page.locator("#choice").inner_text()
            assert page.locator(".differs").count() == 0
            continue
        assert marked.get_attribute("data-stage") == broken.first.stage
        assert (marked.get_attribute("data-layer") or "null") in (str(broken.first.layer), "null")
        first = page.locator(".value").evaluate_all("all => all.findIndex(each => each.matches('.differs'))")
        at = page.locator(".value").evaluate_all("all => all.findIndex(each => each.matches('.first'))")
        assert first == at, "nothing before it differs"


def test_each_row_of_the_diagnosis_table_is_reached(lesson: Lesson):
    """Spec R15: the first differing value, and the contract that it breaks."""
    table = {
        "wrong-position": "position index",
        "token-fed-twice": "token ownership",
        "heads-out-of-order": "axis order",
        "missing-append": "missing or duplicate append",
        "wrong-layer": "wrong layer's cache",
        "other-generator-state": "generator state",
        "shared-between-requests": "cross-request cache contamination",
    }
    for fault, contract in table.items():
        assert contract in of(lesson, "seeded", fault).first.contract


CAUGHT = {"nothing": 0, "tokens": 6, "last": 12, "rows": 13, "values": 15}


def test_a_check_that_looks_at_more_lets_less_pass(watched: Watched, lesson_page: Path):
    page = watched.open(lesson_page)
    page.select_option("#pick-run", "seeded")
    for check, caught in CAUGHT.items():
        page.locator(f'input[name="check"][value="{check}"]').check()
        assert f"Catches {caught} of 15 faults" in page.locator("#check-readout").inner_text()
        assert page.locator("#check-table .catches").count() == caught
        assert page.locator("#check-table .passes").count() == 15 - caught


def test_questions_take_wrong_and_right_answers(watched: Watched, lesson_page: Path):
    page = watched.open(lesson_page)
    for number, question in enumerate(QUESTIONS):
        form = page.locator(f"#question-{number}")
        outcome, hint, solution = (form.locator(name) for name in (".outcome", ".hint", ".solution"))
        check = form.get_by_role("button", name="Check")
        check.press("Enter")
        assert outcome.inner_text() == "Give an answer first."
        assert hint.is_hidden()
        assert solution.is_hidden()
        for wrong in range(max(4, len(question.choices)))[: len(question.choices) or 3]:
            if wrong == question.right:
                continue
            answer(page, number, wrong)
            check.press("Enter")
            assert "Not that" in outcome.inner_text()
            assert solution.is_hidden(), "an answer comes before the solution"
        form.get_by_role("button", name="Hint").press("Enter")
        assert question.hint in hint.inner_text()
        form.get_by_role("button", name="Solution").press("Enter")
        assert question.solution in solution.inner_text()
        answer(page, number, question.right)
        check.press("Enter")
        assert outcome.inner_text() == "✓ Right."
        assert page.locator("#score").inner_text() == f"{number + 1} of {len(QUESTIONS)} solved."


def test_a_right_answer_shows_the_solution_at_once(watched: Watched, lesson_page: Path):
    page = watched.open(lesson_page)
    answer(page, 0, 3)
    page.locator("#question-0 input").press("Enter")
    assert page.locator("#question-0 .solution").is_visible()
    assert page.locator("#question-0 .show-hint").is_hidden()


def answer(page: Page, number: int, choice: int) -> None:
    form = page.locator(f"#question-{number}")
    if QUESTIONS[number].choices:
        form.locator(f'input[value="{choice}"]').check()
    else:
        form.locator("input").fill(str(choice))


def test_what_the_solutions_say_of_this_decoder_is_so(lesson: Lesson):
    """The numbers in the answers come from this walk."""
    hidden = of(lesson, "seeded", "missing-append")
    assert all(step.same_choice for step in hidden.steps)
    assert max(step.gap for step in hidden.steps) > 3
    assert max(step.gap for step in of(lesson, "greedy", "wrong-position").steps) > 20
    assert of(lesson, "greedy", "disturbed-attn_out").steps[-1].gap <= lesson.allowed, "a later row agrees again"
    assert all(step.gap <= lesson.allowed for step in of(lesson, "greedy", "cancelling-pair").steps)


def test_every_stage_has_words(lesson: Lesson):
    assert {value.stage for each in lesson.walks for step in each.steps for value in step.values} <= set(STAGES)


def test_no_control_is_without_a_test(watched: Watched, lesson_page: Path):
    page = watched.open(lesson_page)
    ids = page.eval_on_selector_all("#walk button, #walk select, #walk input", "all => all.map(each => each.id)")
    assert set(ids) == {"pick-run", "pick-fault", "pick-step", "step-back", "step-on", "to-first"}
    assert page.locator("#checks input").count() == len(CAUGHT)
    links = page.locator("nav a")
    for link in links.all():
        link.press("Enter")
        assert page.locator(link.get_attribute("href")).is_visible()


@in_look("light", "dark", "phone")
def test_axe_finds_no_serious_fault(watched: Watched, lesson_page: Path, lesson: Lesson):
    page = watched.open(lesson_page)
    show(page, of(lesson, "seeded", "wrong-layer"))
    page.eval_on_selector_all("details", "all => all.forEach(each => { each.open = true; })")
    found = [each for each in Axe().run(page).response["violations"] if each["impact"] in ("serious", "critical")]
    assert [(each["id"], each["nodes"][0]["html"][:200]) for each in found] == []
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "wider than its screen"


@in_look("light", "dark", "phone")
def test_it_looks_as_before(watched: Watched, lesson_page: Path, lesson: Lesson, request: pytest.FixtureRequest):
    page = watched.open(lesson_page)
    show(page, of(lesson, "seeded", "wrong-layer"))
    page.locator(".layers .card").last.evaluate("node => node.scrollIntoView()")
    assert_looks_as_before(page, f"lesson-{request.node.callspec.params['watched']}")


def test_the_same_lesson_gives_the_same_page(lesson: Lesson):
    assert render(lesson) == render(lesson)
