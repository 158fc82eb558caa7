"""Taps inside attention: the inputs and outputs of each layer's attention function.

During one forward, the function in use is wrapped wherever the model looks it up: in the library's registry and
among the globals of the model's own code. It is never replaced, and neither the configuration nor the masks
change, so tapping does not alter the run.

Types that compute attention without the library's interface expose only their modules. In transformers 5.17
these are: big_bird, bloom, codegen, cpmant, falcon, gpt_neo, gpt_neox_japanese, gptj, megatron-bert, mpt, mvp,
openai-gpt, prophetnet, reformer, rembert, roformer, trocr, xglm, xlm, xlnet, and those without attention:
falcon_mamba, mamba, mamba2, rwkv, xlstm.
"""

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from kvproof._numerics.taps import Tap
from kvproof.contract.stages import Site, Stage
from kvproof.subjects._taps import layer_of

Attention = Callable[..., Any]

#: Cache layers that keep every token; others keep a window or a buffer by design.
_KEEP_EVERYTHING = ("DynamicLayer", "LinearAttentionAndFullAttentionLayer")


@contextmanager
def attention_tapped(model: nn.Module, tap: Tap, shape: tuple[int, int], cache: Any) -> Iterator[None]:
    """Pass what attention reads and computes to the tap, layer by layer.

    ``shape`` is (batch, new). A site holds the layer's number, and a label if the layer attends more than once.
    The tap sees the length of the cache only if the layer keeps every token. Attention continues with the values
    that the tap returns. The cache keeps its own values, and changed attention weights affect nothing after them.
    """
    watch = _Watch(model, tap, shape, cache)
    with ExitStack() as stack:
        for mapping, name, function in _places(model):
            stack.callback(_put_back, mapping, name, mapping.get(name))
            mapping[name] = watch.wrapped(function)
        yield


def _places(model: nn.Module) -> Iterator[tuple[dict[str, Any], str, Attention]]:
    """Yield each mapping, name and function through which the model may look up attention, once.

    For a registry, yield its local mapping, which takes precedence over the one that all registries share.
    """
    configs = [getattr(module, "config", None) for module in model.modules()]
    in_use = {str(getattr(config, "_attn_implementation", None)) for config in configs}
    classes = {kind for module in model.modules() for kind in type(module).__mro__}
    registries: dict[int, Any] = {}
    for home in sorted({kind.__module__ for kind in classes} & sys.modules.keys()):
        known = vars(sys.modules[home])
        registry = known.get("ALL_ATTENTION_FUNCTIONS")
        registries[id(registry)] = registry
        for name in [name for name in known if name.endswith("eager_attention_forward")]:
            yield known, name, known[name]
    for registry in registries.values():
        own = getattr(registry, "_local_mapping", None)
        if registry is not None and isinstance(own, dict):
            for name in [name for name in in_use if name in registry]:
                yield own, name, registry[name]


def _put_back(mapping: dict[str, Any], name: str, before: Attention | None) -> None:
    if before is None:
        mapping.pop(name, None)
    else:
        mapping[name] = before


