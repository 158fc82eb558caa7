"""With a static cache, the local layers of gpt_neo place their window by the buffer's length.

Exit 1 if the fault shows.
"""

import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, StaticCache

torch.manual_seed(0)
config = AutoConfig.for_model(
    "gpt_neo",
    vocab_size=101,
    hidden_size=64,
    num_layers=2,
    num_heads=4,
    intermediate_size=48,
    attention_types=[[["global", "local"], 1]],
    window_size=4,
    max_position_embeddings=64,
)
model = AutoModelForCausalLM.from_config(config, dtype=torch.float64, attn_implementation="eager").eval()
for weight in model.parameters():
    if weight.dim() == 2:
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
print("; ".join(f"{name} cache: relative gap {gap:.1e}" for name, gap in gaps.items()) + "; expected below 1e-5")
raise SystemExit(max(gaps.values()) > 1e-5)
