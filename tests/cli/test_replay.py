"""`kvproof replay`: a fresh record holds, and whatever was changed in one is found and named."""

import dataclasses
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvproof.contract.ledger import End, Header, Step
from kvproof.reference import Checkpoint, DecoderConfig, save_checkpoint
from kvproof.reference.training import initialised

from .conftest import PLANS, Trained
from .ledgers import Edit, edited, found, lines_of, text_of
from .running import Outcome, run

# --- records that hold ---


@pytest.mark.parametrize("name", PLANS)
def test_a_fresh_ledger_replays_to_the_last_bit(name: str, ledgers: dict[str, str], replayed):
    outcome = replayed(ledgers[name])
    lines = lines_of(ledgers[name])
    assert (outcome.status, outcome.err) == (0, "")
    said, tokens = outcome.out.splitlines()
    assert said.endswith(f"all {len(lines)} lines replay through both paths, logits to the last bit.")
    assert tokens == lines[-1]["tokens"]


@pytest.mark.parametrize("name", ["greedy", "seeded"])
def test_the_ledgers_that_a_report_holds_replay_with_its_checkpoint(name: str, trained: Trained):
    weights = trained.folder / "checkpoint.safetensors"
    outcome = run("replay", trained.folder / f"{name}.jsonl", "--checkpoint", weights, "--quiet")
    assert (outcome.status, outcome.out, outcome.err) == (0, "", "")


def test_without_a_checkpoint_the_recorded_seed_trains_it_again(ledgers: dict[str, str], scratch: Path):
    scratch.write_text(ledgers["greedy"], "utf-8")
    outcome = run("replay", scratch)
    assert (outcome.status, outcome.err) == (0, "")
    assert "to the last bit" in outcome.out


# --- the header ---


@pytest.mark.parametrize(
    ("name", "path", "value", "line", "member"),
    [
        ("greedy", ("prompt",), [2], 1, "prompt_tokens"),
        ("greedy", ("prompt",), [0, 2], 1, "prompt_tokens"),
        ("greedy", ("prompt_tokens",), "A", 1, "prompt_tokens"),
        ("seeded", ("policy", "seed"), 42, 2, "generator_before"),
        ("seeded", ("policy", "top_k"), 2, 2, "ids of probabilities"),
        ("seeded", ("policy", "top_k"), 4, 2, "ids of probabilities"),
        ("seeded", ("policy", "top_k"), 100, 2, "ids of probabilities"),
        ("seeded", ("policy", "temperature"), 2.0, 2, "probability of A"),
        ("seeded", ("policy", "temperature"), 1.0 + 1e-6, 2, "probability of A"),
        ("greedy", ("stops", "eos_id"), None, 6, "stop_reason"),
        ("greedy", ("stops", "eos_id"), 3, 4, "step"),
        ("filling", ("stops", "eos_id"), 1, 6, "stop_reason"),
        ("filling", ("stops", "context"), False, 6, "stop_reason"),
        ("refused", ("stops", "context"), True, 6, "stop_reason"),
        ("greedy", ("stops", "max_tokens"), 2, 4, "step"),
        ("limited", ("stops", "max_tokens"), 1, 3, "step"),
        ("limited", ("stops", "max_tokens"), 3, 4, "stop_reason"),
        ("limited", ("stops", "max_tokens"), None, 4, "stop_reason"),
    ],
)
def test_an_edited_header_is_found_at_the_first_line_that_does_not_follow(
    name: str, path: tuple[str, ...], value: object, line: int, member: str, ledgers: dict[str, str], replayed
):
    outcome = replayed(edited(ledgers[name], 1, path, value))
    assert found(outcome, line, member), outcome


@pytest.mark.parametrize(
    ("prompt", "problem"),
    [
        ([8], "token id 8 is outside the vocabulary 0..7"),
        ([-1], "token id -1 is outside the vocabulary 0..7"),
        ([], "no token: a prefix holds at least one"),
        ([0] * 5, "position 4 is past the context"),
    ],
)
@pytest.mark.parametrize("name", ["greedy", "seeded"])
def test_a_prompt_that_cannot_be_consumed_is_refused(
    name: str, prompt: list[int], problem: str, ledgers: dict[str, str], scratch: Path, replayed
):
    """The text of an unknown id was asked for before the prompt was checked, which ended in a traceback."""
    outcome = replayed(edited(ledgers[name], 1, ("prompt",), prompt))
    assert outcome.refused(f"{scratch}: the header's prompt cannot be consumed: {problem}"), outcome


