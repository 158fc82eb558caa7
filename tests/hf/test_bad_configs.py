"""Configurations that no model can be built from: the member and its value are named."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.cli.running import run

BASE = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 128,
}


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"hidden_act": "nonsense"}, "hidden_act='nonsense'"),
        ({"num_attention_heads": 0}, "num_attention_heads=0"),
        ({"num_key_value_heads": 0}, "num_key_value_heads=0"),
        ({"hidden_size": 0}, "hidden_size=0"),
        ({"head_dim": 0}, "head_dim=0"),
        ({"vocab_size": 0}, "vocab_size=0"),
        ({"intermediate_size": -5}, "intermediate_size=-5"),
        ({"vocab_size": 10**15}, "vocab_size=1000000000000000"),
        ({"hidden_size": "32"}, "'hidden_size'"),
        ({"rope_scaling": {"rope_type": "nonsense"}}, "rope_type='nonsense'"),
    ],
    ids=str,
)
def test_a_configuration_that_cannot_be_built_is_refused_by_its_member(
    changed: dict[str, Any], named: str, tmp_path: Path
):
    """A bare KeyError or ZeroDivisionError was all that was said."""
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**BASE, **changed}), "utf-8")
    outcome = run("audit", "--config", file, "--length", 8, "--scenario", "token-by-token")
    assert outcome.refused(file, named), outcome


def test_the_configuration_without_a_change_is_built(tmp_path: Path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(BASE), "utf-8")
    short = ("--length", 8, "--scenario", "token-by-token", "--no-certificate", "--quiet")
    assert run("audit", "--config", file, *short).status == 0
