"""Decoders that people bring: as functions, as modules, as the result of a factory."""

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from kvproof import Verdict, audit
from kvproof.errors import SubjectError, UsageError
from kvproof.scenarios import Ability, Boundaries, chunked_prefill, token_by_token
from kvproof.subjects import CacheOps, CallableSubject, ModuleSubject, as_subject
from kvproof.subjects._adapter import LoadOptions
from kvproof.subjects._cache_values import as_tensor
from kvproof.subjects._registry import split_factory
from kvproof.subjects._targets import load_target

VOCAB = 11
IDS = (3, 1, 4, 1, 5, 9, 2, 6)


def table(dtype: str = "float32") -> np.ndarray:
    return np.random.default_rng(0).normal(size=(VOCAB, VOCAB)).astype(dtype)


def sums(dtype: str = "float32") -> tuple[Callable[[Any], Any], Callable[[Any, Any], Any]]:
    """A decoder whose row is the sum of its tokens' rows of a table: its cache is that sum."""
    rows = table(dtype)

    def full(ids: np.ndarray) -> np.ndarray:
        return rows[ids].cumsum(axis=0)

    def step(ids: np.ndarray, cache: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
        start = np.zeros(VOCAB, dtype) if cache is None else cache
        logits = start + rows[ids].cumsum(axis=0)
        return logits, logits[-1]

    return full, step


def test_two_functions_are_audited_as_they_are():
    report = audit(sums())
    assert report.verdict.passes
    assert report.subject.vocab_size == VOCAB
    assert report.subject.dtype == "float32"
    assert {s.name for s in report.scenarios if s.verdict.passes} >= {"token-by-token", "fork", "buffer reuse"}


def test_functions_in_two_dtypes_have_a_float64_rung():
    report = audit(CallableSubject(*sums(), cast=sums), [token_by_token(IDS)])
    (row, *_) = report.scenarios[-1].rows
    assert row.top_gap is not None
    assert row.top_gap < 1e-12


def forgetful(dtype: str = "float32") -> tuple[Callable[[Any], Any], Callable[[Any, Any], Any]]:
    full, step = sums(dtype)
    return full, lambda ids, cache: step(ids, None)


def test_a_step_that_forgets_is_found():
    report = audit(CallableSubject(*forgetful(), cast=forgetful), [token_by_token(IDS)])
    assert report.verdict is Verdict.DIVERGED


def test_functions_in_float64_are_their_own_top_rung():
    assert audit(forgetful("float64"), [token_by_token(IDS)]).verdict is Verdict.DIVERGED
    assert audit(sums("float64"), [token_by_token(IDS)]).verdict is Verdict.MATCH


def test_in_float32_alone_a_gap_far_beyond_every_noise_is_a_bug_and_a_small_one_is_undecided():
    report = audit(forgetful(), [token_by_token(IDS)])
    assert report.verdict is Verdict.DIVERGED
    assert "note: no float64 rung" in str(report)
    full, step = sums()
    nudged = (full, lambda ids, cache: (step(ids, cache)[0] + 1e-3, step(ids, cache)[1]))
    assert audit(nudged, [token_by_token(IDS)]).verdict is Verdict.INCONCLUSIVE


def test_a_function_that_gives_its_last_row_alone_is_asked_for_each_prefix():
    full, step = sums()
    report = audit((lambda ids: full(ids)[-1], step), [chunked_prefill(IDS, 3)])
    assert report.verdict.passes
    assert len(report.scenarios[-1].rows) == len(IDS)


class Lent:
    """An array of another framework: nothing but DLPack."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()


def read_only(array: np.ndarray) -> np.ndarray:
    array = array.copy()
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    "wrap", [torch.from_numpy, np.asarray, Lent, read_only], ids=["torch", "numpy", "dlpack", "read-only"]
)
def test_logits_may_be_arrays_of_any_framework(wrap: Callable[[np.ndarray], Any]):
    full, step = sums()

    def wrapped(ids: np.ndarray, cache: Any) -> Any:
        logits, kept = step(ids, cache)
        return wrap(logits), kept

    assert audit((lambda ids: wrap(full(ids)), wrapped), [token_by_token(IDS)]).verdict.passes


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([1.0, 2.0], "are a list: give a torch tensor, a NumPy array"),
        (None, "are a NoneType"),
        (np.arange(3), r"hold torch.int64 of shape \(3,\), not floating-point numbers"),
    ],
)
def test_what_is_no_array_of_numbers_is_refused(value: Any, message: str):
    with pytest.raises(SubjectError, match=message):
        as_tensor(value, "the logits")


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (lambda ids, cache: table()[ids], "must return \\(logits, cache\\), not a ndarray"),
        (lambda ids, cache: (table()[ids][:1], None), "gave 1 row of logits for 2 tokens: .* pass last_row=True"),
        (lambda ids, cache: (table()[ids][None, None], None), "logits of shape \\(1, 1, 2, 11\\)"),
        (lambda ids, cache: 1 / 0, "raised ZeroDivisionError"),
    ],
)
def test_a_step_that_returns_something_else_says_what(step: Callable[..., Any], message: str):
    subject = CallableSubject(sums()[0], step)
    with pytest.raises(SubjectError, match=message):
        subject.session().extend([[1, 2]])


def test_a_call_that_raises_leaves_the_session_as_it_was():
    full, step = sums()

    def careless(ids: np.ndarray, cache: Any) -> Any:
        logits, kept = step(ids, cache)
        if cache is not None:
            cache += 100  # half-way through a change in place
        if 7 in ids:
            raise ValueError("seven")
        return logits, kept

    session = CallableSubject(full, careless).session()
    session.extend([[1, 2]])
    with pytest.raises(SubjectError, match="seven"):
        session.extend([[7]])
    assert session.ids == ((1, 2),)
    assert torch.allclose(session.extend([[3]])[0, 0], torch.from_numpy(full(np.array([1, 2, 3]))[-1]))


def test_a_cast_that_does_not_cast_is_told():
    subject = CallableSubject(*sums(), cast=lambda dtype: sums())
    with pytest.raises(SubjectError, match="gave a decoder whose logits are float32"):
        subject.cast(torch.float64)


class Sums(nn.Module):
    """The same as a module, under names of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(VOCAB, VOCAB)

    def forward(self, ids: Tensor, memory: Tensor | None = None, where: Tensor | None = None) -> Any:
        logits = self.rows(ids).cumsum(dim=1)
        if memory is not None:
            logits = logits + memory[:, None]
        return logits, logits[:, -1]


class InPlace(Sums):
    """Keeps its sum in what it is given."""

    def forward(self, ids: Tensor, memory: Tensor | None = None) -> Tensor:
        logits = self.rows(ids).cumsum(dim=1)
        if memory is not None:
            logits = logits + memory[:, None]
            memory.copy_(logits[:, -1])
        return logits


def test_a_module_is_audited_under_the_names_it_has():
    subject = ModuleSubject(Sums(), cache="memory", positions="where")
    assert {Ability.TAP, Ability.CAST, Ability.BATCH, Ability.FORK} <= set(subject.info.abilities)
    assert audit(subject).verdict.passes


def test_a_cache_that_changes_in_place_is_made_in_the_modules_dtype():
    subject = ModuleSubject(
        InPlace(), cache="memory", batch=False, start=lambda m: m.rows.weight.new_zeros(1, VOCAB)
    )
    report = audit(subject)
    assert report.verdict.passes, report
    assert Ability.BATCH not in report.subject.abilities


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ({"cache": "past"}, "cache='past': Sums has no such argument: forward\\(ids: .*memory: .*where"),
        ({"cache": "memory", "positions": "position_ids"}, "positions='position_ids': Sums has no such argument"),
        ({"cache": "memory", "mask": "mask"}, "mask='mask': Sums has no such argument"),
    ],
)
def test_a_wrong_name_shows_the_modules_own_signature(names: dict[str, str], message: str):
    with pytest.raises(UsageError, match=message):
        ModuleSubject(Sums(), **names)