@pytest.mark.parametrize("seed", [0, 42, 2**63 - 1])
def test_an_edited_seed_is_told_as_the_state_that_it_would_start_from(
    seed: int, ledgers: dict[str, str], replayed
):
    """The message held two generator states that differ somewhere in thousands of characters."""
    outcome = replayed(edited(ledgers["seeded"], 1, ("policy", "seed"), seed))
    assert found(outcome, 2, "generator_before"), outcome
    assert outcome.err.endswith(f", and the state that seed {seed} starts from follows\n")


def test_a_record_whose_seed_was_taken_away_replays_from_its_recorded_states(ledgers: dict[str, str], replayed):
    """Entropy may start in any state, so nothing holds the first one; every later one must follow from it."""
    lines = edited(ledgers["seeded"], 1, ("policy", "seed"), None)
    assert replayed(lines).status == 0
    lines[2]["generator_before"] = other_digit(lines[2]["generator_before"])
    outcome = replayed(lines)
    assert found(outcome, 3, "generator_before"), outcome


@pytest.mark.parametrize("seed", [-1, 2**63, 2**64, 10**400])
def test_a_seed_that_no_training_starts_from_is_refused(seed: int, ledgers: dict[str, str], scratch: Path):
    """Torch refused the seed deep inside training, which ended in a traceback."""
    scratch.write_text(text_of(edited(ledgers["greedy"], 1, ("subject_seed",), seed)), "utf-8")
    outcome = run("replay", scratch)
    assert outcome.refused(
        f"{scratch}: its model cannot be recreated; give --checkpoint: ",
        f"the training seed must lie in 0..2**63-1, not {seed}",
    ), outcome


def test_a_seed_whose_training_misses_its_loss_is_refused(ledgers: dict[str, str], scratch: Path):
    """It was told as an error inside kvproof. Training from seed 8 stays far above the corpus's floor."""
    scratch.write_text(text_of(edited(ledgers["greedy"], 1, ("subject_seed",), 8)), "utf-8")
    outcome = run("replay", scratch)
    assert outcome.refused(
        f"{scratch}: its model cannot be recreated; give --checkpoint: ", "training ended at", "seed=8"
    ), outcome


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (("kind",), "step", ["line 1"]),
        (("ledger_version",), 3, ["ledger version 3", "reads 1 to 2"]),
        (("ledger_version",), "1", ["ledger version '1'"]),
        (("subject_digest",), "0" * 64, ["made by a model with digest 0000000000000000…"]),
        (("dtype",), "float64", ["made in float64", "computes in float32"]),
        (("path",), "sideways", ["line 1", "$.path", "'sideways'"]),
        (("policy", "kind"), "greedy", ["line 1", "$.policy"]),
        (("policy", "top_k"), 0, ["top_k", "0"]),
        (("policy", "top_k"), 3.0, ["line 1", "$.policy.top_k", "3.0"]),
        (("policy", "temperature"), 0.0, ["temperature", "0.0"]),
        (("policy", "temperature"), "nan", ["temperature", "nan"]),
        (("policy", "seed"), -1, ["seed", "-1"]),
        (("stops", "max_tokens"), 0, ["max_tokens", "0"]),
        (("stops", "context"), 1, ["line 1", "$.stops.context", "1"]),
        (("prompt",), [0.0], ["line 1", "$.prompt[0]", "0.0"]),
        (("prompt",), 0, ["line 1", "$.prompt"]),
    ],
)
def test_a_header_that_no_run_can_have_is_refused(
    path: tuple[str, ...], value: object, words: list[str], ledgers: dict[str, str], replayed
):
    outcome = replayed(edited(ledgers["seeded"], 1, path, value))
    assert outcome.refused(*words), outcome


