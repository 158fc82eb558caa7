"""The shape of the package: public names, sizes, docstrings, files that ship."""

import ast
import importlib
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import kvproof

SOURCE = Path(kvproof.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))

PUBLIC = [
    "AuditKeywords",
    "CacheOps",
    "CallableSubject",
    "Greedy",
    "KvproofError",
    "MismatchError",
    "ModuleSubject",
    "ReferenceSubject",
    "Report",
    "Request",
    "Run",
    "Sample",
    "Session",
    "StopReason",
    "Stops",
    "Subject",
    "Tolerance",
    "UsageError",
    "Verdict",
    "assert_match",
    "audit",
    "cache_memory",
    "conformance",
    "contract",
    "errors",
    "faults",
    "generate",
    "localise",
    "milestone",
    "policies",
    "reference",
    "replay",
    "scenarios",
    "subjects",
]

#: Longer than the limit, each with the reason. None so far.
LONG_FILES = {"subjects/_transformers/tiny_sizes.py": "data alone, a few lines for each type"}
LONG_FUNCTIONS: dict[str, str] = {}
MAX_PARAMETERS, MAX_COMPLEXITY = 8, 15
#: Functions with more parameters than that. Public calls document each of theirs; the others group no values.
MANY_PARAMETERS = {
    "_engine/audit.py:audit": "kvproof.audit, a documented public call",
    "_engine/localise.py:localise": "kvproof.localise, a documented public call",
    "_generation/requests.py:generate": "kvproof.generate, a documented public call",
    "_generation/requests.py:__init__": "a request has the parameters of kvproof.generate",
    "_numerics/random_rounding.py:_group_norm": "it stands in for torch's own, and takes what that takes",
    "_sweeping/sweep.py:sweep": "what sweep_targets makes of its options, and two callbacks",
    "subjects/_callables.py:__init__": "kvproof.CallableSubject, a documented public call",
    "subjects/_module.py:__init__": "kvproof.ModuleSubject, a documented public call",
}


def test_the_public_names_are_these():
    assert sorted(kvproof.__all__) == PUBLIC
    assert dir(kvproof) == PUBLIC


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_is_there_and_documented(name: str):
    assert getattr(kvproof, name).__doc__


def test_a_name_that_is_not_there_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = kvproof.nonsense


def test_type_checkers_see_the_names_that_load_on_first_use():
    """A name in one list alone would be unknown to a checker, or missing at run time."""
    tree = ast.parse((SOURCE / "__init__.py").read_text("utf-8"))
    (guarded,) = [node for node in tree.body if isinstance(node, ast.If)]
    seen = {
        alias.asname: node.module
        for node in guarded.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert seen == kvproof._HOME


def num_parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return how many parameters a function takes, besides what it is bound to."""
    named = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    return sum(parameter.arg not in ("self", "cls") for parameter in named)


def test_no_function_has_too_many_branches():
    limit = f"lint.mccabe.max-complexity={MAX_COMPLEXITY}"
    command = (sys.executable, "-m", "ruff", "check", "--isolated", "--select", "C901", "--config", limit, SOURCE)
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout


def test_every_exception_from_a_ceiling_is_one():
    """An exception that is none any more goes."""
    functions = {
        f"{file.relative_to(SOURCE)}:{node.name}": num_parameters(node)
        for file in FILES
        for node in ast.walk(ast.parse(file.read_text("utf-8")))
        if isinstance(node, ast.FunctionDef) and num_parameters(node) > MAX_PARAMETERS
    }
    assert functions.keys() == MANY_PARAMETERS.keys()


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(SOURCE)))
def test_files_and_functions_stay_short(file: Path):
    text = file.read_text("utf-8")
    name = str(file.relative_to(SOURCE))
    assert text.count("\n") <= 500 or name in LONG_FILES
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            doc = ast.get_docstring(node, clean=False)
            body = node.end_lineno - node.lineno - (doc.count("\n") + 1 if doc else 0)
            assert num_parameters(node) <= MAX_PARAMETERS or f"{name}:{node.name}" in MANY_PARAMETERS, node.name
            assert body <= 60 or f"{name}:{node.name}" in LONG_FUNCTIONS, f"{node.name} has {body} lines"


def test_every_module_imports_alone_and_says_what_it_is():
    for module in pkgutil.walk_packages([str(SOURCE)], prefix="kvproof."):
        assert importlib.import_module(module.name).__doc__, module.name


def test_type_information_and_schemas_ship():
    assert (SOURCE / "py.typed").exists()
    schemas = {"report-1.json", "report-2.json", "ledger-line-1.json", "ledger-line-2.json", "sweep-1.json"}
    assert {path.name for path in (SOURCE / "schemas").iterdir()} == schemas


@pytest.mark.xdist_group("together")
def test_a_group_of_tests_stays_in_one_process(request: pytest.FixtureRequest):
    """Where groups have no effect, each process loads the pretrained model, and plants every fault, once more."""
    assert not getattr(request.config.option, "loadgroup", False) or request.node.nodeid.endswith("@together")
