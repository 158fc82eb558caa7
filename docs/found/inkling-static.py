"""inkling with a static cache: the query's offset is a live tensor, read once the new tokens are counted.

Exit 1 if the fault shows.
"""

import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, StaticCache

SIZES = {"vocab_size": 101, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "d_rel": 4, "rel_extent": 16}
WINDOW = {
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 16,
    "sliding_window_size": 16,
}
EXPERTS = {"moe_intermediate_size": 24, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1}
LAYERS = {"layer_types": ["hybrid_sliding", "hybrid"], "mlp_layer_types": ["sparse"] * 2, "local_layer_ids": [0]}
torch.manual_seed(0)
config = AutoConfig.for_model("inkling_text", **SIZES, **HEADS, **WINDOW, **EXPERTS, **LAYERS)
model = AutoModelForCausalLM.from_config(config, dtype=torch.float64, attn_implementation="eager").eval()
model.set_experts_implementation("eager")
for weight in model.parameters():
    if weight.dim() > 1:
        torch.nn.init.normal_(weight, std=1.8 / weight.shape[-1] ** 0.5)
ids = torch.randint(3, 101, (1, 12))
gaps = {}
with torch.no_grad():
    expected = model(ids, use_cache=False).logits[:, 8:]
    for name, cache in (
        ("static", StaticCache(config=config, max_cache_len=32)),
        ("dynamic", DynamicCache(config=config)),
    ):
        model(ids[:, :8], past_key_values=cache, use_cache=True)
        actual = model(ids[:, 8:], past_key_values=cache, use_cache=True).logits
        gaps[name] = float((actual - expected).abs().max() / expected.abs().max())
print("; ".join(f"{name} cache: relative gap {gap:.1e}" for name, gap in gaps.items()) + "; expected below 1e-4")
raise SystemExit(max(gaps.values()) > 1e-4)