class _Watch:
    """Taps the attention functions during one forward of one model."""

    def __init__(self, model: nn.Module, tap: Tap, shape: tuple[int, int], cache: Any) -> None:
        self.names = {id(module): name for name, module in model.named_modules()}
        self.tap = tap
        self.shape = shape
        self.cache = getattr(cache, "self_attention_cache", cache)
        self.runs: dict[str | int, int] = {}
        self.inside = False

    def wrapped(self, original: Attention) -> Attention:
        """Return the function wrapped by the tap; calls from other models and nested calls are not tapped."""

        return functools.update_wrapper(functools.partial(self._called, original), original)

    def _called(self, original: Attention, module: Any, *tensors: Any, **options: Any) -> Any:
        if self.inside or not self._understands(module, tensors):
            return original(module, *tensors, **options)
        self.inside = True
        try:
            return self._attend(original, module, tensors, options)
        finally:
            self.inside = False

    def _understands(self, module: Any, tensors: tuple[Any, ...]) -> bool:
        """Return whether these tensors are (batch, head, token, head_dim) of this model's own tokens."""
        if id(module) not in self.names or getattr(module, "is_cross_attention", False):
            return False
        parts = tensors[:3]
        if len(parts) < 3 or not all(isinstance(part, Tensor) and part.dim() == 4 for part in parts):
            return False
        query, key, value = parts
        return (query.shape[0], query.shape[2]) == self.shape and key.shape[2] == value.shape[2] >= self.shape[1]

    def _attend(self, original: Attention, module: Any, tensors: tuple[Any, ...], options: dict[str, Any]) -> Any:
        query, key, value, *rest = tensors
        own = getattr(module, "layer_idx", None)
        kept = self._cache_layer(own, key)
        layer, label = self._place(module, own)
        num_slots = key.shape[2]
        if self.cache is None or type(kept).__name__ in _KEEP_EVERYTHING:
            self.tap(Site(Stage.CACHE_LEN, layer, label), torch.full((len(query),), num_slots))
        query = self.tap(Site(Stage.NEW_Q, layer, label), query)
        written = _num_written(kept)
        end = num_slots if written is None or not self.shape[1] <= written <= num_slots else written
        key = self._new(Site(Stage.NEW_K, layer, label), key, end)
        value = self._new(Site(Stage.NEW_V, layer, label), value, end)
        key = self.tap(Site(Stage.CACHE_K, layer, label), key)
        value = self.tap(Site(Stage.CACHE_V, layer, label), value)
        rest, options = self._masked(Site(Stage.MASK, layer, label), query, num_slots, rest, options)
        output, *others = original(module, query, key, value, *rest, **options)
        if others and isinstance(others[0], Tensor) and others[0].shape[-2:] == (self.shape[1], key.shape[2]):
            others[0] = self.tap(Site(Stage.ATTN_WEIGHTS, layer, label), others[0])
        if tuple(output.shape[:2]) == self.shape:
            output = self.tap(Site(Stage.ATTN_MIX, layer, label), output)
        return (output, *others)

    def _masked(
        self, site: Site, query: Tensor, num_slots: int, rest: list[Any], options: dict[str, Any]
    ) -> tuple[list[Any], dict[str, Any]]:
        """Show the tap the layer's mask, or else an equivalent one, which is used only if the tap changes it."""
        given = rest[0] if rest else options.get("attention_mask")
        if given is None:
            visible = torch.ones(len(query), 1, self.shape[1], num_slots, dtype=torch.bool, device=query.device)
            hidden = visible.tril(num_slots - self.shape[1]).logical_not()
            mask = torch.zeros_like(hidden, dtype=query.dtype).masked_fill(hidden, torch.finfo(query.dtype).min)
        elif isinstance(given, Tensor) and given.dim() == 4:
            mask = given
        else:
            return rest, options
        changed = self.tap(site, mask)
        if changed is mask:
            return rest, options
        return ([changed, *rest[1:]], options) if rest else (rest, {**options, "attention_mask": changed})

    def _place(self, module: Any, own: Any) -> tuple[int | None, str | None]:
        """Return the layer's number, and a label if the number does not identify this call."""
        name = self.names[id(module)]
        layer = own if isinstance(own, int) and own >= 0 else layer_of(name)
        key = name if layer is None else layer
        self.runs[key] = run = self.runs.get(key, 0) + 1
        if run > 1:
            return layer, f"{name} (run {run})"
        return layer, name if layer is None else None

    def _new(self, site: Site, value: Tensor, end: int) -> Tensor:
        """Show only the new tokens' slots to the tap: the last ones before ``end``."""
        start = end - self.shape[1]
        new = value[:, :, start:end]
        changed = self.tap(site, new)
        if changed is new:
            return value
        return torch.cat([value[:, :, :start], changed, value[:, :, end:]], dim=2)

    def _cache_layer(self, index: Any, key: Tensor) -> Any:
        """Return the cache layer that the keys come from; tied modules have no number of their own."""
        layers = getattr(self.cache, "layers", ())
        if isinstance(index, int) and 0 <= index < len(layers):
            return layers[index]
        return next((layer for layer in layers if getattr(layer, "keys", None) is key), None)


def _num_written(layer: Any) -> int | None:
    """Return how many tokens a cache layer has seen, or None if it does not count them."""
    try:
        return int(layer.get_seq_length())
    except (AttributeError, NotImplementedError, TypeError, ValueError):
        return None
