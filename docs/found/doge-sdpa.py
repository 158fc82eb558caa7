"""With sdpa, the default, doge sees the tokens that come later: its dynamic mask replaces the causal one.

Exit 1 if the fault shows.
"""

import torch
from transformers import AutoConfig, AutoModelForCausalLM

SIZES = {"vocab_size": 101, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}


def relative_gap(attention: str) -> float:
    torch.manual_seed(0)
    config = AutoConfig.for_model("doge", **SIZES, **HEADS)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64, attn_implementation=attention).eval()
    for weight in model.parameters():
        if weight.dim() == 2:
            torch.nn.init.normal_(weight, std=1.8 / weight.shape[-1] ** 0.5)
    ids = torch.randint(3, 101, (1, 12))
    with torch.no_grad():
        longer = model(ids, use_cache=False).logits[:, :6]
        shorter = model(ids[:, :6], use_cache=False).logits
    return float((longer - shorter).abs().max() / shorter.abs().max())


gaps = {attention: relative_gap(attention) for attention in ("sdpa", "eager")}
print("; ".join(f"{name}: relative gap {gap:.1e}" for name, gap in gaps.items()) + "; expected below 1e-5")
raise SystemExit(max(gaps.values()) > 1e-5)
