"""Builders of programs: each makes one named scenario over token sequences of the caller's."""

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
    """Consume one token a call, as generation does."""
    return Scenario(
        name="token-by-token",
        exposes="positions, appends and the mask of a single new token",
        operations=tuple(Extend(ids=((token,),)) for token in sequence),
    )


def prefill_and_steps(sequence: Sequence[int], split: int) -> Scenario:
    """Consume the first ``split`` tokens in one call and the rest one by one."""
    if not 1 <= split <= len(sequence):
        raise UsageError(f"cannot split {len(sequence)} tokens after {split}")
    steps = tuple(Extend(ids=((token,),)) for token in sequence[split:])
    return Scenario(
        name="prefill+steps",
        exposes="the first position and mask after a prompt",
        operations=(Extend(ids=(tuple(sequence[:split]),)), *steps),
    )


def chunked(sequence: Sequence[int], size: int) -> Scenario:
    """Consume ``size`` tokens a call, so that later chunks meet a warm cache."""
    if size < 1:
        raise UsageError(f"a chunk holds at least 1 token, not {size}")
    starts = range(0, len(sequence), size)
    return Scenario(
        name="chunked prefill",
        exposes="masks and recurrent state of a block on a warm cache",
        operations=tuple(Extend(ids=(tuple(sequence[i : i + size]),)) for i in starts),
    )


def rollback(sequence: Sequence[int], length: int, continuation: Sequence[int]) -> Scenario:
    """Consume a sequence in one call, forget all but ``length`` tokens, and go on with other ones."""
    return Scenario(
        name="rollback",
        exposes="tails that survive a crop, and positions that do not go back",
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
    """Do the same after calls of ``size`` tokens, so that the crop reaches back over more than the newest."""
    program = rollback(sequence, length, continuation)
    return replace(
        program,
        name="rollback across calls",
        exposes="a crop that only the newest call can be taken back by",
        operations=(*chunked(sequence, size).operations, *program.operations[1:]),
    )


def fork(prefix: Sequence[int], parent: Sequence[int], child: Sequence[int]) -> Scenario:
    """Continue one shared prefix twice, in turns."""
    turns: list[Operation] = []
    for token, other in zip(parent, child, strict=True):
        turns += [Extend(ids=((token,),), session=0), Extend(ids=((other,),), session=1)]
    return Scenario(
        name="fork",
        exposes="a shared prefix handed out by reference",
        operations=(Extend(ids=(tuple(prefix),)), Fork(session=0), *turns),
        needs=frozenset({Ability.FORK}),
    )


def interleaved(first: Sequence[int], second: Sequence[int]) -> Scenario:
    """Run two requests in turns, one token each."""
    turns: list[Operation] = []
    for token, other in zip(first, second, strict=True):
        turns += [Extend(ids=((token,),), session=0), Extend(ids=((other,),), session=1)]
    return Scenario(
        name="interleaved requests",
        exposes="state that requests share",
        operations=(Open(), *turns),
    )


def multi_turn(sequence: Sequence[int]) -> Scenario:
    """Consume a prompt, answer token by token, take a second prompt on the warm cache, and answer again."""
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
        exposes="a second prompt on a warm cache",
        operations=tuple(Extend(ids=(part,)) for part in parts if part),
    )


def batch_of(
    name: str, exposes: str, rows: Sequence[Sequence[int]], steps: Sequence[Sequence[int]], *, size: int = 1
) -> Scenario:
    """Start a session with several rows, of any lengths, and continue them together, ``size`` tokens a call."""
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
    """Run several rows of one prefix and let them take each other's place between steps."""
    batch = len(orders[0])
    operations: list[Operation] = [Extend(ids=(tuple(prefix),) * batch)]
    for number, order in enumerate(orders):
        step = tuple((tokens[(number + row) % len(tokens)],) for row in range(batch))
        operations += [Extend(ids=step), Reorder(rows=tuple(order))]
    operations.append(Extend(ids=tuple((tokens[row % len(tokens)],) for row in range(batch))))
    return Scenario(
        name="beam reorder",
        exposes="state that stays behind when rows move",
        operations=tuple(operations),
        needs=frozenset({Ability.BATCH, Ability.REORDER}),
        batch=batch,
    )


def buffer_reuse(first: Sequence[int], second: Sequence[int]) -> Scenario:
    """Run one request, reset, and run another in the same session."""
    return Scenario(
        name="buffer reuse",
        exposes="what a reset leaves behind",
        operations=(
            Extend(ids=(tuple(first),)),
            Reset(),
            *(Extend(ids=((token,),)) for token in second),
        ),
    )


