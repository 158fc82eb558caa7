"""Scenarios: programs of cache operations, with an oracle for every row of logits.

A program is data. Each operation that feeds tokens names their ids, and the ids alone determine what the
resulting rows must equal: the uncached rows of the same tokens, computed from scratch.
"""

from kvproof.scenarios import _calls, _operations
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
    token_by_token,
    window_crossing,
    with_cache,
    without_positions,
)
from kvproof.scenarios._calls import *  # noqa: F403
from kvproof.scenarios._catalogue import catalogue, check_names, select
from kvproof.scenarios._fit import fit_calls
from kvproof.scenarios._operations import *  # noqa: F403
from kvproof.scenarios._random import RANDOM_PROGRAMS, drawable_kinds, random_program, random_programs
from kvproof.scenarios._states import SessionState
from kvproof.scenarios._walk import (
    Scenario,
    Transition,
    capacity,
    compared_lengths,
    compared_prefixes,
    is_legal,
    longest_sequences,
    needs_of,
    walk,
)

__all__ = [
    "RANDOM_PROGRAMS",
    "Scenario",
    "SessionState",
    "Transition",
    "batch_of",
    "beam_reorder",
    "beam_search",
    "buffer_reuse",
    "capacity",
    "catalogue",
    "check_names",
    "chunked_prefill",
    "compared_lengths",
    "compared_prefixes",
    "context_end",
    "drawable_kinds",
    "fit_calls",
    "fork",
    "generation",
    "interleaved_requests",
    "is_legal",
    "isolation",
    "longest_sequences",
    "multi_turn",
    "needs_of",
    "poisoned_buffer",
    "prefill_and_steps",
    "prompt_lookup",
    "random_program",
    "random_programs",
    "rollback",
    "rollback_across_calls",
    "select",
    "token_by_token",
    "walk",
    "window_crossing",
    "with_cache",
    "without_positions",
]
# To make a new operation public, add it to the `__all__` of its own file.
__all__ += _calls.__all__
__all__ += _operations.__all__
