"""The adapter for the reference decoder."""

import copy
import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from kvproof._numerics.digests import weights_digest
from kvproof._numerics.dtypes import name_of
from kvproof._numerics.taps import Tap
from kvproof.contract.results import SubjectInfo
from kvproof.errors import CheckpointError
from kvproof.reference import VOCABULARY, Checkpoint, DecoderCache
from kvproof.reference.cache import Append
from kvproof.scenarios import Ability
from kvproof.subjects._base import Opening, Session, Subject
from kvproof.subjects._module_state import random_parts, state_of_module

_ABILITIES = (
    Ability.CAST,
    Ability.TAP,
    Ability.INSPECT,
    Ability.EDIT,
    Ability.BATCH,
    Ability.CROP,
    Ability.FORK,
    Ability.REORDER,
)


class ReferenceSubject(Subject):
    """A checkpoint of the reference decoder, frozen, on the CPU.

    Its cache refuses a layer with a wrong number of entries. With ``counts_entries=False`` it uses whatever the
    cache holds, as most decoders do, so that faults in the number of entries reach the logits.
    """

    NAME = "reference decoder"

    def __init__(self, checkpoint: Checkpoint, *, counts_entries: bool = True) -> None:
        for name, weight in checkpoint.decoder.state_dict().items():
            if not weight.isfinite().all():
                raise CheckpointError(f"weight {name!r} holds a value that is not finite; nothing runs on it")
        self.checkpoint = checkpoint
        self.counts_entries = counts_entries
        self.decoder = checkpoint.decoder
        self._requests = itertools.count()
        config = self.decoder.config
        self._info = SubjectInfo(
            name=self.NAME,
            digest=weights_digest(self.decoder),
            mode="train" if self.decoder.training else "eval",
            dtype=name_of(self.dtype),
            num_layers=config.num_layers,
            vocab_size=config.vocab_size,
            context_len=config.context_len,
            abilities=_ABILITIES,
        )

    @property
    def info(self) -> SubjectInfo:
        """The subject's description and abilities."""
        return self._info

    @property
    def root_module(self) -> nn.Module:
        """The decoder."""
        return self.decoder

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that the decoder computes in."""
        return self.decoder.final_norm.weight.dtype

    @property
    def seed(self) -> int | None:
        """The seed of the training run."""
        return self.checkpoint.seed

    def state(self) -> Mapping[str, object]:
        """The module's tensors and plain attributes."""
        return state_of_module(self.decoder)

    def random_parts(self) -> Iterator[str]:
        """Yield training mode, and dropout given as a number."""
        yield from random_parts(self.decoder)

    def token(self, token_id: int) -> str:
        """Return the text of a token, or its id if the decoder has another vocabulary."""
        return VOCABULARY[token_id] if self.info.vocab_size == len(VOCABULARY) else str(token_id)

    @torch.no_grad()
    def _rows(self, ids: Sequence[int], tap: Tap) -> Tensor:
        logits: Tensor = self.decoder(torch.tensor([ids]), torch.arange(len(ids))[None], tap=tap)
        return logits[0]

    def _session(self, opening: Opening) -> "ReferenceSession":
        config = self.decoder.config
        cache = DecoderCache.empty(
            self.new_request(),
            num_layers=config.num_layers,
            batch=opening.batch,
            num_heads=config.num_heads,
            head_dim=config.head_dim,
            dtype=self.dtype,
        )
        cache = dataclasses.replace(cache, counts_entries=self.counts_entries)
        return ReferenceSession(self, [[] for _ in range(opening.batch)], cache, opening.tap)

    def _cast(self, dtype: torch.dtype) -> "ReferenceSubject":
        decoder = copy.deepcopy(self.decoder).to(dtype)
        checkpoint = Checkpoint(decoder=decoder, seed=self.checkpoint.seed, loss=self.checkpoint.loss)
        return ReferenceSubject(checkpoint, counts_entries=self.counts_entries)

    def new_request(self) -> str:
        """Return a request name that is unique within this subject."""
        return f"request-{next(self._requests)}"


class ReferenceSession(Session):
    """One request's cache. Caches are values, so a call that fails halfway leaves the old one in place."""

    def __init__(
        self, subject: ReferenceSubject, ids: Sequence[Sequence[int]], cache: DecoderCache, tap: Tap
    ) -> None:
        super().__init__(subject, ids)
        self.reference = subject
        self.cache = cache
        self.tap = tap

    @torch.no_grad()
    def _extend(self, ids: Sequence[Sequence[int]], start: int) -> Tensor:
        append = Append(self.cache, num_new=len(ids[0]))
        positions = torch.arange(start, start + len(ids[0])).expand(len(ids), -1)
        logits: Tensor = self.reference.decoder(torch.tensor(ids), positions, append, self.tap)
        self.cache = append.finish()
        return logits

    def _crop(self, length: int) -> None:
        self.cache = self.cache.crop(length)

    def _reorder(self, rows: Sequence[int]) -> None:
        self.cache = self.cache.reorder(list(rows))

    def _fork(self, tap: Tap) -> "ReferenceSession":
        cache = self.cache.owned_by(self.reference.new_request())
        return ReferenceSession(self.reference, self.ids, cache, tap)

    def _reset(self) -> None:
        self.cache = self.cache.crop(0)

    def _cache_tensors(self) -> tuple[Mapping[str, Tensor], ...]:
        return tuple({"k": layer.keys, "v": layer.values} for layer in self.cache.layers)

    def _put_tensors(self, layers: Sequence[Mapping[str, Tensor]]) -> None:
        """Replace the entries without checks; the next call refuses a layer with a wrong number of them."""
        kept = zip(self.cache.layers, layers, strict=True)
        changed = (dataclasses.replace(old, keys=new["k"], values=new["v"]) for old, new in kept)
        self.cache = dataclasses.replace(self.cache, layers=tuple(changed))
