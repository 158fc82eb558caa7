"""Inputs of a model's forward that an audit does not give are named in the report's notes."""

import inspect
from typing import Any

import pytest
import torch

from kvproof import audit
from kvproof.scenarios import token_by_token
from kvproof.subjects._transformers import random_model
from kvproof.subjects._transformers.inputs import unchecked_inputs


def token_types(input_ids: Any, attention_mask: Any, token_type_ids: Any, past_key_values: Any) -> None:
    """Take token types."""


def images(input_ids: Any, pixel_values: Any, image_sizes: Any, output_attentions: Any, **kwargs: Any) -> None:
    """Take images."""


def plain(input_ids: Any, position_ids: Any, inputs_embeds: Any, use_cache: Any, return_dict: Any) -> None:
    """Take tokens alone."""


def recurrent(input_ids: Any, state: Any, cache_params: Any, *args: Any, **kwargs: Any) -> None:
    """Take tokens and a state."""


@pytest.mark.parametrize(
    ("forward", "names"),
    [
        (token_types, ["token_type_ids"]),
        (images, ["pixel_values", "image_sizes"]),
        (plain, []),
        (recurrent, []),
    ],
)
def test_an_input_that_can_change_the_logits_and_is_not_given_is_named(forward: Any, names: list[str]):
    assert list(unchecked_inputs(inspect.signature(forward).parameters)) == names


@pytest.mark.parametrize(
    ("model_type", "names"), [("codegen", "token_type_ids"), ("llama", None), ("mamba", None)]
)
def test_the_report_names_what_was_not_given(model_type: str, names: str | None):
    subject = random_model(model_type, seed=0, dtype=torch.float32, attention="eager")
    report = audit(subject, [token_by_token((1, 2, 3))], certificate=False, all_values=False)
    told = [note.rpartition(": ")[2] for note in report.notes if note.startswith("not checked: inputs")]
    assert told == ([] if names is None else [names])
