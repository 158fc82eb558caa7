"""The tokens that an audit runs: random ones, or a prompt's."""

from kvproof._audit import random_sequences
from kvproof._errors import UsageError
from kvproof.subjects import Subject


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
