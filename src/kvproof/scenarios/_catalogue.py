"""The catalogue: every named scenario, built from two token sequences and the subject's boundaries."""

import difflib
from collections.abc import Iterable, Iterator, Sequence
from itertools import cycle, islice

from kvproof.errors import UsageError
from kvproof.scenarios._builders import (
    batch_of,
    beam_reorder,
    beam_search,
    buffer_reuse,
    chunked_prefill,
    context_end,
    fork,
    generation,
    interleaved_requests,
    isolation,
    multi_turn,
    poisoned_buffer,
    prefill_and_steps,
    prompt_lookup,
    rollback,
    rollback_across_calls,
    skip,
    token_by_token,
    window_crossing,
    with_cache,
    without_positions,
)
from kvproof.scenarios._calls import Method
from kvproof.scenarios._operations import Boundaries, CacheKind
from kvproof.scenarios._walk import Scenario

#: A context of at most this many tokens is always filled to its end.
SHORT_CONTEXT = 512
#: Longer contexts and windows are crossed only if that needs at most this many times the sequences' length.
MAX_FACTOR = 4


def catalogue(
    sequence: Sequence[int], other: Sequence[int], boundaries: Boundaries | None = None
) -> tuple[Scenario, ...]:
    """Return every named scenario over two token sequences of equal length, at least 8.

    Several scenarios can share a name and differ in their split points; an audit reports them as one. A scenario
    that cannot be built for the subject's boundaries has no operations, and gives the reason.
    """
    n = len(sequence)
    if n < 8 or len(other) != n:
        raise UsageError(
            f"the catalogue needs two sequences of one length of at least 8, not {n} and {len(other)}"
        )
    return (
        *_one_row(sequence, other),
        *_several_rows(sequence, other),
        *_at_boundaries(sequence, other, boundaries),
        *_other_caches(sequence, other),
        *_through_generate(sequence, other),
    )


def _one_row(sequence: Sequence[int], other: Sequence[int]) -> Iterator[Scenario]:
    half, third = len(sequence) // 2, len(sequence) // 3
    yield token_by_token(sequence)
    yield from (prefill_and_steps(sequence, split) for split in (half, len(sequence) - 1))
    yield from (chunked_prefill(sequence, size) for size in (2, third))
    yield multi_turn(sequence)
    yield rollback(sequence[:half], 0, other[:third])
    yield rollback(sequence[:half], half - 1, other[:third])
    yield rollback(sequence, third, other[third : third + 4])
    yield fork(sequence[:half], sequence[half : half + 3], other[half : half + 3])
    yield interleaved_requests(sequence[:third], other[:third])
    yield buffer_reuse(other[:half], sequence[:half])
    step = prefill_and_steps(sequence[: half + 3], half)
    yield without_positions(step, "positions left out")


def _several_rows(sequence: Sequence[int], other: Sequence[int]) -> Iterator[Scenario]:
    half, third = len(sequence) // 2, len(sequence) // 3
    yield batch_of(
        "batch",
        "batch rows that affect each other",
        (sequence[:half], other[:half]),
        (sequence[half : half + 3], other[half : half + 3]),
    )
    padded = (sequence[:half], other[:third], sequence[:2])
    steps = (sequence[half : half + 3], other[third : third + 3], sequence[2:5])
    name, exposes = "left-padded batch", "padding that is attended to, or counted in positions"
    yield batch_of(name, exposes, padded, steps)
    yield batch_of(name, exposes, padded, steps, size=3)
    yield isolation(sequence[: third + 2], (other, other[::-1]), 2)
    yield beam_reorder(sequence[:half], ((1, 0, 2), (2, 2, 0)), other[:5])
    yield without_positions(batch_of(name, exposes, padded, steps), "positions left out, left-padded batch")


