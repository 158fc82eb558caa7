"""Random models as a standalone file can build them: a configuration as plain values, and weights of one rule.

The library's own initialisation hides faults (see `_tiny.randomise`); the rule here is a short form of that one.
"""

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from kvproof.errors import UsageError
from kvproof.subjects._transformers.model import TransformersSubject
from kvproof.subjects._transformers.quiet import as_usage_errors
from kvproof.subjects._transformers.tiny_sizes import LAYER_COUNTS

Values = dict[str, Any]

#: What a configuration notes about itself, and no caller sets.
_NOTES: Final = frozenset({"architectures", "dtype", "model_type", "torch_dtype", "transformers_version"})
#: Further names under which layers are counted.
_COUNTS: Final = (*LAYER_COUNTS, "num_blocks", "encoder_layers", "num_encoder_layers", "num_decoder_layers")
#: The ends of names of lists that name layers by number.
_NUMBERED: Final = ("_indices", "_ids", "moe_layers", "_attention_layers")
#: What is left no smaller than this: a reader takes a model of two channels, or one token, for a mistake.
_LEAST: Final = 8
_WIDE: Final = frozenset({"hidden_size", "d_model", "n_embd", "vocab_size"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What a random model is built from."""

    model_type: str
    values: Values  #: the configuration's own attributes, where they are not the type's defaults
    seed: int
    attention: str

    def with_values(self, values: Values) -> "Recipe":
        """Return the same recipe with another configuration."""
        return Recipe(model_type=self.model_type, values=values, seed=self.seed, attention=self.attention)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pretrained:
    """Where ``from_pretrained`` finds a model, and how it loads it."""

    name: str
    gguf_file: str | None
    dtype: str
    attention: str
    trust_remote_code: bool

    @property
    def arguments(self) -> Values:
        """The arguments of ``from_pretrained`` besides the name."""
        file = {} if self.gguf_file is None else {"gguf_file": self.gguf_file}
        trusting = {"trust_remote_code": True} if self.trust_remote_code else {}
        return {**file, "dtype": self.dtype, "attn_implementation": self.attention, **trusting}


def pretrained_source(target: str, dtype: str, attention: str, trust_remote_code: bool) -> Pretrained:
    """Return how ``from_pretrained`` loads a target: a folder, a file or a name on the hub."""
    path, name, gguf_file = Path(target), target, None
    if path.is_file():
        name, gguf_file = str(path.resolve().parent), path.name
    elif path.is_dir():
        name = str(path.resolve())
    return Pretrained(
        name=name,
        gguf_file=gguf_file,
        dtype=dtype,
        attention=attention,
        trust_remote_code=trust_remote_code,
    )


def scaled(model: torch.nn.Module) -> torch.nn.Module:
    """Draw every weight anew, so large that each part of the model moves the logits."""
    for name, weight in model.named_parameters():
        noise = torch.randn_like(weight)
        if any(part in name for part in ("A_log", "dt_", "time_", "recurrent_param")) or name.endswith(".D"):
            weight.data += 0.1 * weight * noise  # a recurrence is stable only near its first values
        elif weight.dim() > 1:
            weight.data = 1.8 / weight.shape[-1] ** 0.5 * noise
        else:
            weight.data += 0.2 * noise
    return model.eval().requires_grad_(False)


def recipe_of(subject: TransformersSubject, attention: str) -> Recipe:
    """Return the recipe of a subject's configuration; its weights are others."""
    config, seed = subject.model.config, subject.seed
    if seed is None:
        raise UsageError(f"{subject.info.name} is no random model")
    values = _own(config.to_dict(), type(config)().to_dict())
    return Recipe(model_type=config.model_type, values=values, seed=seed, attention=attention)


def num_parameters(recipe: Recipe) -> int:
    """Return how many weights the model has, without making them."""
    with as_usage_errors(f"no {recipe.model_type} of this configuration"), torch.device("meta"):
        config = AutoConfig.for_model(recipe.model_type, **copy.deepcopy(recipe.values))
        return int(AutoModelForCausalLM.from_config(config).num_parameters())


def plain_model(recipe: Recipe, *, name: str, device: str = "cpu") -> TransformersSubject:
    """Build the float64 model of a recipe; raise `UsageError` where the library cannot."""
    with as_usage_errors(f"{name} cannot be built from plain values"), torch.random.fork_rng(devices=[]):
        config = AutoConfig.for_model(recipe.model_type, **copy.deepcopy(recipe.values))
        torch.default_generator.manual_seed(recipe.seed)
        model = AutoModelForCausalLM.from_config(config, attn_implementation=recipe.attention).double()
        return TransformersSubject(scaled(model).to(device), name=name, seed=recipe.seed)


def size_of(recipe: Recipe, num_weights: int) -> tuple[int, int, int]:
    """Return how much a model asks of its reader, its weights first."""
    numbers = [value for _, value in _leaves(recipe.values) if _is_count(value)]
    return num_weights, sum(numbers), len(repr(recipe.values))


def smaller_recipes(recipe: Recipe) -> Iterator[Recipe]:
    """Yield recipes of fewer layers, narrower and shorter ones, and with less that is not a default."""
    for values in _smaller_values(recipe.values):
        yield recipe.with_values(values)


def _own(values: Values, default: Mapping[str, Any]) -> Values:
    """Return the values that are not the default's; of the configuration of a part, those of its own."""
    kept: Values = {}
    for name, value in values.items():
        usual = default.get(name)
        if name in _NOTES or name.startswith("_") or (name in default and value == usual):
            continue
        is_part = name.endswith("_config") and isinstance(value, dict) and isinstance(usual, dict)
        kept[name] = _own(value, usual) if is_part and isinstance(usual, dict) else value
    return kept


def _smaller_values(values: Values) -> Iterator[Values]:
    num_layers = max((v for path, v in _leaves(values) if path[-1] in _COUNTS and _is_count(v)), default=1)
    size = num_layers // 2
    while size:
        for start in range(num_layers - size + 1):
            yield _without_layers(values, num_layers, range(start, start + size))
        size //= 2
    counts = [(path, value) for path, value in _leaves(values) if _is_count(value) and value > 1]
    widths = [(path, value) for path, value in counts if value % 8 == 0]
    if all(value > _LEAST for path, value in widths if path[-1] in _WIDE):
        halved = copy.deepcopy(values)
        for path, value in widths:
            _put(halved, path, value // 2)
        yield halved
    for path, value in counts:
        if not str(path[-1]).endswith("_id") and path[-1] not in _COUNTS:
            for smaller in dict.fromkeys((1, 2, value // 2) if value <= 8 else (value // 2,)):
                if smaller >= (_LEAST if path[-1] in _WIDE else 1):
                    changed = copy.deepcopy(values)
                    _put(changed, path, smaller)
                    yield changed
    for path, value in _members(values):
        if isinstance(value, bool | str):
            continue  # a switch left out is another kind of model, such as an encoder
        left = copy.deepcopy(values)
        _drop(left, path)
        yield left


def _without_layers(values: Any, num_layers: int, gone: range) -> Any:
    """Return values without some layers, in every count of them and in every list that has one entry for each."""
    kept = [layer for layer in range(num_layers) if layer not in gone]
    if not isinstance(values, dict):
        return values
    changed: Values = {}
    for name, value in values.items():
        if name in _COUNTS and value == num_layers:
            value = len(kept)
        elif name == "attention_types":  # pairs of a pattern and how often it repeats
            kinds = [kind for pattern, times in value for kind in pattern * times]
            value = [[[kinds[layer] for layer in kept if layer < len(kinds)], 1]]
        elif isinstance(value, list) and len(value) == num_layers:
            value = [value[layer] for layer in kept]
        elif isinstance(value, list) and str(name).endswith(_NUMBERED):
            value = [kept.index(layer) for layer in value if layer in kept]
        elif isinstance(value, dict) and value and all(isinstance(key, int) for key in value):
            value = {kept.index(layer): part for layer, part in value.items() if layer in kept}
        elif isinstance(value, dict):
            value = _without_layers(value, num_layers, gone)
        changed[name] = value
    return changed


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _leaves(values: Values) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yield every value that is no dictionary, with the names that lead to it."""
    for path, value in _members(values):
        if not isinstance(value, dict):
            yield path, value


def _members(values: Values, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    for name, value in values.items():
        yield (*path, name), value
        if isinstance(value, dict):
            yield from _members(value, (*path, name))


def _put(values: Values, path: tuple[Any, ...], value: Any) -> None:
    for name in path[:-1]:
        values = values[name]
    values[path[-1]] = value


def _drop(values: Values, path: tuple[Any, ...]) -> None:
    for name in path[:-1]:
        values = values[name]
    del values[path[-1]]