def test_a_module_that_returns_no_cache_says_how_to_tell_where_it_is():
    subject = ModuleSubject(InPlace(), cache="memory")
    with pytest.raises(SubjectError, match="new_cache= names the attribute, or start= makes"):
        subject.session().extend([[1]])


def test_an_attribute_that_is_not_there_is_named():
    subject = ModuleSubject(Sums(), cache="memory", new_cache="past")
    with pytest.raises(SubjectError, match="returned a tuple without 'past'"):
        subject.session().extend([[1]])


def test_declared_windows_are_boundaries():
    subject = ModuleSubject(Sums(), cache="memory", windows=(4,), context_len=32)
    assert subject.boundaries == Boundaries(context_len=32, windows=(4,))


def test_what_a_cache_can_do_is_what_its_ways_say():
    ops = CacheOps(fork=None, crop=lambda cache, length: cache)
    assert set(ops.abilities()) == {Ability.CROP}
    whole = CacheOps(show=lambda cache: [], put=lambda cache, layers: cache, reorder=lambda cache, rows: cache)
    assert set(whole.abilities()) == {Ability.FORK, Ability.REORDER, Ability.INSPECT, Ability.EDIT}


def test_a_fork_shares_nothing():
    session = CallableSubject(*sums()).session()
    session.extend([[1, 2]])
    child = session.fork()
    child.extend([[3]])
    assert session.ids == ((1, 2),)
    assert copy.deepcopy(session.cache).sum() == session.cache.sum()


