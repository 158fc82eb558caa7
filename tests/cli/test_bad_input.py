"""Wrong usage, broken checkpoints, wrong tokens and interruptions: each ends cleanly and says why."""

import copy
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from kvproof.errors import CheckpointError, ContextError, SessionError, TokenError, TrainingError, UsageError
from kvproof.reference import Checkpoint, Decoder, DecoderConfig, load_checkpoint, save_checkpoint
from kvproof.reference.checkpoint import _metadata_digest
from kvproof.subjects import ReferenceSubject

from .running import run

# --- usage ---


@pytest.fixture
def nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Training or running anything is an error inside kvproof, with its own exit status."""

    def started(*arguments: object, **options: object) -> None:
        raise AssertionError("something ran")

    for name in (
        "kvproof.reference.train",
        "kvproof._reference_system.milestone.milestone",
        "kvproof._generation.replay.replay",
    ):
        monkeypatch.setattr(name, started)


@pytest.mark.usefixtures("nothing_runs")
@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (["frobnicate"], "'frobnicate'"),
        (["--frobnicate"], "--frobnicate"),
        (["milestone", "--frobnicate"], "--frobnicate"),
        (["milestone", "extra"], "(extra)"),
        (["milestone", "--checkpoint"], "--checkpoint"),
        (["milestone", "--without", "everything"], "'everything'"),
        (["milestone", "--without"], "--without"),
        (["milestone", "--checkpoint", "."], "'.' is a directory"),
        (["milestone", "--save-checkpoint", "."], "'.' is a directory"),
        (["replay"], "LEDGER"),
        (["replay", "."], "'.' is a directory"),
    ],
)
def test_wrong_usage_is_told_in_one_line_and_exits_with_2(arguments: list[str], shown: str):
    outcome = run(*arguments)
    assert (outcome.status, outcome.out) == (2, "")
    told = [line for line in outcome.err.splitlines() if line.startswith("Error: ")]
    assert len(told) == 1
    assert shown in told[0]
    assert outcome.err.endswith(f"{told[0]}\n")
    assert "Traceback" not in outcome.err


# --- checkpoints ---


def first_weight(raw: bytes) -> int:
    """Return where a safetensors file's weights begin."""
    return 8 + int.from_bytes(raw[:8], "little")


def flipped(raw: bytes, at: int, mask: int) -> bytes:
    at %= len(raw)
    return raw[:at] + bytes([raw[at] ^ mask]) + raw[at + 1 :]


