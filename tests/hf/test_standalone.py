"""Files that show a finding without kvproof: what they run is what kvproof ran."""

import ast
import contextlib
import io
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from kvproof._engine.programs import run_program
from kvproof._numerics.tolerances import TOP_RUNG
from kvproof._shrinking.models import (
    Recipe,
    num_parameters,
    plain_model,
    pretrained_source,
    recipe_of,
    smaller_recipes,
)
from kvproof._shrinking.programs import FailureFinder
from kvproof._shrinking.standalone import standalone
from kvproof._shrinking.writable import Found
from kvproof.errors import UsageError
from kvproof.scenarios import (
    Ability,
    Action,
    CacheKind,
    Claim,
    Crop,
    Extend,
    Fork,
    Generate,
    Method,
    Open,
    OpenSession,
    Operation,
    Poison,
    Reorder,
    Reset,
    Scenario,
    is_legal,
    needs_of,
    random_programs,
)
from kvproof.subjects import limits_of
from kvproof.subjects._adapter import LoadOptions
from kvproof.subjects._targets import load_target
from kvproof.subjects._transformers import TransformersSubject

from .folders import saved_model

_MODELS: dict[str, tuple[TransformersSubject, Recipe]] = {}


def model_of(kind: str) -> tuple[TransformersSubject, Recipe]:
    """A plain model of a type and its recipe, made once."""
    if kind not in _MODELS:
        recipe = recipe_of(load_target(f"random:{kind}", LoadOptions()), "eager")
        _MODELS[kind] = (plain_model(recipe, name=kind), recipe)
    return _MODELS[kind]


def program_of(*operations: Operation, batch: int = 1, cache: CacheKind = CacheKind.DYNAMIC) -> Scenario:
    program = Scenario(name="x", exposes="x", operations=operations, batch=batch, cache=cache)
    program = Scenario(
        name="x", exposes="x", operations=operations, batch=batch, cache=cache, needs=needs_of(program)
    )
    return program


def found_in(program: Scenario, subject: TransformersSubject, *, cached: bool = True, title: str = "x") -> Found:
    """The program's last row, as if it were wrong."""
    calls = list(run_program(subject, program))
    single = Ability.PAD in program.needs
    row = calls[-1].rows[-1]
    return Found(
        program=program,
        place=(len(calls) - 1, row.batch_row, row.offset),
        prefix=row.prefix,
        cached=cached,
        single=single,
        limit=1e-3 if single else 1e-5,
        title=title,
        sentence="what was found",
    )


def run_text(text: str) -> tuple[int, str]:
    """Run a file's text as a script does, and return its exit status and what it printed."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), pytest.raises(SystemExit) as left:
        exec(compile(text, "reproduction.py", "exec"), {"__name__": "__main__"})
    return left.value.code, out.getvalue()


A, B, C = Extend(ids=((5, 6, 7),)), Extend(ids=((8,),)), Extend(ids=((9, 4),))
TWO = Extend(ids=((5, 6, 7), (1, 2, 3)))
RAGGED = Extend(ids=((5, 6, 7), (3,)))
STEP = Extend(ids=((8,), (9,)))
HEALTHY: dict[str, tuple[str, Scenario]] = {
    "steps": ("gpt2", program_of(A, B, C)),
    "a crop": ("llama", program_of(A, Crop(length=1), C)),
    "a crop past a window": ("gemma3", program_of(Extend(ids=(tuple(range(3, 15)),)), Crop(length=2), C, B)),
    "a reorder": ("llama", program_of(TWO, Reorder(rows=(1, 0)), STEP, batch=2)),
    "a reorder that drops a row": ("llama", program_of(TWO, Reorder(rows=(1,)), C, batch=2)),
    "a fork": ("llama", program_of(A, Fork(), B, Extend(ids=((2,),), session=1))),
    "two sessions": ("llama", program_of(Open(), A, Extend(ids=((2,),), session=1), B)),
    "a reset": ("llama", program_of(A, Reset(), C)),
    "a static cache": ("llama", program_of(A, B, Reset(), C, cache=CacheKind.STATIC)),
    "poison": ("llama", program_of(A, Poison(), B, cache=CacheKind.STATIC)),
    "padding": ("llama", program_of(RAGGED, STEP, batch=2)),
    "positions from the padding index": ("roberta", program_of(A, B)),
    "a recurrence": ("mamba2", program_of(A, B)),
    "a state that is returned": ("rwkv", program_of(A, B)),
    "memories that are returned": ("xlnet", program_of(A, B)),
    "a cache class of its own": ("minimax", program_of(A, B, batch=1)),
    "a state on its modules": ("recurrent_gemma", program_of(A, B)),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_what_is_healthy_exits_with_0(name: str):
    kind, program = HEALTHY[name]
    subject, recipe = model_of(kind)
    assert is_legal(program, limits_of(subject))
    text = standalone(found_in(program, subject), subject, recipe, "cpu")
    status, printed = run_text(text)
    assert (status, text.count("\n") < 60) == (0, True), f"{printed}\n{text}"
    assert "relative gap" in printed


FAULTY: dict[str, tuple[str, Scenario]] = {
    "a block on a warm cache": ("mamba", program_of(B, C)),
    "a reorder": ("minimax", program_of(TWO, Reorder(rows=(1, 0)), STEP, batch=2)),
}


@pytest.mark.parametrize("name", FAULTY)
def test_what_is_wrong_exits_with_1_by_the_gap_that_kvproof_measures(name: str):
    kind, program = FAULTY[name]
    subject, recipe = model_of(kind)
    found = found_in(program, subject)
    failure = FailureFinder(subject).find(program)
    assert failure is not None
    exact = Found(
        program=program,
        place=failure.place,
        prefix=failure.prefix,
        cached=True,
        single=False,
        limit=found.limit,
        title="x",
        sentence="x",
    )
    status, printed = run_text(standalone(exact, subject, recipe, "cpu"))
    assert status == 1
    assert printed.endswith(f"relative gap {failure.gap:.1e}\n")


def test_a_model_that_sees_later_tokens_is_shown_without_a_cache():
    program = program_of(A)
    for kind, expected in (("big_bird", 1), ("llama", 0)):
        subject, recipe = model_of(kind)
        assert (FailureFinder(subject, cached=False).find(program) is not None) == bool(expected)
        found = Found(
            program=program,
            place=(0, 0, 0),
            prefix=(5,),
            cached=False,
            single=False,
            limit=1e-5,
            title="x",
            sentence="x",
        )
        text = standalone(found, subject, recipe, "cpu")
        assert "cache=" not in text.replace("use_cache=", "")
        assert run_text(text)[0] == expected


def test_text_from_elsewhere_stays_a_comment():
    subject, recipe = model_of("gpt2")
    hostile = 'x\nraise SystemExit(9)\r"""\u2028\x0craise SystemExit(9)'
    text = standalone(found_in(program_of(A), subject, title=hostile), subject, recipe, "cpu")
    assert run_text(text)[0] == 0
    assert "raise SystemExit(9)" in text
    assert not any(isinstance(node, ast.Raise) for node in ast.walk(ast.parse(text)))


