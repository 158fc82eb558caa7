"""`kvproof generate` on models of transformers: text, stop rules, records, replay, and what is refused."""

import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from jsonschema import Draft202012Validator
from safetensors.torch import load_file, save_file
from tests.hf.folders import saved_model, saved_tokenizer
from transformers import AutoTokenizer

import kvproof
from kvproof._generation.requests import Request
from kvproof._numerics.digests import row_digest
from kvproof.cli.generate import settled
from kvproof.contract.ledger import parse_ledger

from .ledgers import Lines, edited, found, lines_of, text_of
from .running import Outcome, run

SCHEMAS = Path(kvproof.__file__).parent / "schemas"
LINES = Draft202012Validator(json.loads((SCHEMAS / "ledger-line-2.json").read_text("utf-8")))
TINY = "random:llama"
#: The text of each id.
WORDS = ("<unk>", *(f"w{i}" for i in range(1, 101)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model and a tokenizer with a word for each of its 101 ids."""
    return saved_tokenizer(saved_model(tmp_path_factory.mktemp("models") / "tiny"), WORDS)


@pytest.fixture(scope="module")
def chatting(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with a chat template."""
    copy = saved_model(tmp_path_factory.mktemp("models") / "chatting")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = "w1 {% for said in messages %}{{ said.content }} {% endfor %}w2"
    tokenizer.save_pretrained(copy)
    return copy


def generated(*arguments: object, to: Path) -> tuple[Outcome, Lines]:
    """Generate, and return what was printed and the ledger's lines."""
    outcome = run("generate", *arguments, "--ledger", to)
    return outcome, lines_of(to.read_text("utf-8"))


# --- records that hold ---

PLANS = {
    "greedy": ["--ids", "1,2,3"],
    "greedy with a penalty": ["--ids", "1,2,3", "--repetition-penalty", "1.5"],
    "everything drawn": ["--ids", "1 2 3", "--policy", "sample", "--seed", "5"],
    "every rule": [
        *("--ids", "7", "--policy", "sample", "--temperature", "1.5", "--top-k", "40", "--top-p", "0.9"),
        *("--min-p", "0.01", "--typical-p", "0.95", "--repetition-penalty", "1.2", "--seed", "3"),
    ],
    "uncached": ["--ids", "1,2", "--path", "uncached", "--policy", "sample", "--top-k", "9"],
    "one path alone": ["--ids", "1,2", "--no-margins"],
    "uncached alone": ["--ids", "1,2", "--no-margins", "--path", "uncached"],
    "bfloat16": ["--ids", "1,2", "--dtype", "bfloat16", "--policy", "sample", "--top-p", "0.9"],
}


@pytest.mark.parametrize("plan", PLANS)
def test_a_fresh_record_is_valid_and_replays_to_the_last_bit(plan: str, tmp_path: Path):
    file = tmp_path / "ledger.jsonl"
    outcome, lines = generated(TINY, *PLANS[plan], "--max-tokens", 6, to=file)
    assert outcome.status == 0, outcome
    assert outcome.out.split() == [line["chosen_token"] for line in lines[1:-1]]
    assert "6 tokens in " in outcome.err
    for line in lines:
        LINES.validate(line)
    measured = {line["margin_verdict"] is not None for line in lines[1:-1]}
    assert measured == {"alone" not in plan}
    again = run("replay", file)
    assert (again.status, again.err) == (0, ""), again
    assert "all 8 lines replay through both paths, logits to the last bit." in again.out


def test_a_request_hangs_on_its_seed(tmp_path: Path):
    texts = {
        seed: run("generate", TINY, "--ids", 1, "--policy", "sample", "--seed", seed, "--max-tokens", 9).out
        for seed in (0, 1)
    }
    assert texts[0] != texts[1]
    default = run("generate", TINY, "--ids", 1, "--policy", "sample", "--max-tokens", 9).out
    assert default == texts[0]


def test_a_record_of_version_1_replays(ledgers: dict[str, str], replayed):
    """Version 2 added members; what was written before holds as it did."""
    validator = Draft202012Validator(json.loads((SCHEMAS / "ledger-line-1.json").read_text("utf-8")))
    for name in ("greedy", "seeded", "unseeded", "refused"):
        lines = [as_version_1(line) for line in lines_of(ledgers[name])]
        for line in lines:
            validator.validate(line)
        outcome = replayed(lines)
        assert (outcome.status, outcome.err) == (0, ""), (name, outcome)
        assert "to the last bit" in outcome.out
        outcome = replayed(edited(text_of(lines), 3, ("chosen",), lambda old: (old + 1) % 8))
        assert found(outcome, 3, "chosen"), outcome


def as_version_1(line: dict) -> dict:
    new = {
        "header": [
            "ledger_minor",
            "source",
            "tokenizer_digest",
            "transformers",
            "margins",
            "full_logits",
            "prompt_text",
            "chat",
        ],
        "step": ["num_kept", "probabilities_digest"],
        "end": ["text"],
    }
    line = {name: value for name, value in line.items() if name not in new[line["kind"]]}
    if line["kind"] == "header":
        since = ("top_p", "min_p", "typical_p", "repetition_penalty")
        line["ledger_version"] = 1
        line["policy"] = {name: value for name, value in line["policy"].items() if name not in since}
        line["stops"] = {n: value for n, value in line["stops"].items() if n not in ("stop_ids", "stop_texts")}
    return line


# --- text, and where it ends ---


def test_text_is_printed_as_it_stands_in_the_record(folder: Path, tmp_path: Path):
    outcome, lines = generated(folder, "--prompt", "w5 w6", "--max-tokens", 8, to=tmp_path / "l.jsonl")
    assert outcome.out == f"{lines[-1]['text']}\n"
    words = [WORDS[line["chosen"]] for line in lines[1:-1]]
    assert lines[-1]["text"] == " " + " ".join(words)
    assert (lines[0]["prompt"], lines[0]["prompt_text"], lines[0]["chat"]) == ([5, 6], "w5 w6", False)
    again = run("replay", tmp_path / "l.jsonl")
    assert (again.status, again.err) == (0, "")


@pytest.mark.parametrize(("raw", "prompt"), [([], [1, 5, 6, 2]), (["--raw"], [5, 6])])
def test_a_chat_template_is_used_where_there_is_one_and_left_out_if_asked(
    raw: list[str], prompt: list[int], chatting: Path, tmp_path: Path
):
    file = tmp_path / "ledger.jsonl"
    _, lines = generated(chatting, "--prompt", "w5 w6", *raw, "--max-tokens", 2, to=file)
    assert lines[0]["prompt"] == prompt
    assert run("replay", file).status == 0
    file.write_text(text_of(edited(file.read_text("utf-8"), 1, ("chat",), not lines[0]["chat"])), "utf-8")
    assert found(run("replay", file), 1, "prompt")


def returned(folder: Path) -> list[int]:
    """The ids that greedy returns after w5 w6."""
    made = run("generate", folder, "--prompt", "w5 w6", "--max-tokens", 8, "--quiet").out
    return [WORDS.index(word) for word in made.split()]


def test_each_stop_rule_ends_a_request_where_it_says(folder: Path, tmp_path: Path):
    ids = returned(folder)
    across = f"{WORDS[ids[2]][-1]} {WORDS[ids[3]][:2]}"  # the end of one word and the start of the next
    at = {token: index for index, token in reversed(list(enumerate(ids)))}
    for option, value, reason, text_ends in (
        ("--stop-id", ids[3], "stop_token", at[ids[3]]),
        ("--stop", across, "stop_text", 4),
        ("--max-tokens", 3, "max_tokens", 3),
    ):
        file = tmp_path / "ledger.jsonl"
        _, lines = generated(folder, "--prompt", "w5 w6", option, value, to=file)
        end, text = lines[-1], "".join(f" {WORDS[i]}" for i in ids)
        assert end["stop_reason"] == reason
        if option == "--stop":
            assert end["text"] == text[: text.index(across)]
            assert across in text
        else:
            assert end["text"] == "".join(f" {WORDS[i]}" for i in ids[:text_ends])
        assert run("replay", file).status == 0


def test_the_model_s_own_end_token_ends_a_request_unless_it_is_ignored(folder: Path, tmp_path: Path):
    end = returned(folder)[2]
    own = saved_model(tmp_path / "own")
    settings = json.loads((own / "generation_config.json").read_text())
    (own / "generation_config.json").write_text(json.dumps({**settings, "eos_token_id": [99, end]}))
    _, lines = generated(own, "--ids", "5,6", "--max-tokens", 8, to=tmp_path / "a.jsonl")
    assert lines[-1]["stop_reason"] == "eos"
    assert lines[0]["stops"]["eos_id"] == [99, end]
    _, lines = generated(own, "--ids", "5,6", "--max-tokens", 8, "--ignore-eos", to=tmp_path / "b.jsonl")
    assert lines[-1]["stop_reason"] == "max_tokens"


def test_the_context_ends_a_request(tmp_path: Path):
    file = tmp_path / "ledger.jsonl"
    _, lines = generated(TINY, "--ids", ",".join(["3"] * 126), "--no-margins", to=file)
    assert [line["position"] for line in lines[1:-1]] == [125, 126, 127]
    assert lines[-1]["stop_reason"] == "context"
    assert run("replay", file).status == 0


@pytest.mark.parametrize(
    ("text", "stops", "expected"),
    [
        ("caf\ufffd", (), "caf"),
        ("one tw", ("two",), "one "),
        ("one two", ("three",), "one two"),
        ("aaa", ("aab", "b"), "a"),
        ("", ("x",), ""),
    ],
)
def test_what_later_tokens_can_change_is_held_back(text: str, stops: tuple[str, ...], expected: str):
    assert settled(text, stops) == expected


def test_a_text_that_acts_on_a_terminal_is_printed_escaped(folder: Path, tmp_path: Path):
    words = ("<unk>", *(f"\x1b[{i}m" for i in range(1, 101)))
    hostile = saved_tokenizer(saved_model(tmp_path / "hostile"), words)
    outcome = run("generate", hostile, "--ids", "5,6", "--max-tokens", 3)
    assert outcome.status == 0
    assert "\x1b" not in outcome.out
    assert outcome.out.count("\\x1b[") == 3


# --- Ctrl-C, kills, full disks ---


def test_ctrl_c_ends_with_what_is_there_marked(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    original, file = Request.step, tmp_path / "ledger.jsonl"

    def interrupted(self: Request) -> None:
        if len(self.steps) == 3:
            raise KeyboardInterrupt
        original(self)

    monkeypatch.setattr(Request, "step", interrupted)
    outcome, lines = generated(folder, "--prompt", "w5", to=file)
    assert outcome.status == 130
    assert "interrupted" in outcome.err
    assert outcome.out == f"{lines[-1]['text']}\n"
    assert len(lines) == 5
    assert lines[-1]["stop_reason"] == "interrupted"
    again = run("replay", file)
    assert again.status == 0
    assert "which was interrupted" in again.out


def test_ctrl_c_before_the_first_token_is_marked_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def interrupted(self: Request) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Request, "step", interrupted)
    outcome, lines = generated(TINY, "--ids", "5", to=tmp_path / "ledger.jsonl")
    assert (outcome.status, len(lines)) == (130, 2)
    assert run("replay", tmp_path / "ledger.jsonl").status == 0


def test_a_kill_loses_at_most_the_last_line(tmp_path: Path):
    file = tmp_path / "ledger.jsonl"
    code = f"""
import os, signal
from pathlib import Path
import kvproof
from kvproof.subjects._adapter import LoadOptions
from kvproof.subjects._targets import load_target
def kill(request):
    if len(request.steps) == 4:
        os.kill(os.getpid(), signal.SIGKILL)
kvproof.generate(load_target({TINY!r}, LoadOptions()), [1, 2], ledger=Path({str(file)!r}), on_step=kill)
"""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, check=False)
    assert done.returncode == -9
    record = parse_ledger(file.read_text("utf-8"), "it")
    assert len(record.run.steps) == 4
    assert run("replay", file).refused(
        "does not say where its model 'random:llama' was loaded from: give --target"
    )
    outcome = run("replay", file, "--target", TINY)
    assert outcome.status == 1
    assert "the record stops after line 5: there is no end; the lines before it were replayed" in outcome.err


@pytest.fixture
def small_files() -> Iterator[int]:
    """Let no file of this process grow beyond a size, as on a disk that is full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    limit = 9000
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    yield limit
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_disk_that_fills_up_leaves_whole_lines(tmp_path: Path, small_files: int):
    file = tmp_path / "ledger.jsonl"
    outcome, lines = generated(TINY, "--ids", "5", to=file)
    assert outcome.status == 73
    assert outcome.err.endswith(f"cannot write {file}: File too large; the lines that it holds are complete\n")
    assert 1 < len(lines) < 120
    assert file.stat().st_size <= small_files
    assert parse_ledger(file.read_text("utf-8"), "it").damage is not None


def test_a_ledger_that_cannot_be_made_is_told(tmp_path: Path):
    outcome = run("generate", TINY, "--ids", "5", "--ledger", tmp_path / "nowhere" / "ledger.jsonl")
    assert outcome.status == 73
    assert "cannot write" in outcome.err


# --- whole rows ---


@pytest.fixture(scope="module")
def with_rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("rows") / "ledger.jsonl"
    plan = ["--ids", "5,6", "--policy", "sample", "--max-tokens", 6, "--full-logits"]
    generated(TINY, *plan, to=file)
    return file


def test_full_logits_stand_beside_the_ledger(with_rows: Path):
    rows = load_file(with_rows.with_suffix(".safetensors"))["logits"]
    steps = lines_of(with_rows.read_text("utf-8"))[1:-1]
    assert rows.shape == (6, 101)
    assert [row_digest(row) for row in rows] == [step["logits_digest"] for step in steps]
    assert run("replay", with_rows).status == 0


def test_rows_that_were_edited_cut_off_or_taken_away_are_found(with_rows: Path, tmp_path: Path):
    file = tmp_path / "ledger.jsonl"
    file.write_bytes(with_rows.read_bytes())
    beside = file.with_suffix(".safetensors")
    assert run("replay", file).refused(f"there is no {beside}")
    beside.write_bytes(b"nothing")
    assert run("replay", file).refused("cannot read the rows", beside)
    rows = load_file(with_rows.with_suffix(".safetensors"))["logits"]
    rows[2, 7] += 1e-4
    save_file({"logits": rows}, beside)
    assert found(run("replay", file), 4, "digest of full_logits")
    save_file({"logits": rows[:2].clone()}, beside)
    assert found(run("replay", file), 4, "full_logits")
    save_file({"logits": rows[:, :9].clone()}, beside)
    assert found(run("replay", file), 2, "full_logits")


# --- replay from a step, elsewhere, and of another model ---


def test_replay_goes_on_from_any_step(with_rows: Path, tmp_path: Path):
    for step in (0, 3, 5):
        outcome = run("replay", with_rows, "--from", step)
        assert outcome.status == 0, outcome
        assert f"all {8 - step} lines" in outcome.out
        assert "to the last bit" in outcome.out
    file = tmp_path / "ledger.jsonl"
    file.with_suffix(".safetensors").write_bytes(with_rows.with_suffix(".safetensors").read_bytes())
    file.write_text(text_of(edited(with_rows.read_text("utf-8"), 3, ("margin",), 7.0)), "utf-8")
    assert found(run("replay", file), 3, "margin")
    assert run("replay", file, "--from", 2).status == 0
    file.write_text(text_of(edited(with_rows.read_text("utf-8"), 6, ("draw",), 3)), "utf-8")
    assert found(run("replay", file, "--from", 2), 6, "draw")


@pytest.mark.parametrize("step", [-1, 6, 99])
def test_a_step_that_is_not_there_is_refused(step: int, with_rows: Path):
    assert run("replay", with_rows, "--from", step).refused(f"there is no step {step}", "0..5")


#: What is edited in a record, and the member that is reported.
EDITS = {
    "a token": (("chosen",), 3, "chosen"),
    "a position": (("position",), 9, "position"),
    "a logit": (("top_logits", 0, "value"), lambda old: old + 1e-3, "logits of"),
    "the digest of a row": (("logits_digest",), "0" * 64, "logits_digest"),
    "a probability": (("probabilities", 1, "value"), 0.5, "probability of"),
    "the digest of all probabilities": (("probabilities_digest",), "0" * 64, "probabilities_digest"),
    "the number of kept tokens": (("num_kept",), 100, "num_kept"),
    "a draw": (("draw",), 0, "draw"),
    "a generator's state": (("generator_after",), "AAAA", "generator_after"),
    "an error": (("error",), 1.0, "error"),
}


@pytest.mark.parametrize("edit", EDITS)
def test_the_first_line_that_fails_is_named_with_what_differs(edit: str, with_rows: Path, tmp_path: Path):
    path, value, member = EDITS[edit]
    file = tmp_path / "ledger.jsonl"
    file.with_suffix(".safetensors").write_bytes(with_rows.with_suffix(".safetensors").read_bytes())
    file.write_text(text_of(edited(with_rows.read_text("utf-8"), 4, path, value)), "utf-8")
    outcome = run("replay", file)
    assert outcome.status == 1
    assert f"line 4: {member}" in outcome.err, outcome


def test_another_model_is_told_and_not_replayed(with_rows: Path):
    outcome = run("replay", with_rows, "--target", "random:gpt2")
    assert outcome.refused("made by a model with digest"), outcome


def test_another_tokenizer_is_told_and_not_replayed(folder: Path, chatting: Path, tmp_path: Path):
    file = tmp_path / "ledger.jsonl"
    generated(folder, "--prompt", "w5", "--max-tokens", 2, to=file)
    assert run("replay", file, "--target", chatting).refused("made with a tokenizer with digest")
    bare = saved_model(tmp_path / "bare")
    assert run("replay", file, "--target", bare).refused("this model has no tokenizer")


def test_other_versions_are_told(with_rows: Path, tmp_path: Path):
    file = tmp_path / "ledger.jsonl"
    file.with_suffix(".safetensors").write_bytes(with_rows.with_suffix(".safetensors").read_bytes())
    file.write_text(text_of(edited(with_rows.read_text("utf-8"), 1, ("transformers",), "4.0.0")), "utf-8")
    outcome = run("replay", file)
    assert outcome.status == 0
    assert "logits to the last bit (made elsewhere: transformers 4.0.0, here " in outcome.out


def test_a_record_lets_no_code_run_and_no_network_be_asked(with_rows: Path, tmp_path: Path):
    """What a record names is loaded, so it must be data: a record may come from anyone."""
    evil = tmp_path / "evil.py"
    evil.write_text("raise SystemExit('it ran')\n")
    text = with_rows.read_text("utf-8")
    file = tmp_path / "ledger.jsonl"
    file.with_suffix(".safetensors").write_bytes(with_rows.with_suffix(".safetensors").read_bytes())
    file.write_text(text_of(edited(text, 1, ("source", "target"), f"{evil}:make")), "utf-8")
    assert run("replay", file).refused("made by the function", "give --target")
    file.write_text(text_of(edited(text, 1, ("source", "attention"), "org/kernel")), "utf-8")
    assert run("replay", file).refused("$.source.attention")
    file.write_text(text_of(edited(text, 1, ("source", "target"), "org/model")), "utf-8")
    assert run("replay", file).refused("neither a folder nor in the local hub cache")


# --- several prompts ---


def test_each_of_several_prompts_is_recorded_as_if_it_were_alone(folder: Path, tmp_path: Path):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("w5 w6\nw1 w2 w3 w4\nw7\n")
    sampling = ["--policy", "sample", "--top-p", "0.9", "--max-tokens", "5"]
    several = ["--prompts", prompts, "--batch", 2, "--seed", 4, *sampling]
    outcome = run("generate", folder, *several, "--ledger", tmp_path / "ledgers")
    assert outcome.status == 0, outcome
    assert "15 tokens in " in outcome.err
    shown = dict(line.split("] ", 1) for line in outcome.out.splitlines())
    for number, prompt in (0, "w5 w6"), (2, "w7"):  # the longest runs beside both
        file = tmp_path / "ledgers" / f"{number:04}.jsonl"
        _, alone = generated(folder, "--prompt", prompt, "--seed", 4 + number, *sampling, to=tmp_path / "a.jsonl")
        together = lines_of(file.read_text("utf-8"))
        assert without_time(together) == without_time(alone)
        assert shown[f"[{number}"] == together[-1]["text"]
    assert run("replay", file).status == 0


def without_time(lines: Lines) -> Lines:
    header = {**lines[0], "environment": {**lines[0]["environment"], "created": None}}
    return [header, *lines[1:]]


def test_prompts_may_be_ids(tmp_path: Path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("[1, 2]\n[3]\n")
    outcome = run(
        "generate", TINY, "--prompts", prompts, "--max-tokens", 3, "--ledger", tmp_path / "l", "--quiet"
    )
    assert (outcome.status, outcome.err) == (0, "")
    assert lines_of((tmp_path / "l" / "0000.jsonl").read_text())[0]["prompt"] == [1, 2]


# --- side by side ---

DECODER = '''
"""Two logits that are equal but for rounding, and a cache that rounds in another order, or forgets."""
import numpy as np
from kvproof import CacheOps, CallableSubject

def functions(dtype, forgets=False):
    def logits(total, count):
        row = np.zeros(4, dtype)
        row[1], row[2] = dtype(10) * total, dtype(count)
        return row
    def full(ids):
        tenths = np.full(len(ids), 0.1, dtype)
        return np.stack([logits(tenths[: n + 1][::-1].sum(), n + 1) for n in range(len(ids))])
    def step(ids, cache):
        total, count = cache or (dtype(0), 0)
        rows = []
        for _ in ids:
            total, count = total + dtype(0.1), count + 1
            if forgets and count == 9:
                total = total - dtype(0.5)
            rows.append(logits(total, count))
        return np.stack(rows), (total, count)
    return full, step

def rounding():
    return CallableSubject(*functions(np.float32), context_len=64,
                           cast=lambda name: functions(getattr(np, name)))

def forgetful():
    return CallableSubject(*functions(np.float32, True), context_len=64,
                           cast=lambda name: functions(getattr(np, name), True))
'''


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("decoders") / "decoder.py"
    file.write_text(DECODER)
    return file


def test_texts_that_agree_are_said_to(tmp_path: Path):
    outcome = run("generate", TINY, "--ids", "1,2,3", "--max-tokens", 6, "--compare")
    assert outcome.status == 0
    assert outcome.out.endswith("cached and uncached choose the same 6 tokens\n")


def test_texts_that_rounding_parts_are_explained(decoder: Path, tmp_path: Path):
    ledger = tmp_path / "l.jsonl"
    outcome = run(
        "generate", f"{decoder}:rounding", "--ids", "0", "--max-tokens", 40, "--compare", "--ledger", ledger
    )
    assert outcome.status == 0, outcome
    said = outcome.out.splitlines()[-1]
    assert said.startswith("the texts part at step ")
    assert ". rounding: margin " in said
    assert " within twice the measured error " in said
    steps = lines_of(ledger.read_text())[1:-1]
    parted = steps[int(said.split("at step ")[1].split(":")[0])]
    assert parted["margin_verdict"] in ("explained flip", "tie")
    assert parted["margin"] <= 2 * parted["error"]
    assert run("replay", ledger).refused("made by the function")
    assert run("replay", ledger, "--target", f"{decoder}:rounding").status == 0


def test_texts_that_a_bug_parts_are_a_divergence(decoder: Path, tmp_path: Path):
    ledger = tmp_path / "l.jsonl"
    target = f"{decoder}:forgetful"
    outcome = run("generate", target, "--ids", "0", "--max-tokens", 40, "--compare", "--ledger", ledger)
    assert outcome.status == 1, outcome
    assert ". bug: " in outcome.out.splitlines()[-1]
    outcome = run("replay", ledger, "--target", target)
    assert found(outcome, 10, "logits of the other path of 1"), outcome


# --- bad input ---


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["give one of --prompt, --prompt-file, --ids and --prompts"]),
        (["--ids", "1", "--prompt", "x"], ["give one of"]),
        (["--prompt", ""], ["the prompt is empty"]),
        (["--prompt", "text"], ["has no tokenizer"]),
        (["--ids", ""], ["no token"]),
        (["--ids", "1,x"], ["--ids takes integers", "'1,x'"]),
        (["--ids", "101"], ["token id 101 is outside the vocabulary 0..100"]),
        (["--ids", "-1"], ["token id -1 is outside the vocabulary"]),
        (["--ids", ",".join(["1"] * 129)], ["the prompt has 129 tokens", "context of 128"]),
        (["--ids", "1", "--temperature", "0"], ["--temperature does not go with greedy", "--policy sample"]),
        (["--ids", "1", "--seed", "0"], ["--seed does not go with greedy"]),
        (["--ids", "1", "--policy", "sample", "--temperature", "0"], ["temperature must lie in", "0.0"]),
        (["--ids", "1", "--policy", "sample", "--temperature", "-1"], ["temperature must lie in", "-1.0"]),
        (["--ids", "1", "--policy", "sample", "--temperature", "nan"], ["temperature must lie in", "nan"]),
        (["--ids", "1", "--policy", "sample", "--top-k", "0"], ["top_k must be at least 1, not 0"]),
        (["--ids", "1", "--policy", "sample", "--top-k", "102"], ["top_k 102", "vocabulary of 101 tokens"]),
        (["--ids", "1", "--policy", "sample", "--top-p", "0"], ["top_p must lie above 0", "0.0"]),
        (["--ids", "1", "--policy", "sample", "--top-p", "1.5"], ["top_p must lie", "1.5"]),
        (["--ids", "1", "--policy", "sample", "--min-p", "-0.5"], ["min_p must lie", "-0.5"]),
        (["--ids", "1", "--policy", "sample", "--typical-p", "2"], ["typical_p must lie", "2.0"]),
        (["--ids", "1", "--policy", "sample", "--seed", "-1"], ["seed must lie in", "-1"]),
        (["--ids", "1", "--repetition-penalty", "0"], ["repetition_penalty must lie in", "0.0"]),
        (["--ids", "1", "--max-tokens", "0"], ["max_tokens must be at least 1, not 0"]),
        (["--ids", "1", "--stop-id", "101"], ["stop token 101 is outside the vocabulary"]),
        (["--ids", "1", "--stop", ""], ["a stop text is empty"]),
        (["--ids", "1", "--stop", "x"], ["has no tokenizer: a stop text is looked for in text"]),
        (["--ids", "1", "--batch", "0"], ["batch must be at least 1, not 0"]),
        (["--ids", "1", "--batch", "2"], ["--batch is the number of prompts", "add --prompts"]),
        (["--prompt", "x", "--batch", "2"], ["--batch is the number of prompts", "add --prompts"]),
        (["--ids", "1", "--full-logits"], ["--full-logits", "--ledger"]),
        (["--ids", "1", "--full-logits", "--ledger", "l.safetensors"], ["l.safetensors", "name the ledger"]),
        (["--ids", "1", "--compare", "--no-margins"], ["--compare takes one prompt"]),
        (["--prompt-file", "nowhere.txt"], ["no such prompt file: nowhere.txt"]),
        (["--prompts", "nowhere.txt"], ["no such prompt file: nowhere.txt"]),
    ],
    ids=lambda value: " ".join(value)[:50],
)
def test_what_cannot_be_is_refused_in_one_line_and_nothing_is_written(
    arguments: list[str], words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    outcome = run("generate", TINY, *arguments)
    assert outcome.refused(*words), outcome
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (["generate"], "Missing argument 'TARGET'"),
        (["generate", TINY, "--policy", "beam"], "'beam'"),
        (["generate", TINY, "--ids", "1", "--policy", "sample", "--temperature", "hot"], "'hot'"),
        (["generate", TINY, "--ids", "1", "--max-tokens", "many"], "'many'"),
    ],
)
def test_an_unknown_value_of_an_option_is_wrong_usage(arguments: list[str], shown: str):
    outcome = run(*arguments)
    assert (outcome.status, outcome.out) == (2, "")
    assert shown in outcome.err


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("p.txt", "", ["holds no prompt"]),
        ("p.txt", "w1\n\nw2\n", ["line 2 is empty"]),
        ("p.jsonl", "w1\n", ["line 1 is not JSON"]),
        ("p.jsonl", "[1]\n{}\n", ["line 2 is neither a text nor a list of ids"]),
        ("p.jsonl", "[1]\n[1.5]\n", ["line 2 is neither a text nor a list of ids"]),
        ("p.jsonl", "[1]\n[200]\n", ["prompt 1: token id 200 is outside the vocabulary"]),
        ("p.jsonl", "[1]\n[]\n", ["prompt 1: no token"]),
    ],
)
def test_a_file_of_prompts_that_cannot_be_is_refused_by_its_line(
    name: str, content: str, words: list[str], tmp_path: Path
):
    (tmp_path / name).write_text(content)
    outcome = run("generate", TINY, "--prompts", tmp_path / name, "--ledger", tmp_path / "ledgers")
    assert outcome.refused(*words), outcome
    assert not (tmp_path / "ledgers").exists()


def test_a_truncated_edited_or_newer_ledger_is_told(with_rows: Path, tmp_path: Path):
    text = with_rows.read_text("utf-8")
    file = tmp_path / "ledger.jsonl"
    file.with_suffix(".safetensors").write_bytes(with_rows.with_suffix(".safetensors").read_bytes())
    file.write_text(text[:-3], "utf-8")
    outcome = run("replay", file)
    assert outcome.status == 1
    assert "line 8 is cut off" in outcome.err
    file.write_text(text_of(edited(text, 1, ("ledger_version",), 3)), "utf-8")
    assert run("replay", file).refused("ledger version 3, written by a newer kvproof; this one reads 1 to 2")


# --- from Python ---


def test_the_same_from_python(folder: Path, tmp_path: Path):
    from kvproof.subjects._adapter import LoadOptions
    from kvproof.subjects._targets import load_target

    subject = load_target(str(folder), LoadOptions())
    seen: list[int] = []
    made = kvproof.generate(
        subject,
        "w5 w6",
        kvproof.Sample(top_p=0.9, seed=1),
        kvproof.Stops(max_tokens=4),
        ledger=tmp_path / "l.jsonl",
        on_step=lambda request: seen.append(request.steps[-1].chosen),
    )
    assert seen == list(made.returned)
    assert kvproof.replay(made, subject).problem is None
    assert parse_ledger((tmp_path / "l.jsonl").read_text("utf-8"), "it").run == made
    by_model = kvproof.generate(subject.model, [5, 6], stops=kvproof.Stops(max_tokens=4), margins=False)
    assert len(by_model.returned) == 4
    assert torch.is_tensor(subject.rows(made.header.prompt))
    with pytest.raises(kvproof.UsageError, match="give one"):
        kvproof.generate(subject, [5], full_logits=True)
