"""Tiny models of many types: they build, are alive everywhere and are the same for the same seed."""

import pytest

pytest.importorskip("transformers")

import torch
import transformers

from kvproof.errors import UsageError
from kvproof.subjects._transformers import known_types, tiny_config, tiny_model

TYPES = [
    "bamba",
    "deepseek_v3",
    "falcon",
    "gemma3_text",
    "gpt2",
    "gpt_neox",
    "jamba",
    "llama",
    "mamba",
    "mixtral",
    "opt",
    "phi3",
    "qwen3_next",
]

BEFORE_5 = int(transformers.__version__.partition(".")[0]) < 5

pytestmark = pytest.mark.filterwarnings("default")  # the library's own warnings are not ours to fail on

#: Types with experts: one that no token chose moves nothing.
ROUTED = {"deepseek_v3", "jamba", "mixtral", "qwen3_next"}

each_type = pytest.mark.parametrize("model_type", [name for name in TYPES if name in known_types()])
each_dense_type = pytest.mark.parametrize(
    "model_type", [name for name in TYPES if name in known_types() and name not in ROUTED]
)


def logits(model) -> torch.Tensor:
    ids = torch.randint(3, 101, (1, 12), generator=torch.Generator().manual_seed(5))
    return model(ids).logits[0]


@each_type
def test_a_tiny_model_gives_finite_logits_that_say_something(model_type: str):
    model = tiny_model(model_type, seed=0)
    values = logits(model)
    assert values.shape == (12, 101)
    assert values.isfinite().all()
    assert (values.std(-1) > 0.5).all()  # far from uniform
    assert ((values[1:] - values[:-1]).abs().amax(-1) > 0.5).all()  # and not the same at every token
    assert not model.training
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert not any(parameter.requires_grad for parameter in model.parameters())


@each_type
def test_no_weight_is_constant(model_type: str):
    weights = dict(tiny_model(model_type, seed=0).named_parameters())
    assert [name for name, weight in weights.items() if weight.min() == weight.max()] == []


@each_dense_type
def test_every_weight_moves_the_logits(model_type: str):
    """At the library's own initialisation, whole branches are hidden behind zeros."""
    model = tiny_model(model_type, seed=0)
    model.requires_grad_(True)
    values = logits(model)
    (values * torch.randn(values.shape, generator=torch.Generator().manual_seed(1))).sum().backward()
    gradients = {name: weight.grad for name, weight in model.named_parameters()}
    assert [name for name, gradient in gradients.items() if gradient is None or not gradient.any()] == []


@pytest.mark.parametrize(
    ("model_type", "name", "fan_in"),
    [
        ("llama", "model.layers.0.mlp.down_proj.weight", 48),
        ("gpt2", "transformer.h.0.mlp.c_proj.weight", 48),  # stored transposed
        ("mamba", "backbone.layers.0.mixer.conv1d.weight", 4),  # one channel each
    ],
)
def test_a_matrix_is_scaled_by_its_fan_in(model_type: str, name: str, fan_in: int):
    weight = tiny_model(model_type, seed=0).get_parameter(name)
    assert weight.std().item() == pytest.approx(1.8 / fan_in**0.5, rel=0.1)


def test_a_table_tied_to_the_output_matrix_is_scaled_as_a_table():
    model = tiny_model("gpt2", seed=0)
    assert model.lm_head.weight is model.transformer.wte.weight
    assert model.lm_head.weight.std().item() == pytest.approx(0.5, rel=0.05)


def test_a_recurrence_stays_near_its_initial_values():
    """``A_log`` starts at log 1 … log 8 in each channel; drawn anew, states would explode or vanish."""
    decay = tiny_model("mamba", seed=0).get_parameter("backbone.layers.0.mixer.A_log")
    start = torch.arange(1, 9).log().expand_as(decay)
    moved = (decay - start) / start.clamp_min(0.7)
    assert 0.05 < moved.std().item() < 0.2


def test_a_routing_correction_is_not_zero():
    model = tiny_model("deepseek_v3", seed=0)
    corrections = [buffer for name, buffer in model.named_buffers() if name.endswith("correction_bias")]
    assert corrections
    assert all(buffer.any() for buffer in corrections)


