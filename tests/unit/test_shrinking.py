"""Random programs are legal, find planted faults, and shrink to the shortest program that shows them."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.strategies import programs, random_subject, subjects

from kvproof import ReferenceSubject, Verdict, audit
from kvproof._engine.programs import Coverage, run_program
from kvproof._numerics.tolerances import TOP_RUNG
from kvproof._shrinking.programs import FailureFinder, Tries, simplify
from kvproof._shrinking.simpler import cost_of, num_tokens, simpler_programs
from kvproof.errors import SubjectError, UsageError
from kvproof.reference import Checkpoint, DecoderConfig
from kvproof.scenarios import (
    Ability,
    Action,
    Boundaries,
    CacheKind,
    Claim,
    Crop,
    Extend,
    Fork,
    Limits,
    Open,
    OpenSession,
    Operation,
    Reorder,
    Reset,
    Scenario,
    SessionState,
    drawable_kinds,
    is_legal,
    longest_sequences,
    needs_of,
    random_programs,
    walk,
)
from kvproof.subjects import Subject, limits_of
from kvproof.subjects._base import Opening
from kvproof.subjects._reference import ReferenceSession

CONFIG = DecoderConfig(num_layers=2, num_heads=2, head_dim=4, mlp_width=8, context_len=12, vocab_size=16)
LIMITS = Limits(
    abilities=frozenset(Ability), vocab_size=9, boundaries=Boundaries(context_len=40, windows=(1, 4, 8))
)


@given(st.data())
def test_a_drawn_program_is_legal_and_compares_a_row(data: st.DataObject):
    subject = data.draw(subjects())
    program = data.draw(programs(subject))
    assert is_legal(program, limits_of(subject))
    assert any(call.rows for call in run_program(subject, program))


@settings(max_examples=10)
@given(st.data())
def test_every_simpler_program_that_is_called_legal_runs(data: st.DataObject):
    """What is simpler is never refused, so a refusal cannot end a search for the wrong reason."""
    subject = data.draw(subjects(min_context=4))
    program = data.draw(programs(subject))
    for candidate in list(simpler_programs(program))[:12]:
        if is_legal(candidate, limits_of(subject)):
            list(run_program(subject, candidate))


def drawn(limits: Limits = LIMITS, num: int = 200) -> list[Operation]:
    return [o for p in random_programs(limits, num=num, seed=1, max_len=20) for o in p.operations]


def test_the_seed_alone_decides_what_is_drawn():
    assert random_programs(LIMITS, num=5, seed=3, max_len=9) == random_programs(LIMITS, num=5, seed=3, max_len=9)
    assert random_programs(LIMITS, num=5, seed=3, max_len=9) != random_programs(LIMITS, num=5, seed=4, max_len=9)


def test_every_kind_of_operation_and_cache_is_drawn():
    kinds = {type(operation) for operation in drawn()}
    assert kinds == {Extend, Crop, Fork, Reorder, Reset, Open}
    caches = {program.cache for program in random_programs(LIMITS, num=40, seed=0, max_len=9)}
    assert caches == {CacheKind.DYNAMIC, CacheKind.STATIC}


@pytest.mark.parametrize(
    ("ability", "kind"), [(Ability.CROP, Crop), (Ability.FORK, Fork), (Ability.REORDER, Reorder)]
)
def test_what_a_subject_is_not_able_to_do_is_never_drawn(ability: Ability, kind: type):
    without = replace(LIMITS, abilities=LIMITS.abilities - {ability})
    assert kind not in {type(operation) for operation in drawn(without)}
    assert kind.__name__.lower() in drawable_kinds(LIMITS)
    assert kind.__name__.lower() not in drawable_kinds(without)


def test_a_subject_without_batches_gets_one_row():
    without = replace(LIMITS, abilities=LIMITS.abilities - {Ability.BATCH})
    assert all(len(o.ids) == 1 for o in drawn(without) if isinstance(o, Extend))
    assert all(o.batch == 1 for o in drawn(without) if isinstance(o, Open))


def test_behind_a_window_the_newest_call_alone_is_taken_back():
    feed, more = Extend(ids=((1, 2, 3),)), Extend(ids=((4, 5),))
    for length, legal in ((2, False), (3, True), (5, True), (6, False)):
        program = Scenario(name="x", exposes="x", operations=(feed, more, Crop(length=length)))
        assert is_legal(program, LIMITS) is legal, length
    short = Scenario(name="x", exposes="x", operations=(feed, Crop(length=2), Crop(length=0)))
    assert is_legal(short, LIMITS)


class BrokenSession(ReferenceSession):
    """A session one of whose operations does nothing."""

    def _crop(self, length: int) -> None:
        if self.reference.broken != "crop":
            super()._crop(length)

    def _reorder(self, rows: Sequence[int]) -> None:
        if self.reference.broken != "reorder" or len(rows) != len(self.ids):
            super()._reorder(rows)

    def _reset(self) -> None:
        if self.reference.broken != "reset":
            super()._reset()


class Broken(ReferenceSubject):
    """A decoder whose sessions are broken so."""

    def __init__(self, checkpoint: Checkpoint, broken: str) -> None:
        super().__init__(checkpoint)
        self.broken = broken

    def _session(self, opening: Opening) -> BrokenSession:
        session = super()._session(opening)
        return BrokenSession(self, session.ids, session.cache, opening.tap)

    def _cast(self, dtype: torch.dtype) -> "Broken":
        return Broken(super()._cast(dtype).checkpoint, self.broken)


def planted(broken: str) -> Broken:
    return Broken(random_subject(CONFIG, 0).checkpoint, broken)


SHORTEST: dict[str, tuple[type, ...]] = {
    "crop": (Extend, Crop, Extend),
    "reorder": (Extend, Reorder, Extend),
    "reset": (Extend, Reset, Extend),
}


@pytest.mark.parametrize("broken", SHORTEST)
def test_a_planted_fault_is_found_and_shrinks_to_the_shortest_program(broken: str):
    subject = planted(broken)
    drawn = random_programs(limits_of(subject), num=16, seed=0, max_len=6)
    report = audit(subject, drawn, all_values=False)
    assert report.scenarios[-1].verdict is Verdict.DIVERGED
    finder = FailureFinder(subject.cast(TOP_RUNG))
    program, failure = next((p, f) for p in drawn if (f := finder.find(p)) is not None)
    shortest, found = finder.shrink(program, failure, Tries(max_tries=400))
    assert tuple(map(type, shortest.operations)) == SHORTEST[broken]
    assert num_tokens(shortest) <= (4 if broken == "reorder" else 2)
    assert found.prefix in {s[: len(found.prefix)] for s in longest_sequences(shortest)}
    assert cost_of(shortest) < cost_of(program)


def test_a_healthy_decoder_passes_the_same_programs_and_says_what_they_did():
    subject = random_subject(CONFIG, 0)
    report = audit(subject, random_programs(limits_of(subject), num=16, seed=0, max_len=6), all_values=False)
    assert report.verdict.passes
    note, *_ = report.notes
    num_rows = len(report.scenarios[-1].rows)
    assert note.startswith(f"the random programs compared {num_rows} rows, and made ")
    for kind in ("extends", "crops", "forks", "reorders", "resets", "opens"):
        assert kind in note
    assert "not tried" not in note


def test_what_was_able_and_not_tried_is_said():
    subject = random_subject(CONFIG, 0)
    (program,) = random_programs(limits_of(subject), num=1, seed=0, max_len=10)
    only = replace(program, operations=(Extend(ids=((1,),)),), batch=1)
    report = audit(subject, [only], all_values=False)
    assert report.notes[0] == (
        "the random programs compared 1 row, and made 1 extend, 0 crops, 0 forks, 0 reorders, 0 resets, 0 opens; "
        "not tried, though the subject is able: crop, fork, reorder, reset, open"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Undo(Action):
    """Forget the newest ``num`` tokens: an operation that no tool knows."""

    ability = Ability.CROP

    num: int

    def change(self, state: SessionState) -> SessionState:
        return Crop(length=state.length - self.num).change(state)

    def is_allowed(self, states: tuple[SessionState, ...], limits: Limits, cache: CacheKind) -> bool:
        return 0 < self.num <= states[self.session].length and cache is CacheKind.DYNAMIC

    def act(self, session: OpenSession) -> Counter[Claim]:
        session.crop(len(session) - self.num)
        return Counter()

    @property
    def magnitude(self) -> int:
        return self.num

    def simplify(self) -> Iterator["Undo"]:
        if self.num > 1:
            yield replace(self, num=self.num - 1)


def test_a_new_operation_is_run_checked_and_shrunk_by_what_its_class_says():
    operations = (Extend(ids=((1, 2, 3, 4),)), Undo(num=2), Extend(ids=((5,),)), Extend(ids=((6,),)))
    program = Scenario(name="x", exposes="x", operations=operations)
    assert longest_sequences(program) == ((1, 2, 3, 4), (1, 2, 5, 6))
    assert needs_of(program) == {Ability.CROP}
    assert is_legal(program, LIMITS)
    assert not is_legal(replace(program, operations=(Extend(ids=((1,),)), Undo(num=2))), LIMITS)
    coverage = Coverage()
    calls = list(run_program(random_subject(CONFIG, 0), program, coverage=coverage))
    assert [row.prefix for row in calls[-1].rows] == [(1, 2, 5, 6)]
    assert coverage.made["undo"] == 1
    finder = FailureFinder(planted("crop").cast(TOP_RUNG))
    failure = finder.find(program)
    assert failure is not None
    shortest, _ = finder.shrink(program, failure, Tries(max_tries=400))
    assert tuple(map(type, shortest.operations)) == (Extend, Undo, Extend)
    assert (shortest.operations[1], num_tokens(shortest)) == (Undo(num=1), 2)


@pytest.mark.parametrize(
    "operation",
    [
        Extend(ids=((1,),), session=1),
        Extend(ids=((1,), (2,))),
        Reorder(rows=(1,)),
        Fork(session=-1),
        Crop(length=-1),
    ],
    ids=lambda operation: operation.kind(),
)
def test_an_operation_on_what_does_not_exist_is_refused_and_never_legal(operation: Operation):
    program = Scenario(name="x", exposes="x", operations=(Extend(ids=((1,),)), operation))
    assert not is_legal(program, LIMITS)
    with pytest.raises(UsageError, match=r"^operation 1 of 'x' names a session or rows that do not exist: "):
        list(walk(program))


def test_what_raises_shows_no_wrong_row():
    class Raising(ReferenceSubject):
        def _session(self, opening: Opening) -> ReferenceSession:
            raise SubjectError("no session today")

    subject = Raising(random_subject(CONFIG, 0).checkpoint)
    assert FailureFinder(subject).find(Scenario(name="x", exposes="x", operations=(Extend(ids=((1,),)),))) is None


def test_both_forms_of_a_subject_must_fail():
    program = random_programs(limits_of(planted("crop")), num=16, seed=0, max_len=6)
    broken, healthy = planted("crop").cast(TOP_RUNG), random_subject(CONFIG, 0).cast(TOP_RUNG)

    def num_found(*subjects: Subject) -> int:
        return sum(FailureFinder(*subjects).find(p) is not None for p in program)

    assert num_found(broken, broken) == num_found(broken) > 0
    assert num_found(broken, healthy) == 0


def test_tries_are_bounded_counted_and_never_repeated():
    told: list[int] = []

    def halves(number: int) -> Sequence[int]:
        return (number // 2, number - 1)

    def search(most: int, good: Callable[[int], bool]) -> int:
        told.clear()
        tries = Tries(max_tries=most, on_try=told.append)
        return simplify(100, halves, lambda new, old: new < old and good(new), tries, key=int)

    assert search(1000, lambda number: number >= 7) == 7
    assert told == list(range(1, len(told) + 1))
    assert search(3, lambda number: number >= 7) > 7
    assert told == [1, 2, 3]
