"""Tiny randomly initialised language models of any causal-LM type that transformers knows.

They test code, not weights: any weights show whether an architecture's cached path computes the same as its
uncached path, provided that every branch affects the logits (see `randomise`).
"""

import copy
import difflib
import math
from collections.abc import Iterable, Mapping
from inspect import signature
from itertools import cycle, islice
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn

from kvproof.errors import UsageError
from kvproof.subjects._transformers.quiet import quiet
from kvproof.subjects._transformers.tiny_sizes import (
    CONTEXT_LEN,
    EXCEPTIONS,
    LAYER_COUNTS,
    NUM_LAYERS,
    OLD_KINDS,
    PER_LAYER,
    REFUSED,
    ROPE_CONTEXT_LEN,
    ROPE_FACTOR,
    SIZES,
)

if TYPE_CHECKING:
    import transformers

_NO_OVERRIDES: Final[Mapping[str, object]] = MappingProxyType({})

_GAIN: Final = 1.8  #: standard deviation of matrices, times the square root of the fan-in
_EMBEDDING_STD: Final = 0.5
_VECTOR_STD: Final = 0.2  #: standard deviation of the noise added to norms and biases
_STATE_STEP: Final = 0.1  #: relative change of state-space parameters
_ROUTING_STD: Final = 0.1

#: Parameters of recurrences whose initial values keep the state from vanishing at once or exploding.
_STATE_SPACE: Final = frozenset(
    {
        "A_log",
        "D",
        "dt_bias",
        "recurrent_param",
        "time_decay",
        "time_first",
        "time_mix_key",
        "time_mix_receptance",
        "time_mix_value",
    }
)
_ROUTING_BIASES: Final = ("correction_bias", "expert_bias")


def known_types() -> tuple[str, ...]:
    """Return the causal-LM types of the installed transformers, sorted.

    A few cannot be used alone (drafters) or need another library; `tiny_config` and `tiny_model` raise for them.
    """
    return tuple(sorted(_class_names()))


def tiny_config(
    model_type: str, overrides: Mapping[str, object] = _NO_OVERRIDES
) -> "transformers.PreTrainedConfig":
    """Return a tiny configuration of a causal-LM type, with every kind of layer.

    The vocabulary has 101 tokens, the context 128 and windows 8. ``overrides`` replace attributes of the language
    part, by the type's own names or the usual ones.

    Raises `UsageError` for a type that is unknown, has no causal decoder or cannot be used alone, and for
    overrides that the type does not know or refuses.
    """
    config_class = _model_class(model_type).config_class
    with quiet():
        default = config_class()
        text = _language_part(default)
        _refuse_unknown(overrides, text, default)
        try:
            sizes = _shrunken(default, overrides)
            if text is not default and "text_config" not in overrides:
                sizes["text_config"] = type(text)(**_shrunken(text, overrides)).to_dict()
            return config_class(**sizes)
        except Exception as error:
            raise UsageError(f"transformers refuses the tiny configuration of {model_type!r}: {error}") from error


def tiny_model(
    model_type: str, *, seed: int, attention: str = "eager", overrides: Mapping[str, object] = _NO_OVERRIDES
) -> "transformers.PreTrainedModel":
    """Return a tiny model of a causal-LM type on the CPU: float32, eval mode, no gradients, `randomise`-d.

    The same seed gives the same weights; torch's global generator is unchanged. Raises `UsageError` as
    `tiny_config` does, and for an attention implementation or an optional library that is missing.
    """
    config = tiny_config(model_type, overrides)
    model_class = _model_class(model_type)
    with quiet(), torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        try:
            model = model_class._from_config(config, attn_implementation=attention, dtype=torch.float32)
        except Exception as error:
            raise UsageError(
                f"transformers cannot build a tiny {model_type!r} with attention {attention!r}: {error}"
            ) from error
    model.float().eval().requires_grad_(False)
    randomise(model, seed)
    return model