def test_the_path_of_the_chosen_rows_is_found_where_the_paths_differ_in_a_bit(ledgers: dict[str, str], replayed):
    """Where this machine computes both paths to the same bits, either one is the truth."""
    lines = lines_of(ledgers["greedy"])
    differ = [number for number, line in enumerate(lines, start=1) if line.get("error", 0.0) > 0.0]
    outcome = replayed(edited(ledgers["greedy"], 1, ("path",), "uncached"))
    if differ:
        assert found(outcome, differ[0], "logits_digest"), outcome
    else:
        assert outcome.status == 0


#: What tells about a run and decides nothing in it. Another environment widens what is allowed.
INFORMATIONAL = [
    ("subject",),
    ("subject_seed",),
    *(("environment", name) for name in ("kvproof", "python", "torch", "platform", "processor", "created")),
    ("environment", "num_threads"),
]


@pytest.mark.parametrize("path", INFORMATIONAL, ids=".".join)
def test_an_informational_member_of_the_header_fails_nothing(
    path: tuple[str, ...], ledgers: dict[str, str], replayed
):
    lines = edited(ledgers["seeded"], 1, path, lambda old: old + (1 if isinstance(old, int) else "?"))
    assert replayed(lines).status == 0


# --- the steps ---


def other_digit(text: str) -> str:
    """Change one character in the middle of a digest or of a generator's state, to one that may stand there."""
    middle = len(text) // 2
    return text[:middle] + ("1" if text[middle] == "0" else "0") + text[middle + 1 :]


#: Member, edit, and the name that it is reported by where that is another.
STEP_EDITS: list[tuple[str, Edit]] = [
    ("step", lambda old: old + 1),
    ("consumed", lambda old: [(old[0] + 1) % 8]),
    ("consumed", lambda old: [*old, 2]),
    ("consumed", lambda old: []),
    ("consumed_tokens", lambda old: "D"),
    ("position", lambda old: old + 1),
    ("position", lambda old: old - 1),
    ("cache_len", lambda old: old + 1),
    ("cache_len", lambda old: 0),
    ("logits_digest", other_digit),
    ("logits_digest", lambda old: ""),
    ("draw", lambda old: (old + 1) % 3),
    ("draw", lambda old: 99),
    ("draw", lambda old: None),
    ("chosen", lambda old: (old + 1) % 8),
    ("chosen", lambda old: -1),
    ("chosen", lambda old: 99),
    ("chosen_token", lambda old: "D"),
    ("generator_before", other_digit),
    ("generator_before", lambda old: "not base64"),
    ("generator_before", lambda old: None),
    ("generator_after", other_digit),
    ("generator_after", lambda old: None),
    ("margin", lambda old: old + 1e-3),
    ("margin", lambda old: "nan"),
    ("margin", lambda old: "inf"),
    ("error", lambda old: old + 1e-3),
    ("error", lambda old: "nan"),
    ("margin_verdict", lambda old: "tie"),
]


@pytest.mark.parametrize("line", [2, 3, 4, 5])
@pytest.mark.parametrize("member", ["margin", "error"])
@pytest.mark.parametrize("name", ["greedy", "seeded"])
def test_a_measured_number_is_held_to_the_last_bit_where_it_was_made(
    name: str, member: str, line: int, ledgers: dict[str, str], replayed
):
    """A margin or error that was changed by less than the tolerance passed in the very same environment."""
    outcome = replayed(edited(ledgers[name], line, (member,), lambda old: old + 1e-6))
    assert found(outcome, line, member), outcome


@pytest.mark.parametrize("line", [2, 4])
@pytest.mark.parametrize(("member", "edit"), STEP_EDITS)
def test_an_edited_member_of_a_step_is_found_and_named(
    member: str, edit: Edit, line: int, ledgers: dict[str, str], replayed
):
    outcome = replayed(edited(ledgers["seeded"], line, (member,), edit))
    assert found(outcome, line, member), outcome


