"""The adapter for causal language models of the transformers library.

Versions differ in the name of the cache argument, in what ``crop`` counts, and in what a cache reports, so the
model's own signatures are asked and every call is checked: a cache that did not grow by what was fed makes
the call no cached one, and nothing is concluded from it.
"""

import copy
import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from kvproof._digest import weights_digest
from kvproof._errors import AbilityError, SubjectError, UsageError
from kvproof._float64 import TrueFloat64
from kvproof._report import SubjectInfo
from kvproof._trace import Tap, untouched
from kvproof.scenarios import Ability
from kvproof.subjects._base import Session, Subject
from kvproof.subjects._transformers._taps import tapped

#: The names of the cache argument that are understood, newest first.
_CACHE_ARGUMENTS = ("cache", "past_key_values", "cache_params")


class TransformersSubject(Subject):
    """A causal language model, frozen, on the device that it stands on."""

    def __init__(self, model: PreTrainedModel, *, name: str, seed: int | None = None) -> None:
        self.model = model.eval().requires_grad_(False)
        for weight_name, weight in model.state_dict().items():
            if weight.is_floating_point() and not weight.isfinite().all():
                raise UsageError(f"{name}: weight {weight_name!r} holds a value that is not finite")
        self._seed = seed
        parameters = inspect.signature(model.forward).parameters
        self.cache_argument = next((a for a in _CACHE_ARGUMENTS if a in parameters), None)
        if self.cache_argument is None:
            raise AbilityError(
                f"{name}: its forward takes none of {', '.join(_CACHE_ARGUMENTS)}, so kvproof cannot hand it "
                f"a cache: forward({', '.join(parameters)})"
            )
        self.takes_positions = "position_ids" in parameters
        self.takes_mask = "attention_mask" in parameters
        self.config = model.config.get_text_config(decoder=True)
        self._info = SubjectInfo(
            name=name,
            digest=weights_digest(model),
            mode="train" if model.training else "eval",
            dtype=str(model.dtype).removeprefix("torch."),
            num_layers=int(self.config.num_hidden_layers),
            vocab_size=int(model.get_output_embeddings().weight.shape[0]),
            context_len=_context_len(self.config),
            abilities=tuple(self._abilities()),
        )

    @property
    def info(self) -> SubjectInfo:
        """What the subject is and can do."""
        return self._info

    @property
    def seed(self) -> int | None:
        """The seed of a random model."""
        return self._seed

    def token(self, token_id: int) -> str:
        """Return the id itself."""
        return str(token_id)

    def new_cache(self, *, records_past: bool = False) -> Any:
        """Return an empty cache that knows the model's layer kinds, ready to be cropped if ``records_past``."""
        cache = DynamicCache(config=self.config)
        if records_past and hasattr(cache, "activate_past_recording"):
            cache.activate_past_recording()
        return cache

    def forward(self, tap: Tap, **arguments: Any) -> Any:
        """Run the model's own forward, in true float64 where the weights are float64, with taps in place."""
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            if self.model.dtype is torch.float64:
                stack.enter_context(TrueFloat64())
            if tap is not untouched:
                stack.enter_context(tapped(self.model, tap, tuple(arguments["input_ids"].shape)))
            return self.model(**arguments)

    def _abilities(self) -> Iterator[Ability]:
        yield from (Ability.CAST, Ability.TAP, Ability.BATCH, Ability.FORK, Ability.REORDER)
        if getattr(self.new_cache(), "is_croppable", True):
            yield Ability.CROP
        if self.takes_positions and self.takes_mask:
            yield Ability.PAD

    def _rows(self, ids: Sequence[int], tap: Tap) -> Tensor:
        tensor = torch.tensor([list(ids)], device=self.model.device)
        logits: Tensor = self.forward(tap, input_ids=tensor, use_cache=False).logits
        return logits[0]

    def _session(self, batch: int, tap: Tap, needs: frozenset[Ability]) -> "TransformersSession":
        records = Ability.CROP in needs
        cache = self.new_cache(records_past=records)
        return TransformersSession(self, [[] for _ in range(batch)], cache, tap, records_past=records)

    def _cast(self, dtype: torch.dtype) -> "TransformersSubject":
        model = copy.deepcopy(self.model).to(dtype)
        if dtype is torch.float64 and hasattr(model, "set_experts_implementation"):
            model.set_experts_implementation("eager")  # the grouped kernels know no float64
        return TransformersSubject(model, name=self._info.name, seed=self._seed)