def isolation(row: Sequence[int], neighbours: Sequence[Sequence[int]], num_steps: int) -> Scenario:
    """Run one batch row in several sessions whose other row differs; feed its last tokens one by one."""
    split = len(row) - num_steps
    operations: list[Operation] = [Open(batch=2) for _ in neighbours[1:]]
    for start, stop in ((0, split), *((i, i + 1) for i in range(split, len(row)))):
        operations += [
            Extend(ids=(tuple(row[start:stop]), tuple(neighbour[start:stop])), session=session)
            for session, neighbour in enumerate(neighbours)
        ]
    return Scenario(
        name="batch isolation",
        exposes="a row that changes with its neighbours' tokens",
        operations=tuple(operations),
        needs=frozenset({Ability.BATCH}),
        batch=2,
    )


def on_cache(scenario: Scenario, kind: CacheKind, *, advice: bool = False) -> Scenario:
    """Return a program as one named after the kind of cache that its sessions keep."""
    return replace(
        scenario,
        name=f"{kind.value} cache",
        exposes=_CACHE_EXPOSES[kind],
        needs=scenario.needs | {ability for ability in (kind.ability,) if ability is not None},
        cache=kind,
        advice=advice,
    )


_CACHE_EXPOSES = {
    CacheKind.DYNAMIC: "appends, and what a window drops",
    CacheKind.STATIC: "masks, positions and appends that count the buffer instead of what it holds",
    CacheKind.OFFLOADED: "entries that are read before they are back",
    CacheKind.QUANTISED: "what keeping keys and values in few bits costs",
}


def positions_left_out(scenario: Scenario, name: str) -> Scenario:
    """Return a program in which the decoder has to find the positions of new tokens itself."""
    return replace(
        scenario,
        name=name,
        exposes="positions that a decoder counts from 0, or from the padding, where the caller gives none",
        needs=scenario.needs | {Ability.OMIT_POSITIONS},
        omit_positions=True,
        advice=True,
    )


def poisoned(first: Sequence[int], second: Sequence[int], split: int) -> Scenario:
    """Fill a static cache's unused slots with garbage and go on; reset it, and do so again with other tokens."""
    return Scenario(
        name="poisoned buffer",
        exposes="slots without a token that are read all the same",
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
    """Pass a window by steps, by a prompt, and by a block on a warm cache; takes 2 × window + 1 tokens."""
    if window < 2 or len(sequence) < 2 * window + 1:
        raise UsageError(f"{len(sequence)} tokens do not cross a window of {window}")
    end, ids = 2 * window + 1, tuple(sequence)
    steps = (window - 1, *range(window, end + 1))
    prompt = (window + 1, window + 2, window + 3)
    block = (min(2, window - 1), window + 3, window + 4)
    return tuple(
        Scenario(
            name="window crossing",
            exposes="masks, slots and states that are off by one where a window fills",
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
    """Fill the context with a sequence of its length; more tokens must be refused, before the end and at it."""
    ids, beyond = tuple(sequence), (sequence[0],)
    split = len(ids) - 2
    return Scenario(
        name="context end",
        exposes="a last position that is lost, or one past it that is taken",
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
    """Generate through the decoder's own library, one forced continuation for each prompt."""
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
    Method.GREEDY: "what the library's own loop feeds: masks, positions, the newest token",
    Method.BEAM: "state that stays behind when the library moves beams",
    Method.PROMPT_LOOKUP: "proposals that are rejected and stay in the cache",
    Method.CHUNKED_PREFILL: "masks and positions of the library's own blocks",
    Method.STATIC_CACHE: "buffers, masks and positions of the library's own static cache",
}


def beam_search(prompt: Sequence[int], tokens: Sequence[int]) -> Scenario:
    """Search with three beams that take each other's place, by the library's own search; takes 3 tokens."""
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
    """Generate with proposals from the prompt, of which some are right: three tokens repeat, and then ``other``.

    It comes where the proposals go on with the third token.
    """
    a, b, c = period
    return generation(
        Method.PROMPT_LOOKUP,
        ((a, b, c, a, b, c),),
        ((a, b, c, a, b, other, a, b, c),),
    )


def skipped(name: str, exposes: str, reason: str) -> Scenario:
    """Return a scenario that is not run on this subject, and why."""
    return Scenario(name=name, exposes=exposes, operations=(), skipped=reason)
