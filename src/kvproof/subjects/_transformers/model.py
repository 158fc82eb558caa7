"""The adapter for causal language models of the transformers library.

Versions differ in the name of the cache argument, in what ``crop`` counts, and in what a cache reports.
Therefore this module inspects the model's own signatures and checks every call: if the cache did not grow by
the number of tokens fed, the call was not a cached one, and kvproof draws no conclusion from it.
"""

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from kvproof._numerics.casting import cast_module
from kvproof._numerics.digests import weights_digest
from kvproof._numerics.dtypes import name_of
from kvproof._numerics.taps import Tap, untouched
from kvproof._numerics.true_float64 import TrueFloat64
from kvproof.contract.results import SubjectInfo
from kvproof.contract.stages import Site, Stage
from kvproof.errors import AbilityError, SubjectError, UsageError
from kvproof.scenarios import Ability, Boundaries, CacheKind, Generate
from kvproof.subjects._base import Generated, Opening, Session, Subject
from kvproof.subjects._module_state import random_parts, state_of_module
from kvproof.subjects._taps import describe_compiled, tapped
from kvproof.subjects._transformers import caches as _caches
from kvproof.subjects._transformers import generate as _generate
from kvproof.subjects._transformers import positions as _positions
from kvproof.subjects._transformers import states as _states
from kvproof.subjects._transformers.attention import attention_tapped
from kvproof.subjects._transformers.inputs import unchecked_inputs
from kvproof.subjects._transformers.tables import exact_tables
from kvproof.subjects._transformers.tokenizer import Tokenizer

#: How a cache reorders its rows: the first keeps their number, the second can change it. Some have only one.
SELECTIONS = ("reorder_cache", "batch_select_indices")
#: If all logits need more bytes than this, compute only the requested positions.
_MANY_BYTES = 2**26


