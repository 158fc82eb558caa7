"""The tokens that an audit runs: random ones, or a prompt's."""

from collections.abc import Iterable, Iterator

import torch

from kvproof.errors import UsageError
from kvproof.scenarios import Scenario, catalogue, select
from kvproof.subjects import Subject

#: Tokens a sequence, where the caller does not say.
DEFAULT_LENGTH = 28


def sequences_for(
    subject: Subject, prompt: str | None, length: int, seed: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return two sequences of one length, at least ``length``: the first starts with the prompt's ids.

    A prompt of fewer tokens than ``length`` is filled up with random ids, a longer one is used whole; the second
    sequence is random. Without a prompt both are. The seed alone decides what is random.

    Raises `UsageError` for a prompt that the subject's tokenizer cannot take, and for more tokens than the
    context.
    """
    ids = () if prompt is None else subject.encode(prompt)
    if len(ids) > subject.info.context_len:
        raise UsageError(
            f"the prompt has {len(ids)} tokens, more than the context of {subject.info.context_len} that "
            f"{subject.info.name} accepts"
        )
    first, second = random_sequences(subject, max(length, len(ids)), seed)
    return ids + first[len(ids) :], second


def programs_for(
    subject: Subject, scenarios: Iterable[Scenario | str] | None, length: int, seed: int
) -> Iterator[Scenario]:
    """Yield the programs that a caller gave, and the catalogue's in place of their names."""
    wanted = None if scenarios is None else list(scenarios)
    names = [] if wanted is None else [entry for entry in wanted if isinstance(entry, str)]
    if wanted is None or names:
        sequences = random_sequences(subject, min(length, subject.info.context_len), seed)
        yield from select(catalogue(*sequences, subject.boundaries), only=names)
    yield from (entry for entry in wanted or () if not isinstance(entry, str))


def random_sequences(subject: Subject, length: int, seed: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return two sequences of random ids, drawn from the seed alone; raise `UsageError` past the context."""
    if length > subject.info.context_len:
        raise UsageError(
            f"{length} tokens are more than the context of {subject.info.context_len} that "
            f"{subject.info.name} accepts"
        )
    if not 0 <= seed < 2**63:
        raise UsageError(f"seed must lie in 0..2**63-1, not {seed}")
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, subject.info.vocab_size, (2, length), generator=generator).tolist()
    nearest = subject.token_ids.nearest
    return tuple(map(nearest, ids[0])), tuple(map(nearest, ids[1]))
