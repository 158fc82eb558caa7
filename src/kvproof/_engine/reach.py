"""How far programs go: the longest sequence, the largest call on a warm cache, the largest batch."""

from collections.abc import Iterable

from kvproof.contract.results import Reach
from kvproof.scenarios import Extend, Scenario, longest_sequences, walk


def reach_of(programs: Iterable[Scenario]) -> Reach:
    """Return how far programs go together."""
    return furthest(
        Reach(
            num_tokens=max(map(len, longest_sequences(program)), default=0),
            block_len=largest_block(program),
            num_rows=program.batch,
        )
        for program in programs
    )


def furthest(reaches: Iterable[Reach]) -> Reach:
    """Return the largest of each."""
    num_tokens, block_len, num_rows = 0, 0, 0
    for reach in reaches:
        num_tokens, block_len = max(num_tokens, reach.num_tokens), max(block_len, reach.block_len)
        num_rows = max(num_rows, reach.num_rows)
    return Reach(num_tokens=num_tokens, block_len=block_len, num_rows=num_rows)


def largest_block(program: Scenario) -> int:
    """Return how many tokens the largest call on a warm cache feeds to a row."""
    blocks = (
        transition.operation.num_columns
        for transition in walk(program)
        if isinstance(transition.operation, Extend) and transition.before[transition.operation.session].length
    )
    return max(blocks, default=0)
