"""Calls that break the cache's contract, each tried on a warm session that must stay as it was."""

from collections.abc import Callable

import torch
from torch import Tensor

from kvproof.contract.milestone import Refusal
from kvproof.errors import SessionError
from kvproof.reference import DecoderCache
from kvproof.reference.cache import Append
from kvproof.reference.corpus import SEQUENCES
from kvproof.subjects import ReferenceSubject
from kvproof.subjects._reference import ReferenceSession


def try_refusals(subject: ReferenceSubject) -> tuple[Refusal, ...]:
    """Try every broken call and return how each was refused."""
    return tuple(_try(subject, attempt, call) for attempt, call in _ATTEMPTS.items())


def _warm(subject: ReferenceSubject) -> ReferenceSession:
    session = subject.session()
    assert isinstance(session, ReferenceSession)
    session.extend([SEQUENCES[0][:2]])
    return session


def _try(subject: ReferenceSubject, attempt: str, call: Callable[[ReferenceSession], object]) -> Refusal:
    session = _warm(subject)
    if attempt == _PAST_CONTEXT:
        session.extend([SEQUENCES[0][2:]])
    ids, kept = session.ids, [t.clone() for layer in session.cache_tensors() for t in layer.values()]
    try:
        call(session)
        message, refused = "accepted", False
    except SessionError as error:
        message, refused = str(error), True
    now = [t for layer in session.cache_tensors() for t in layer.values()]
    unchanged = session.ids == ids and all(torch.equal(a, b) for a, b in zip(kept, now, strict=True))
    return Refusal(attempt=attempt, message=message, refused=refused, unchanged=unchanged)


def _new_entries(session: ReferenceSession) -> Tensor:
    kept = session.cache.layers[0].keys
    return torch.zeros(kept.shape[0], kept.shape[1], 1, kept.shape[3], dtype=kept.dtype)


def _append_twice(session: ReferenceSession) -> None:
    append, new = Append(session.cache, num_new=1), _new_entries(session)
    append(0, new, new)
    append(0, new, new)


def _append_missing(session: ReferenceSession) -> None:
    append, new = Append(session.cache, num_new=1), _new_entries(session)
    append(0, new, new)
    append.finish()


def _append_out_of_turn(session: ReferenceSession) -> None:
    append, new = Append(session.cache, num_new=1), _new_entries(session)
    append(1, new, new)


def _swap_axes(session: ReferenceSession) -> None:
    append, new = Append(session.cache, num_new=1), _new_entries(session).transpose(1, 2)
    append(0, new, new)


def _other_layer(session: ReferenceSession) -> None:
    cache = session.cache
    Append(DecoderCache(cache.request, cache.layers[::-1], cache.num_consumed), num_new=1)


def _other_request(session: ReferenceSession) -> None:
    cache, other = session.cache, _warm(session.reference).cache
    Append(DecoderCache(cache.request, other.layers, cache.num_consumed), num_new=1)


_PAST_CONTEXT = "feed position 4"
_ATTEMPTS: dict[str, Callable[[ReferenceSession], object]] = {
    _PAST_CONTEXT: lambda session: session.extend([[1]]),
    "feed token id 8": lambda session: session.extend([[8]]),
    "feed token id -1": lambda session: session.extend([[-1]]),
    "feed no token": lambda session: session.extend([[]]),
    "append to one layer twice": _append_twice,
    "let a layer miss its append": _append_missing,
    "append out of turn": _append_out_of_turn,
    "swap the head and sequence axes": _swap_axes,
    "hand a layer another layer's cache": _other_layer,
    "hand a request another request's cache": _other_request,
}
