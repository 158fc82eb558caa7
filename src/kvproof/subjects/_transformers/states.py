"""What a model keeps between two calls, if that is not the library's `DynamicCache`.

Some types return lists of tensors (rwkv, xlnet, reformer). Some need a cache class from their own modelling file
(minimax and xlstm; before 5.0 most recurrent ones). recurrent_gemma keeps its recurrent states on its modules.
"""

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn

#: The names of the argument that takes a cache object, newest first.
CACHE_ARGUMENTS: Final = ("cache", "past_key_values", "cache_params")
#: The names of the argument that takes the state that the previous call returned, or None in the first call.
RETURNED: Final = ("state", "mems", "past_buckets_states")

#: Types whose cache this adapter cannot pass from call to call, and why.
_NOT_INCREMENTAL: Final[Mapping[str, str]] = {
    "blt": "it cuts its input into patches, and every one of its parts keeps a cache of its own",
    "cpmant": "its forward wants the whole prefix, behind prompt tokens of its own, at every call",
    "xlm": "its forward wants the whole prefix again at every call, beside the cache",
}

#: Attributes in which modules keep a recurrent state from one call to the next.
_ON_MODULES: Final = ("conv1d_state", "recurrent_states")


def cache_argument(parameters: Mapping[str, Any]) -> str | None:
    """Return the name of a forward's cache argument, or None."""
    return next((name for name in (*CACHE_ARGUMENTS, *RETURNED) if name in parameters), None)


def why_no_session(model: nn.Module, parameters: Mapping[str, Any]) -> str | None:
    """Return why the model cannot continue a prefix, or None if it can."""
    model_type = str(getattr(model.config, "model_type", None))
    if model_type in _NOT_INCREMENTAL:
        return _NOT_INCREMENTAL[model_type]
    if cache_argument(parameters) is not None:
        return None
    if stateful_modules(model):
        return "its state stays on its own modules, and every prompt starts it anew"
    names = ", ".join((*CACHE_ARGUMENTS, *RETURNED))
    return f"its forward takes none of {names}, so nothing can be continued: forward({', '.join(parameters)})"


def own_cache_class(model: nn.Module) -> type | None:
    """Return the cache class in the model's own modelling file, or None if the model uses the library's."""
    home = type(model).__module__
    for name, value in vars(sys.modules[home]).items():
        if isinstance(value, type) and value.__module__ == home and name.endswith("Cache"):
            is_layer = any(base.__name__ == "CacheLayerMixin" for base in value.__mro__)
            if not is_layer:
                return value
    return None


def own_cache(cache_class: type, model: nn.Module, config: Any, batch: int) -> Any:
    """Return an empty cache of a model's own class, for ``batch`` rows."""
    known = {
        "config": config,
        "batch_size": batch,
        "max_batch_size": batch,
        "dtype": model.dtype,
        "device": model.device,
        "devices": [model.device] * int(config.num_hidden_layers),
    }
    wanted = inspect.signature(cache_class).parameters
    return cache_class(**{name: value for name, value in known.items() if name in wanted})


def cache_len(cache: Any) -> int | None:
    """Return how many tokens the cache reports, or None if it does not count them."""
    if isinstance(cache, list | tuple):
        return None  # plain tensors do not show which axis counts tokens
    lengths = []
    for layer in getattr(cache, "layers", ()):
        if hasattr(layer, "max_cache_len") and not hasattr(layer, "cumulative_length"):
            continue  # before 5.0 a layer with a buffer counts nonzero slots, whatever filled them
        try:
            lengths.append(int(layer.get_seq_length()))
        except (AttributeError, NotImplementedError, TypeError, ValueError):
            continue  # recurrent layers hold a state and count nothing
    if lengths or hasattr(cache, "layers"):
        return max(lengths, default=None)
    if hasattr(cache, "seqlen_offset") and not hasattr(cache, "get_seq_length"):
        return int(cache.seqlen_offset)
    if hasattr(cache, "states_cache"):
        return cache.states_cache[0].shape[1] if cache.states_cache else 0
    return int(cache.get_seq_length()) if hasattr(cache, "get_seq_length") else None