@pytest.mark.parametrize(
    ("decoder", "message"),
    [
        (Sums(), "Sums is a torch module: say how it names its cache.*it takes forward\\(ids"),
        (7, "a decoder is a int: give a Subject, or two functions"),
        ((1, 2), "a decoder is a tuple"),
    ],
    ids=["module", "number", "numbers"],
)
def test_what_cannot_be_audited_as_it_is_says_why(decoder: object, message: str):
    with pytest.raises(UsageError, match=message):
        as_subject(decoder)


@pytest.mark.parametrize(
    ("target", "parts"),
    [
        ("pkg.module:factory", ("pkg.module", "factory")),
        ("path/file.py:factory", ("path/file.py", "factory")),
        ("random:llama", None),
        ("org/name", None),
        ("pkg.module:", None),
        ("a folder:x", None),
    ],
)
def test_a_target_with_a_factory_is_told_from_others(target: str, parts: tuple[str, str] | None):
    assert split_factory(target) == parts


FACTORIES = """
import numpy as np
from kvproof.errors import UsageError

rows = np.random.default_rng(0).normal(size=(11, 11)).astype("float32")

def decoder():
    return (lambda ids: rows[ids], lambda ids, cache: (rows[ids], None))

def number():
    return 7

def broken():
    raise ValueError("no weights here")

constant = 3
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "mine.py"
    file.write_text(FACTORIES)
    return file


def test_a_factory_in_a_file_gives_the_subject(file: Path):
    subject = load_target(f"{file}:decoder", LoadOptions())
    assert subject.info.name == f"{file}:decoder"
    assert subject.info.vocab_size == 11


def test_a_factory_in_a_module_of_this_folder_gives_the_subject(file: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(file.parent)
    monkeypatch.syspath_prepend(str(file.parent))
    assert load_target("mine:decoder", LoadOptions()).info.vocab_size == 11


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("nothing", {}, "has no function 'nothing'; it has: broken, decoder, number"),
        ("constant", {}, "has no function 'constant'"),
        ("number", {}, "is a int: give a Subject, or two functions"),
        ("broken", {}, "raised ValueError: no weights here"),
        ("decoder", {"dtype": "bfloat16"}, "computes in float32 and cannot be cast to bfloat16"),
        ("decoder", {"attention": "sdpa"}, "--attention and --device do not go with"),
        ("decoder", {"config": Path("config.json")}, "give a TARGET or --config FILE, and not both"),
    ],
)
def test_a_factory_that_gives_no_decoder_says_why(file: Path, name: str, options: dict[str, Any], message: str):
    with pytest.raises(UsageError, match=message):
        load_target(f"{file}:{name}", LoadOptions(**options))


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("no/such/file.py:decoder", "no such file: no/such/file.py"),
        ("no_such_package.x:decoder", "no module named 'no_such_package'"),
    ],
)
def test_a_factory_that_is_not_there_says_so(target: str, message: str):
    with pytest.raises(UsageError, match=message):
        load_target(target, LoadOptions())


def test_a_file_that_raises_as_it_is_read_says_what(tmp_path: Path):
    file = tmp_path / "wrong.py"
    file.write_text("import no_such_library\n")
    with pytest.raises(UsageError, match="raised ModuleNotFoundError: No module named 'no_such_library'"):
        load_target(f"{file}:decoder", LoadOptions())


@pytest.mark.parametrize("context_len", [0, -1, 1.5, True, None, "8"])
def test_a_context_that_is_no_number_of_positions_is_refused(context_len: Any):
    message = f"^context_len must be an integer of at least 1, not {re.escape(repr(context_len))}$"
    with pytest.raises(UsageError, match=message):
        CallableSubject(*sums(), context_len=context_len)
    with pytest.raises(UsageError, match=message):
        ModuleSubject(Sums(), cache="memory", context_len=context_len)


@pytest.mark.parametrize("seed", [-1, 2**63, 2**70])
def test_a_seed_beyond_64_bits_is_refused(seed: int):
    with pytest.raises(UsageError, match=r"^seed must lie in 0\.\.2\*\*63-1, not "):
        audit(sums(), ["token-by-token"], seed=seed)
