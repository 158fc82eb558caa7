"""A block of tokens on a warm cache: recurrent_gemma starts its convolution again; single steps do not.

Exit 1 if the fault shows.
"""

import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

SIZES = {"vocab_size": 101, "hidden_size": 64, "intermediate_size": 48, "num_attention_heads": 4, "head_dim": 16}
TYPE = {"block_types": ["recurrent", "attention"], "num_hidden_layers": 2, "lru_width": 64}
torch.manual_seed(0)
config = AutoConfig.for_model("recurrent_gemma", **SIZES, **TYPE)
model = AutoModelForCausalLM.from_config(config, dtype=torch.float64, attn_implementation="eager").eval()
for weight in model.parameters():
    if weight.dim() > 1:
        torch.nn.init.normal_(weight, std=1.8 / weight.shape[-1] ** 0.5)
ids = torch.randint(3, 101, (1, 12))
gaps = {}
with torch.no_grad():
    for block in (1, 2):
        expected = model(ids, use_cache=False).logits[:, 6:]
        cache, rows = DynamicCache(config=config), []
        model(ids[:, :6], past_key_values=cache, use_cache=True)
        for start in range(6, 12, block):
            positions = torch.arange(start, start + block)[None]
            tokens = ids[:, start : start + block]
            rows.append(model(tokens, position_ids=positions, past_key_values=cache, use_cache=True).logits)
        actual = torch.cat(rows, dim=1)
        gaps[block] = float((actual - expected).abs().max() / expected.abs().max())
print(
    "; ".join(f"blocks of {block}: {gap:.1e}" for block, gap in gaps.items()) + "; relative gaps, expected 1e-4"
)
raise SystemExit(max(gaps.values()) > 1e-4)
