"""Builds scenarios: each function makes one kind of program from the caller's token sequences."""

from collections.abc import Sequence
from dataclasses import replace

from kvproof.errors import UsageError
from kvproof.scenarios._calls import Extend, Generate, Method, Refused
from kvproof.scenarios._operations import (
    Ability,
    CacheKind,
    Claim,
    Crop,
    Fork,
    Open,
    Operation,
    Poison,
    Reorder,
    Reset,
)
from kvproof.scenarios._walk import Scenario


def token_by_token(sequence: Sequence[int]) -> Scenario:
    """Feed one token per call, as generation does."""
    return Scenario(
        name="token-by-token",
        exposes="wrong positions, appends or masks of a single new token",
        operations=tuple(Extend(ids=((token,),)) for token in sequence),
    )


def prefill_and_steps(sequence: Sequence[int], split: int) -> Scenario:
    """Feed the first ``split`` tokens in one call and the rest one by one."""
    if not 1 <= split <= len(sequence):
        raise UsageError(f"cannot split {len(sequence)} tokens after {split}")
    steps = tuple(Extend(ids=((token,),)) for token in sequence[split:])
    return Scenario(
        name="prefill+steps",
        exposes="a wrong position or mask right after a prompt",
        operations=(Extend(ids=(tuple(sequence[:split]),)), *steps),
    )


def chunked_prefill(sequence: Sequence[int], size: int) -> Scenario:
    """Feed ``size`` tokens per call, so that later chunks extend a warm cache."""
    if size < 1:
        raise UsageError(f"a chunk holds at least 1 token, not {size}")
    starts = range(0, len(sequence), size)
    return Scenario(
        name="chunked prefill",
        exposes="a wrong mask or recurrent state for a block on a warm cache",
        operations=tuple(Extend(ids=(tuple(sequence[i : i + size]),)) for i in starts),
    )


def rollback(sequence: Sequence[int], length: int, continuation: Sequence[int]) -> Scenario:
    """Feed a sequence in one call, crop it to ``length`` tokens, and continue with different tokens."""
    return Scenario(
        name="rollback",
        exposes="entries that survive a crop, and positions that do not go back",
        operations=(
            Extend(ids=(tuple(sequence),)),
            Crop(length=length),
            *(Extend(ids=((token,),)) for token in continuation),
        ),
        needs=frozenset({Ability.CROP}),
    )


def rollback_across_calls(
    sequence: Sequence[int], size: int, length: int, continuation: Sequence[int]
) -> Scenario:
    """Roll back after feeding ``size`` tokens per call, so that the crop undoes more than the newest call."""
    program = rollback(sequence, length, continuation)
    return replace(
        program,
        name="rollback across calls",
        exposes="a crop that can undo only the newest call",
        operations=(*chunked_prefill(sequence, size).operations, *program.operations[1:]),
    )


def fork(prefix: Sequence[int], parent: Sequence[int], child: Sequence[int]) -> Scenario:
    """Continue one shared prefix in two sessions, alternating between them."""
    turns: list[Operation] = []
    for token, other in zip(parent, child, strict=True):
        turns += [Extend(ids=((token,),), session=0), Extend(ids=((other,),), session=1)]
    return Scenario(
        name="fork",
        exposes="forks that share their prefix by reference",
        operations=(Extend(ids=(tuple(prefix),)), Fork(session=0), *turns),
        needs=frozenset({Ability.FORK}),
    )


def interleaved_requests(first: Sequence[int], second: Sequence[int]) -> Scenario:
    """Run two requests, alternating between them after each token."""
    turns: list[Operation] = []
    for token, other in zip(first, second, strict=True):
        turns += [Extend(ids=((token,),), session=0), Extend(ids=((other,),), session=1)]
    return Scenario(
        name="interleaved requests",
        exposes="state that leaks from one request to another",
        operations=(Open(), *turns),
    )


