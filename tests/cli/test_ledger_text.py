"""What a ledger's text may hold: JSON of reasonable values, and nothing that acts on a terminal."""

import json
from pathlib import Path

import pytest

from .ledgers import edited, found, lines_of, text_of

UNREADABLE = "not JSON that can be read: "
#: JSON, or what lenient readers take for it, that stands where a float belongs, and how it is refused.
VALUES = {
    "an integer of 400 digits": ("1" + "0" * 399, "must be a number that a float can hold, not 1000"),
    "a negative integer of 400 digits": ("-1" + "0" * 399, "must be a number that a float can hold, not -1000"),
    "an integer of 5001 digits": ("1" + "0" * 5000, UNREADABLE),
    "a deep list": ("[" * 100_000, UNREADABLE),
    "a deep list that ends": ("[" * 100_000 + "]" * 100_000, UNREADABLE),
    "a deep object": ('{"a":' * 100_000, UNREADABLE),
    "NaN": ("NaN", f"{UNREADABLE}NaN is not JSON; write it as a string"),
    "Infinity": ("Infinity", f"{UNREADABLE}Infinity is not JSON; write it as a string"),
    "-Infinity": ("-Infinity", f"{UNREADABLE}-Infinity is not JSON; write it as a string"),
    "1e999": ("1e999", f"{UNREADABLE}1e999 is too large for a number"),
    "-1e999": ("-1e999", f"{UNREADABLE}-1e999 is too large for a number"),
}


def spliced(text: str, line: int, path: tuple[str, ...], value: str) -> str:
    """Return the ledger with a member's value replaced by any text, JSON or not."""
    mark = "here stands the value"
    whole = text_of(edited(text, line, path, mark))
    assert whole.count(mark) == 1
    return whole.replace(f'"{mark}"', value)


@pytest.mark.parametrize(("line", "path"), [(1, ("policy", "temperature")), (4, ("margin",))])
@pytest.mark.parametrize(("value", "problem"), VALUES.values(), ids=VALUES)
def test_a_value_beyond_reason_is_refused_by_file_and_line(
    value: str, problem: str, line: int, path: tuple[str, ...], ledgers: dict[str, str], scratch: Path, replayed
):
    """Each ended in a traceback, or became a number that JSON does not have."""
    outcome = replayed(spliced(ledgers["seeded"], line, path, value))
    assert outcome.refused(f"{scratch} line {line}: ", problem), outcome
    assert len(outcome.err) < len(str(scratch)) + 300, "a long value is shown shortened"


@pytest.mark.parametrize(
    ("line", "member"), [(1, "dtype"), (4, "margin"), (4, "chosen"), (6, "stop_reason"), (4, "kind")]
)
@pytest.mark.parametrize("other", ["null", "1", "the same"])
def test_a_duplicate_key_is_refused_by_name(
    other: str, line: int, member: str, ledgers: dict[str, str], scratch: Path, replayed
):
    """The last of the two was read and the first one ignored, so two readers could see two records."""
    lines = ledgers["seeded"].splitlines()
    value = json.dumps(json.loads(lines[line - 1])[member]) if other == "the same" else other
    lines[line - 1] = f'{{"{member}": {value}, {lines[line - 1][1:]}'
    outcome = replayed("".join(f"{line}\n" for line in lines))
    assert outcome.refused(f"{scratch} line {line}: ", f"duplicate key '{member}'"), outcome


@pytest.mark.parametrize(
    ("line", "path"),
    [(1, ("subject",)), (2, ("chosen_token",)), (4, ("top_logits", 0, "token")), (6, ("tokens",))],
)
@pytest.mark.parametrize("text", ["\ud800", "A\udfff", "\udc00\ud800"])
def test_a_lone_surrogate_is_refused_by_its_path(
    text: str, line: int, path: tuple[str | int, ...], ledgers: dict[str, str], scratch: Path, replayed
):
    """It was read without a word, and the first attempt to print it ended in a traceback."""
    outcome = replayed(edited(ledgers["seeded"], line, path, text))
    named = "$" + "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path)
    assert outcome.refused(f"{scratch} line {line}: {named} must be text without lone surrogates"), outcome
    assert outcome.err.isascii()