@pytest.mark.parametrize(
    ("member", "edit"),
    [
        ("draw", 0),
        ("generator_before", "AAAA"),
        ("generator_after", "AAAA"),
        ("chosen", 4),
        ("margin_verdict", "unexplained flip"),
    ],
)
def test_an_edited_member_of_a_greedy_step_is_found_and_named(
    member: str, edit: object, ledgers: dict[str, str], replayed
):
    outcome = replayed(edited(ledgers["greedy"], 3, (member,), edit))
    assert found(outcome, 3, member), outcome


@pytest.mark.parametrize(
    ("index", "member", "edit", "named"),
    [
        *((index, "value", lambda old: old + 1e-6, "logits of {token}") for index in range(8)),
        (5, "value", lambda old: "nan", "logits of {token}"),
        (5, "id", lambda old: (old + 1) % 8, "ids of top_logits"),
        (5, "id", lambda old: -1, "ids of top_logits"),
        (5, "id", lambda old: 8, "ids of top_logits"),
        (5, "token", lambda old: "Q", "token"),
    ],
)
def test_each_edited_logit_is_found(
    index: int, member: str, edit: Edit, named: str, ledgers: dict[str, str], replayed
):
    token = lines_of(ledgers["seeded"])[3]["top_logits"][index]["token"]
    outcome = replayed(edited(ledgers["seeded"], 4, ("top_logits", index, member), edit))
    assert found(outcome, 4, named.format(token=token)), outcome


@pytest.mark.parametrize(
    ("name", "index", "member", "edit", "named"),
    [
        *(("greedy", index, "value", lambda old: old + 1e-9, "probability of {token}") for index in range(8)),
        *(("seeded", index, "value", lambda old: old + 1e-9, "probability of {token}") for index in range(3)),
        ("seeded", 1, "value", lambda old: "nan", "probability of {token}"),
        ("seeded", 1, "id", lambda old: (old + 1) % 8, "ids of probabilities"),
        ("seeded", 1, "token", lambda old: "Q", "token"),
    ],
)
def test_each_edited_probability_is_found(
    name: str, index: int, member: str, edit: Edit, named: str, ledgers: dict[str, str], replayed
):
    token = lines_of(ledgers[name])[3]["probabilities"][index]["token"]
    outcome = replayed(edited(ledgers[name], 4, ("probabilities", index, member), edit))
    assert found(outcome, 4, named.format(token=token)), outcome


@pytest.mark.parametrize(
    "change", [lambda old: old[:-1], lambda old: old[1:], lambda old: old[::-1], lambda old: []]
)
def test_probabilities_that_are_missing_or_in_another_order_are_found(
    change: Edit, ledgers: dict[str, str], replayed
):
    outcome = replayed(edited(ledgers["seeded"], 4, ("probabilities",), change))
    assert found(outcome, 4, "ids of probabilities"), outcome


@pytest.mark.parametrize("change", [lambda old: old[1:], lambda old: old[::-1], lambda old: [*old, old[0]]])
def test_top_logits_that_are_not_the_largest_in_order_are_found(change: Edit, ledgers: dict[str, str], replayed):
    outcome = replayed(edited(ledgers["seeded"], 4, ("top_logits",), change))
    assert found(outcome, 4, "ids of top_logits"), outcome


@pytest.mark.parametrize("elsewhere", [False, True])
@pytest.mark.parametrize(
    ("change", "number"),
    [
        (lambda old: [], 0),
        (lambda old: old[:1], 1),
        (lambda old: old[:-1], 7),
    ],
)
@pytest.mark.parametrize("name", ["greedy", "seeded"])
def test_top_logits_that_were_taken_away_are_found(
    name: str, change: Edit, number: int, elsewhere: bool, ledgers: dict[str, str], replayed
):
    """Only the entries that were left were compared, so a record without any replayed."""
    lines = edited(ledgers[name], 4, ("top_logits",), change)
    if elsewhere:
        lines[0]["environment"]["torch"] = "0.0.1"
    outcome = replayed(lines)
    assert found(outcome, 4, "number of top_logits"), outcome
    assert f" is {number}, and 8 follows" in outcome.err