def test_a_file_imports_torch_and_transformers_alone():
    subject, recipe = model_of("minimax")
    tree = ast.parse(standalone(found_in(program_of(A, B), subject), subject, recipe, "cpu"))
    names = {n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    names |= {alias.name for n in ast.walk(tree) if isinstance(n, ast.Import) for alias in n.names}
    assert {name.split(".")[0] for name in names} == {"sys", "torch", "transformers"}


def test_a_model_on_disk_is_read_from_its_folder(tmp_path: Path):
    folder = saved_model(tmp_path / "it's here")
    subject = load_target(str(folder), LoadOptions()).cast(TOP_RUNG)
    source = pretrained_source(str(folder), "float32", "eager", False)
    assert isinstance(subject, TransformersSubject)
    text = standalone(found_in(program_of(A, B), subject), subject, source, "cpu")
    assert repr(str(folder.resolve())) in text
    assert run_text(text)[0] == 0


class Shout(Action):
    """An action that no file knows."""

    __slots__ = ()

    def act(self, session: OpenSession) -> Counter[Claim]:
        return Counter()


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (program_of(Generate(method=Method.GREEDY, prompts=((1, 2),), steps=(((0, 3),),))), "generate()"),
        (program_of(A, cache=CacheKind.OFFLOADED), "offloaded cache"),
        (program_of(A, Shout(), B), "programs with shout are not written out"),
        (program_of(*[B] * 40), "has fewer than 60"),
    ],
    ids=["generate", "offloaded", "unknown", "long"],
)
def test_what_cannot_be_written_out_is_refused(program: Scenario, words: str):
    subject, recipe = model_of("llama")
    found = Found(
        program=program,
        place=(39, 0, 0),
        prefix=(8,),
        cached=True,
        single=False,
        limit=1e-5,
        title="x",
        sentence="x",
    )
    with pytest.raises(UsageError) as caught:
        standalone(found, subject, recipe, "cpu")
    assert words in str(caught.value)


def test_every_simpler_recipe_keeps_its_lists_as_long_as_its_layers():
    _, recipe = model_of("gpt_neo")
    fewer = [r for r in smaller_recipes(recipe) if r.values.get("num_layers") == 2]
    assert [r.values["attention_layers"] for r in fewer[:3]] == [
        ["global", "local"],
        ["global", "local"],
        ["global", "local"],
    ]
    for smaller in fewer:
        assert len(smaller.values["attention_layers"]) == 2
        assert plain_model(smaller, name="x").info.num_layers == 2
        assert num_parameters(smaller) < num_parameters(recipe)


def test_random_programs_raise_no_alarm_where_windows_drop_what_they_passed():
    subject, _ = model_of("gemma3")
    assert Ability.CROP in subject.info.abilities
    finder = FailureFinder(subject)
    for program in random_programs(limits_of(subject), num=12, seed=2, max_len=14):
        assert finder.find(program) is None, program.operations
        list(run_program(subject, program))  # and nothing is refused
