"""Left padding enters what no mask reaches: compressed entries, blocks of slots, a convolution.

Types: deepseek_v4, minimax_m3_vl_text, recurrent_gemma. Exit 1 if the fault shows.
"""

import torch
from transformers import AutoConfig, AutoModelForCausalLM

SIZES = {"vocab_size": 101, "hidden_size": 64, "intermediate_size": 48, "num_attention_heads": 4, "head_dim": 16}
TYPES = {
    "deepseek_v4": {"layer_types": ["sliding_attention", "heavily_compressed_attention"], "num_hidden_layers": 2}
    | {"mlp_layer_types": ["moe", "moe"], "moe_intermediate_size": 24, "n_routed_experts": 4}
    | {"num_experts_per_tok": 2, "q_lora_rank": 24, "o_lora_rank": 16, "o_groups": 2}
    | {"compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 4}},
    "minimax_m3_vl_text": {"layer_types": ["full_attention", "minimax_m3_sparse"], "num_hidden_layers": 2}
    | {"mlp_layer_types": ["sparse"] * 2, "num_key_value_heads": 2, "num_local_experts": 4, "index_n_heads": 2}
    | {"index_head_dim": 16, "index_block_size": 4, "index_topk_blocks": 2, "rotary_dim": 8},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"], "num_hidden_layers": 2, "lru_width": 64},
}


def relative_gap(model_type: str) -> float:
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **SIZES, **TYPES[model_type], pad_token_id=0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    if model_type != "recurrent_gemma":
        model.set_experts_implementation("eager")
    for weight in model.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=1.8 / weight.shape[-1] ** 0.5)
    ids = torch.randint(3, 101, (1, 12))
    padded = torch.cat([torch.full((1, 3), 5), ids], dim=1)
    mask = torch.tensor([[0] * 3 + [1] * 12])
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        actual = model(padded, attention_mask=mask, position_ids=positions, use_cache=False).logits[:, 3:]
    return float((actual - expected).abs().max() / expected.abs().max())


gaps = {model_type: relative_gap(model_type) for model_type in TYPES}
print("; ".join(f"{name}: relative gap {gap:.1e}" for name, gap in gaps.items()) + "; expected below 1e-4")
raise SystemExit(max(gaps.values()) > 1e-4)
