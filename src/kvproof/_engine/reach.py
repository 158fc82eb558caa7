"""How far programs go: the longest sequence, the largest call on a warm cache, the largest batch."""

from collections.abc import Iterable

from kvproof.contract.results import Reach
from kvproof.scenarios import Extend, Scenario, longest_sequences, walk


def reach_of(programs: Iterable[Scenario]) -> Reach:
    """Return how far programs go together."""
    num_tokens, block_len, num_rows = 0, 0, 0
    for program in programs:
        num_tokens = max(num_tokens, *map(len, longest_sequences(program)), 0)
        num_rows = max(num_rows, program.batch)
        block_len = max(block_len, largest_block(program))
    return Reach(num_tokens=num_tokens, block_len=block_len, num_rows=num_rows)


def largest_block(program: Scenario) -> int:
    """Return how many tokens the largest call on a warm cache feeds to a row."""
    blocks = (
        transition.operation.num_columns
        for transition in walk(program)
        if isinstance(transition.operation, Extend) and transition.before[transition.operation.session].length
    )
    return max(blocks, default=0)
