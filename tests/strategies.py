"""Hypothesis strategies for reference decoders and what is run on them: a shared asset of the tests."""

import math

import torch
from hypothesis import strategies as st

from kvproof.reference import Checkpoint, Decoder, DecoderConfig
from kvproof.strategies import programs
from kvproof.subjects import ReferenceSubject

__all__ = ["configs", "programs", "random_subject", "sequences", "subjects"]


@st.composite
def configs(draw: st.DrawFn, min_layers: int = 1, min_heads: int = 1, min_context: int = 2) -> DecoderConfig:
    """Draw a decoder's sizes: 1-4 layers, 1-4 heads, any small width, context and vocabulary."""
    return DecoderConfig(
        num_layers=draw(st.integers(min_layers, 4)),
        num_heads=draw(st.integers(min_heads, 4)),
        head_dim=draw(st.integers(2, 8)),
        mlp_width=draw(st.integers(1, 16)),
        context_len=draw(st.integers(min_context, 12)),
        vocab_size=draw(st.integers(3, 24)),
    )


def random_subject(config: DecoderConfig, seed: int, dtype: torch.dtype = torch.float32) -> ReferenceSubject:
    """Return a decoder whose random weights are large enough for every fault to reach the logits.

    Matrices have standard deviation 1.8 / sqrt(fan in), embeddings 0.5; norms and biases are moved off
    their defaults, which hide whole branches.
    """
    generator = torch.Generator().manual_seed(seed)
    decoder = Decoder(config)
    with torch.no_grad():
        for name, weight in decoder.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if "embedding" in name:
                weight.copy_(0.5 * noise)
            elif weight.dim() == 2:
                weight.copy_(1.8 / math.sqrt(weight.shape[1]) * noise)
            else:
                start = 1.0 if "norm" in name and name.endswith("weight") else 0.0
                weight.copy_(start + 0.2 * noise)
    frozen = decoder.to(dtype).eval().requires_grad_(False)
    return ReferenceSubject(Checkpoint(decoder=frozen, seed=seed, loss=math.nan))


@st.composite
def subjects(draw: st.DrawFn, min_layers: int = 1, min_heads: int = 1, min_context: int = 2) -> ReferenceSubject:
    """Draw a random reference decoder."""
    config = draw(configs(min_layers, min_heads, min_context))
    return random_subject(config, draw(st.integers(0, 2**16)))


@st.composite
def sequences(draw: st.DrawFn, subject: ReferenceSubject, min_len: int = 1) -> tuple[int, ...]:
    """Draw token ids that fit the subject's context, no token equal to the one before it."""
    info = subject.info
    length = draw(st.integers(min_len, info.context_len))
    first = draw(st.integers(0, info.vocab_size - 1))
    steps = draw(st.lists(st.integers(1, info.vocab_size - 1), min_size=length - 1, max_size=length - 1))
    ids = [first]
    for step in steps:
        ids.append((ids[-1] + step) % info.vocab_size)
    return tuple(ids)
