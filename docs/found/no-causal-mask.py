"""As decoders these types see the tokens that come later: there is no causal mask.

Types: big_bird, rembert, megatron-bert, roformer. Exit 1 if the fault shows.
"""

import torch
from transformers import AutoConfig, AutoModelForCausalLM

SIZES = {"vocab_size": 101, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
MORE = {"intermediate_size": 48, "max_position_embeddings": 64, "is_decoder": True}
OWN = {
    "big_bird": {"attention_type": "original_full"},
    "rembert": {"input_embedding_size": 32, "output_embedding_size": 64},
    "megatron-bert": {},
    "roformer": {"embedding_size": 64},
}


def relative_gap(model_type: str) -> float:
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **SIZES, **MORE, **OWN[model_type])
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64, attn_implementation="eager").eval()
    for weight in model.parameters():
        if weight.dim() == 2:
            torch.nn.init.normal_(weight, std=1.8 / weight.shape[-1] ** 0.5)
    ids = torch.randint(3, 101, (1, 12))
    with torch.no_grad():
        longer = model(ids, use_cache=False).logits[:, :6]
        shorter = model(ids[:, :6], use_cache=False).logits
    return float((longer - shorter).abs().max() / shorter.abs().max())


gaps = {model_type: relative_gap(model_type) for model_type in OWN}
print("; ".join(f"{name}: relative gap {gap:.1e}" for name, gap in gaps.items()) + "; expected below 1e-5")
raise SystemExit(max(gaps.values()) > 1e-5)
