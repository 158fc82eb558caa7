"""A caller who leaves positions out: bamba counts each new block from 0, whatever the cache holds.

Exit 1 if the fault shows.
"""

import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

torch.manual_seed(0)
config = AutoConfig.for_model(
    "bamba",
    vocab_size=101,
    hidden_size=64,
    intermediate_size=48,
    num_hidden_layers=2,
    attn_layer_indices=[1],
    num_attention_heads=4,
    num_key_value_heads=2,
    mamba_n_heads=8,
    mamba_d_head=16,
    mamba_d_state=8,
    mamba_n_groups=2,
    mamba_chunk_size=8,
)
model = AutoModelForCausalLM.from_config(config, dtype=torch.float64, attn_implementation="eager").eval()
for weight in model.parameters():
    if weight.dim() > 1:
        torch.nn.init.normal_(weight, std=1.8 / weight.shape[-1] ** 0.5)
ids = torch.randint(3, 101, (1, 12))
gaps = {}
with torch.no_grad():
    expected = model(ids, use_cache=False).logits[:, -1]
    for name, positions in (("left out", None), ("given", torch.tensor([[11]]))):
        cache = DynamicCache(config=config)
        model(ids[:, :11], past_key_values=cache, use_cache=True)
        actual = model(ids[:, 11:], past_key_values=cache, position_ids=positions, use_cache=True).logits[:, -1]
        gaps[name] = float((actual - expected).abs().max() / expected.abs().max())
print(
    "; ".join(f"positions {name}: {gap:.1e}" for name, gap in gaps.items())
    + "; relative gaps, expected below 1e-5"
)
raise SystemExit(max(gaps.values()) > 1e-5)
