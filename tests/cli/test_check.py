"""``kvproof check``: a broken adapter is told apart from a broken decoder, on the command line."""

from pathlib import Path

import pytest

from .running import run

MINE = """
import numpy as np

from kvproof import CacheOps, CallableSubject

table = np.random.default_rng(0).normal(size=(11, 11))


def full(ids):
    return table[ids].cumsum(axis=0)


def step(ids, cache):
    cache = {"sum": 0} if cache is None else cache
    logits = cache["sum"] + table[ids].cumsum(axis=0)
    cache["sum"] = logits[-1]
    return logits, cache


def sound():
    return CallableSubject(full, step)


def shares():
    return CallableSubject(full, step, ops=CacheOps(fork=lambda cache: cache))


def raises():
    return CallableSubject(full, lambda ids, cache: cache["layer 7"])


def fails():
    return {}["weights"]
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A file with adapters, in the current folder."""
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    return "mine.py"


def test_an_adapter_that_keeps_its_promises_passes(mine: str):
    found = run("check", f"{mine}:sound")
    assert (found.status, found.err) == (0, "")
    assert found.out.startswith("full:\nkept: rows are of the declared dtype")
    assert run("check", f"{mine}:sound", "--quiet").out == ""


def test_a_broken_promise_is_named_and_is_the_exit_status(mine: str):
    found = run("check", f"{mine}:shares", "--quiet")
    assert found.status == 1
    assert found.out.startswith(
        "BROKEN: a fork shares nothing with what it was forked from: what was forked from"
    )
    assert found.out.count("\n") == 1


def test_what_raises_is_shown_where_it_is(mine: str):
    found = run("check", f"{mine}:raises")
    line = MINE.splitlines().index('    return CallableSubject(full, lambda ids, cache: cache["layer 7"])') + 1
    assert found.status == 1
    assert f"mine.py, line {line}, in <lambda>" in found.out


def test_a_factory_that_raises_says_where(mine: str):
    line = MINE.splitlines().index('    return {}["weights"]') + 1
    assert run("check", f"{mine}:fails").refused("raised KeyError: 'weights'", f"mine.py, line {line}, in fails")


def test_an_audit_checks_the_adapter_first_and_its_verdict_stays(mine: str):
    found = run("audit", f"{mine}:shares", "--scenario", "token-by-token", "--scenario", "fork")
    assert found.status == 1
    assert "BROKEN: a fork shares nothing" in found.out
    assert "kvproof check TARGET checks all its promises" in found.out
    assert "BROKEN" not in run("audit", f"{mine}:sound", "--scenario", "fork").out


def test_token_ids_are_chosen_here_too(mine: str):
    assert run("check", f"{mine}:sound", "--ids", "3,5-7").status == 0
    assert run("check", f"{mine}:sound", "--avoid-ids", "x").refused("'x' is no token id")


def test_a_decoder_that_cannot_take_token_0_is_loaded_with_others(mine: str, tmp_path: Path):
    with (tmp_path / mine).open("a") as file:
        file.write("\n\ndef no_zero():\n    return lambda ids: full(ids) if all(ids) else 1 / 0, step\n")
    assert run("check", f"{mine}:no_zero").refused("ZeroDivisionError")
    assert run("check", f"{mine}:no_zero", "--avoid-ids", "0").status == 0
    assert run("audit", f"{mine}:no_zero", "--avoid-ids", "0", "--scenario", "token-by-token").status == 0