@pytest.mark.parametrize(
    ("name", "member", "value"),
    [
        ("greedy", "stop_reason", "context"),
        ("greedy", "stop_reason", "max_tokens"),
        ("greedy", "stop_reason", None),
        ("greedy", "problem", "refused"),
        ("greedy", "tokens", "<bos> A C D <eos>"),
        ("greedy", "tokens", "<bos> A B D <eos> "),
        ("refused", "stop_reason", "context"),
        ("refused", "problem", None),
        ("refused", "problem", "made up"),
        ("refused", "problem", lambda old: f"{old}."),
        ("refused", "problem", lambda old: old.replace("4", "5")),
        ("limited", "stop_reason", "eos"),
        ("limited", "tokens", "<bos> A"),
    ],
)
def test_an_edited_member_of_the_end_is_found_and_named(
    name: str, member: str, value: str | Edit | None, ledgers: dict[str, str], replayed
):
    last = len(ledgers[name].splitlines())
    outcome = replayed(edited(ledgers[name], last, (member,), value))
    assert found(outcome, last, member), outcome


#: The version has tests of its own, and its minor number may be missing.
UNCHECKED = ("kind", "ledger_version", "ledger_minor")
MEMBERS = [
    *((1, field.name) for field in dataclasses.fields(Header) if field.name not in UNCHECKED),
    *((3, field.name) for field in dataclasses.fields(Step) if field.name != "kind"),
    *((6, field.name) for field in dataclasses.fields(End) if field.name != "kind"),
]


@pytest.mark.parametrize(("line", "member"), MEMBERS)
def test_a_missing_misspelt_or_mistyped_member_is_refused_by_name(
    line: int, member: str, ledgers: dict[str, str], replayed
):
    missing, misspelt = lines_of(ledgers["seeded"]), lines_of(ledgers["seeded"])
    del missing[line - 1][member]
    misspelt[line - 1][f"{member}_"] = misspelt[line - 1].pop(member)
    outcome = replayed(missing)
    assert outcome.refused(f"line {line}", f"is missing key '{member}'"), outcome
    outcome = replayed(misspelt)
    assert outcome.refused(f"line {line}", f"unknown key '{member}_'"), outcome
    outcome = replayed(edited(ledgers["seeded"], line, (member,), {"of": "another type"}))
    assert outcome.refused(f"line {line}", f"$.{member}"), outcome


# --- whole lines ---


@pytest.mark.parametrize(
    ("change", "line", "member"),
    [
        ([0, 2, 1, 3, 4, 5], 2, "step"),
        ([0, 1, 3, 2, 4, 5], 3, "step"),
        ([0, 1, 2, 4, 3, 5], 4, "step"),
        ([0, 2, 3, 4, 5], 2, "step"),
        ([0, 1, 3, 4, 5], 3, "step"),
        ([0, 1, 2, 4, 5], 4, "step"),
        ([0, 1, 2, 3, 5], 5, "stop_reason"),
        ([0, 5], 2, "end"),
        ([0, 1, 1, 2, 3, 4, 5], 3, "step"),
        ([0, 1, 2, 2, 3, 4, 5], 4, "step"),
        ([0, 1, 2, 3, 4, 4, 5], 6, "step"),
    ],
)
def test_swapped_deleted_and_repeated_steps_are_found(
    change: list[int], line: int, member: str, ledgers: dict[str, str], replayed
):
    lines = lines_of(ledgers["seeded"])
    outcome = replayed([lines[index] for index in change])
    assert found(outcome, line, member), outcome


@pytest.mark.parametrize("name", ["greedy", "seeded", "unseeded", "filling", "refused"])
def test_a_run_cut_short_is_found_though_its_end_makes_up_a_reason(name: str, ledgers: dict[str, str], replayed):
    """Any text for a problem was taken as the reason why a run ended, at whatever step it was cut."""
    header, *steps, end = lines_of(ledgers[name])
    for num_steps in range(1, len(steps)):
        kept = steps[:num_steps]
        tokens = " ".join((header["prompt_tokens"], *(step["chosen_token"] for step in kept)))
        made_up = {**end, "stop_reason": None, "problem": "made up", "tokens": tokens}
        outcome = replayed([header, *kept, made_up])
        assert found(outcome, num_steps + 2, "end"), outcome
        assert outcome.err.endswith(f" is after step {num_steps - 1}, and another step follows\n")