def randomise(model: nn.Module, seed: int) -> None:
    """Redraw every weight, at a scale at which each branch of the network affects the logits.

    The usual initialisation (std 0.02, biases 0, norms 1) makes an audit blind: at a tiny width the residual
    stream is nearly the embedding, so a wrong attention output or state changes the logits by no more than
    rounding does, and parameters that start at zero (biases, gates, routing corrections) hide their branch
    entirely. Here a matrix has std 1.8 / √fan-in, and an embedding 0.5; norms, biases and other vectors change by
    0.2 × normal; parameters of recurrences change by 10 %, because the recurrence is stable only near their
    initial values; and routing-bias buffers are 0.1 × normal. With a first version of these scales, on 146
    planted faults in eight types, the weakest fault was 43 × above rounding in float32, instead of 1.8 ×.
    """
    generator = torch.Generator().manual_seed(seed)
    # An embedding that is also the output matrix is scaled as an embedding, whichever comes first.
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    seen: set[int] = set()
    with torch.no_grad():
        for path, owner in model.named_modules():
            for name, parameter in owner.named_parameters(path, recurse=False):
                if id(parameter) in seen or not parameter.is_floating_point():
                    continue
                seen.add(id(parameter))
                normal = torch.randn(parameter.shape, generator=generator).to(parameter)
                is_table = id(parameter) in tables
                parameter.copy_(_EMBEDDING_STD * normal if is_table else _drawn(name, owner, parameter, normal))
        for name, buffer in model.named_buffers():
            if name.endswith(_ROUTING_BIASES):
                buffer.copy_(_ROUTING_STD * torch.randn(buffer.shape, generator=generator))


def _drawn(name: str, owner: nn.Module, initial: Tensor, normal: Tensor) -> Tensor:
    """Return the new value of a parameter that is not an embedding."""
    last = name.rpartition(".")[2]
    if last in _STATE_SPACE or ("dt_proj" in name and "bias" in last):
        # A parameter stored as a logarithm can be log 1 = 0, which a relative change would not move.
        size = torch.where(initial == 0, torch.ones_like(initial), initial.abs())
        return initial + _STATE_STEP * size * normal
    if initial.dim() < 2 or last.endswith("bias") or _is_scale(initial):
        return initial + _VECTOR_STD * normal
    return _GAIN / math.sqrt(_fan_in(owner, initial)) * normal


def _fan_in(owner: nn.Module, weight: Tensor) -> int:
    if type(owner).__name__ == "Conv1D":  # transformers' own: a linear layer with its weight transposed
        return weight.shape[0]
    if isinstance(owner, nn.modules.conv._ConvNd):
        return weight[0].numel()
    # Stacked experts: the fan-in is one of the last two axes, depending on the type.
    return weight.shape[-1] if weight.dim() == 2 else max(weight.shape[-2:])


def _is_scale(initial: Tensor) -> bool:
    """Return whether all entries are the same nonzero value, as in newly initialised per-head norms."""
    value = initial.flatten()[0]
    return bool(value != 0) and bool((initial == value).all())


def _class_names() -> Mapping[str, str]:
    try:
        from transformers.models.auto import modeling_auto
    except ImportError as error:
        raise UsageError("tiny models need the transformers library: pip install transformers") from error
    names: Mapping[str, str] = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    return names


def _model_class(model_type: str) -> "type[transformers.PreTrainedModel]":
    names = _class_names()
    if model_type in REFUSED:
        raise UsageError(f"{model_type!r} cannot stand alone: {REFUSED[model_type]}")
    if model_type not in names:
        raise UsageError(_why_unknown(model_type))
    import transformers

    model_class: type[transformers.PreTrainedModel] = getattr(transformers, names[model_type])
    if ".deprecated." in model_class.__module__:
        raise UsageError(f"{model_type!r} is deprecated in this transformers, and knows no cache of today's form")
    return model_class


