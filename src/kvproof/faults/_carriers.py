"""The short programs in which the certificate plants faults: a prompt of ``position`` tokens, then more."""

from collections.abc import Callable, Sequence
from functools import cache

from kvproof.scenarios import Ability, Crop, Extend, Fork, Open, Operation, Reorder, Reset, Scenario

#: Makes a program from two sequences of the same length, at least 4, and the length of its prompt.
Carrier = Callable[[Sequence[int], Sequence[int], int], Scenario]

#: How many tokens follow the prompt one by one: a fault that has not shown by then is hidden.
NUM_STEPS = 3


def steps(a: Sequence[int], b: Sequence[int], position: int) -> Scenario:
    """Step after a prompt."""
    return _program("steps", _fed(a[:position], *_each(a[position : position + NUM_STEPS])))


def steps_to_end(a: Sequence[int], b: Sequence[int], position: int) -> Scenario:
    """Step over all that follows a prompt."""
    return _program("steps to the end", _fed(a[:position], *_each(a[position:])))


def block(a: Sequence[int], b: Sequence[int], position: int) -> Scenario:
    """Feed the rest in one block on the warm cache."""
    return _program("block", _fed(a[:position], a[position:]))


def batch(a: Sequence[int], b: Sequence[int], position: int) -> Scenario:
    """Step two rows of the same length."""
    return _rows("batch", (a[:position], b[:position]), a, b, position)


@cache
def rows_of(num_rows: int) -> Carrier:
    """Return the program that steps so many rows of the same length, each of other tokens."""

    def rows(a: Sequence[int], b: Sequence[int], position: int) -> Scenario:
        sequences = [tuple(a), tuple(b)]
        sequences += [(*s[n:], *s[:n]) for n in range(1, num_rows // 2 + 1) for s in sequences[:2]]
        ends = [position, *range(position + 1, min(position + 3, len(a) + 1))]
        more: list[Operation] = [
            Extend(ids=tuple(row[start:end] for row in sequences[:num_rows]))
            for start, end in zip([0, *ends], ends, strict=False)
        ]
        return _program(f"{num_rows} rows", more, Ability.BATCH, batch=num_rows)

    return rows


def padded(a: Sequence[int], b: Sequence[int], position: int) -> Scenario:
    """Step two rows, the second padded on the left by one token."""
    return _rows("padded batch", (a[:position], b[: position - 1]), a, b, position)


def rollback(a: Sequence[int], b: Sequence[int], position: int) -> Scenario:
    """Take tokens back and continue with others."""
    end = min(position + 2, len(a) - 1)
    later = _fed(*_each(b[position : position + 2]))
    return _program("rollback", [*_fed(a[:end]), Crop(length=position), *later], Ability.CROP)


def beams(a: Sequence[int], b: Sequence[int], position: int) -> Scenario:
    """Swap two rows."""
    operations: list[Operation] = [
        Extend(ids=(tuple(a[:position]), tuple(b[:position]))),
        Reorder(rows=(1, 0)),
        Extend(ids=((a[position],), (b[position],))),
    ]
    return _program("beams", operations, Ability.BATCH, Ability.REORDER, batch=2)


def branches(a: Sequence[int], b: Sequence[int], position: int) -> Scenario:
    """Continue one prompt twice."""
    return _program("fork", [*_fed(a[:position]), Fork(), *_turns(a, b, position)], Ability.FORK)


def requests(a: Sequence[int], b: Sequence[int], position: int) -> Scenario:
    """Run two requests in turns."""
    prompts = [*_fed(a[:position]), Extend(ids=(tuple(b[:position]),), session=1)]
    return _program("two requests", [Open(), *prompts, *_turns(a, b, position)])


def reuse(a: Sequence[int], b: Sequence[int], position: int) -> Scenario:
    """Start again with another prompt."""
    later = _fed(a[:position], *_each(a[position : position + 2]))
    return _program("reuse", [*_fed(b[:position]), Reset(), *later])


#: For each program, the scenarios of the catalogue that must see a fault planted in it.
SEEN_BY: dict[Carrier, tuple[str, ...]] = {
    steps: ("token-by-token", "prefill+steps", "multi-turn"),
    block: ("chunked prefill", "multi-turn"),
    batch: ("batch", "left-padded batch", "batch isolation"),
    padded: ("left-padded batch",),
    rollback: ("rollback", "rollback across calls"),
    beams: ("beam reorder",),
    branches: ("fork",),
    requests: ("interleaved requests",),
    reuse: ("buffer reuse",),
}


def _fed(*parts: Sequence[int]) -> list[Operation]:
    """Return a call for each part."""
    return [Extend(ids=(tuple(part),)) for part in parts]


def _each(ids: Sequence[int]) -> list[Sequence[int]]:
    return [(token,) for token in ids]


def _turns(a: Sequence[int], b: Sequence[int], position: int) -> list[Operation]:
    """Step both sessions in turns; the second one takes other tokens, so that a leak from it shows."""
    turns: list[Operation] = []
    for own, other in zip(a[position : position + 2], b[position : position + 2], strict=True):
        turns += [Extend(ids=((own,),)), Extend(ids=((other,),), session=1)]
    return turns


def _rows(
    name: str, prompts: Sequence[Sequence[int]], a: Sequence[int], b: Sequence[int], position: int
) -> Scenario:
    starts = [len(prompt) for prompt in prompts]
    num_steps = min(2, len(a) - position)
    more: list[Operation] = [
        Extend(ids=tuple((row[start + step],) for row, start in zip((a, b), starts, strict=True)))
        for step in range(num_steps)
    ]
    ragged = (Ability.PAD,) if len(set(starts)) > 1 else ()
    return _program(name, [Extend(ids=tuple(map(tuple, prompts))), *more], Ability.BATCH, *ragged, batch=2)


def _program(name: str, operations: Sequence[Operation], *needs: Ability, batch: int = 1) -> Scenario:
    return Scenario(
        name=name,
        exposes="a planted fault",
        operations=tuple(operations),
        needs=frozenset(needs),
        batch=batch,
    )
