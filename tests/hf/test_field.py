"""Greedy generation gives the tokens of transformers' own ``generate()``; ``make bench-field`` does all types."""

import pytest
from benchmarks.field import compared

#: Plain attention, windows, experts, a convolution with a window, a state-space model, an encoder as a decoder.
TYPES = ("llama", "gemma3_text", "mixtral", "lfm2", "mamba", "bert")


@pytest.mark.parametrize("kind", TYPES)
def test_greedy_returns_the_library_s_tokens(kind: str):
    outcome = compared(f"random:{kind}", num_tokens=12)
    assert (outcome.said, outcome.num_equal) == ("the same", 12)


def test_tokens_that_part_get_their_finding():
    """``generate()`` counts roberta's positions from 0, and the model from the padding index + 1."""
    outcome = compared("random:roberta", num_tokens=4)
    assert outcome.num_equal < 4
    assert outcome.explained
    assert "diverged; The cached path diverges" in outcome.said
    assert "the first value that differs is position: 0" in outcome.said