@each_type
def test_the_seed_decides_the_weights(model_type: str):
    first, same, other = (tiny_model(model_type, seed=seed).state_dict() for seed in (3, 3, 4))
    assert all(torch.equal(first[name], same[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first if "weight" in name)


def test_the_global_generator_is_left_alone():
    before = torch.get_rng_state()
    tiny_model("llama", seed=9)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_library_logs_as_much_as_before():
    from transformers.utils import logging

    before = logging.get_verbosity()
    tiny_config("gpt_oss")
    assert logging.get_verbosity() == before


def test_every_kind_of_layer_is_present():
    assert set(tiny_config("gemma3_text").layer_types) == {"sliding_attention", "full_attention"}
    assert set(tiny_config("qwen3_next").layer_types) == {"linear_attention", "full_attention"}
    assert set(tiny_config("qwen2").layer_types) == {"sliding_attention", "full_attention"}


def test_scaled_rotary_positions_scale_within_the_tiny_context():
    config = tiny_config("gpt_oss")
    rope = config.rope_scaling if BEFORE_5 else config.rope_parameters
    assert (rope["rope_type"], rope["original_max_position_embeddings"], rope["factor"]) == ("yarn", 64, 2.0)


def test_overrides_take_usual_names_and_reach_every_layer():
    config = tiny_config("gpt2", {"num_hidden_layers": 2})
    assert config.n_layer == 2
    config = tiny_config("gemma3_text", {"num_hidden_layers": 3, "sliding_window": 5})
    assert config.layer_types == ["sliding_attention", "full_attention", "sliding_attention"]
    assert config.sliding_window == 5


def test_overrides_reach_the_language_part_of_a_composite():
    config = tiny_config("gemma3", {"num_hidden_layers": 2})
    assert config.get_text_config().num_hidden_layers == 2
    assert config.vision_config.num_hidden_layers == 1


def test_making_a_configuration_leaves_the_tables_alone():
    model_type = "gemma3n_text" if BEFORE_5 else "cohere_compass_text"  # what is given holds a list, or a mapping
    first = tiny_config(model_type).to_dict()
    assert tiny_config(model_type).to_dict() == first


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_the_attention_implementation_is_the_one_asked_for(attention: str):
    model = tiny_model("llama", seed=0, attention=attention)
    assert model.config._attn_implementation == attention


def test_known_types_are_sorted_and_many():
    types = known_types()
    assert list(types) == sorted(set(types))
    assert {"llama", "gpt2", "mamba"} <= set(types)


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("lama", "unknown model type 'lama'; the closest: llama"),
        ("Qwen2", "unknown model type 'Qwen2'; the closest: qwen2"),
        ("qqqqqqqq", "unknown model type 'qqqqqqqq'$"),
        ("distilbert", "'distilbert' is an encoder only: it sees all tokens at once"),
        ("t5", "'t5' is an encoder-decoder"),
        ("vit", "'vit' has no causal-LM class"),
        pytest.param(
            "gemma4_assistant",
            "cannot stand alone: it drafts for another model",
            marks=pytest.mark.skipif("gemma4_assistant" not in known_types(), reason="came after 5.0"),
        ),
        pytest.param(
            "transfo-xl",
            "'transfo-xl' is deprecated in this transformers",
            marks=pytest.mark.skipif(not BEFORE_5, reason="5.0 dropped what was deprecated"),
        ),
    ],
)
def test_a_type_without_a_causal_decoder_is_refused_with_the_reason(model_type: str, reason: str):
    with pytest.raises(UsageError, match=reason):
        tiny_model(model_type, seed=0)


def test_an_override_that_the_type_does_not_know_is_refused_with_the_closest_name():
    with pytest.raises(UsageError, match=r"'llama' has no configuration attribute 'hidden_sise'; .*hidden_size"):
        tiny_config("llama", {"hidden_sise": 32})


def test_an_override_that_the_library_refuses_is_the_callers_error():
    with pytest.raises(UsageError, match="refuses the tiny configuration of 'gemma3_text'") as caught:
        tiny_config("gemma3_text", {"layer_types": ["nonsense"] * 4})
    assert caught.value.__cause__ is not None


def test_an_attention_implementation_that_is_not_there_is_the_callers_error():
    with pytest.raises(UsageError, match="cannot build a tiny 'llama' with attention 'nonsense'"):
        tiny_model("llama", seed=0, attention="nonsense")
