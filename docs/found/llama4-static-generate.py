"""generate() with a static cache on a model with chunked attention: the mask function does not know an argument.

Exit 1 if the fault shows.
"""

import torch
from transformers import AutoConfig, AutoModelForCausalLM

torch.manual_seed(0)
config = AutoConfig.for_model(
    "llama4_text",
    vocab_size=101,
    hidden_size=64,
    intermediate_size=48,
    intermediate_size_mlp=48,
    num_hidden_layers=2,
    no_rope_layers=[1, 0],
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    num_local_experts=2,
    attention_chunk_size=8,
    eos_token_id=None,
    bos_token_id=1,
    pad_token_id=0,
)
model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
ids = torch.randint(3, 101, (1, 6))
settings = {"max_new_tokens": 4, "do_sample": False, "disable_compile": True}
expected = model.generate(ids, **settings)
try:
    actual = model.generate(ids, cache_implementation="static", **settings)
    outcome = "same tokens" if torch.equal(actual, expected) else "other tokens"
except Exception as error:
    outcome = f"raises {type(error).__name__}: {str(error).splitlines()[0]}"
print(f"llama4_text: {outcome}; expected the same tokens as with a dynamic cache")
raise SystemExit(outcome != "same tokens")
