"""Help and a plain import stay light; the public names load on first use."""

import importlib
import os
import subprocess
import sys

import pytest

import kvproof

HEAVY = "('torch', 'numpy', 'safetensors', 'jaxtyping', 'rich', 'hypothesis', 'transformers')"
RUN = """
import sys
sys.argv[0] = "kvproof"
try:
    from kvproof.cli import main
    main()
finally:
    loaded = [name for name in %s if name in sys.modules]
    print("loaded:", *loaded, file=sys.stderr)
"""


def python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, env=environment, check=False
    )


def test_importing_kvproof_loads_nothing_heavy():
    done = python(f"import sys, kvproof; print([name for name in {HEAVY} if name in sys.modules])")
    assert (done.returncode, done.stdout, done.stderr) == (0, "[]\n", "")


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        (["--help"], 0),
        (["--version"], 0),
        (["milestone", "--help"], 0),
        (["replay", "--help"], 0),
        (["generate", "--help"], 0),
        (["generate", "random:llama", "--ids", "1", "--seed", "1"], 2),
        (["milestone", "--without", "everything"], 2),
        (["replay", "no-such-ledger.jsonl"], 2),
        (["shrink", "--help"], 0),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else str(value),
)
def test_a_command_that_runs_nothing_loads_nothing_heavy(arguments: list[str], status: int):
    done = python(RUN % HEAVY, *arguments)
    assert done.returncode == status
    assert done.stdout or done.stderr
    assert done.stderr.splitlines()[-1] == "loaded:"


def test_names_of_the_contract_load_no_torch_and_names_of_the_engine_do():
    done = python(
        "import sys, kvproof\n"
        "kvproof.Greedy, kvproof.Sample, kvproof.Stops, kvproof.Verdict, kvproof.Report, kvproof.UsageError\n"
        "print('torch' in sys.modules)\n"
        "kvproof.audit\n"
        "print('torch' in sys.modules)\n"
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "False\nTrue\n", "")


@pytest.mark.parametrize("name", kvproof.__all__)
def test_a_public_name_loads_and_is_the_same_on_every_use(name: str):
    first = getattr(kvproof, name)
    assert getattr(kvproof, name) is first
    if name in kvproof._HOME:
        assert first is getattr(importlib.import_module(kvproof._HOME[name]), name)
        assert first.__name__ == name


def test_dir_lists_the_public_names_and_no_other_name_loads():
    assert dir(kvproof) == sorted(kvproof.__all__)
    with pytest.raises(AttributeError, match="no attribute 'cache_of_yesterday'"):
        _ = kvproof.cache_of_yesterday
