"""Inputs of a model's forward that an audit does not give: images, audio, token types, an encoder's states."""

import inspect
from collections.abc import Iterator, Mapping
from typing import Final

from kvproof.subjects._transformers.states import CACHE_ARGUMENTS, RETURNED

#: What an audit gives, or gives in another form, and what cannot change the logits that it compares.
_GIVEN_OR_IDLE: Final = frozenset(
    {
        "self",
        "input_ids",
        "inputs_embeds",
        "attention_mask",
        "position_ids",
        "cache_position",
        *CACHE_ARGUMENTS,
        *RETURNED,
        "use_cache",
        "use_mems",
        "labels",
        "logits_to_keep",
        "num_logits_to_keep",
    }
)
#: The starts of names that choose only what else is returned.
_RETURNS: Final = ("output_", "return_")


def unchecked_inputs(parameters: Mapping[str, inspect.Parameter]) -> Iterator[str]:
    """Yield the names of a forward's arguments that can change its logits and that an audit leaves out."""
    for name, parameter in parameters.items():
        is_named = parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
        if is_named and name not in _GIVEN_OR_IDLE and not name.startswith(_RETURNS):
            yield name