@pytest.mark.parametrize(
    "made_up", [{}, {"stop_reason": None, "problem": "made up"}, {"stop_reason": None, "problem": None}]
)
@pytest.mark.parametrize("name", PLANS)
def test_a_record_without_a_step_is_found(
    name: str, made_up: dict[str, object], ledgers: dict[str, str], replayed
):
    """A header and an end alone, with a made-up problem, replayed as a whole run."""
    header, *_, end = lines_of(ledgers[name])
    outcome = replayed([header, {**end, **made_up, "tokens": header["prompt_tokens"]}])
    assert found(outcome, 2, "end"), outcome
    assert outcome.err.endswith(" is after no step, and a first step follows\n")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ([1, 0, 2, 3, 4, 5], ["line 1 is not the header of a kvproof ledger"]),
        ([1, 2, 3, 4, 5], ["line 1 is not the header of a kvproof ledger"]),
        ([0, 0, 1, 2, 3, 4, 5], ["line 2 is neither a step nor an end", "'header'"]),
        ([0, 1, 2, 3, 5, 4], ["line 6", "after the end"]),
        ([0, 1, 2, 3, 4, 5, 5], ["line 7", "after the end"]),
    ],
)
def test_lines_that_make_no_ledger_are_refused(
    change: list[int], words: list[str], ledgers: dict[str, str], replayed
):
    lines = lines_of(ledgers["seeded"])
    outcome = replayed([lines[index] for index in change])
    assert outcome.refused(*words), outcome


def test_a_last_line_cut_off_at_any_byte_is_reported_after_the_lines_before_it_replayed(
    ledgers: dict[str, str], replayed
):
    whole = ledgers["limited"].encode()
    start = whole.rindex(b"\n", 0, -1) + 1
    for end in range(start, len(whole)):
        outcome = replayed(whole[:end])
        said = "line 4 is cut off" if end > start else "the record stops after line 3: there is no end"
        assert (outcome.status, outcome.out) == (1, "")
        assert said in outcome.err, (end, outcome)
        assert outcome.err.endswith("the lines before it were replayed\n")
        assert outcome.err.count("\n") == 1


def test_a_cut_off_record_with_a_wrong_line_before_the_cut_tells_both(ledgers: dict[str, str], replayed):
    outcome = replayed(text_of(edited(ledgers["greedy"], 3, ("chosen",), 4))[:-5])
    assert outcome.status == 1
    problem, damage = outcome.err.splitlines()
    assert "line 3: chosen is 4" in problem
    assert "line 6 is cut off" in damage


# --- files that are no ledger ---


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", ["has no complete line"]),
        (b"\n", ["line 1: not JSON: ", "line 1 column 1"]),
        (b"{", ["has no complete line"]),
        (b"an ordinary text\n", ["line 1: not JSON: ", "line 1 column 1"]),
        (b"[1, 2]\n", ["line 1 is not the header of a kvproof ledger"]),
        (b"null\n", ["line 1 is not the header of a kvproof ledger"]),
        (b'{"kind": "header"}\n', ["ledger version None"]),
        (b'{"kind": "header", "ledger_version": 1}\n', ["line 1", "is missing key"]),
        (b"\0\0\0\0\n", ["line 1: not JSON: ", "line 1 column 1"]),
        (b"\x89PNG\r\n\x1a\n\xff\xfe\n", ["cannot read"]),
        (b"\xef\xbb\xbf{}\n", ["line 1: not JSON: ", "BOM"]),
    ],
)
def test_a_file_that_is_no_ledger_is_refused(content: bytes, words: list[str], scratch: Path, replayed):
    outcome = replayed(content)
    assert outcome.refused(scratch, *words), outcome


def test_a_file_that_does_not_exist_is_refused(tmp_path: Path, saved: Path):
    outcome = run("replay", tmp_path / "nowhere.jsonl", "--checkpoint", saved)
    assert outcome.refused("no such ledger", tmp_path / "nowhere.jsonl"), outcome


