"""reset() of a dynamic cache zeroes keys and values and keeps its length: the next tokens attend to the zeroes.

Every type with a DynamicCache; llama here. Exit 1 if the fault shows.
"""

import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

SIZES = {"vocab_size": 101, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2}
torch.manual_seed(0)
config = AutoConfig.for_model("llama", **SIZES, num_attention_heads=4, num_key_value_heads=2)
model = AutoModelForCausalLM.from_config(config, dtype=torch.float64, attn_implementation="eager").eval()
for weight in model.parameters():
    if weight.dim() > 1:
        torch.nn.init.normal_(weight, std=1.8 / weight.shape[-1] ** 0.5)
ids = torch.randint(3, 101, (1, 12))
with torch.no_grad():
    expected = model(ids, use_cache=False).logits
    cache = DynamicCache(config=config)
    model(ids[:, :5], past_key_values=cache, use_cache=True)
    cache.reset()
    length = cache.get_seq_length()
    actual = model(ids, past_key_values=cache, use_cache=True).logits
gap = float((actual - expected).abs().max() / expected.abs().max())
print(f"llama: length {length} after reset(), expected 0; relative gap {gap:.1e}, expected below 1e-5")
raise SystemExit(length != 0 or gap > 1e-5)