def _why_unknown(model_type: str) -> str:
    from transformers.models.auto import configuration_auto, modeling_auto

    if model_type in modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES:
        return f"{model_type!r} is an encoder-decoder: transformers has no causal-LM class for its decoder alone"
    if model_type in modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES:
        return f"{model_type!r} is an encoder only: it sees all tokens at once and has no cache to audit"
    if model_type in configuration_auto.CONFIG_MAPPING_NAMES:
        return f"{model_type!r} has no causal-LM class in transformers, so it has no cache to audit"
    return f"unknown model type {model_type!r}{_closest(model_type, known_types())}"


def _closest(name: str, names: Iterable[str]) -> str:
    close = difflib.get_close_matches(name.lower(), sorted(names), n=3)
    return "; the closest: " + ", ".join(close) if close else ""


def _language_part(default: "transformers.PreTrainedConfig") -> "transformers.PreTrainedConfig":
    """Return the text configuration of a composite, or any other configuration unchanged."""
    part = getattr(default, "text_config", None)
    return default if part is None else part


def _attributes(default: "transformers.PreTrainedConfig") -> frozenset[str]:
    """Return the names that a configuration class accepts, except aliases of other names."""
    names = {*default.to_dict(), *signature(type(default).__init__).parameters}
    return frozenset(names - set(default.attribute_map))


def _refuse_unknown(overrides: Mapping[str, object], *parts: "transformers.PreTrainedConfig") -> None:
    for name in overrides:
        if not any(part.attribute_map.get(name, name) in _attributes(part) for part in parts):
            hint = _closest(name, _attributes(parts[0]))
            raise UsageError(f"{parts[0].model_type!r} has no configuration attribute {name!r}{hint}")


def _shrunken(default: "transformers.PreTrainedConfig", overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that make a configuration class tiny."""
    known = _attributes(default)
    values = default.to_dict()
    renamed = {default.attribute_map.get(name, name): value for name, value in overrides.items()}
    chosen: dict[str, Any] = {
        **_short_rope(values),
        **SIZES,
        **EXCEPTIONS.get(default.model_type, {}),
        **renamed,
    }
    # Copy the values: configuration classes modify their arguments, and the tables are shared.
    sizes = {name: copy.deepcopy(value) for name, value in chosen.items() if name in known}
    num_layers = next((sizes[name] for name in LAYER_COUNTS if name in sizes), NUM_LAYERS)
    patterns = {**_mixed_patterns(values), **_patterns(default.model_type)}
    for name, pattern in patterns.items():
        if name in known and name not in renamed:
            sizes[name] = list(islice(cycle(pattern), num_layers))
    return sizes


def _patterns(config_type: str) -> Mapping[str, tuple[object, ...]]:
    """Return the patterns of a configuration type, with the kinds named as in the installed release."""
    import transformers

    patterns = PER_LAYER.get(config_type, {})
    if hasattr(transformers, "PreTrainedConfig"):  # since 5.0
        return patterns
    old = OLD_KINDS.get(config_type, {})
    return {name: tuple(old.get(str(kind), kind) for kind in kinds) for name, kinds in patterns.items()}


def _mixed_patterns(values: Mapping[str, Any]) -> dict[str, tuple[object, ...]]:
    """Return each kind of layer once, in the default order; if there is only one, leave it to the class."""
    kinds = {name: tuple(dict.fromkeys(values.get(name) or ())) for name in ("layer_types", "mlp_layer_types")}
    return {name: pattern for name, pattern in kinds.items() if len(pattern) > 1}


def _short_rope(values: Mapping[str, Any]) -> dict[str, object]:
    """Return the rotary settings that scale with a trained length, for a tiny trained length.

    With a trained length in the thousands, only the lowest frequency would be scaled within the context.
    """
    short = {
        "original_max_position_embeddings": ROPE_CONTEXT_LEN,
        "max_position_embeddings": CONTEXT_LEN,
        "factor": ROPE_FACTOR,
    }
    changed: dict[str, object] = {}
    for name in ("rope_parameters", "rope_scaling"):
        rope = values.get(name)
        if isinstance(rope, dict) and "original_max_position_embeddings" in rope:
            changed[name] = {**rope, **{key: value for key, value in short.items() if key in rope}}
    return changed
