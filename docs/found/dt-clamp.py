"""The scan clamps dt from below at time_step_min, the single step does not.

Types: zamba2, nemotron_h. Exit 1 if the fault shows.
"""

import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

STATE = {"mamba_d_state": 8, "ssm_state_size": 8, "n_mamba_heads": 8, "mamba_num_heads": 8, "chunk_size": 8}
WIDTH = {"hidden_size": 64, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 4}
SIZES = {"vocab_size": 101, "num_hidden_layers": 2, "use_mamba_kernels": False, **WIDTH, **STATE}
EXTRA = {
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"], "hybrid_layer_ids": [1], "adapter_rank": 8}
    | {"mamba_ngroups": 2, "mamba_headdim": 16, "attention_head_dim": 32, "num_mem_blocks": 1},
    "nemotron_h": {"hybrid_override_pattern": "M*", "layers_block_type": ["linear_attention", "full_attention"]}
    | {"n_groups": 2, "mamba_head_dim": 16, "head_dim": 16},
}


def relative_gap(model_type: str) -> float:
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **SIZES, **EXTRA[model_type])
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval()
    for weight in model.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=1.8 / weight.shape[-1] ** 0.5)
    ids = torch.randint(3, 101, (1, 12))
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        cache = DynamicCache(config=config)
        rows = [model(ids[:, i : i + 1], past_key_values=cache, use_cache=True).logits for i in range(12)]
    actual = torch.cat(rows, dim=1)
    return float((actual - expected).abs().max() / expected.abs().max())


gaps = {model_type: relative_gap(model_type) for model_type in EXTRA}
print("; ".join(f"{name}: relative gap {gap:.1e}" for name, gap in gaps.items()) + "; expected below 1e-5")
raise SystemExit(max(gaps.values()) > 1e-5)