def _at_boundaries(
    sequence: Sequence[int], other: Sequence[int], boundaries: Boundaries | None
) -> Iterator[Scenario]:
    back = rollback_across_calls(range(3), 2, 1, ())
    window, end = window_crossing(range(5), 2)[0], context_end(range(3))
    if boundaries is None:
        reason = "the boundaries of the subject are unknown"
        yield from (skip(example.name, example.exposes, reason) for example in (back, window, end))
        return
    max_len, context_len = MAX_FACTOR * len(sequence), boundaries.context_len
    windows = sorted(window for window in set(boundaries.windows) if window >= 2)
    # After each call, caches drop the entries that left the window. A crop can undo several calls only within it.
    kept = min([len(sequence) // 2, *(window - 1 for window in windows)])
    if kept < 4:
        reason = f"after each call the cache drops what has left the window of {windows[0]}"
        yield skip(back.name, back.exposes, reason)
    else:
        size = kept - kept // 3
        yield rollback_across_calls(sequence[:kept], size, size - 1, other[:2])
    for size in windows:
        if 2 * size + 1 <= min(max_len, context_len):
            yield from window_crossing(_cycled(sequence, 2 * size + 1), size)
    needed = 2 * windows[0] + 1 if windows else 0
    if not windows:
        yield skip(window.name, window.exposes, "the subject has no window")
    elif needed > context_len:
        reason = f"crossing the window of {windows[0]} takes {needed} tokens"
        yield skip(window.name, window.exposes, f"{reason}, and the context ends at {context_len}")
    elif needed > max_len:
        reason = f"crossing the window of {windows[0]} takes {needed} tokens"
        yield skip(window.name, window.exposes, reason + _too_long(max_len, len(sequence)))
    max_len = max(SHORT_CONTEXT, max_len)
    if context_len < 3:
        yield skip(end.name, end.exposes, f"a context of {context_len} tokens is too short to be filled in steps")
    elif context_len > max_len:
        reason = f"filling the context takes {context_len} tokens"
        yield skip(end.name, end.exposes, reason + _too_long(max_len, len(sequence)))
    else:
        yield context_end(_cycled(sequence, context_len))


def _too_long(max_len: int, sequence_len: int) -> str:
    return f", and sequences of {sequence_len} tokens allow at most {max_len}; use longer ones (--length)"


def _cycled(sequence: Sequence[int], length: int) -> tuple[int, ...]:
    return tuple(islice(cycle(sequence), length))


def _other_caches(sequence: Sequence[int], other: Sequence[int]) -> Iterator[Scenario]:
    half, third = len(sequence) // 2, len(sequence) // 3
    static = (
        prefill_and_steps(sequence[: half + 4], half),
        chunked_prefill(sequence, third),
        token_by_token(sequence[:third]),
        buffer_reuse(other[:third], sequence[:4]),
    )
    yield from (with_cache(program, CacheKind.STATIC) for program in static)
    yield poisoned_buffer(sequence[:half], other[:third], half - 3)
    short = prefill_and_steps(sequence[: half + 4], half)
    yield with_cache(short, CacheKind.OFFLOADED)
    # The caller chose to store few bits, so the error is reported but does not affect the verdict.
    yield with_cache(short, CacheKind.QUANTISED, advice=True)


def _through_generate(sequence: Sequence[int], other: Sequence[int]) -> Iterator[Scenario]:
    half, third = len(sequence) // 2, len(sequence) // 3
    row, rest = (sequence[:half],), (sequence[half : half + 4],)
    yield generation(Method.GREEDY, row, rest)
    yield generation(
        Method.GREEDY,
        (sequence[:half], other[:third], sequence[:2]),
        (sequence[half : half + 3], other[third : third + 3], sequence[2:5]),
    )
    yield generation(Method.CHUNKED_PREFILL, row, rest)
    yield generation(Method.STATIC_CACHE, row, rest)
    different = tuple(dict.fromkeys((*sequence, *other)))[:4]
    lookup, search = prompt_lookup(range(3), 3), beam_search(sequence[:third], range(3))
    if len(different) < 4:
        reason = f"it needs four different tokens, and the sequences have only {len(different)}"
        yield from (skip(example.name, example.exposes, reason) for example in (lookup, search))
        return
    yield prompt_lookup(different[:3], different[3])
    yield beam_search(sequence[:third], different[:3])


def check_names(names: Iterable[str], known: Iterable[str]) -> None:
    """Raise `UsageError` for the first name that is not a known scenario's, with the nearest name that is."""
    known = list(dict.fromkeys(known))
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            suggestion = f". Did you mean {near[0]!r}? There are: " if near else "; there are: "
            raise UsageError(f"no scenario {name!r}{suggestion}{', '.join(known)}")


def select(
    scenarios: Sequence[Scenario], *, only: Sequence[str] = (), without: Sequence[str] = ()
) -> tuple[Scenario, ...]:
    """Return only the named scenarios, or all except the named ones; raise `UsageError` for an unknown name."""
    check_names((*only, *without), [scenario.name for scenario in scenarios])
    return tuple(s for s in scenarios if (not only or s.name in only) and s.name not in without)
