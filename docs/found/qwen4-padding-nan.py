"""Left padding gives NaN: two masks of the lowest number are added to minus infinity, and NaN times 0 is NaN.

Eager attention of qwen4_exp_text. Exit 1 if the fault shows.
"""

import torch
from transformers import AutoConfig, AutoModelForCausalLM

SIZES = {"vocab_size": 101, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 3}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "linear_num_key_heads": 2}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "hc_count": 2}
MORE = {"linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16}
INDEXER = {"indexer_n_heads": 16, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 8}
OWN = {"hc_lowrank": 8, "ple_layer_ids": [1], "ple_embed_dim": 32, "ngram_vocab_size_base": 50}
LAST = {"heads_per_ngram": 2, "split_ngram_parts": 1, "make_ngram_vocab_size_divisible_by": 8}
REST = {"shared_expert_intermediate_size": 24, "indexer_compress_ratio": 4}
TYPES = ["linear_attention", "qwen_sparse_attention", "linear_attention"]


def outcome(attention: str) -> str:
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "qwen4_exp_text",
        layer_types=TYPES,
        output_gate_type="sigmoid",
        eos_token_id=2,
        pad_token_id=0,
        **{**SIZES, **HEADS, **EXPERTS, **MORE, **INDEXER, **OWN, **LAST, **REST},
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=attention).eval()
    ids = torch.randint(3, 101, (1, 12))
    padded = torch.cat([torch.zeros(1, 3, dtype=torch.long), ids], dim=1)
    mask = torch.tensor([[0] * 3 + [1] * 12])
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        actual = model(padded, attention_mask=mask, position_ids=positions, use_cache=False).logits[:, 3:]
    return f"relative gap {float((actual - expected).abs().max() / expected.abs().max()):.1e}"


outcomes = {attention: outcome(attention) for attention in ("eager", "sdpa")}
print("; ".join(f"{name}: {text}" for name, text in outcomes.items()) + "; expected below 1e-5")
raise SystemExit(any("nan" in text for text in outcomes.values()))
