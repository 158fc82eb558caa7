"""One cause, one paragraph: the same finding of several scenarios is told once, in every rendering."""

import dataclasses
import xml.etree.ElementTree as ET
from collections.abc import Callable
from typing import Any

import pytest
from tests.small_report import DIVERGENCE, RAISED, REPORT

from kvproof.contract.findings import group_findings
from kvproof.contract.report import Report, brief
from kvproof.contract.results import Divergence, FourWays, ScenarioResult, Verdict
from kvproof.contract.stages import Stage
from kvproof.render import html, junit, markdown, terminal

CAUSE = "wrong layer's cache"
NAMES = ("token-by-token", "chunked prefill", "rollback", "fork")


def scenario(name: str, divergence: Divergence | None = DIVERGENCE, **changes: Any) -> ScenarioResult:
    """Return a scenario that diverged."""
    own = {"verdict": Verdict.DIVERGED, "four_ways": None, "divergence": divergence, "name": name}
    return dataclasses.replace(REPORT.scenarios[0], **{**own, **changes})


def report_of(*scenarios: ScenarioResult) -> Report:
    """Return a report of these scenarios alone."""
    plain = {"milestone": None, "faults": (), "certificate": None, "spreads": ()}
    return dataclasses.replace(REPORT, scenarios=scenarios, **plain)


def visible(page: str) -> str:
    """Return a page without the data of its scripts."""
    return page.partition("<main")[2].partition("<script")[0]


RENDERERS: dict[str, Callable[[Report], str]] = {
    "terminal": terminal.render,
    "markdown": markdown.render,
    "html": lambda report: visible(html.render(report)),
    "pytest": brief,
}


@pytest.mark.parametrize("form", RENDERERS)
def test_the_same_finding_is_told_once_and_names_every_scenario(form: str):
    text = RENDERERS[form](report_of(*map(scenario, NAMES)))
    assert text.count(CAUSE) + text.count(CAUSE.replace("'", "&#39;")) == 1
    assert "3 more scenarios: chunked prefill, rollback, fork." in " ".join(text.split())


#: What makes a finding another one.
OTHERS: dict[str, ScenarioResult] = {
    "layer": scenario("b", dataclasses.replace(DIVERGENCE, layer=1, site="cache_k of layer 1")),
    "stage": scenario("b", dataclasses.replace(DIVERGENCE, stage=Stage.CACHE_V, site="cache_v of layer 0")),
    "module": scenario("b", dataclasses.replace(DIVERGENCE, site="the output of head")),
    "cause": scenario("b", dataclasses.replace(DIVERGENCE, contract="keys and values swapped")),
    "advice": scenario("b", advice=True),
    "verdict": scenario("b", verdict=Verdict.INCONCLUSIVE),
    "exception": scenario("b", raised=RAISED),
    "condition": scenario("b", condition="exactly where the call feeds 3 tokens"),
}


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("form", RENDERERS)
def test_another_finding_has_a_paragraph_of_its_own(form: str, name: str):
    first, other = scenario("a"), OTHERS[name]
    assert len(group_findings((first, other))) == 2
    assert "The same finding" not in RENDERERS[form](report_of(first, other))


def test_what_only_numbers_tell_apart_is_one_finding():
    later = dataclasses.replace(DIVERGENCE, position=7, actual=3.0, head=0, slot=5, ids=(0, 2, 1))
    (group,) = group_findings((scenario("a"), scenario("b", later)))
    assert [each.name for each in group.scenarios] == ["a", "b"]
    assert group.more == ("The same finding in b.",)


def test_a_module_of_an_older_report_is_told_by_what_was_replaced():
    old = dataclasses.replace(DIVERGENCE, stage=Stage.MODULE, site=None, introduced=("the output of head",))
    unlike = dataclasses.replace(old, introduced=("the output of neck",))
    unknown = dataclasses.replace(old, introduced=(), sentence="consuming A, the output of head: 1")
    assert len(group_findings((scenario("a", old), scenario("b", old)))) == 1
    assert len(group_findings((scenario("a", old), scenario("b", unlike)))) == 2
    assert len(group_findings((scenario("a", old), scenario("b", unknown)))) == 2


def test_what_is_raised_from_the_same_lines_is_one_finding_whatever_lengths_it_names():
    def raising(name: str, **changes: Any) -> ScenarioResult:
        raised = dataclasses.replace(RAISED, **changes)
        return scenario(name, None, verdict=Verdict.RAISED, raised=raised, rows=())

    longer = raising("b", error="ValueError: 7 tokens, not 8", call=3)
    elsewhere = raising("b", traceback=str(RAISED.traceback).replace("line 7", "line 9"))
    assert len(group_findings((raising("a"), longer))) == 1
    assert len(group_findings((raising("a"), elsewhere))) == 2
    assert len(group_findings((raising("a"), raising("b", error="TypeError: no")))) == 2


def test_what_was_not_compared_for_one_reason_is_told_once():
    def undecided(name: str, reason: str) -> ScenarioResult:
        return scenario(name, None, verdict=Verdict.INCONCLUSIVE, reason=reason, rows=())

    assert len(group_findings((undecided("a", "no room"), undecided("b", "no room")))) == 1
    assert len(group_findings((undecided("a", "no room"), undecided("b", "no time")))) == 2


@pytest.mark.parametrize(("of_other", "said"), [("one-pass", True), ("this scenario", False), (None, False)])
def test_another_side_of_the_same_finding_is_said(of_other: str | None, said: bool):
    def side(suspect: str | None) -> FourWays:
        return FourWays(ids=(0,), groups=(("literal",),), suspect=suspect, sentence=f"it is {suspect}")

    first = scenario("a", four_ways=side("this scenario"))
    (group,) = group_findings((first, scenario("b", four_ways=side(of_other))))
    assert (f"In b, it is {of_other}." in group.text) == said


@pytest.mark.parametrize("confirmed", [True, False])
def test_a_confirmation_that_the_others_do_not_share_is_said(confirmed: bool):
    first, other = (dataclasses.replace(DIVERGENCE, confirmed=each) for each in (confirmed, not confirmed))
    (group,) = group_findings((scenario("a", first), scenario("b", other)))
    assert group.more[-1] == ("Not confirmed in b." if confirmed else "Confirmed in b.")


def test_a_test_of_junit_stands_alone():
    suite = ET.fromstring(junit.render(report_of(*map(scenario, NAMES))))
    texts = [failure.text or "" for failure in suite.iter("failure")]
    assert len(texts) == len(NAMES)
    assert all(CAUSE in text for text in texts)