def test_a_checkpoint_is_no_ledger(saved: Path):
    outcome = run("replay", saved, "--checkpoint", saved)
    assert outcome.refused(saved), outcome


@pytest.mark.parametrize("line", [2, 3, 6])
@pytest.mark.parametrize("text", ["not JSON", "", "{", '{"kind": "step"} {}', "[]", '"step"', "{}"])
def test_a_line_that_is_no_record_is_refused_by_its_number(
    text: str, line: int, ledgers: dict[str, str], replayed
):
    lines = ledgers["greedy"].splitlines()
    lines[line - 1] = text
    outcome = replayed("".join(f"{line}\n" for line in lines))
    assert outcome.refused(f"line {line}"), outcome


def test_another_models_ledger_is_refused(ledgers: dict[str, str], scratch: Path, tmp_path: Path):
    decoder = initialised(DecoderConfig(), 7).to(torch.float32).eval().requires_grad_(False)
    other = Checkpoint(decoder=decoder, seed=7, loss=2.0)
    save_checkpoint(other, tmp_path / "other.safetensors")
    scratch.write_text(ledgers["greedy"], "utf-8")
    outcome = run("replay", scratch, "--checkpoint", tmp_path / "other.safetensors")
    recorded = lines_of(ledgers["greedy"])[0]["subject_digest"]
    assert outcome.refused("made by a model with digest", recorded[:16], other.digest[:16]), outcome


# --- other environments, and generators that started from entropy ---


@pytest.mark.parametrize(
    ("change", "elsewhere", "status"), [(1e-6, True, 0), (1e-6, False, 1), (1e-4, True, 1), (1e-4, False, 1)]
)
def test_a_record_made_elsewhere_replays_within_the_tolerance_and_one_made_here_to_the_last_bit(
    change: float, elsewhere: bool, status: int, ledgers: dict[str, str], replayed
):
    lines = edited(ledgers["seeded"], 4, ("top_logits", 0, "value"), lambda old: old + change)
    lines[3]["logits_digest"] = other_digit(lines[3]["logits_digest"])
    if elsewhere:
        lines[0]["environment"]["torch"] = "0.0.1"
    outcome = replayed(lines)
    assert outcome.status == status, outcome
    assert ("within the tolerance" in outcome.out) == (status == 0)


@pytest.mark.parametrize(
    ("member", "edit"),
    [
        ("consumed", [5]),
        ("position", 0),
        ("draw", lambda old: (old + 1) % 3),
        ("chosen", lambda old: (old + 1) % 8),
        ("generator_after", other_digit),
        ("margin", lambda old: old + 1e-3),
        ("error", lambda old: old + 1e-3),
    ],
)
def test_an_edit_is_found_in_a_record_made_elsewhere_too(
    member: str, edit: object, ledgers: dict[str, str], replayed
):
    lines = edited(ledgers["seeded"], 4, (member,), edit)
    lines[0]["environment"]["torch"] = "0.0.1"
    outcome = replayed(lines)
    assert found(outcome, 4, member), outcome


@pytest.mark.parametrize(
    ("edit", "member"),
    [
        (lambda old: old[::-1], "order of top_logits"),
        (lambda old: [old[0]] * len(old), "number of top_logits"),
        (lambda old: old[:-1], "number of top_logits"),
        (lambda old: [], "number of top_logits"),
    ],
    ids=["reversed", "repeated", "shortened", "emptied"],
)
def test_top_logits_that_are_not_the_largest_in_order_are_found_elsewhere_too(
    edit: Edit, member: str, ledgers: dict[str, str], replayed
):
    """Only each entry was held to the model, and not which entries there are."""
    lines = edited(ledgers["seeded"], 4, ("top_logits",), edit)
    lines[0]["environment"]["torch"] = "0.0.1"
    outcome = replayed(lines)
    assert found(outcome, 4, member), outcome


@pytest.mark.parametrize("member", ["subject_digest", "dtype"])
def test_what_a_header_holds_is_shown_and_not_obeyed(member: str, ledgers: dict[str, str], replayed):
    """It was printed as it stood, escape codes and line ends included."""
    outcome = replayed(edited(ledgers["greedy"], 1, (member,), "\x1b[31mx\ny"))
    assert outcome.refused("\\x1b[31mx\\ny"), outcome


