"""crop() of deepseek_v4 takes back keys and values, and leaves the compressed entries of the tokens taken back.

Exit 1 if the fault shows: the cache says it can be cropped, and the next logits are others.
"""

import torch
from transformers import AutoConfig, AutoModelForCausalLM

config = AutoConfig.for_model(
    "deepseek_v4",
    vocab_size=101,
    hidden_size=64,
    intermediate_size=48,
    num_hidden_layers=2,
    layer_types=["sliding_attention", "heavily_compressed_attention"],
    mlp_layer_types=["moe", "moe"],
    num_attention_heads=4,
    head_dim=16,
    moe_intermediate_size=24,
    n_routed_experts=4,
    num_experts_per_tok=2,
    q_lora_rank=24,
    o_lora_rank=16,
    o_groups=2,
    compress_rates={"compressed_sparse_attention": 4, "heavily_compressed_attention": 4},
)
torch.manual_seed(0)
model = AutoModelForCausalLM.from_config(config, dtype=torch.float64, attn_implementation="eager").eval()
model.set_experts_implementation("eager")
for weight in model.parameters():
    if weight.dim() > 1:
        torch.nn.init.normal_(weight, std=1.8 / weight.shape[-1] ** 0.5)
ids, token = torch.randint(3, 101, (1, 18)), torch.tensor([[7]])
with torch.no_grad():
    expected = model(torch.cat([ids[:, :10], token], dim=1), use_cache=False).logits[:, -1]
    cache = model(ids, use_cache=True).past_key_values
    croppable = cache.is_croppable
    cache.crop(-8)
    actual = model(token, past_key_values=cache, use_cache=True, position_ids=torch.tensor([[10]])).logits[:, -1]
gap = float((actual - expected).abs().max() / expected.abs().max())
print(f"deepseek_v4: is_croppable {croppable}, relative gap {gap:.1e} after crop(-8), expected below 1e-4")
raise SystemExit(croppable and gap > 1e-4)