@pytest.mark.parametrize(
    ("path", "value", "problem"),
    [
        (("policy", "top_k"), 0, "$.policy: top_k must be at least 1, not 0"),
        (("policy", "temperature"), 0, "$.policy: temperature must lie in 1e-30..1e30, not 0.0"),
        (("policy", "temperature"), -1.5, "$.policy: temperature must lie in 1e-30..1e30, not -1.5"),
        (("policy", "temperature"), "inf", "$.policy: temperature must lie in 1e-30..1e30, not inf"),
        (("policy", "temperature"), "nan", "$.policy: temperature must lie in 1e-30..1e30, not nan"),
        (("policy", "seed"), -1, "$.policy: seed must lie in 0..2**63-1, not -1"),
        (("policy", "seed"), 2**63, f"$.policy: seed must lie in 0..2**63-1, not {2**63}"),
        (("stops", "max_tokens"), 0, "$.stops: max_tokens must be at least 1, not 0"),
        (("stops", "max_tokens"), -1, "$.stops: max_tokens must be at least 1, not -1"),
    ],
)
def test_a_policy_that_cannot_be_is_refused_by_file_line_and_path(
    path: tuple[str, ...], value: object, problem: str, ledgers: dict[str, str], scratch: Path, replayed
):
    """The refusal named neither the file nor the place, as if the command had been called wrongly."""
    outcome = replayed(edited(ledgers["seeded"], 1, path, value))
    assert outcome.refused(f"{scratch} line 1: ", problem), outcome


HOSTILE = "\x1b]0;title\x07\x1b[2J\r\nx\u2028\u202e"
ESCAPED = "\\x1b]0;title\\x07\\x1b[2J\\r\\nx\\u2028\\u202e"


@pytest.mark.parametrize(
    ("line", "path", "named"),
    [
        (1, ("prompt_tokens",), "prompt_tokens"),
        (4, ("consumed_tokens",), "consumed_tokens"),
        (4, ("chosen_token",), "chosen_token"),
        (4, ("logits_digest",), "logits_digest"),
        (4, ("generator_before",), "generator_before"),
        (4, ("generator_after",), "generator_after"),
        (4, ("top_logits", 0, "token"), "token"),
        (4, ("probabilities", 0, "token"), "token"),
        (6, ("problem",), "problem"),
        (6, ("tokens",), "tokens"),
    ],
)
def test_escape_codes_in_a_record_are_shown_and_not_obeyed(
    line: int, path: tuple[str | int, ...], named: str, ledgers: dict[str, str], replayed
):
    """A record could move the cursor, set the window's title and add lines to what replay says of it."""
    outcome = replayed(edited(ledgers["seeded"], line, path, HOSTILE))
    assert found(outcome, line, named), outcome
    assert f" is {ESCAPED}, and " in outcome.err
    assert outcome.err.removesuffix("\n").isprintable()


def test_escape_codes_in_the_name_of_a_wrong_probability_are_shown_and_not_obeyed(
    ledgers: dict[str, str], replayed
):
    """A token's text names its probability, so it stood in the message as it was."""
    lines = lines_of(ledgers["seeded"])
    lines[3]["probabilities"][0] |= {"token": HOSTILE, "value": 0.75}
    outcome = replayed(lines)
    assert found(outcome, 4, f"probability of {ESCAPED}"), outcome
    assert outcome.err.removesuffix("\n").isprintable()


@pytest.mark.parametrize(
    ("line", "change", "problem"),
    [
        (1, {HOSTILE: 1}, f"line 1: $ has unknown key '{ESCAPED}'"),
        (4, {HOSTILE: 1}, f"line 4: $ has unknown key '{ESCAPED}'"),
        (4, {"kind": HOSTILE}, f"line 4 is neither a step nor an end: its kind is '{ESCAPED}'"),
        (1, {"ledger_version": HOSTILE}, f"has ledger version '{ESCAPED}'"),
        (1, {"path": HOSTILE}, "line 1: $.path must be one of ('cached', 'uncached'), not"),
        (6, {"stop_reason": HOSTILE}, "line 6: $.stop_reason must be one of"),
    ],
)
def test_escape_codes_in_a_line_that_is_refused_are_shown_and_not_obeyed(
    line: int, change: dict[str, object], problem: str, ledgers: dict[str, str], replayed
):
    lines = lines_of(ledgers["seeded"])
    lines[line - 1] |= change
    outcome = replayed(lines)
    assert outcome.refused(problem), outcome
    assert outcome.err.removesuffix("\n").isprintable()
