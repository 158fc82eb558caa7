"""A batch of two, stepped by one token: the shifted state has no time axis and is broadcast over the batch.

Exit 1 if the fault shows.
"""

import torch
from transformers import AutoConfig, AutoModelForCausalLM

torch.manual_seed(0)
config = AutoConfig.for_model("rwkv", vocab_size=101, hidden_size=64, num_hidden_layers=2, context_length=64)
model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
for weight in model.parameters():
    if weight.dim() == 2:
        torch.nn.init.normal_(weight, std=1.8 / weight.shape[-1] ** 0.5)
ids = torch.randint(3, 101, (2, 8))
with torch.no_grad():
    expected = model(ids, use_cache=True).logits[:, -1]
    state = model(ids[:, :7], use_cache=True).state
    actual = model(ids[:, 7:], state=state, use_cache=True).logits
gap = float((actual[:, -1] - expected).abs().max() / expected.abs().max())
print(f"rwkv: logits of shape {tuple(actual.shape)}, relative gap {gap:.1e}; expected (2, 1, 101), below 1e-4")
raise SystemExit(actual.shape != (2, 1, 101) or gap > 1e-4)
