"""The pytest plugin, run as its users run it: in projects of their own, with and without xdist."""

import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ET

import pytest

pytest_plugins = ["pytester"]

DECODER = """
import numpy as np
import pytest

rows = np.random.default_rng(0).normal(size=(11, 11))

def full(ids):
    return rows[ids].cumsum(axis=0)

def step(ids, cache):
    logits = (0 if cache is None else cache) + rows[ids].cumsum(axis=0)
    return logits, logits[-1]

def forgets(ids, cache):
    return step(ids, None)
"""
PASSING = """
def test_the_cache(kvproof):
    report = kvproof.assert_match((full, step))
    assert report.verdict.passes
"""
FAILING = """
def test_the_cache(kvproof):
    kvproof.assert_match((full, forgets), "token-by-token")
"""
EACH = """
@pytest.mark.kvproof_scenarios("token-by-token", "chunked prefill", "batch")
def test_the_cache(kvproof, kvproof_scenario):
    kvproof.assert_match((full, step), kvproof_scenario)
"""


def run(pytester: pytest.Pytester, test: str, *options: str) -> pytest.RunResult:
    pytester.makepyfile(DECODER + test)
    return pytester.runpytest_subprocess("-p", "no:cacheprovider", *options)


@pytest.mark.parametrize("options", [[], ["-n", "1"]], ids=["alone", "xdist"])
def test_a_decoder_that_passes_passes(pytester: pytest.Pytester, options: list[str]):
    result = run(pytester, PASSING, *options)
    result.assert_outcomes(passed=1)
    assert not (pytester.path / "kvproof-reports").exists()


@pytest.mark.parametrize("ci", [None, "true"], ids=["at a terminal", "in CI"])
@pytest.mark.parametrize("options", [[], ["-n", "1"]], ids=["alone", "xdist"])
def test_a_failure_is_the_finding_and_its_report_is_kept(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, options: list[str], ci: str | None
):
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.delenv("BUILD_NUMBER", raising=False)
    if ci is not None:  # pytest then repeats a whole failure in its last lines
        monkeypatch.setenv("CI", ci)
    result = run(pytester, FAILING, *options)
    result.assert_outcomes(failed=1)
    text, _, _ = result.stdout.str().partition("short test summary info")
    assert "The cached path diverges: consuming" in text
    assert text.count("token-by-token (diverged): ") == 1
    assert "Which side: the ways of computing this row do not tell which side is wrong" in text
    assert "To repeat it: pytest 'test_a_failure_is_the_finding" in text
    assert "Traceback" not in text
    (file,) = (pytester.path / "kvproof-reports").iterdir()
    assert f"The whole report: {file}" in text
    assert json.loads(file.read_text("utf-8"))["verdict"] == "diverged"


def test_a_decoder_that_raises_fails_with_its_own_traceback(pytester: pytest.Pytester):
    raising = """
def raises(ids, cache):
    if cache is not None:
        raise ValueError("no warm cache")
    return step(ids, cache)

def test_the_cache(kvproof):
    kvproof.assert_match((full, raises), "token-by-token")
"""
    result = run(pytester, raising)
    result.assert_outcomes(failed=1)
    text = result.stdout.str()
    assert "token-by-token (raised): the cached path raises in call 2, fed " in text
    assert 'raise ValueError("no warm cache")' in text
    (file,) = (pytester.path / "kvproof-reports").iterdir()
    assert json.loads(file.read_text("utf-8"))["verdict"] == "raised"


@pytest.mark.parametrize("options", [[], ["-n", "2"]], ids=["alone", "xdist"])
def test_a_suite_shows_one_line_a_scenario(pytester: pytest.Pytester, options: list[str]):
    result = run(pytester, EACH, "-v", "-rs", *options)
    result.assert_outcomes(passed=2, skipped=1)
    result.stdout.fnmatch_lines_random(
        ["*test_the_cache?token-by-token?*PASSED*" if not options else "*PASSED*test_the_cache?token-by-token?*"]
    )
    assert "the subject lacks the ability: batch" in result.stdout.str()


def test_every_scenario_is_a_test_where_none_is_named(pytester: pytest.Pytester):
    result = run(
        pytester,
        EACH.replace('@pytest.mark.kvproof_scenarios("token-by-token", "chunked prefill", "batch")', ""),
        "--collect-only",
        "-q",
    )
    assert "27 tests collected" in result.stdout.str()


def test_a_scenario_that_is_not_there_is_named(pytester: pytest.Pytester):
    result = run(pytester, EACH.replace('"batch"', '"bach"'))
    assert result.ret != 0
    assert (
        "no scenario 'bach'. Did you mean 'batch'? There are: token-by-token,"
        in result.stdout.str() + result.stderr.str()
    )


def test_options_come_from_pyproject(pytester: pytest.Pytester):
    pytester.makepyprojecttoml(
        '[tool.pytest.ini_options]\nkvproof_length = "8"\nkvproof_report_dir = "kept"\n'
        "kvproof_certificate = true\n"
    )
    test = """
def test_the_cache(kvproof):
    report = kvproof.assert_match((full, step), ["token-by-token"])
    assert report.certificate is not None
    assert len(report.scenarios[-1].rows) == 8
    kvproof.assert_match((full, forgets), ["token-by-token"])
"""
    result = run(pytester, test)
    result.assert_outcomes(failed=1)
    assert "The cached path diverges" in result.stdout.str()
    assert len(list((pytester.path / "kept").iterdir())) == 1


def test_an_option_that_is_no_number_is_told(pytester: pytest.Pytester):
    pytester.makepyprojecttoml('[tool.pytest.ini_options]\nkvproof_length = "many"\n')
    result = run(pytester, PASSING)
    assert "kvproof_length must be a whole number, not 'many'" in result.stdout.str() + result.stderr.str()


def test_junit_says_what_was_found(pytester: pytest.Pytester):
    run(pytester, PASSING, "--junit-xml=junit.xml")
    properties = ET.parse(pytester.path / "junit.xml").getroot().iter("property")
    found = {p.get("name"): p.get("value") for p in properties}
    assert found["kvproof_verdict"] in ("match", "rounding")
    assert found["kvproof_subject"] == "full"
    assert int(found["kvproof_rows"]) > 100


def test_collecting_loads_no_torch(pytester: pytest.Pytester):
    pytester.makepyfile(
        "def test_a(kvproof, kvproof_scenario): ...\n\n"
        "def test_b():\n    import sys\n    assert 'torch' not in sys.modules and 'numpy' not in sys.modules\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "kvproof.pytest_plugin", "-k", "test_b"]
    alone = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # other plugins may load what they like
    done = subprocess.run(command, cwd=pytester.path, capture_output=True, text=True, env=alone)
    assert done.returncode == 0, done.stdout
    assert "1 passed" in done.stdout
