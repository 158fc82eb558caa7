"""reorder_cache() moves keys and values, and leaves behind what a type keeps besides them.

Types: minimax (linear attention's state), deepseek_v4 (compressed entries). Exit 1 if the fault shows.
"""

import torch
from transformers import AutoConfig, AutoModelForCausalLM

SIZES = {"vocab_size": 101, "hidden_size": 64, "intermediate_size": 48, "num_attention_heads": 4, "head_dim": 16}
TYPES = {
    "minimax": {"layer_types": ["linear_attention", "full_attention"], "num_hidden_layers": 2}
    | {"num_key_value_heads": 2, "num_local_experts": 2, "block_size": 8},
    "deepseek_v4": {"layer_types": ["sliding_attention", "heavily_compressed_attention"], "num_hidden_layers": 2}
    | {"mlp_layer_types": ["moe", "moe"], "moe_intermediate_size": 24, "n_routed_experts": 4}
    | {"num_experts_per_tok": 2, "q_lora_rank": 24, "o_lora_rank": 16, "o_groups": 2, "sliding_window": 8}
    | {"compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 4}},
}


def relative_gap(model_type: str) -> float:
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **SIZES, **TYPES[model_type])
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64, attn_implementation="eager").eval()
    model.set_experts_implementation("eager")
    for weight in model.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=1.8 / weight.shape[-1] ** 0.5)
    ids, token = torch.randint(3, 101, (2, 18)), torch.tensor([[7], [7]])
    swapped = torch.tensor([1, 0])
    with torch.no_grad():
        expected = model(torch.cat([ids[swapped], token], dim=1), use_cache=False).logits[:, -1]
        cache = model(ids, use_cache=True).past_key_values
        cache.reorder_cache(swapped)
        positions = torch.tensor([[18]])
        actual = model(token, past_key_values=cache, use_cache=True, position_ids=positions).logits[:, -1]
    return float((actual - expected).abs().max() / expected.abs().max())


gaps = {model_type: relative_gap(model_type) for model_type in TYPES}
print("; ".join(f"{name}: relative gap {gap:.1e}" for name, gap in gaps.items()) + "; expected below 1e-4")
raise SystemExit(max(gaps.values()) > 1e-4)
