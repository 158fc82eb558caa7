"""What every adapter's calls are held to: token ids, the context, and what is generated."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvproof.contract.results import SubjectInfo
from kvproof.errors import ContextError, TokenError, UsageError
from kvproof.scenarios import Ability, Generate, Method

if TYPE_CHECKING:
    from kvproof.subjects._base import Subject


def check_ids(ids: Sequence[int], info: SubjectInfo) -> None:
    """Raise `TokenError` unless ``ids`` holds at least one token and all lie in the vocabulary."""
    check_list("token ids", ids)
    if not ids:
        raise TokenError("no token: a prefix holds at least one")
    for token_id in ids:
        if not is_integer(token_id):
            raise TokenError(f"token id {token_id!r} is a {type(token_id).__name__}, not an integer")
        if not 0 <= token_id < info.vocab_size:
            raise TokenError(f"token id {token_id} is outside the vocabulary 0..{info.vocab_size - 1}")


def check_list(what: str, value: object) -> None:
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise TokenError(f"{what} must be a list or tuple of integers, not a {type(value).__name__}")


def is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def check_generate(operation: Generate, subject: "Subject") -> None:
    """Raise unless the method supports these steps from these prompts."""
    method, prompts, steps = operation.method, operation.prompts, operation.steps
    if not prompts or not steps:
        raise UsageError("a generation needs at least one prompt and one step")
    for prompt in prompts:
        check_ids(prompt, subject.info)
    longest = max(map(len, prompts))
    check_context(0, longest + len(steps), subject.info)
    num_rows = len(steps[0]) if method is Method.BEAM else len(prompts)
    if len(prompts) > 1 and method in (Method.BEAM, Method.PROMPT_LOOKUP):
        raise UsageError(f"{method.value} is forced from one prompt, not from {len(prompts)}")
    if num_rows > 1:
        subject.require(Ability.BATCH)
    if any(len(prompt) != longest for prompt in prompts):
        subject.require(Ability.PAD)
    for number, step in enumerate(steps):
        check_ids([token for _, token in step], subject.info)
        rows = [row for row, _ in step]
        fits = rows == list(range(num_rows))
        if method is Method.BEAM:
            alive = num_rows if number else 1  # beams start as copies of one prompt; only the first counts
            fits = len(set(step)) == num_rows == len(step) and all(0 <= row < alive for row in rows)
        if not fits:
            raise UsageError(f"{method.value} of {num_rows} rows cannot take the step {step}")


def check_context(start: int, num_new: int, info: SubjectInfo) -> None:
    """Raise `ContextError` if a token would be past the last position."""
    if start + num_new > info.context_len:
        raise ContextError(
            f"position {max(start, info.context_len)} is past the context: {info.name} accepts positions "
            f"0..{info.context_len - 1}, {start} tokens are consumed and {num_new} more were given"
        )