def test_a_generator_state_in_a_greedy_record_is_found(ledgers: dict[str, str], replayed):
    outcome = replayed(edited(ledgers["greedy"], 2, ("generator_before",), "AAAA"))
    assert found(outcome, 2, "generator_before"), outcome
    assert outcome.err.endswith("generator_before is AAAA, and None follows\n")


@pytest.mark.parametrize("line", [3, 4])
def test_a_later_generator_state_of_an_unseeded_run_is_held_to_the_one_before(
    line: int, ledgers: dict[str, str], replayed
):
    outcome = replayed(edited(ledgers["unseeded"], line, ("generator_before",), other_digit))
    assert found(outcome, line, "generator_before"), outcome


@pytest.mark.parametrize("state", ["not base64", "AAAA", ""])
def test_a_first_state_of_an_unseeded_run_that_is_none_is_found(state: str, ledgers: dict[str, str], replayed):
    outcome = replayed(edited(ledgers["unseeded"], 2, ("generator_before",), state))
    assert found(outcome, 2, "generator_before"), outcome


@pytest.mark.parametrize(
    ("name", "derived"),
    [("unseeded", "the state of a generator"), ("seeded", "the state that seed 41 starts from")],
)
def test_a_drawing_run_without_generator_states_is_found_and_moves_no_other_generator(
    name: str, derived: str, ledgers: dict[str, str], replayed
):
    """Without a recorded state the token was drawn from torch's global generator, and the run could pass."""
    lines = lines_of(ledgers[name])
    for step in lines[1:-1]:
        step["generator_before"] = step["generator_after"] = None
    before = torch.get_rng_state()
    outcome = replayed(lines)
    assert found(outcome, 2, "generator_before"), outcome
    assert outcome.err.endswith(f" is None, and {derived} follows\n")
    assert torch.equal(torch.get_rng_state(), before)


# --- anything at all ---


def clean(outcome: Outcome) -> bool:
    """Whether a command ended with a verdict or a refusal, not in the middle of something."""
    said = outcome.out if outcome.status == 0 else outcome.err
    return outcome.status in (0, 1, 2) and bool(said) and "Traceback" not in outcome.err


@pytest.mark.parametrize("name", ["greedy", "seeded"])
@given(data=st.data())
def test_a_change_of_any_one_character_ends_in_a_verdict_or_a_refusal(
    name: str, data: st.DataObject, ledgers: dict[str, str], scratch: Path, saved: Path
):
    lines = ledgers[name].splitlines(keepends=True)
    row = data.draw(st.integers(0, len(lines) - 1), label="line")
    at = data.draw(st.integers(0, len(lines[row]) - 1), label="character")
    new = data.draw(st.sampled_from('0189"-.,:[]{}eE \n\r\0\\aé€'), label="replacement")
    lines[row] = lines[row][:at] + new + lines[row][at + 1 :]
    scratch.write_bytes("".join(lines).encode())
    outcome = run("replay", scratch, "--checkpoint", saved)
    assert clean(outcome), outcome


@given(data=st.data())
def test_a_record_cut_off_anywhere_is_never_taken_for_a_whole_one(
    data: st.DataObject, ledgers: dict[str, str], scratch: Path, saved: Path
):
    whole = ledgers["greedy"].encode()
    scratch.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 1))])
    outcome = run("replay", scratch, "--checkpoint", saved)
    assert outcome.status in (1, 2)
    assert clean(outcome), outcome


def test_a_checkpoint_for_a_ledger_of_another_model_is_refused(saved: Path, tmp_path: Path):
    """It was left aside without a word."""
    ledger = tmp_path / "ledger.jsonl"
    assert run("generate", "random:gpt2", "--ids", "1", "--max-tokens", 2, "--ledger", ledger).status == 0
    outcome = run("replay", ledger, "--checkpoint", saved)
    assert outcome.refused(ledger, "records", "--checkpoint gives weights of the reference system"), outcome
