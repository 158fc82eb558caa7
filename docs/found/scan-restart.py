"""A block of two or more tokens on a warm cache restarts the scan from zero; single steps do not.

Types: mamba, falcon_mamba, jamba, zamba. Exit 1 if the fault shows.
"""

import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

STATE = {"state_size": 8, "time_step_rank": 8, "mamba_d_state": 8, "mamba_dt_rank": 8, "n_mamba_heads": 2}
WIDTH = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 4}
SIZES = {"vocab_size": 101, "num_hidden_layers": 4, **WIDTH, **STATE}
EXTRA = {
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 1, "use_mamba_kernels": False},
    "zamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False}
    | {"layers_block_type": ["linear_attention", "hybrid"] * 2, "attention_head_dim": 32},
}
CACHE = {"mamba": "cache_params", "falcon_mamba": "cache_params"}


def relative_gap(model_type: str) -> float:
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **SIZES, **EXTRA.get(model_type, {}))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval()
    for name, weight in model.named_parameters():
        if weight.dim() > 1 and "A_log" not in name:
            torch.nn.init.normal_(weight, std=1.8 / weight.shape[-1] ** 0.5)
    ids = torch.randint(3, 101, (1, 12))
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits[:, 6:]
        cache = DynamicCache(config=config)
        name = CACHE.get(model_type, "past_key_values")
        model(ids[:, :6], use_cache=True, **{name: cache})
        actual = model(ids[:, 6:], use_cache=True, **{name: cache}).logits
    return float((actual - expected).abs().max() / expected.abs().max())


gaps = {model_type: relative_gap(model_type) for model_type in ("mamba", "falcon_mamba", "jamba", "zamba")}
print("; ".join(f"{name}: relative gap {gap:.1e}" for name, gap in gaps.items()) + "; expected below 1e-5")
raise SystemExit(max(gaps.values()) > 1e-5)