def multi_turn(sequence: Sequence[int]) -> Scenario:
    """Feed a prompt, answer token by token, feed a second prompt on the warm cache, and answer again."""
    quarter = max(1, len(sequence) // 4)
    first, answer, second, rest = (
        sequence[:quarter],
        sequence[quarter : 2 * quarter],
        sequence[2 * quarter : 3 * quarter],
        sequence[3 * quarter :],
    )
    parts = [tuple(first), *((t,) for t in answer), tuple(second), *((t,) for t in rest)]
    return Scenario(
        name="multi-turn",
        exposes="a wrong mask or position for a second prompt on a warm cache",
        operations=tuple(Extend(ids=(part,)) for part in parts if part),
    )


def batch_of(
    name: str, exposes: str, rows: Sequence[Sequence[int]], steps: Sequence[Sequence[int]], *, size: int = 1
) -> Scenario:
    """Start a session with several rows of any lengths, and continue them together, ``size`` tokens per call."""
    needs = {Ability.BATCH} if len(set(map(len, rows))) == 1 else {Ability.BATCH, Ability.PAD}
    operations = [Extend(ids=tuple(map(tuple, rows)))]
    (num_steps,) = {len(step) for step in steps}
    operations += [
        Extend(ids=tuple(tuple(step[start : start + size]) for step in steps))
        for start in range(0, num_steps, size)
    ]
    return Scenario(
        name=name, exposes=exposes, operations=tuple(operations), needs=frozenset(needs), batch=len(rows)
    )


def beam_reorder(prefix: Sequence[int], orders: Sequence[Sequence[int]], tokens: Sequence[int]) -> Scenario:
    """Run several rows of one prefix and reorder them between steps."""
    batch = len(orders[0])
    operations: list[Operation] = [Extend(ids=(tuple(prefix),) * batch)]
    for number, order in enumerate(orders):
        step = tuple((tokens[(number + row) % len(tokens)],) for row in range(batch))
        operations += [Extend(ids=step), Reorder(rows=tuple(order))]
    operations.append(Extend(ids=tuple((tokens[row % len(tokens)],) for row in range(batch))))
    return Scenario(
        name="beam reorder",
        exposes="state that does not move with its row",
        operations=tuple(operations),
        needs=frozenset({Ability.BATCH, Ability.REORDER}),
        batch=batch,
    )


def buffer_reuse(first: Sequence[int], second: Sequence[int]) -> Scenario:
    """Run one request, reset the session, and run another in it."""
    return Scenario(
        name="buffer reuse",
        exposes="state that survives a reset",
        operations=(
            Extend(ids=(tuple(first),)),
            Reset(),
            *(Extend(ids=((token,),)) for token in second),
        ),
    )


def isolation(row: Sequence[int], neighbours: Sequence[Sequence[int]], num_steps: int) -> Scenario:
    """Run one batch row in several sessions whose other row differs. Feed its last tokens one by one."""
    split = len(row) - num_steps
    operations: list[Operation] = [Open(batch=2) for _ in neighbours[1:]]
    for start, stop in ((0, split), *((i, i + 1) for i in range(split, len(row)))):
        operations += [
            Extend(ids=(tuple(row[start:stop]), tuple(neighbour[start:stop])), session=session)
            for session, neighbour in enumerate(neighbours)
        ]
    return Scenario(
        name="batch isolation",
        exposes="a batch row that depends on its neighbours' tokens",
        operations=tuple(operations),
        needs=frozenset({Ability.BATCH}),
        batch=2,
    )


def with_cache(scenario: Scenario, kind: CacheKind, *, advice: bool = False) -> Scenario:
    """Return the program with another kind of cache, named after that kind."""
    return replace(
        scenario,
        name=f"{kind.value} cache",
        exposes=_CACHE_EXPOSES[kind],
        needs=scenario.needs | {ability for ability in (kind.ability,) if ability is not None},
        cache=kind,
        advice=advice,
    )


_CACHE_EXPOSES = {
    CacheKind.DYNAMIC: "wrong appends, and entries that a window drops too early or too late",
    CacheKind.STATIC: "masks, positions and appends that go by the size of the buffer, not by what it holds",
    CacheKind.OFFLOADED: "entries that are read before they have been copied back",
    CacheKind.QUANTISED: "the error from storing keys and values in few bits",
}


def without_positions(scenario: Scenario, name: str) -> Scenario:
    """Return the program without explicit positions: the decoder computes the positions of new tokens itself."""
    return replace(
        scenario,
        name=name,
        exposes="default positions that start at 0 on a warm cache, or that count the padding",
        needs=scenario.needs | {Ability.OMIT_POSITIONS},
        omit_positions=True,
        advice=True,
    )


def poisoned_buffer(first: Sequence[int], second: Sequence[int], split: int) -> Scenario:
    """Fill a static cache's unused slots with garbage and continue; reset it and repeat with other tokens."""
    return Scenario(
        name="poisoned buffer",
        exposes="unused cache slots that are read",
        operations=(
            Extend(ids=(tuple(first[:split]),)),
            Poison(),
            *(Extend(ids=((token,),)) for token in first[split:]),
            Reset(),
            Poison(),
            Extend(ids=(tuple(second[:split]),)),
            *(Extend(ids=((token,),)) for token in second[split:]),
        ),
        needs=frozenset({Ability.STATIC_CACHE, Ability.POISON}),
        cache=CacheKind.STATIC,
        claims=frozenset({Claim.POISONED}),
    )


def window_crossing(sequence: Sequence[int], window: int) -> tuple[Scenario, ...]:
    """Cross a window in steps, with a prompt, and with a block on a warm cache. Needs 2 × window + 1 tokens."""
    if window < 2 or len(sequence) < 2 * window + 1:
        raise UsageError(f"{len(sequence)} tokens do not cross a window of {window}")
    end, ids = 2 * window + 1, tuple(sequence)
    steps = (window - 1, *range(window, end + 1))
    prompt = (window + 1, window + 2, window + 3)
    block = (min(2, window - 1), window + 3, window + 4)
    return tuple(
        Scenario(
            name="window crossing",
            exposes="off-by-one errors in masks, slots and states where a window is full",
            operations=tuple(
                Extend(ids=(ids[start:stop],))
                for start, stop in zip((0, *cuts), cuts, strict=False)
                if stop <= end
            ),
            crosses=crosses,
        )
        for cuts, crosses in ((steps, (window - 1, window, window + 1, end)), (prompt, ()), (block, ()))
    )


def context_end(sequence: Sequence[int]) -> Scenario:
    """Fill the context with a sequence as long as the context. Calls past the end must be refused."""
    ids, beyond = tuple(sequence), (sequence[0],)
    split = len(ids) - 2
    return Scenario(
        name="context end",
        exposes="a last position that does not work, or one past it that is accepted",
        operations=(
            Extend(ids=(ids[:split],), last_only=True),
            Refused(ids=(ids[split:] + beyond,)),
            Extend(ids=(ids[split : split + 1],)),
            Extend(ids=(ids[split + 1 :],)),
            Refused(ids=(beyond,)),
        ),
        crosses=(len(ids),),
        claims=frozenset({Claim.REFUSED}),
    )


def generation(
    method: Method,
    prompts: Sequence[Sequence[int]],
    continuations: Sequence[Sequence[int]],
) -> Scenario:
    """Generate through the decoder's own library, with one forced continuation for each prompt."""
    steps = tuple(tuple(enumerate(tokens)) for tokens in zip(*continuations, strict=True))
    padded = len(set(map(len, prompts))) > 1
    return Scenario(
        name=f"generate {'left-padded batch' if padded else method.value}",
        exposes=_METHOD_EXPOSES[method],
        operations=(Generate(method=method, prompts=tuple(map(tuple, prompts)), steps=steps),),
        needs=frozenset(
            {Ability.GENERATE, *_METHOD_NEEDS.get(method, ()), *((Ability.BATCH, Ability.PAD) if padded else ())}
        ),
        claims=frozenset({Claim.ACCEPTED, Claim.REJECTED} if method is Method.PROMPT_LOOKUP else ()),
    )


_METHOD_NEEDS = {
    Method.PROMPT_LOOKUP: (Ability.CROP, Ability.GENERATE_ASSISTED),
    Method.CHUNKED_PREFILL: (Ability.GENERATE_CHUNKED,),
    Method.STATIC_CACHE: (Ability.STATIC_CACHE,),
}
_METHOD_EXPOSES = {
    Method.GREEDY: "wrong masks, positions or tokens from the library's own loop",
    Method.BEAM: "state that does not move when the library reorders beams",
    Method.PROMPT_LOOKUP: "rejected proposals that stay in the cache",
    Method.CHUNKED_PREFILL: "wrong masks or positions in the library's own chunks",
    Method.STATIC_CACHE: "wrong buffers, masks or positions of the library's own static cache",
}


def beam_search(prompt: Sequence[int], tokens: Sequence[int]) -> Scenario:
    """Run the library's own beam search with three beams that change places. Needs 3 different tokens."""
    if len(set(tokens)) != 3:
        raise UsageError(f"three beams need three different tokens, not {tuple(tokens)}")
    parents = ((0, 0, 0), (1, 0, 1), (2, 0, 1), (1, 1, 0))
    steps = tuple(tuple(zip(rows, tokens, strict=True)) for rows in parents)
    return Scenario(
        name="generate beam search",
        exposes=_METHOD_EXPOSES[Method.BEAM],
        operations=(Generate(method=Method.BEAM, prompts=(tuple(prompt),), steps=steps),),
        needs=frozenset({Ability.GENERATE, Ability.BATCH, Ability.REORDER}),
    )


def prompt_lookup(period: Sequence[int], other: int) -> Scenario:
    """Generate with tokens proposed from the prompt, some of which are right.

    The prompt repeats three tokens, and so does the continuation, except that ``other`` replaces the third token
    once. The proposals are wrong at that point.
    """
    a, b, c = period
    return generation(
        Method.PROMPT_LOOKUP,
        ((a, b, c, a, b, c),),
        ((a, b, c, a, b, other, a, b, c),),
    )


def skip(name: str, exposes: str, reason: str) -> Scenario:
    """Return a scenario that is not run on this subject, with the reason."""
    return Scenario(name=name, exposes=exposes, operations=(), skipped=reason)