class TransformersSubject(Subject):
    """A causal language model, frozen, on its own device."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        name: str,
        seed: int | None = None,
        tokenizer: Tokenizer | None = None,
        true_float64: bool = True,
        digest: str | None = None,
    ) -> None:
        """Wrap a model. Without ``true_float64``, a float64 model uses float32 where its code asks for float32.

        ``digest`` is the digest of the weights that a cast model was made from; computing one takes a second per
        gigabyte.
        """
        self._true_float64 = true_float64 and model.dtype is torch.float64
        self.model = model.eval().requires_grad_(False)
        if model.dtype is torch.float64 and hasattr(model, "set_experts_implementation"):
            model.set_experts_implementation("eager")  # the grouped kernels do not support float64
        self._tokenizer = tokenizer
        for weight_name, weight in model.state_dict().items():
            if weight.is_floating_point() and not _is_finite(weight):
                raise UsageError(f"{name}: weight {weight_name!r} holds a value that is not finite")
        self._seed = seed
        parameters = inspect.signature(model.forward).parameters
        reason = _states.why_no_session(model, parameters)
        if reason is not None:
            raise AbilityError(f"{name} cannot be audited: {reason}")
        self.cache_argument = str(_states.cache_argument(parameters))
        self.own_cache = _states.own_cache_class(model)
        self.stateful_modules = _states.stateful_modules(model)
        # A state that is passed back as returned counts its own positions and does not support padding.
        hands_cache = self.cache_argument in _states.CACHE_ARGUMENTS
        self.takes_positions = hands_cache and "position_ids" in parameters
        self.padding_position = _positions.padding_position(model)
        self.takes_mask = hands_cache and "attention_mask" in parameters
        self.takes_cache_positions = "cache_position" in parameters
        self.cache_switch = "use_mems" if "use_mems" in parameters else "use_cache"
        self.config = model.config.get_text_config(decoder=True)
        kinds = (CacheKind.STATIC, CacheKind.OFFLOADED, CacheKind.QUANTISED)
        self._no_cache = {kind: self._why_not(kind) for kind in kinds}
        self._no_generate = _generate.why_not(model)
        self._info = SubjectInfo(
            name=name,
            digest=digest or weights_digest(model),
            mode="train" if model.training else "eval",
            dtype=name_of(model.dtype),
            num_layers=int(self.config.num_hidden_layers),
            vocab_size=_vocab_size(model, self.config),
            context_len=_positions.context_len(model, self.config),
            abilities=tuple(self._abilities()),
        )

    @property
    def info(self) -> SubjectInfo:
        """The subject's description and abilities."""
        return self._info

    @property
    def seed(self) -> int | None:
        """The seed of a random model."""
        return self._seed

    @property
    def root_module(self) -> PreTrainedModel:
        """The model."""
        return self.model

    @property
    def may_fork(self) -> bool:
        """Whether the model is on the CPU."""
        return bool(self.model.device.type == "cpu")

    @property
    def boundaries(self) -> Boundaries:
        """The context, and the windows, convolutions and scan blocks that the configuration declares."""
        return Boundaries(context_len=self.info.context_len, windows=_caches.windows(self.config))

    @property
    def lacks(self) -> Mapping[Ability, str]:
        """Why the library cannot keep some kinds of cache for the model, or cannot generate from it."""
        reasons = _caches.lacks(self._no_cache)
        return reasons if self._no_generate is None else {**reasons, Ability.GENERATE: self._no_generate}

    def state(self) -> Mapping[str, object]:
        """The module's tensors and plain attributes."""
        return state_of_module(self.model)

    def random_parts(self) -> Iterator[str]:
        """Yield training mode, and dropout given as a number."""
        yield from random_parts(self.model)

    def limitations(self) -> Iterator[str]:
        """Yield the inputs of the model's forward that no call gives."""
        names = ", ".join(unchecked_inputs(inspect.signature(self.model.forward).parameters))
        if names:
            yield f"not checked: inputs of the model's forward that an audit does not give: {names}"
        yield from describe_compiled(self.model)

    def token(self, token_id: int) -> str:
        """Return the token's text in quotes, because its spaces matter; without a tokenizer, return the id."""
        text = None if self._tokenizer is None else self._tokenizer.text(token_id)
        return str(token_id) if text is None else repr(text)

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """The end tokens in the model's generation settings, or else its configuration, that have logits."""
        settings = getattr(self.model, "generation_config", None)
        named = getattr(settings, "eos_token_id", None)
        named = getattr(self.config, "eos_token_id", None) if named is None else named
        ids = named if isinstance(named, list | tuple) else () if named is None else (named,)
        return tuple(int(i) for i in ids if 0 <= int(i) < self.info.vocab_size)

    @property
    def avoided_ids(self) -> tuple[int, ...]:
        """The padding token that the configuration names, if it has logits."""
        named = getattr(self.config, "pad_token_id", None)
        return (named,) if isinstance(named, int) and 0 <= named < self.info.vocab_size else ()

    @property
    def tokenizer_digest(self) -> str | None:
        """The digest of the tokenizer's vocabulary, rules and chat template; None without one."""
        return None if self._tokenizer is None else self._tokenizer.digest()

    @property
    def chats(self) -> bool:
        """Whether the tokenizer has a chat template."""
        return self._tokenizer is not None and self._tokenizer.chats()

    def _encode(self, text: str) -> Sequence[int]:
        return super()._encode(text) if self._tokenizer is None else self._tokenizer.encode(text)

    def _encode_chat(self, text: str) -> Sequence[int]:
        if self._tokenizer is None or not self._tokenizer.chats():
            return super()._encode_chat(text)
        return self._tokenizer.encode_chat(text)

    def _text(self, ids: Sequence[int]) -> str | None:
        return None if self._tokenizer is None else self._tokenizer.decode(ids)

    def new_cache(self, batch: int, *, records_past: bool = False) -> Any:
        """Return an empty cache for ``batch`` rows, ready to be cropped if ``records_past``.

        None is the empty state for types that are fed the state that their last call returned.
        """
        if self.cache_argument in _states.RETURNED:
            return None
        if self.own_cache is not None:
            return _states.own_cache(self.own_cache, self.model, self.config, batch)
        if not hasattr(DynamicCache, "activate_past_recording"):
            # Before 5.0 a windowed layer cannot undo a drop; a cache without a configuration drops nothing.
            return DynamicCache() if records_past else DynamicCache(config=self.config)
        cache = DynamicCache(config=self.config)
        if records_past:
            cache.activate_past_recording()
        return cache

    def forward(self, tap: Tap, **arguments: Any) -> Any:
        """Run the model's own forward, in true float64 where the weights are float64, with taps in place."""
        return self._run(self.model, tap, arguments)

    def _run(self, call: Callable[..., Any], tap: Tap, arguments: dict[str, Any]) -> Any:
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            if self._true_float64:
                stack.enter_context(TrueFloat64())
            if tap is not untouched:
                arguments = self._shown(tap, arguments)
                shape = tuple(arguments["input_ids"].shape)
                cache = arguments.get(self.cache_argument)
                stack.enter_context(tapped(self.model, tap, shape))
                stack.enter_context(attention_tapped(self.model, tap, shape, cache))
            return call(**arguments)

    def _shown(self, tap: Tap, arguments: dict[str, Any]) -> dict[str, Any]:
        """Pass a call's inputs to the tap: tokens, positions and the caller's padding mask.

        Without a cache, the model computes its own positions, and the tap sees them as the model counts them.
        """
        ids, positions, mask = (arguments.get(n) for n in ("input_ids", "position_ids", "attention_mask"))
        assert isinstance(ids, Tensor)
        shown = {**arguments, "input_ids": tap(Site(Stage.TOKEN), ids)}
        if positions is None and self.takes_positions and not arguments.get(self.cache_switch):
            positions = _positions.positions(torch.ones_like(ids), ids, self.padding_position)
        if isinstance(positions, Tensor) and positions.shape == ids.shape:
            changed = tap(Site(Stage.POSITION), positions)
            if changed is not positions:
                shown["position_ids"] = changed
        if isinstance(mask, Tensor) and mask.dim() == 2:
            shown["attention_mask"] = tap(Site(Stage.MASK), mask)
        return shown

    def _abilities(self) -> Iterator[Ability]:
        yield from (Ability.CAST, Ability.TAP, Ability.BATCH, Ability.FORK)
        if self._keeps_library_cache():
            yield from (Ability.INSPECT, Ability.EDIT)
        cache = self.new_cache(1)
        if not self.stateful_modules:
            if any(hasattr(cache, name) for name in SELECTIONS):
                yield Ability.REORDER
            # Older releases do not report whether a cache can be cropped; there, all of the library's own can.
            if getattr(cache, "is_croppable", type(cache) is DynamicCache):
                yield Ability.CROP
        if self.takes_positions and self.takes_mask:
            yield Ability.PAD
            yield Ability.OMIT_POSITIONS
        for kind, reason in self._no_cache.items():
            if kind.ability is not None and reason is None:
                yield kind.ability
        if self._no_cache[CacheKind.STATIC] is None and _caches.has_spare_slots(self.config):
            yield Ability.POISON
        if self._no_generate is None:
            yield Ability.GENERATE
            if self.cache_argument in _generate.CHUNKED_ARGUMENTS and self._keeps_library_cache():
                yield Ability.GENERATE_CHUNKED
            if not getattr(self.model, "_is_stateful", False):
                yield Ability.GENERATE_ASSISTED

    def _keeps_library_cache(self) -> bool:
        returned = self.cache_argument in _states.RETURNED
        return not returned and self.own_cache is None and not self.stateful_modules

    def _why_not(self, kind: CacheKind) -> str | None:
        if not self._keeps_library_cache():
            return f"its state is no cache of the library's, so there is no {kind.value} one"
        return _caches.why_not(kind, self.config, self.model.device)

    def _rows(self, ids: Sequence[int], tap: Tap) -> Tensor:
        tensor = torch.tensor([list(ids)], device=self.model.device)
        logits: Tensor = self.forward(tap, input_ids=tensor, **{self.cache_switch: False}).logits
        return logits[0]

    def _kept_rows(self, ids: Sequence[int], tap: Tap, keep: range) -> Tensor:
        """Return the rows at some positions; compute only those if all rows would need much memory."""
        all_bytes = len(ids) * self.info.vocab_size * self.model.dtype.itemsize
        if all_bytes <= _MANY_BYTES or "logits_to_keep" not in inspect.signature(self.model.forward).parameters:
            return super()._kept_rows(ids, tap, keep)
        tensor = torch.tensor([list(ids)], device=self.model.device)
        kept = torch.arange(keep.start, keep.stop, device=self.model.device)
        options = {self.cache_switch: False, "logits_to_keep": kept}
        logits: Tensor = self.forward(tap, input_ids=tensor, **options).logits
        return logits[0]

    def _session(self, opening: Opening) -> "TransformersSession":
        return TransformersSession(self, [[] for _ in range(opening.batch)], self.opened_cache(opening), opening)

    def opened_cache(self, opening: Opening) -> Any:
        """Return the empty cache that a session opens with."""
        if opening.cache is CacheKind.DYNAMIC:
            return self.new_cache(opening.batch, records_past=Ability.CROP in opening.needs)
        return _caches.new_cache(opening.cache, self.config, opening.capacity)

    def _generate(self, operation: Generate, make_tap: Callable[[], Tap]) -> Generated:
        _states.put_module_state(self.stateful_modules, None)
        return _generate.generate(self.model, operation, make_tap, self._run, takes_mask=self.takes_mask)

    def with_exact_tables(self, rounded_to: torch.dtype) -> "tuple[TransformersSubject, tuple[str, ...]] | None":
        """Return the model with its buffers recomputed in float64, as a new model of its class computes them."""
        model = copy.deepcopy(self.model)
        names = exact_tables(model, rounded_to)
        exact = TransformersSubject(model, name=self._info.name, seed=self._seed, tokenizer=self._tokenizer)
        return (exact, names) if names else None

    def _cast(self, dtype: torch.dtype) -> "TransformersSubject":
        model, info = cast_module(self.model, dtype), self._info
        return TransformersSubject(
            model, name=info.name, seed=self._seed, tokenizer=self._tokenizer, digest=info.digest
        )