class TransformersSession(Session):
    """One cache of the library's own, fed with masks and positions as its documentation says."""

    def __init__(
        self,
        subject: TransformersSubject,
        ids: Sequence[Sequence[int]],
        cache: Any,
        tap: Tap,
        *,
        records_past: bool,
    ) -> None:
        super().__init__(subject, ids)
        self.transformers = subject
        self.cache = cache
        self.tap = tap
        self.records_past = records_past
        # A recording cache keeps what a forward pushed out of the window until the crop that must follow it.
        self.owes_crop = False

    def _extend(self, ids: Sequence[Sequence[int]], start: int) -> Tensor:
        """Run one call. One that raises may leave the library's cache half-grown, so it is filled anew."""
        try:
            return self._call(self._ids, ids, self.tap)
        except BaseException:
            self._reset()
            if start:
                self._call([[]] * len(ids), self._ids, untouched)
            raise

    def _call(self, old: Sequence[Sequence[int]], ids: Sequence[Sequence[int]], tap: Tap) -> Tensor:
        if self.owes_crop:
            self._remove(0)
        subject, num_new = self.transformers, max(map(len, ids))
        start = max(map(len, old))
        device = subject.model.device
        tensor = torch.tensor([[0] * (num_new - len(row)) + list(row) for row in ids], device=device)
        lengths = [len(before) + len(new) for before, new in zip(old, ids, strict=True)]
        total = start + num_new
        mask = torch.tensor([[0] * (total - n) + [1] * n for n in lengths], device=device)
        arguments: dict[str, Any] = {
            "input_ids": tensor,
            "use_cache": True,
            str(subject.cache_argument): self.cache,
        }
        if subject.takes_mask and (subject.takes_positions or start == 0):
            arguments["attention_mask"] = mask
        if subject.takes_positions:
            arguments["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)[:, -num_new:]
        output = subject.forward(tap, **arguments)
        self.cache = _returned_cache(output, self.cache)
        grown = _cache_len(self.cache)
        if grown is not None and grown != total:
            raise SubjectError(f"the call was not a cached one: the cache holds {grown} tokens, not {total}")
        self.owes_crop = self.records_past
        logits: Tensor = output.logits
        return logits

    def _crop(self, length: int) -> None:
        self._remove(len(self) - length)

    def _remove(self, num_tokens: int) -> None:
        """Take the newest tokens off the cache; older versions are told how many stay, newer ones how many go."""
        if "max_length" in inspect.signature(type(self.cache).crop).parameters:
            self.cache.crop(len(self) - num_tokens)
        else:
            self.cache.crop(-num_tokens)
        self.owes_crop = False

    def _reorder(self, rows: Sequence[int]) -> None:
        index = torch.tensor(list(rows), device=self.transformers.model.device)
        if len(rows) == len(self._ids):
            self.cache.reorder_cache(index)
        else:
            self.cache.batch_select_indices(index)

    def _fork(self, tap: Tap) -> "TransformersSession":
        cache = copy.deepcopy(self.cache)
        fork = TransformersSession(self.transformers, self.ids, cache, tap, records_past=self.records_past)
        fork.owes_crop = self.owes_crop
        return fork

    def _reset(self) -> None:
        self.cache = self.transformers.new_cache(records_past=self.records_past)
        self.owes_crop = False

    def _cache_tensors(self) -> tuple[Mapping[str, Tensor], ...]:
        raise AbilityError("a transformers cache is not shown yet")


def _returned_cache(output: Any, fed: Any) -> Any:
    """Return the cache to go on with: the one returned, or the one fed where outputs lack it."""
    for name in _CACHE_ARGUMENTS:
        returned = getattr(output, name, None)
        if returned is not None:
            return returned
    return fed


def _cache_len(cache: Any) -> int | None:
    """Return how many tokens the cache says it holds, or None where no layer counts them."""
    lengths = []
    for layer in getattr(cache, "layers", ()):
        try:
            lengths.append(int(layer.get_seq_length()))
        except (AttributeError, NotImplementedError, TypeError, ValueError):
            continue  # recurrent layers hold a state and count nothing
    return max(lengths, default=None)


def _context_len(config: Any) -> int:
    """Return how many positions the model declares; models without positions take any number."""
    for name in ("max_position_embeddings", "n_positions", "max_seq_len", "context_length"):
        value = getattr(config, name, None)
        if isinstance(value, int) and value > 0:
            return value
    return 2**20
