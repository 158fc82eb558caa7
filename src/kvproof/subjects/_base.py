"""The abstract subject and session, and the checks that every adapter inherits from them.

Public methods are final: they validate their arguments, call the adapter's underscored method of the same name,
and only then update the session's own record of ids. The engine reads that record to know what a row must equal,
so it does not need to trust the adapter. An adapter's exceptions become `SubjectError`, with their cause.
"""

import copy
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from kvproof._numerics.taps import Tap, untouched
from kvproof.contract.results import SubjectInfo
from kvproof.errors import (
    AbilityError,
    SessionError,
    SubjectError,
    UsageError,
)
from kvproof.scenarios import Ability, Boundaries, CacheKind, Claim, Generate, Limits
from kvproof.subjects._checks import (
    check_context,
    check_generate,
    check_ids,
    check_list,
    is_integer,
)
from kvproof.subjects._decoder_calls import check_logits, wrap_errors
from kvproof.subjects._token_ids import TokenIds


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """How a session is opened."""

    batch: int = 1
    tap: Tap = untouched
    needs: frozenset[Ability] = frozenset()
    cache: CacheKind = CacheKind.DYNAMIC
    capacity: int = 0  #: tokens that the cache must hold; a dynamic cache can grow beyond that
    omit_positions: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratedCall:
    """The result of one forward inside a library's own ``generate()``; ``tap`` saw only that forward."""

    tap: Tap
    num_new: int  #: tokens that each batch row was fed, padding included
    offset: int  #: which of these tokens the first kept row follows
    prefixes: tuple[tuple[tuple[int, ...], ...], ...]  #: for each kept row, each batch row's tokens
    logits: Float[Tensor, "batch kept vocab"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    """All forwards of one ``generate()``, and how often each event that a scenario can claim happened."""

    calls: tuple[GeneratedCall, ...]
    counts: Counter[Claim] = field(default_factory=Counter)


class Subject(ABC):
    """A decoder under audit."""

    _ids: TokenIds | None = None  #: the ids that the caller chose

    @property
    @abstractmethod
    def info(self) -> SubjectInfo:
        """The subject's description and abilities."""

    @property
    @abstractmethod
    def seed(self) -> int | None:
        """The seed that recreates the subject, if there is one."""

    @property
    def boundaries(self) -> Boundaries:
        """The lengths at which the subject changes its behaviour."""
        return Boundaries(context_len=self.info.context_len)

    @property
    def root_module(self) -> nn.Module | None:
        """The torch module that every call runs, if the decoder is one. Its modules' paths name the layers."""
        return None

    @property
    def may_fork(self) -> bool:
        """Whether a forked process can use the decoder: it needs no device, and no threads of the parent."""
        return False

    @property
    def lacks(self) -> Mapping[Ability, str]:
        """The reasons why abilities are not declared, in words, for those that have a specific reason."""
        return {}

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """The end tokens in the decoder's own settings."""
        return ()

    @property
    def tokenizer_digest(self) -> str | None:
        """A digest that identifies the tokenizer, or None without a tokenizer."""
        return None

    @property
    def chats(self) -> bool:
        """Whether the tokenizer has a chat template."""
        return False

    @property
    def avoided_ids(self) -> Collection[int]:
        """The ids that a program must not feed unless its author asks for them, such as the padding token's."""
        return ()

    @property
    def token_ids(self) -> TokenIds:
        """The ids that programs, random ones too, are made of. A prompt's tokens are fed as they are."""
        return TokenIds.choose(self.info.vocab_size, avoid=self.avoided_ids) if self._ids is None else self._ids

    @final
    def with_ids(self, ids: Collection[int] | None = None, avoid_ids: Collection[int] = ()) -> "Subject":
        """Return the same decoder, whose programs are made of these token ids.

        ``ids`` are the only ones to use. Without them, every id in the vocabulary is used, except `avoided_ids`.
        ``avoid_ids`` are not used in either case. Raises `UsageError` for an id outside the vocabulary, and if
        fewer than two ids remain.
        """
        avoided = avoid_ids if ids is not None else (*self.avoided_ids, *avoid_ids)
        chosen = copy.copy(self)
        chosen._ids = TokenIds.choose(self.info.vocab_size, ids=ids, avoid=avoided)
        return chosen

    @property
    def max_block(self) -> int | None:
        """The most tokens that one call of a session takes for each row. A session splits longer ones itself."""
        return None

    @property
    def last_row(self) -> bool:
        """Whether a call of a session returns the logits after its last token alone."""
        return False

    @property
    def one_session(self) -> bool:
        """Whether the decoder holds one session at a time."""
        return False

    def notes(self, changes: Sequence[str] = ()) -> Iterator[str]:
        """Yield what the reader of a report must know about how the decoder is called.

        ``changes`` names what the decoder keeps in itself, by `state`, and changed in some calls.
        """
        if self.max_block is not None:
            yield f"a call takes at most {self.max_block} tokens of a row (max_block), so longer ones are split"
        if self.last_row:
            yield "a call returns its last row of logits alone (last_row), so only these rows are compared"
        if self.one_session:
            yield "the decoder holds one session at a time (one_session), so nothing shows what sessions share"
        if self.token_ids.note is not None:
            yield self.token_ids.note

    def state(self) -> Mapping[str, object]:
        """What the decoder keeps between calls, by name, each with a mark that changes if it does."""
        return {}

    def random_parts(self) -> Iterator[str]:
        """Yield what may make the decoder draw random numbers, in words, such as a dropout given as a number."""
        yield from ()

    def limitations(self) -> Iterator[str]:
        """Yield what an audit of the decoder leaves out, in words, for the report's notes."""
        yield from ()

    @abstractmethod
    def token(self, token_id: int) -> str:
        """Return the text of a token."""

    @final
    def text(self, ids: Sequence[int]) -> str | None:
        """Return the text of all ``ids`` together, including special tokens; None without a tokenizer."""
        return wrap_errors(lambda: self._text(ids))

    @final
    def decode(self, ids: Sequence[int]) -> str:
        """Return the texts of ``ids``, separated by spaces."""
        return " ".join(self.token(i) for i in ids)

    @final
    def encode(self, text: str, *, chat: bool = False) -> tuple[int, ...]:
        """Return the token ids of ``text``, with the special tokens that the subject's tokenizer adds.

        With ``chat``, ``text`` is a user message, and the tokenizer's chat template turns it into the prompt.

        Raises `AbilityError` if there is no tokenizer or template, and `UsageError` if the text is empty, if the
        tokenizer cannot encode it, or if the tokenizer returns ids outside the vocabulary.
        """
        if not text:
            raise UsageError("the prompt is empty: it holds at least one token")
        ids = tuple(wrap_errors(lambda: self._encode_chat(text) if chat else self._encode(text)))
        if not ids:
            raise UsageError(f"the tokenizer of {self.info.name} makes no token of the prompt {text[:40]!r}")
        for token_id in ids:
            if not 0 <= token_id < self.info.vocab_size:
                raise UsageError(
                    f"the tokenizer of {self.info.name} does not fit the model: it gives id {token_id}, and the "
                    f"logits are of ids 0..{self.info.vocab_size - 1}"
                )
        return ids

    @final
    def rows(
        self, ids: Sequence[int], *, tap: Tap = untouched, keep: range | None = None
    ) -> Float[Tensor, "kept vocab"]:
        """Return the uncached logits of one forward over a complete prefix, at all positions or in ``keep``.

        Raises `TokenError`, `ContextError`, or, if the decoder itself raises, `SubjectError`.
        """
        check_ids(ids, self.info)
        check_context(0, len(ids), self.info)
        kept = range(len(ids)) if keep is None else keep
        if kept.step != 1 or not 0 <= kept.start < kept.stop <= len(ids):
            raise UsageError(f"cannot keep positions {kept} of {len(ids)} tokens")
        rows = wrap_errors(lambda: self._kept_rows(ids, tap, kept))
        check_logits(rows, (len(kept), self.info.vocab_size))
        return rows

    @final
    def session(
        self,
        *,
        batch: int = 1,
        tap: Tap = untouched,
        needs: Collection[Ability] = (),
        cache: CacheKind = CacheKind.DYNAMIC,
        capacity: int | None = None,
        omit_positions: bool = False,
    ) -> "Session":
        """Open a session: the state of one request, or of ``batch`` requests that advance together.

        ``needs`` names the abilities that will be used, because some caches must know before they are filled.
        A cache of fixed size holds ``capacity`` tokens, by default the whole context. With ``omit_positions``,
        the decoder computes the positions of new tokens itself.
        """
        if not is_integer(batch) or batch < 1:
            raise UsageError(f"batch must be an integer of at least 1, not {batch!r}")
        if batch != 1:
            self.require(Ability.BATCH)
        capacity = self.info.context_len if capacity is None else capacity
        if not is_integer(capacity) or not 1 <= capacity <= self.info.context_len:
            raise UsageError(
                f"capacity must be an integer from 1 to the context of {self.info.context_len}, not {capacity!r}"
            )
        used = {*needs, *((Ability.OMIT_POSITIONS,) if omit_positions else ())}
        used |= set() if cache.ability is None else {cache.ability}
        for ability in used:
            self.require(ability)
        opening = Opening(
            batch=batch,
            tap=tap,
            needs=frozenset(needs),
            cache=cache,
            capacity=capacity,
            omit_positions=omit_positions,
        )
        return wrap_errors(lambda: self._session(opening))

    @final
    def generate(self, operation: Generate, make_tap: Callable[[], Tap] = lambda: untouched) -> Generated:
        """Generate through the decoder's own library, with every choice forced; each forward gets its own tap.

        Returns every forward that the library ran, in order, as `GeneratedCall`: together they must hold the row
        before each choice of ``operation.steps``. An adapter returns the same from ``_generate``, and calls
        ``make_tap()`` once for each forward. It raises `RefusedError` for a method that the library lacks.

        Raises `UsageError` for steps that the method does not support, `TokenError`, `ContextError`, and
        `SubjectError` if the library raises or does not return every row that the operation compares.
        """
        self.require(Ability.GENERATE)
        check_generate(operation, self)
        generated = wrap_errors(lambda: self._generate(operation, make_tap))
        given = {row for call in generated.calls for rows in call.prefixes for row in rows}
        missing = {row for rows in operation.prefixes() for row in rows} - given
        if missing:
            shortest = min(missing, key=lambda row: (len(row), row))
            raise SubjectError(f"generate() gave no row after {self.decode(shortest)}")
        for call in generated.calls:
            batch, kept = len(call.prefixes[0]), len(call.prefixes)
            check_logits(call.logits, (batch, kept, self.info.vocab_size))
        return generated

    @final
    def cast(self, dtype: torch.dtype) -> "Subject":
        """Return the same decoder computing in another dtype."""
        self.require(Ability.CAST)
        return wrap_errors(lambda: self._cast(dtype))

    def with_exact_tables(self, rounded_to: torch.dtype) -> "tuple[Subject, tuple[str, ...]] | None":
        """Return the same decoder with tables recomputed in its own dtype, and their names; None if it has none.

        A model that is cast to float64 keeps tables (decay factors, slopes, angles) that were rounded in a lower
        dtype, at worst ``rounded_to``.
        """
        return None

    @final
    def require(self, ability: Ability) -> None:
        """Raise `AbilityError` unless the subject declares the ability."""
        if ability not in self.info.abilities:
            raise AbilityError(f"{self.info.name} does not declare the ability {ability.value!r}")

    def _encode(self, text: str) -> Sequence[int]:
        raise AbilityError(f"{self.info.name} has no tokenizer: it takes token ids, not text")

    def _encode_chat(self, text: str) -> Sequence[int]:
        raise AbilityError(f"{self.info.name} has no chat template")

    def _text(self, ids: Sequence[int]) -> str | None:
        return None

    @abstractmethod
    def _rows(self, ids: Sequence[int], tap: Tap) -> Float[Tensor, "seq vocab"]: ...

    def _kept_rows(self, ids: Sequence[int], tap: Tap, keep: range) -> Float[Tensor, "kept vocab"]:
        """Return the rows at some positions. Override this to save memory if those can be computed separately."""
        rows = self._rows(ids, tap)
        check_logits(rows, (len(ids), self.info.vocab_size))
        return rows[keep.start : keep.stop]

    @abstractmethod
    def _session(self, opening: Opening) -> "Session": ...

    def _generate(self, operation: Generate, make_tap: Callable[[], Tap]) -> Generated:
        raise AbilityError(f"{self.info.name} has no generate() of its own")

    @abstractmethod
    def _cast(self, dtype: torch.dtype) -> "Subject": ...


class Session(ABC):
    """The state of a decoder that consumes tokens over several calls. A call that raises leaves it unchanged."""

    def __init__(self, subject: Subject, ids: Sequence[Sequence[int]]) -> None:
        self.subject = subject
        self._ids = [list(row) for row in ids]

    @property
    def ids(self) -> tuple[tuple[int, ...], ...]:
        """The consumed tokens of each batch row."""
        return tuple(tuple(row) for row in self._ids)

    def __len__(self) -> int:
        """Return the length of the longest row."""
        return max(map(len, self._ids))

    @final
    def extend(self, ids: Sequence[Sequence[int]]) -> Float[Tensor, "batch kept vocab"]:
        """Consume each batch row's new tokens; return the logits that follow them, or the last ones alone.

        Rows of unequal length can only start a session, and need `Ability.PAD`. They are right-aligned, so that
        the last logits of each row follow its last token. Raises `TokenError`, `ContextError`, `CacheError` or
        `SubjectError`.
        """
        info, start = self.subject.info, len(self)
        check_list("rows of token ids", ids)
        if len(ids) != len(self._ids):
            raise SessionError(f"{len(ids)} rows of tokens for a session of {len(self._ids)}")
        for row in ids:
            check_ids(row, info)
        num_new = max(map(len, ids))
        for row in ids:
            if len(row) != num_new and (start or Ability.PAD not in info.abilities):
                raise SessionError(f"rows of {len(row)} and {num_new} tokens in one call")
        check_context(start, num_new, info)
        logits = wrap_errors(lambda: self._extend(ids, start))
        check_logits(logits, (len(ids), 1 if self.subject.last_row else num_new, info.vocab_size))
        for consumed, row in zip(self._ids, ids, strict=True):
            consumed.extend(row)
        return logits

    @final
    def crop(self, length: int) -> None:
        """Forget all but the first ``length`` tokens."""
        self.subject.require(Ability.CROP)
        if len(set(map(len, self._ids))) > 1:
            raise SessionError("rows of unequal length cannot be cropped to one length")
        if not is_integer(length) or not 0 <= length <= len(self):
            raise SessionError(f"cannot crop {len(self)} tokens to {length!r}")
        wrap_errors(lambda: self._crop(length))
        self._ids = [row[:length] for row in self._ids]

    @final
    def reorder(self, rows: Sequence[int]) -> None:
        """Make batch row i continue the old row ``rows[i]``; rows may repeat or be left out."""
        self.subject.require(Ability.REORDER)
        check_list("batch rows", rows)
        for row in rows:
            if not is_integer(row) or not 0 <= row < len(self._ids):
                raise SessionError(f"no batch row {row!r}: the session has {len(self._ids)}")
        if not rows:
            raise SessionError("a session keeps at least one batch row")
        wrap_errors(lambda: self._reorder(rows))
        self._ids = [list(self._ids[row]) for row in rows]

    @final
    def fork(self, *, tap: Tap = untouched) -> "Session":
        """Return an independent session that continues from this one's state."""
        self.subject.require(Ability.FORK)
        return wrap_errors(lambda: self._fork(tap))

    @final
    def reset(self) -> None:
        """Forget everything."""
        wrap_errors(self._reset)
        self._ids = [[] for _ in self._ids]

    @final
    def poison(self) -> int:
        """Fill the cache's unused slots with large finite garbage; return the number of values written."""
        self.subject.require(Ability.POISON)
        return wrap_errors(self._poison)

    @final
    def cache_tensors(self) -> tuple[Mapping[str, Tensor], ...]:
        """Return each layer's cached tensors by name, with the batch on axis 0; a layer without a cache has none.

        Attention caches ``k`` and ``v``, (batch, head, slot, head_dim). Recurrent layers cache ``conv``, the last
        inputs of a convolution along its last axis, and ``state``. Other layers use names of their own.
        """
        self.subject.require(Ability.INSPECT)
        return wrap_errors(self._cache_tensors)

    @final
    def edit(self, change: Callable[[tuple[dict[str, Tensor], ...]], None]) -> None:
        """Call ``change`` to replace cache tensors, by layer and name. Planted faults use it to break the cache.

        ``change`` must not write into the tensors that it receives: another session may share them.
        """
        self.subject.require(Ability.EDIT)
        layers = tuple(dict(layer) for layer in self.cache_tensors())
        change(layers)
        wrap_errors(lambda: self._put_tensors(layers))

    @abstractmethod
    def _extend(self, ids: Sequence[Sequence[int]], start: int) -> Float[Tensor, "batch kept vocab"]: ...

    @abstractmethod
    def _crop(self, length: int) -> None: ...

    @abstractmethod
    def _reorder(self, rows: Sequence[int]) -> None: ...

    @abstractmethod
    def _fork(self, tap: Tap) -> "Session": ...

    @abstractmethod
    def _reset(self) -> None: ...

    def _poison(self) -> int:
        raise AbilityError(f"a cache of {self.subject.info.name} has no slots without a token")

    def _cache_tensors(self) -> tuple[Mapping[str, Tensor], ...]:
        raise AbilityError(f"a cache of {self.subject.info.name} shows no tensors")

    def _put_tensors(self, layers: Sequence[Mapping[str, Tensor]]) -> None:
        raise AbilityError(f"a cache of {self.subject.info.name} takes no tensors")


def limits_of(subject: Subject) -> Limits:
    """Return the limits on a subject's programs."""
    return Limits(
        abilities=frozenset(subject.info.abilities),
        vocab_size=subject.info.vocab_size,
        boundaries=subject.boundaries,
        ids=subject.token_ids.ids,
    )
