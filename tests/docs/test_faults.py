"""The page of deliberate faults is what the catalogue says, and leaves no class of public bugs without one."""

import importlib.util
from pathlib import Path
from types import ModuleType

from kvproof.faults import catalogue
from kvproof.scenarios import catalogue as scenarios

ROOT = Path(__file__).parents[2]


def _load_tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("write_faults", ROOT / "tools" / "write_faults.py")
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    return tool


TOOL = _load_tool()


def test_the_page_is_what_the_tool_writes():
    """Where this fails, run ``python tools/write_faults.py``."""
    assert TOOL.TARGET.read_text("utf-8") == TOOL.text()


def test_every_class_of_public_bugs_has_a_fault_and_the_105_records_are_all_counted():
    assert {name for fault in catalogue() for name in fault.classes} == set(TOOL.CLASSES)
    assert sum(number for number, _, _ in (*TOOL.CLASSES.values(), *TOOL.NO_FAULT.values())) == 105


def test_every_fault_names_scenarios_of_the_catalogue():
    names = {scenario.name for scenario in scenarios(range(8), range(8))}
    assert all(fault.seen_by and set(fault.seen_by) <= names for fault in catalogue())