def fingerprint(cache: Any) -> list[tuple[Tensor, int]]:
    """Return the cache's tensors with their versions. If two fingerprints are equal, nothing was written between.

    The tensors are kept alive, so that a new tensor cannot be mistaken for an old one.
    """
    return [(tensor, tensor._version) for tensor in _tensors(cache)]


def is_same(first: list[tuple[Tensor, int]], second: list[tuple[Tensor, int]]) -> bool:
    """Return whether two fingerprints hold the same tensors in the same versions."""
    return len(first) == len(second) and all(
        old is new and before == after for (old, before), (new, after) in zip(first, second, strict=True)
    )


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from _tensors(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _tensors(part)
    elif type(value).__name__.endswith(("Cache", "Layer")):  # a configuration holds none
        yield from _tensors(vars(value))


def stateful_modules(model: nn.Module) -> list[nn.Module]:
    """Return the modules that keep a recurrent state from one call to the next."""
    return [module for module in model.modules() if any(hasattr(module, name) for name in _ON_MODULES)]


def take_module_state(modules: list[nn.Module]) -> list[dict[str, Any]]:
    """Return the modules' states. Their forwards replace these tensors and never write into them."""
    return [{name: vars(module)[name] for name in _ON_MODULES if name in vars(module)} for module in modules]


def put_module_state(modules: list[nn.Module], state: list[dict[str, Any]] | None) -> None:
    """Restore the states that `take_module_state` returned, or clear them (None) to start a sequence."""
    for number, module in enumerate(modules):
        for name in _ON_MODULES:
            if name in vars(module):
                setattr(module, name, None if state is None else state[number][name])


def cache_positions(argument: str, config: Any, start: int, num_new: int) -> Tensor:
    """Return the ``cache_position`` that versions before 5.0 require."""
    if argument == "cache_params" and start == 0:
        # These caches recognise a prompt only by this length, whatever the prompt's own length.
        return torch.arange(int(config.conv_kernel))
    return torch.arange(start, start + num_new)


#: Names of tensors, and the attributes of a cache layer that hold them.
_HELD: Final = (("k", "keys"), ("v", "values"), ("index_k", "indexer_keys"))
#: The same for attributes that hold several numbered tensors.
_NUMBERED: Final = (("conv", "conv_states"), ("state", "recurrent_states"))


def held(cache: Any) -> tuple[dict[str, Tensor], ...]:
    """Return what each layer of a library's cache holds, by name."""
    return tuple({name: read() for name, read, _ in _places(layer)} for layer in _layers(cache))


def put(cache: Any, layers: Sequence[Mapping[str, Tensor]]) -> None:
    """Replace the tensors that `held` returned."""
    for layer, tensors in zip(_layers(cache), layers, strict=True):
        for name, read, write in _places(layer):
            if tensors[name] is not read():
                write(tensors[name])


def _layers(cache: Any) -> Sequence[Any]:
    layers: Sequence[Any] = getattr(cache, "self_attention_cache", cache).layers
    return layers


def _places(layer: Any) -> Iterator[tuple[str, Callable[[], Tensor], Callable[[Tensor], None]]]:
    """Yield the name of each tensor that a layer holds, and how it is read and written."""
    for name, attribute in _HELD:
        value = getattr(layer, attribute, None)
        if isinstance(value, Tensor) and value.numel():
            yield name, partial(getattr, layer, attribute), partial(setattr, layer, attribute)
    for name, attribute in _NUMBERED:
        for number, value in dict(getattr(layer, attribute, None) or {}).items():
            if isinstance(value, Tensor) and value.numel():
                states = getattr(layer, attribute)
                label = f"{name}_{number}" if number else name
                yield label, partial(states.__getitem__, number), partial(states.__setitem__, number)
