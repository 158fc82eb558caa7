"""Contract data to plain JSON values and back."""

import copy
import dataclasses
import json
import math
import types
import typing
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.small_report import GREEDY_RUN, REPORT, SEEDED_RUN

from kvproof.contract.codec import CodecError, from_plain, to_plain
from kvproof.contract.ledger import End, Header, LedgerFile, Step
from kvproof.contract.report import Report
from kvproof.contract.results import FaultResult, RowResult, Verdict
from kvproof.policies import Greedy, Sample, Stops

st.register_type_strategy(
    Sample,
    st.builds(
        Sample,
        temperature=st.floats(min_value=1e-30, max_value=1e30),
        top_k=st.integers(min_value=1),
        seed=st.none() | st.integers(0, 2**63 - 1),
    ),
)
st.register_type_strategy(Greedy, st.builds(Greedy, repetition_penalty=st.none() | st.floats(0.01, 100)))
st.register_type_strategy(
    Stops,
    st.builds(
        Stops,
        eos_id=st.none() | st.integers(),
        context=st.booleans(),
        max_tokens=st.none() | st.integers(min_value=1),
    ),
)


def contract_types(kind: Any) -> set[type]:
    """Return every dataclass that stands in a type's members, at any depth."""
    if not dataclasses.is_dataclass(kind):
        return {found for part in typing.get_args(kind) for found in contract_types(part)}
    members = typing.get_type_hints(kind).values()
    return {kind, *(found for member in members for found in contract_types(member))}


def values_in(value: Any) -> list[Any]:
    """Return every dataclass instance in a value, itself included."""
    if isinstance(value, tuple):
        return [found for item in value for found in values_in(item)]
    if not dataclasses.is_dataclass(value):
        return []
    members = [getattr(value, field.name) for field in dataclasses.fields(value)]
    return [value, *(found for member in members for found in values_in(member))]


def through_json(value: Any) -> Any:
    """Write a value as strict JSON and read it again."""
    return from_plain(type(value), json.loads(json.dumps(to_plain(value), allow_nan=False)))


EXAMPLES = {type(value): value for value in values_in(REPORT)}
CONTRACT = sorted(contract_types(Report), key=lambda kind: kind.__name__)


@pytest.mark.parametrize("kind", CONTRACT, ids=lambda kind: kind.__name__)
def test_every_contract_type_comes_back_equal_from_json(kind: type):
    assert through_json(EXAMPLES[kind]) == EXAMPLES[kind]


@pytest.mark.parametrize("kind", sorted({Header, Step, End}, key=lambda kind: kind.__name__))
def test_every_kind_of_ledger_line_is_part_of_the_contract(kind: type):
    assert kind in CONTRACT


# Every kind of member stands in one of these, and they are small enough to draw quickly.
@pytest.mark.parametrize("kind", [Header, Step, End, RowResult, FaultResult], ids=lambda kind: kind.__name__)
@given(data=st.data())
def test_any_value_comes_back_to_the_last_bit(kind: type, data: st.DataObject):
    value = data.draw(st.from_type(kind))
    # NaN equals nothing, and the two zeros equal each other; their texts tell them apart.
    assert repr(through_json(value)) == repr(value)


@pytest.mark.parametrize(("number", "text"), [(math.nan, "nan"), (math.inf, "inf"), (-math.inf, "-inf")])
def test_a_number_that_is_not_finite_is_written_as_a_string(number: float, text: str):
    written = to_plain(dataclasses.replace(REPORT.scenarios[0], largest_gap=number))
    assert written["largest_gap"] == text
    assert json.loads(json.dumps(written, allow_nan=False)) == written
    assert repr(from_plain(float, text)) == repr(number)


def test_plain_values_are_json_types_alone():
    def kinds(plain: Any) -> set[type]:
        parts = plain.values() if isinstance(plain, dict) else plain if isinstance(plain, list) else ()
        return {type(plain), *(kind for part in parts for kind in kinds(part))}

    assert kinds(to_plain(REPORT)) == {dict, list, str, int, float, bool, types.NoneType}


def test_a_whole_number_is_read_as_a_float_where_one_is_due():
    value = from_plain(float, 3)
    assert (value, type(value)) == (3.0, float)


def test_a_list_of_fixed_length_is_read_entry_by_entry():
    assert from_plain(tuple[int, str], [1, "a"]) == (1, "a")


def edited(plain: Any, path: tuple[str | int, ...], value: Any) -> Any:
    """Return a copy with the member at ``path`` replaced."""
    copied = copy.deepcopy(plain)
    place = copied
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return copied


