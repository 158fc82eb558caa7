"""The example decoders: each passes as it stands, and its bug is caught where it is."""

import importlib.util
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

from kvproof import Report, Verdict, audit

EXAMPLES = Path(__file__).parents[2] / "examples"

#: Each example's bug: scenarios that must see it, some that cannot, and where the first wrong value is.
BUGS = {
    "minimal_gpt": ({"token-by-token", "chunked prefill"}, {"causality"}, "the output of positions:"),
    "preallocated": ({"prefill+steps", "multi-turn"}, {"causality"}, "the output of layers.1.out:"),
    "rotating_window": (
        {"chunked prefill", "window crossing"},
        {"token-by-token"},
        "the output of layers.0.out:",
    ),
    "grouped_rotary": ({"token-by-token", "left-padded batch"}, {"causality"}, "the output of layers.0.out:"),
    "recurrent": ({"chunked prefill", "multi-turn"}, {"token-by-token"}, "the output of layers.0.out:"),
    "numpy_gpt": ({"token-by-token", "rollback"}, {"causality"}, None),
}


@cache
def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def verdicts(report: Report) -> dict[str, Verdict]:
    return {scenario.name: scenario.verdict for scenario in report.scenarios}


@pytest.mark.parametrize("name", BUGS)
def test_it_passes_as_it_stands_and_the_audit_could_have_failed(name: str):
    report = audit(example(name).subject(), all_values=False, certificate=True)
    assert report.verdict.passes, report
    assert report.certificate is not None, report
    assert report.certificate.problem is None
    assert report.certificate.margin > 1000


@pytest.mark.parametrize("name", BUGS)
def test_its_bug_is_caught_and_located(name: str):
    seen, unseen, where = BUGS[name]
    report = audit(example(name).broken(), all_values=False)
    assert report.verdict is Verdict.DIVERGED
    found = verdicts(report)
    assert {n for n in seen if found[n] is not Verdict.DIVERGED} == set()
    assert {n for n in unseen if not found[n].passes} == set()
    divergence = next(s.divergence for s in report.scenarios if s.verdict is Verdict.DIVERGED)
    if where is not None:
        assert f"the first value that differs is {where}" in divergence.sentence
        assert divergence.confirmed


@pytest.mark.parametrize("name", BUGS)
def test_it_can_be_read_in_a_minute(name: str):
    assert 50 <= (EXAMPLES / f"{name}.py").read_text("utf-8").count("\n") <= 150
