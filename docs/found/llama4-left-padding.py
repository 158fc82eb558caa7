"""The attention temperature of llama4 counts slots of the cache, padding included, rather than positions.

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
    attention_chunk_size=64,
    floor_scale=4,  # 8192 by default: the step of the temperature
    pad_token_id=0,
)
model = AutoModelForCausalLM.from_config(config, dtype=torch.float64, attn_implementation="eager").eval()
for weight in model.parameters():
    if weight.dim() > 1:
        torch.nn.init.normal_(weight, std=1.8 / weight.shape[-1] ** 0.5)
ids = torch.randint(3, 101, (1, 7))
padded = torch.cat([torch.zeros(1, 3, dtype=torch.long), ids], dim=1)
mask = (padded != 0).long()
gaps = {}
with torch.no_grad():
    expected = model(ids, use_cache=False).logits
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    actual = model(padded, attention_mask=mask, position_ids=positions, use_cache=False).logits[:, 3:]
gap = float((actual - expected).abs().max() / expected.abs().max())
print(f"llama4_text: relative gap {gap:.1e} with three slots of left padding; expected below 1e-5")
raise SystemExit(gap > 1e-5)
