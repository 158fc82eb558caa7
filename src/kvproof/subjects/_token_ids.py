"""The token ids that programs are made of: some decoders treat padding, or other special tokens, apart."""

from collections.abc import Collection
from dataclasses import dataclass

from torch import nn

from kvproof.errors import UsageError
from kvproof.scenarios._states import nearest_id

#: More ids than this are counted in a note, and not listed.
_MAX_LISTED = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenIds:
    """The token ids that programs are made of."""

    vocab_size: int
    ids: tuple[int, ...] | None = None  #: in ascending order; None for the whole vocabulary
    note: str | None = None  #: which ids are used or left out, in words; None for the whole vocabulary

    @classmethod
    def choose(
        cls, vocab_size: int, *, ids: Collection[int] | None = None, avoid: Collection[int] = ()
    ) -> "TokenIds":
        """Return ``ids``, or by default the whole vocabulary, without the ids to avoid.

        Raises `UsageError` for an id outside the vocabulary, and if fewer than two ids remain.
        """
        for token_id in (*(ids or ()), *avoid):
            if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < vocab_size:
                raise UsageError(f"token id {token_id!r} is not in the vocabulary 0..{vocab_size - 1}")
        if ids is None and not avoid:
            return cls(vocab_size=vocab_size)
        left_out = set(avoid)
        chosen = tuple(i for i in (range(vocab_size) if ids is None else sorted(set(ids))) if i not in left_out)
        if len(chosen) < 2:
            raise UsageError(f"programs need at least two different token ids, and {len(chosen)} remain")
        if ids is None:
            return cls(
                vocab_size=vocab_size, ids=chosen, note=f"no program feeds token {_listed(sorted(left_out))}"
            )
        return cls(vocab_size=vocab_size, ids=chosen, note=f"programs feed only token {_listed(chosen)}")

    def nearest(self, token_id: int) -> int:
        """Return the id itself if programs may feed it, or else another one that depends on it alone."""
        return nearest_id(self.ids, token_id)

    def another(self, token_id: int) -> int:
        """Return the id after this one that programs may feed; after the last one comes the first."""
        following = (token_id + 1) % self.vocab_size
        if self.ids is None:
            return following
        return next((i for i in self.ids if i >= following), self.ids[0])


def first_id(ids: Collection[int] | None, avoid: Collection[int]) -> int:
    """Return an id that a decoder can be tried with before the size of its vocabulary is known."""
    return next((i for i in ids or range(len(avoid) + 1) if i not in avoid), 0)


def declared_padding(module: nn.Module) -> tuple[int, ...]:
    """Return the ids that a module says are padding: in its embeddings, and in its configuration."""
    found = {part.padding_idx for part in module.modules() if isinstance(part, nn.Embedding)}
    found.add(getattr(getattr(module, "config", None), "pad_token_id", None))
    return tuple(sorted(i for i in found if isinstance(i, int) and not isinstance(i, bool) and i >= 0))


def _listed(ids: Collection[int]) -> str:
    if len(ids) > _MAX_LISTED:
        return f"ids of a list of {len(ids)}"
    return f"id{'' if len(ids) == 1 else 's'} {', '.join(map(str, ids))}"