INCOMPLETE = "is not a complete safetensors file"
ALTERED_WEIGHTS = "was altered: its weights have digest"
#: What is done to a good file's bytes, and what the refusal says.
BYTES: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "empty": (lambda raw: b"", INCOMPLETE),
    "ordinary text": (lambda raw: b"These are not the weights of a decoder.\n" * 50, INCOMPLETE),
    "cut in its length": (lambda raw: raw[:7], INCOMPLETE),
    "cut after its length": (lambda raw: raw[:8], INCOMPLETE),
    "cut in its header": (lambda raw: raw[: first_weight(raw) // 2], INCOMPLETE),
    "cut before its weights": (lambda raw: raw[: first_weight(raw)], INCOMPLETE),
    "cut in its weights": (lambda raw: raw[: (first_weight(raw) + len(raw)) // 2], INCOMPLETE),
    "cut by one byte": (lambda raw: raw[:-1], INCOMPLETE),
    "one byte too long": (lambda raw: raw + b"\0", INCOMPLETE),
    # Weights are float32 with the lowest byte first: none of these makes one that is not finite.
    "lowest bit of the first weight": (lambda raw: flipped(raw, first_weight(raw), 1), ALTERED_WEIGHTS),
    "sign of the first weight": (lambda raw: flipped(raw, first_weight(raw) + 3, 128), ALTERED_WEIGHTS),
    "lowest bit in the middle": (lambda raw: flipped(raw, first_weight(raw) + 1600, 1), ALTERED_WEIGHTS),
    "lowest bit of the last weight": (lambda raw: flipped(raw, -4, 1), ALTERED_WEIGHTS),
    "sign of the last weight": (lambda raw: flipped(raw, -1, 128), ALTERED_WEIGHTS),
}


@pytest.mark.usefixtures("nothing_runs")
@pytest.mark.parametrize("damage", BYTES)
def test_a_checkpoint_with_damaged_bytes_is_refused(damage: str, saved: Path, tmp_path: Path):
    change, problem = BYTES[damage]
    path = tmp_path / "damaged.safetensors"
    path.write_bytes(change(saved.read_bytes()))
    outcome = run("milestone", "--checkpoint", path)
    assert outcome.refused(path, problem), outcome


@pytest.mark.usefixtures("nothing_runs")
@pytest.mark.parametrize(
    ("member", "value", "problem"),
    [
        ("loss", "0.1", "metadata does not have the digest"),
        ("seed", "2", "metadata does not have the digest"),
        ("config", '{"num_layers": 1}', "metadata does not have the digest"),
        ("patterns", '["A B D"]', "metadata does not have the digest"),
        ("vocabulary", '["<bos>", "<eos>"]', "metadata does not have the digest"),
        ("digest", "0" * 64, "metadata does not have the digest"),
        ("metadata_digest", "0" * 64, "metadata does not have the digest"),
        ("note", "one member more", "metadata does not have the digest"),
        ("format", "kvproof-reference-2", "'kvproof-reference-2'"),
    ],
)
def test_a_checkpoint_with_altered_metadata_is_refused(
    member: str, value: str, problem: str, saved: Path, tmp_path: Path
):
    with safe_open(saved, framework="pt") as file:
        metadata, tensors = dict(file.metadata()), {name: file.get_tensor(name) for name in list(file.keys())}
    path = tmp_path / "altered.safetensors"
    save_file(tensors, path, {**metadata, member: value})
    outcome = run("milestone", "--checkpoint", path)
    assert outcome.refused(path, problem), outcome


Changes = dict[str, str | None]


@pytest.fixture
def resealed(saved: Path, tmp_path: Path) -> Callable[[Changes, dict[str, torch.Tensor | None]], Path]:
    """Write the checkpoint with changes, None to take away, and the digest of the metadata that results."""

    def write(metadata: Changes, weights: dict[str, torch.Tensor | None]) -> Path:
        with safe_open(saved, framework="pt") as file:
            old, tensors = file.metadata(), {name: file.get_tensor(name) for name in list(file.keys())}
        new = {name: value for name, value in {**old, **metadata}.items() if value is not None}
        new["metadata_digest"] = _metadata_digest(new)
        path = tmp_path / "resealed.safetensors"
        save_file({name: w for name, w in {**tensors, **weights}.items() if w is not None}, path, new)
        return path

    return write


def test_a_checkpoint_that_is_resealed_without_a_change_loads(
    resealed: Callable[..., Path], checkpoint: Checkpoint
):
    assert load_checkpoint(resealed({}, {})).digest == checkpoint.digest


UNREADABLE = "has metadata that cannot be read: "


@pytest.mark.usefixtures("nothing_runs")
@pytest.mark.parametrize(
    ("member", "value", "problem"),
    [
        *((name, None, f"lacks '{name}' in its metadata") for name in ("config", "vocabulary", "patterns")),
        *((name, None, f"lacks '{name}' in its metadata") for name in ("seed", "loss", "digest")),
        ("seed", "x", f"{UNREADABLE}invalid literal for int() with base 10: 'x'"),
        ("seed", "1.5", f"{UNREADABLE}invalid literal for int() with base 10: '1.5'"),
        ("seed", "", f"{UNREADABLE}invalid literal for int() with base 10: ''"),
        ("loss", "small", f"{UNREADABLE}could not convert string to float: 'small'"),
        ("config", "{", UNREADABLE),
        ("config", "", UNREADABLE),
        ("patterns", "A B D", UNREADABLE),
        ("vocabulary", "[", UNREADABLE),
        ("loss", "nan", "records a loss of nan"),
        ("loss", "inf", "records a loss of inf"),
        ("loss", "-inf", "records a loss of -inf"),
        ("config", '{"num_layers": 3}', "holds a decoder of configuration {'num_layers': 3}, not "),
        ("patterns", '["A B D"]', "was trained on patterns ['A B D'] over "),
        ("vocabulary", '["<bos>"]', "over ['<bos>'], not on this corpus"),
        ("digest", "0" * 64, f"{ALTERED_WEIGHTS} "),
        ("config", "[" * 100000, UNREADABLE),
        ("patterns", "[" * 100000, UNREADABLE),
        ("seed", "-5", "records a seed of -5"),
        ("digest", "\x1b[31m\nx", "it records \\x1b[31m\\nx…"),
    ],
)
def test_metadata_that_is_wrong_under_a_digest_that_is_right_is_refused(
    member: str, value: str | None, problem: str, resealed: Callable[..., Path]
):
    """What was missing or unreadable ended in a traceback, and a loss that is not finite was taken."""
    path = resealed({member: value}, {})
    outcome = run("milestone", "--checkpoint", path)
    assert outcome.refused(f"kvproof: {path} ", problem), outcome


@pytest.mark.usefixtures("nothing_runs")
@pytest.mark.parametrize(
    ("name", "weight", "problem"),
    [
        ("final_norm.bias", None, " lacks weight 'final_norm.bias'"),
        ("token_embedding.weight", None, " lacks weight 'token_embedding.weight'"),
        ("blocks.2.mlp.2.bias", torch.ones(4), " has an unknown weight 'blocks.2.mlp.2.bias'"),
        ("final\n_norm", torch.ones(4), r" has an unknown weight 'final\n_norm'"),
        ("final_norm.bias", torch.ones(5), "torch.float32 of shape (5,), not torch.float32 of shape (4,)"),
        ("final_norm.bias", torch.ones(1, 4), "torch.float32 of shape (1, 4), not torch.float32 of shape (4,)"),
        ("final_norm.bias", torch.tensor(1.0), "torch.float32 of shape (), not torch.float32 of shape (4,)"),
        ("final_norm.bias", torch.ones(0), "torch.float32 of shape (0,), not torch.float32 of shape (4,)"),
        (
            "blocks.0.mlp.0.weight",
            torch.ones(4, 32),
            "torch.float32 of shape (4, 32), not torch.float32 of shape (32, 4)",
        ),
        (
            "final_norm.bias",
            torch.ones(4, dtype=torch.float64),
            "torch.float64 of shape (4,), not torch.float32 of shape (4,)",
        ),
        (
            "final_norm.bias",
            torch.ones(4, dtype=torch.int32),
            "torch.int32 of shape (4,), not torch.float32 of shape (4,)",
        ),
    ],
)
def test_weights_that_are_not_the_decoders_are_refused_by_name(
    name: str, weight: torch.Tensor | None, problem: str, resealed: Callable[..., Path]
):
    """Torch's own message ran over several lines, and a weight of another dtype was cast without a word."""
    path = resealed({}, {name: weight})
    outcome = run("milestone", "--checkpoint", path)
    assert outcome.refused(f"kvproof: {path}", repr(name), problem), outcome


@pytest.mark.usefixtures("nothing_runs")
@pytest.mark.parametrize("metadata", [None, {"format": "pt"}])
def test_a_safetensors_file_from_elsewhere_is_refused(metadata: dict[str, str] | None, tmp_path: Path):
    path = tmp_path / "foreign.safetensors"
    save_file({"weight": torch.ones(2, 2)}, path, metadata)
    outcome = run("milestone", "--checkpoint", path)
    assert outcome.refused(path, "not a checkpoint of the reference decoder"), outcome


@pytest.mark.usefixtures("nothing_runs")
@pytest.mark.parametrize("command", ["milestone", "replay"])
def test_a_checkpoint_that_does_not_exist_is_refused(command: str, ledgers: dict[str, str], tmp_path: Path):
    path, ledger = tmp_path / "nowhere.safetensors", tmp_path / "greedy.jsonl"
    ledger.write_text(ledgers["greedy"], "utf-8")
    outcome = run(command, *([ledger] if command == "replay" else []), "--checkpoint", path)
    assert outcome.refused(f"no such checkpoint: {path}"), outcome


@pytest.mark.usefixtures("nothing_runs")
@pytest.mark.parametrize("config", [DecoderConfig(num_layers=3), DecoderConfig(context_len=8)], ids=str)
def test_a_checkpoint_of_another_configuration_is_refused(config: DecoderConfig, tmp_path: Path):
    path = tmp_path / "other.safetensors"
    decoder = Decoder(config).eval().requires_grad_(False)
    save_checkpoint(Checkpoint(decoder=decoder, seed=1, loss=0.5), path)
    outcome = run("milestone", "--checkpoint", path)
    assert outcome.refused(path, "configuration", f"'num_layers': {config.num_layers}"), outcome


def with_weight(checkpoint: Checkpoint, name: str, value: float) -> Checkpoint:
    """Return a copy of the checkpoint in which one weight has one other value."""
    decoder = copy.deepcopy(checkpoint.decoder)
    decoder.get_parameter(name).flatten()[-1:].fill_(value)
    return Checkpoint(decoder=decoder, seed=checkpoint.seed, loss=checkpoint.loss)


@pytest.mark.usefixtures("nothing_runs")
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", ["blocks.1.mlp.2.bias", "token_embedding.weight"])
def test_a_weight_that_is_not_finite_is_refused_by_name(
    name: str, value: float, checkpoint: Checkpoint, tmp_path: Path
):
    path = tmp_path / "not finite.safetensors"
    broken = with_weight(checkpoint, name, value)
    save_checkpoint(broken, path)  # with the digest of the very weights that it holds
    outcome = run("milestone", "--checkpoint", path)
    assert outcome.refused(path, repr(name), "not finite"), outcome
    with pytest.raises(CheckpointError, match=f"'{name}' holds a value that is not finite"):
        ReferenceSubject(broken)


def test_a_finite_weight_of_another_value_is_accepted(checkpoint: Checkpoint):
    changed = with_weight(checkpoint, "blocks.1.mlp.2.bias", 1.0)
    assert ReferenceSubject(changed).info.digest != checkpoint.digest


# --- interruptions and errors inside ---


def raising(error: BaseException) -> Callable[..., None]:
    def call(*arguments: object, **options: object) -> None:
        raise error

    return call


@pytest.mark.parametrize(
    "where", ["kvproof.reference.train", "kvproof._reference_system.milestone.milestone", "os.replace"]
)
def test_an_interruption_leaves_no_file_and_exits_with_130(
    where: str, saved: Path, ready: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Interrupted while training, while running, and while writing."""
    monkeypatch.setattr(where, raising(KeyboardInterrupt()))
    weights = [] if where.endswith("train") else ["--checkpoint", saved]
    target, folder = tmp_path / "weights.safetensors", tmp_path / "report"
    outcome = run("milestone", *weights, "--save-checkpoint", target, "--report", folder)
    monkeypatch.undo()
    assert outcome.status == 130
    assert outcome.err.strip() == "kvproof: interrupted; no file was left half-written"
    assert list(tmp_path.rglob("*")) == []


#: Says when training is under way; a test's parent may have left SIGINT ignored, which children inherit.
TRAINS = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
from kvproof.cli import main
from kvproof.reference.training import Adam
step = Adam.step
def told(self, *arguments):
    step(self, *arguments)
    print("training", flush=True)
Adam.step = told
main()
"""


def test_a_real_interrupt_while_training_leaves_no_file_and_no_traceback(tmp_path: Path):
    target, folder = tmp_path / "weights.safetensors", tmp_path / "report"
    command = [sys.executable, "-c", TRAINS, "milestone", "--save-checkpoint", target, "--report", folder]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        try:
            assert process.stdout.readline() == "training\n"
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 130
    assert err.strip() == "kvproof: interrupted; no file was left half-written"
    assert set(out.split()) <= {"training"}
    assert list(tmp_path.iterdir()) == []


def test_an_unexpected_exception_exits_with_70_and_shows_where(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("kvproof.reference.train", raising(ZeroDivisionError("seventy")))
    outcome = run("milestone")
    assert (outcome.status, outcome.out) == (70, "")
    assert "ZeroDivisionError: seventy" in outcome.err
    assert outcome.err.endswith("kvproof: this is an error inside kvproof, not in what it was given\n")


def test_training_that_misses_its_loss_exits_with_70_in_one_line(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("kvproof.reference.train", raising(TrainingError("ended at 2.0 nats")))
    outcome = run("milestone")
    assert (outcome.status, outcome.out, outcome.err) == (70, "", "kvproof: TrainingError: ended at 2.0 nats\n")


# --- tokens ---

WARM = (0, 2)
NO_SEQUENCE = "^token ids must be a list or tuple of integers, not"
#: Ids that are refused wherever they stand, and how.
BAD_IDS: list[tuple[Sequence[object], type[SessionError], str]] = [
    ([], TokenError, "no token"),
    ([8], TokenError, "token id 8 is outside the vocabulary 0..7"),
    ([2, 10**30], TokenError, f"token id {10**30} is outside"),
    ([-1], TokenError, "token id -1 is outside"),
    ([1.0], TokenError, "token id 1.0 is a float, not an integer"),
    ([2, float("nan")], TokenError, "token id nan is a float, not an integer"),
    (["A"], TokenError, "token id 'A' is a str, not an integer"),
    ([True], TokenError, "token id True is a bool, not an integer"),
    ([None], TokenError, "token id None is a NoneType, not an integer"),
    ([[2]], TokenError, r"token id \[2\] is a list, not an integer"),
    # Numbers of other libraries look like integers when printed, so their type is named.
    ([np.int64(2)], TokenError, r"token id np\.int64\(2\) is a int64, not an integer"),
    ((2, np.uint8(3)), TokenError, r"token id np\.uint8\(3\) is a uint8, not an integer"),
    ([torch.tensor(2)], TokenError, r"token id tensor\(2\) is a Tensor, not an integer"),
    # What holds ids and is no sequence of them raised whatever Python or torch raises.
    ("A", TokenError, f"{NO_SEQUENCE} a str$"),
    (b"\2", TokenError, f"{NO_SEQUENCE} a bytes$"),
    (torch.tensor([2, 3]), TokenError, f"{NO_SEQUENCE} a Tensor$"),
    (np.array([2, 3]), TokenError, f"{NO_SEQUENCE} a ndarray$"),
    (2, TokenError, f"{NO_SEQUENCE} a int$"),
    (None, TokenError, f"{NO_SEQUENCE} a NoneType$"),
    (iter([2, 3]), TokenError, f"{NO_SEQUENCE} a list_iterator$"),
    ({2: 3}, TokenError, f"{NO_SEQUENCE} a dict$"),
    ({2, 3}, TokenError, f"{NO_SEQUENCE} a set$"),
]


@pytest.mark.parametrize(("ids", "error", "message"), BAD_IDS)
def test_the_uncached_path_refuses_ids_that_are_no_tokens(
    ids: Sequence[int], error: type[SessionError], message: str, subject: ReferenceSubject
):
    with pytest.raises(error, match=message):
        subject.rows(ids)


def test_the_uncached_path_refuses_a_prefix_longer_than_the_context(subject: ReferenceSubject):
    with pytest.raises(ContextError, match=r"position 4 is past the context.*positions 0\.\.3"):
        subject.rows([0, 2, 3, 5, 1])
    assert subject.rows([0, 2, 3, 5]).shape == (4, 8)


@pytest.mark.parametrize(
    ("rows", "error", "message"),
    [
        *(([ids], error, message) for ids, error, message in BAD_IDS),
        ([[3, 5, 1]], ContextError, "position 4 is past the context.*2 tokens are consumed and 3 more"),
        ([], SessionError, "0 rows of tokens for a session of 1"),
        ([[3], [3]], SessionError, "2 rows of tokens for a session of 1"),
    ],
)
def test_a_session_refuses_what_it_cannot_consume_and_stays_as_it_was(
    rows: Sequence[Sequence[int]], error: type[SessionError], message: str, subject: ReferenceSubject
):
    session, other = subject.session(), subject.session()
    for warm in (session, other):
        warm.extend([WARM])
    with pytest.raises(error, match=message) as refusal:
        session.extend(rows)
    assert type(refusal.value) is error
    assert session.ids == (WARM,)
    for mine, kept in zip(session.cache_tensors(), other.cache_tensors(), strict=True):
        assert all(torch.equal(mine[name], kept[name]) for name in ("k", "v"))
    assert torch.equal(session.extend([[3, 5]]), other.extend([[3, 5]]))


@pytest.mark.parametrize(
    ("rows", "kind"),
    [([5], "int"), ([None], "NoneType"), ([iter([2, 3])], "list_iterator"), ([{2: 1}], "dict"), (["23"], "str")],
    ids=["int", "none", "iterator", "dict", "text"],
)
def test_a_row_that_is_no_list_is_refused(rows: list[object], kind: str, subject: ReferenceSubject):
    """Its length was asked for before it was looked at."""
    session = subject.session()
    with pytest.raises(TokenError, match=f"^token ids must be a list or tuple of integers, not a {kind}$"):
        session.extend(rows)
    assert session.ids == ((),)


@pytest.mark.parametrize(
    ("method", "argument", "what", "kind"),
    [
        ("extend", 5, "rows of token ids", "int"),
        ("extend", None, "rows of token ids", "NoneType"),
        ("extend", {(0, 2): 1}, "rows of token ids", "dict"),
        ("extend", {(0, 2)}, "rows of token ids", "set"),
        ("reorder", 5, "batch rows", "int"),
        ("reorder", {0: 1}, "batch rows", "dict"),
        ("reorder", b"\0", "batch rows", "bytes"),
    ],
)
def test_what_is_no_list_of_rows_is_refused(
    method: str, argument: object, what: str, kind: str, subject: ReferenceSubject
):
    """Some ended in a traceback of Python's own, and some were taken."""
    session = subject.session()
    with pytest.raises(TokenError, match=f"^{what} must be a list or tuple of integers, not a {kind}$"):
        getattr(session, method)(argument)
    assert session.ids == ((),)


def test_a_batch_refuses_rows_of_unequal_length_and_stays_as_it_was(subject: ReferenceSubject):
    session, other = subject.session(batch=2), subject.session(batch=2)
    for warm in (session, other):
        warm.extend([WARM, (0, 6)])
    with pytest.raises(SessionError, match="rows of 1 and 2 tokens in one call"):
        session.extend([[3], [7, 6]])
    assert session.ids == (WARM, (0, 6))
    assert torch.equal(session.extend([[3], [7]]), other.extend([[3], [7]]))


# --- sessions ---


@pytest.mark.parametrize("batch", [0, -1, 1.5, 1.0, True, "1", None, np.int64(2)])
def test_a_session_of_no_whole_number_of_rows_is_refused(batch: object, subject: ReferenceSubject):
    """An empty batch opened and failed at its first call; True opened as one row, and 1.5 in a traceback."""
    with pytest.raises(
        UsageError, match=f"^batch must be an integer of at least 1, not {re.escape(repr(batch))}$"
    ):
        subject.session(batch=batch)


@pytest.mark.parametrize(
    ("method", "argument", "message"),
    [
        ("crop", True, "cannot crop 2 tokens to True"),
        ("crop", "1", "cannot crop 2 tokens to '1'"),
        ("crop", 1.5, "cannot crop 2 tokens to 1.5"),
        ("crop", 1.0, "cannot crop 2 tokens to 1.0"),
        ("crop", None, "cannot crop 2 tokens to None"),
        ("crop", -1, "cannot crop 2 tokens to -1"),
        ("crop", 3, "cannot crop 2 tokens to 3"),
        ("reorder", [True], "no batch row True: the session has 2"),
        ("reorder", [0, False], "no batch row False: the session has 2"),
        ("reorder", [0.0], "no batch row 0.0: the session has 2"),
        ("reorder", ["0"], "no batch row '0': the session has 2"),
        ("reorder", [0, None], "no batch row None: the session has 2"),
        ("reorder", [2], "no batch row 2: the session has 2"),
        ("reorder", [-1], "no batch row -1: the session has 2"),
        ("reorder", [], "a session keeps at least one batch row"),
    ],
)
def test_a_length_or_row_that_is_no_integer_in_range_is_refused_and_changes_nothing(
    method: str, argument: object, message: str, subject: ReferenceSubject
):
    """True counted as 1, and text or a fraction raised whatever Python or torch raises."""
    session, other = subject.session(batch=2), subject.session(batch=2)
    for warm in (session, other):
        warm.extend([WARM, (0, 6)])
    with pytest.raises(SessionError, match=f"^{re.escape(message)}$"):
        getattr(session, method)(argument)
    assert session.ids == (WARM, (0, 6))
    assert torch.equal(session.extend([[3], [7]]), other.extend([[3], [7]]))
