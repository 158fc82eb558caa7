"""The cache of moshi keeps a sliding window that its masks do not know: past it, steps see less than one pass.

Exit 1 if the fault shows.
"""

import torch
from transformers import AutoConfig, AutoModelForCausalLM

torch.manual_seed(0)
config = AutoConfig.for_model(
    "moshi",
    vocab_size=101,
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
    head_dim=16,
    ffn_dim=48,
    max_position_embeddings=64,
    sliding_window=4,  # 3000 by default
)
model = AutoModelForCausalLM.from_config(config, dtype=torch.float64, attn_implementation="sdpa").eval()
for weight in model.parameters():
    if weight.dim() > 1:
        torch.nn.init.normal_(weight, std=1.8 / weight.shape[-1] ** 0.5)
ids = torch.randint(3, 101, (1, 8))
mask, cache, rows = torch.ones_like(ids), None, []
with torch.no_grad():
    expected = model(ids, attention_mask=mask, use_cache=False).logits[0]
    for i in range(8):
        out = model(ids[:, i : i + 1], attention_mask=mask[:, : i + 1], past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        rows.append(out.logits[0, -1])
row_gaps = (torch.stack(rows) - expected).abs().amax(-1) / expected.abs().max()
within, beyond = float(row_gaps[:4].max()), float(row_gaps[4:].max())
print(f"moshi: relative gap {within:.1e} within the window, {beyond:.1e} beyond it; expected below 1e-5")
raise SystemExit(max(within, beyond) > 1e-5)