class TransformersSession(Session):
    """One of the library's own caches, fed with masks and positions as the library's documentation says."""

    def __init__(
        self,
        subject: TransformersSubject,
        ids: Sequence[Sequence[int]],
        cache: Any,
        opening: Opening,
    ) -> None:
        super().__init__(subject, ids)
        self.transformers = subject
        self.cache = cache
        self.opening = opening
        self.tap = opening.tap
        self.records_past = Ability.CROP in opening.needs
        #: The number of columns in the cache: the length of the longest row ever fed, including padding.
        self.num_columns = 0
        self.module_state: list[dict[str, Any]] | None = None
        # A recording cache keeps entries that a forward pushed out of the window; a crop must follow.
        self.owes_crop = False

    def _extend(self, ids: Sequence[Sequence[int]], start: int) -> Tensor:
        """Run one call. A call that raises may leave the library's cache partly grown, so it is then refilled."""
        try:
            return self._call(self._ids, ids, self.tap)
        except BaseException:
            self._start_anew()
            if start:
                with suppress(Exception):  # what the call itself raised is the finding
                    self._call([[]] * len(ids), self._ids, untouched)
            raise

    def _call(self, old: Sequence[Sequence[int]], ids: Sequence[Sequence[int]], tap: Tap) -> Tensor:
        if self.owes_crop:
            self._remove(0)
        subject, start, num_new = self.transformers, self.num_columns, max(map(len, ids))
        device = subject.model.device
        rows = [[*before, *new] for before, new in zip(old, ids, strict=True)]
        total = start + num_new
        tokens = torch.tensor([[0] * (total - len(row)) + row for row in rows], device=device)
        mask = torch.tensor([[0] * (total - len(row)) + [1] * len(row) for row in rows], device=device)
        arguments: dict[str, Any] = {
            "input_ids": tokens[:, -num_new:],
            subject.cache_switch: True,
            subject.cache_argument: self.cache,
        }
        if subject.takes_mask and (subject.takes_positions or start == 0):
            arguments["attention_mask"] = mask
        if subject.takes_positions and not self.opening.omit_positions:
            positions = _positions.positions(mask, tokens, subject.padding_position)
            arguments["position_ids"] = positions[:, -num_new:]
        if subject.takes_cache_positions:
            columns = _states.cache_positions(subject.cache_argument, subject.config, start, num_new)
            arguments["cache_position"] = columns.to(device)
        held = _states.cache_len(self.cache)
        before = _states.fingerprint(self.cache) if held is None else None
        _states.put_module_state(subject.stateful_modules, self.module_state)
        output = subject.forward(tap, **arguments)
        self.module_state = _states.take_module_state(subject.stateful_modules)
        self.cache = _returned_cache(output, self.cache)
        self._check_growth(before, (held or 0) + num_new)
        self.num_columns = total
        self.owes_crop = self.records_past
        logits: Tensor = output.logits
        return logits

    def _check_growth(self, before: list[tuple[Tensor, int]] | None, total: int) -> None:
        """Raise unless the cache's own count is ``total``, the tokens it held (as faults left it) plus those fed.

        A cache that counts nothing must at least differ from its state ``before``.
        """
        grown = _states.cache_len(self.cache)
        if grown is not None and grown != total:
            raise SubjectError(f"the call was not a cached one: the cache holds {grown} tokens, not {total}")
        if grown is None and (before is None or _states.is_same(before, _states.fingerprint(self.cache))):
            raise SubjectError("the call was not a cached one: it left the cache as it was")

    def _crop(self, length: int) -> None:
        self._remove(len(self) - length)

    def _remove(self, num_tokens: int) -> None:
        """Remove the newest tokens. Older versions expect the number to keep, newer ones the number to remove."""
        kept = self.num_columns - num_tokens
        if "max_length" in inspect.signature(type(self.cache).crop).parameters:
            self.cache.crop(kept)
        else:
            self.cache.crop(-num_tokens)
        left = _states.cache_len(self.cache)
        if left is not None and left != kept:
            raise SubjectError(f"the crop did not roll the cache back: it holds {left} tokens, not {kept}")
        self.num_columns = kept
        self.owes_crop = False

    def _reorder(self, rows: Sequence[int]) -> None:
        index = torch.tensor(list(rows), device=self.transformers.model.device)
        keeps_size = len(rows) == len(self._ids)
        wanted = SELECTIONS if keeps_size else reversed(SELECTIONS)
        getattr(self.cache, next(name for name in wanted if hasattr(self.cache, name)))(index)

    def _fork(self, tap: Tap) -> "TransformersSession":
        cache = copy.deepcopy(self.cache)
        opening = replace(self.opening, batch=len(self._ids), tap=tap)
        fork = TransformersSession(self.transformers, self.ids, cache, opening)
        fork.num_columns, fork.module_state = self.num_columns, self.module_state
        fork.owes_crop = self.owes_crop
        return fork

    def _reset(self) -> None:
        """Empty the cache. A static cache is reset by the library itself, so that its buffers are reused."""
        if self.opening.cache is not CacheKind.STATIC:
            self._start_anew()
            return
        self.cache.reset()
        self.num_columns = 0

    def _poison(self) -> int:
        return _caches.poison(self.cache)

    def _start_anew(self) -> None:
        self.cache = self.transformers.opened_cache(replace(self.opening, batch=len(self._ids)))
        self.num_columns, self.module_state = 0, None
        self.owes_crop = False

    def _cache_tensors(self) -> tuple[Mapping[str, Tensor], ...]:
        return _states.held(self.cache)

    def _put_tensors(self, layers: Sequence[Mapping[str, Tensor]]) -> None:
        _states.put(self.cache, layers)


def _returned_cache(output: Any, fed: Any) -> Any:
    """Return the cache for the next call: the one in the output, or the one fed if the output has none."""
    for name in (*_states.CACHE_ARGUMENTS, *_states.RETURNED):
        returned = getattr(output, name, None)
        if returned is not None:
            return returned
    return fed


def _is_finite(weight: Tensor) -> bool:
    """Return whether every entry is finite. Try the sum first: it takes a tenth of the time of checking each."""
    return bool(weight.sum().isfinite()) or bool(weight.isfinite().all())


def _vocab_size(model: PreTrainedModel, config: Any) -> int:
    """Return the number of logits in a row.

    Some types have one output matrix per codebook, or hide it; inkling drops the padding of the vocabulary.
    """
    weight = getattr(model.get_output_embeddings(), "weight", None)
    size = int(config.vocab_size if weight is None else weight.shape[0])
    unpadded = getattr(config, "unpadded_vocab_size", None)
    return size if unpadded is None else min(size, int(unpadded))