REPORT_PLAIN = to_plain(REPORT)
HEADER_PLAIN = to_plain(SEEDED_RUN.header)
FIRST_ROW = ("scenarios", 0, "rows", 0)
NAMED = {
    "a string for an integer": (
        ("subject", "num_layers"),
        "2",
        "$.subject.num_layers must be an integer, not '2'",
    ),
    "a fraction for an integer": (("schema_version",), 1.5, "$.schema_version must be an integer, not 1.5"),
    "a whole float for an integer": (("schema_version",), 1.0, "$.schema_version must be an integer, not 1.0"),
    "a boolean for an integer": (("schema_version",), True, "$.schema_version must be an integer, not True"),
    "a boolean for a number": (
        (*FIRST_ROW, "evidence", "gap"),
        False,
        "$.scenarios[0].rows[0].evidence.gap must be a number, not False",
    ),
    "a string for a number": (
        (*FIRST_ROW, "evidence", "gap"),
        "0",
        "$.scenarios[0].rows[0].evidence.gap must be a number, not '0'",
    ),
    "another spelling of nan": (
        (*FIRST_ROW, "evidence", "gap"),
        "NaN",
        "$.scenarios[0].rows[0].evidence.gap must be a number, not 'NaN'",
    ),
    "null for a number": (
        (*FIRST_ROW, "evidence", "gap"),
        None,
        "$.scenarios[0].rows[0].evidence.gap must be a number, not None",
    ),
    "a number for a string": (("summary",), 3, "$.summary must be a string, not 3"),
    "a number for a boolean": (
        ("faults", 0, "right_stage"),
        1,
        "$.faults[0].right_stage must be true or false, not 1",
    ),
    "an object for a list": (("constants",), {}, "$.constants must be a list, not {}"),
    "a string for a list": (("scenarios", 1, "rows"), "rows", "$.scenarios[1].rows must be a list, not 'rows'"),
    "a list for an object": (("environment",), [], "$.environment must be an object, not []"),
    "an entry of a list": (
        (*FIRST_ROW, "ids"),
        [0, "1"],
        "$.scenarios[0].rows[0].ids[1] must be an integer, not '1'",
    ),
    "an unknown enum value": (
        ("verdict",),
        "fine",
        f"$.verdict must be one of {[str(verdict) for verdict in Verdict]}, not 'fine'",
    ),
    "a list for an enum value": (
        ("subject", "abilities", 1),
        ["tap"],
        "not ['tap']",
    ),
    "neither of two types": (
        (*FIRST_ROW, "evidence", "sampled_error"),
        "small",
        "$.scenarios[0].rows[0].evidence.sampled_error must be a number, not 'small'; "
        "or $.scenarios[0].rows[0].evidence.sampled_error must be null, not 'small'",
    ),
    "an unknown member": (("environment", "colour"), "red", "$.environment has unknown key 'colour'"),
    "an unknown member deep down": (
        ("milestone", "runs", 1, "cached", "steps", 0, "extra"),
        1,
        "$.milestone.runs[1].cached.steps[0] has unknown key 'extra'",
    ),
}


@pytest.mark.parametrize(("path", "value", "message"), NAMED.values(), ids=NAMED)
def test_what_does_not_fit_is_named_with_its_path(path: tuple[str | int, ...], value: Any, message: str):
    with pytest.raises(CodecError) as caught:
        from_plain(Report, edited(REPORT_PLAIN, path, value))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("path",), "both", "$.path must be one of ('cached', 'uncached'), not 'both'"),
        (("path",), None, "$.path must be one of ('cached', 'uncached'), not None"),
        (("kind",), "step", "$.kind must be one of ('header',), not 'step'"),
    ],
)
def test_a_literal_takes_its_own_values_alone(path: tuple[str, ...], value: Any, message: str):
    with pytest.raises(CodecError) as caught:
        from_plain(Header, edited(HEADER_PLAIN, path, value))
    assert str(caught.value) == message


def test_a_union_of_objects_names_what_each_of_them_misses():
    with pytest.raises(CodecError) as caught:
        from_plain(Header, edited(HEADER_PLAIN, ("policy", "kind"), "beam"))
    assert str(caught.value) == (
        "$.policy has unknown key 'min_p'; or $.policy.kind must be one of ('sample',), not 'beam'"
    )


@pytest.mark.parametrize("run", [GREEDY_RUN, SEEDED_RUN], ids=["greedy", "sample"])
def test_a_union_of_objects_is_told_apart_by_kind(run: Any):
    assert from_plain(Header, to_plain(run.header)).policy == run.header.policy


@pytest.mark.parametrize("kind", CONTRACT, ids=lambda kind: kind.__name__)
def test_every_missing_member_is_named(kind: type):
    whole = to_plain(EXAMPLES[kind])
    added = {field.name for field in dataclasses.fields(kind) if "added_in" in field.metadata}
    for member in whole.keys() - added:
        with pytest.raises(CodecError) as caught:
            from_plain(kind, {name: value for name, value in whole.items() if name != member})
        assert str(caught.value) == f"$ is missing key {member!r}"


def test_a_list_of_fixed_length_names_the_length_it_wants():
    with pytest.raises(CodecError, match=r"^\$ must be 2 entries, not \[1\]$"):
        from_plain(tuple[int, str], [1])


def test_a_long_wrong_value_is_shown_shortened():
    with pytest.raises(CodecError) as caught:
        from_plain(int, "x" * 1000)
    assert str(caught.value) == f"$ must be an integer, not '{'x' * 56}..."


def test_the_path_starts_where_the_caller_says():
    with pytest.raises(CodecError, match=r"^line 3\.run must be an object, not 0$"):
        from_plain(LedgerFile, {"run": 0, "damage": None}, "line 3")
