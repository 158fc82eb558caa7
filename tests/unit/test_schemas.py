"""The published schemas, against the tool that writes them and against what kvproof really writes."""

import copy
import dataclasses
import importlib.util
import json
import math
from collections.abc import Collection, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from tests.small_report import REPORT
from tests.sweep.samples import cell, group, job, table
from tests.unit.test_codec import contract_types

from kvproof.contract.codec import to_plain
from kvproof.contract.ledger import ledger_lines
from kvproof.contract.report import Report
from kvproof.contract.sweep_table import Ending

ROOT = Path(__file__).parents[2]
SCHEMAS = ROOT / "src" / "kvproof" / "schemas"


def _load_tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("write_schemas", ROOT / "tools" / "write_schemas.py")
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    return tool


TOOL = _load_tool()


def validator(name: str) -> Draft202012Validator:
    schema = json.loads((SCHEMAS / name).read_text("utf-8"))
    Draft202012Validator.check_schema(schema)
    return Draft202012Validator(schema)


REPORT_SCHEMA = validator("report-2.json")
LINE_SCHEMA = validator("ledger-line-2.json")
SWEEP_SCHEMA = validator("sweep-1.json")


@pytest.fixture(scope="module")
def lines(report: Report) -> list[Any]:
    """Every line of the ledgers of all runs of a real report."""
    runs = [run for pair in report.milestone.runs for run in (pair.cached, pair.uncached)]
    return [json.loads(line) for run in runs for line in ledger_lines(run)]


def test_the_tool_knows_every_published_schema():
    assert {path.name for path in SCHEMAS.iterdir()} == {*TOOL.TYPES, *TOOL.FROZEN}


@pytest.mark.parametrize("name", TOOL.TYPES)
def test_a_published_schema_is_what_the_tool_writes(name: str):
    """Where this fails, run ``make schemas``, and raise the version if a member changed or went away."""
    assert (SCHEMAS / name).read_text("utf-8") == TOOL.schema_text(TOOL.TYPES[name])


def test_a_real_report_is_valid(report: Report):
    REPORT_SCHEMA.validate(to_plain(report))


def test_every_line_of_real_ledgers_is_valid(lines: list[Any]):
    assert {line["kind"] for line in lines} == {"header", "step", "end"}
    for line in lines:
        LINE_SCHEMA.validate(line)


def test_a_report_with_every_contract_type_is_valid():
    REPORT_SCHEMA.validate(to_plain(REPORT))


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_is_valid(number: float):
    scenario = dataclasses.replace(REPORT.scenarios[0], largest_gap=number)
    REPORT_SCHEMA.validate(to_plain(dataclasses.replace(REPORT, scenarios=(scenario,))))


@pytest.mark.parametrize("text", ["NaN", "Infinity", "0"])
def test_any_other_text_for_a_number_is_not_valid(text: str):
    plain = to_plain(REPORT)
    plain["scenarios"][0]["largest_gap"] = text
    assert not REPORT_SCHEMA.is_valid(plain)


def shape(plain: Any) -> Any:
    """Return the names of a value's members, at any depth; scalars are all alike."""
    if isinstance(plain, dict):
        return tuple((name, shape(value)) for name, value in sorted(plain.items()))
    if isinstance(plain, list):
        return frozenset(map(shape, plain))
    return None


def thinned(plain: Any) -> Any:
    """Return the same value with one entry of each shape in each list, which is quicker to check."""
    if isinstance(plain, dict):
        return {name: thinned(value) for name, value in plain.items()}
    if isinstance(plain, list):
        return list({shape(item): thinned(item) for item in plain}.values())
    return plain


def objects_in(plain: Any) -> Iterator[dict[str, Any]]:
    """Yield every JSON object in a value, itself included; they may be changed in place."""
    if isinstance(plain, dict):
        yield plain
    for part in plain.values() if isinstance(plain, dict) else plain if isinstance(plain, list) else ():
        yield from objects_in(part)


#: Members that came with a minor version: an older file lacks them.
ADDED = {"ledger_minor", "schema_minor"}
#: Those of a report's types.
REPORT_ADDED = {
    field.name
    for kind in contract_types(Report)
    for field in dataclasses.fields(kind)
    if "added_in" in field.metadata
}


def assert_strict(schema: Draft202012Validator, plain: Any, *, added: Collection[str] = ()) -> None:
    """Assert that no member at any depth can go away, and none be added."""
    plain = copy.deepcopy(plain)
    for place in objects_in(plain):
        whole = dict(place)
        for name in whole:
            if name in added:
                continue
            del place[name]
            assert not schema.is_valid(plain), f"still valid without {name!r} of {whole}"
            place.update(whole)
        place["unknown"] = None
        assert not schema.is_valid(plain), f"still valid with an unknown member in {whole}"
        del place["unknown"]
    schema.validate(plain)


def test_a_report_can_neither_lose_nor_gain_a_member(report: Report):
    assert_strict(REPORT_SCHEMA, thinned(to_plain(report)), added={"ledger_minor", *REPORT_ADDED})


def test_a_ledger_line_can_neither_lose_nor_gain_a_member(lines: list[Any]):
    for line in thinned(lines):
        assert_strict(LINE_SCHEMA, line, added=ADDED)


def test_the_table_of_a_sweep_can_neither_lose_nor_gain_a_member():
    done, refused = job("random:llama"), job("random:gpt2")
    groups = (group(done, cell(done)), group(refused, ending=Ending.REFUSED, reason="not here"))
    assert_strict(SWEEP_SCHEMA, to_plain(table(*groups)), added=ADDED)
