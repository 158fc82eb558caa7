"""bloom with a static cache: the position bias is as long as the mask, not as the buffer, and the call raises.

generate() gets through: it passes a mask as long as the buffer. Exit 1 if the fault shows.
"""

import torch
from transformers import AutoConfig, AutoModelForCausalLM, StaticCache

torch.manual_seed(0)
config = AutoConfig.for_model("bloom", vocab_size=101, hidden_size=64, n_layer=2, n_head=4)
model = AutoModelForCausalLM.from_config(config, dtype=torch.float64, attn_implementation="eager").eval()
for weight in model.parameters():
    if weight.dim() > 1:
        torch.nn.init.normal_(weight, std=1.8 / weight.shape[-1] ** 0.5)
ids = torch.randint(3, 101, (1, 12))
masks = {
    "no mask": (None, None),
    "mask of the tokens so far": (torch.ones(1, 8), torch.ones(1, 12)),
    "mask of the buffer's length": ((torch.arange(16)[None] < 8).long(), (torch.arange(16)[None] < 12).long()),
}
outcomes = {}
with torch.no_grad():
    expected = model(ids, use_cache=False).logits[:, 8:]
    for name, (first, second) in masks.items():
        cache = StaticCache(config=config, max_cache_len=16)
        try:
            model(ids[:, :8], attention_mask=first, past_key_values=cache, use_cache=True)
            actual = model(ids[:, 8:], attention_mask=second, past_key_values=cache, use_cache=True).logits
            outcomes[name] = f"{float((actual - expected).abs().max() / expected.abs().max()):.1e}"
        except RuntimeError:
            outcomes[name] = "raises RuntimeError"
print("; ".join(f"{name}: {outcome}" for name, outcome in outcomes.items()) + "; relative gaps, expected 1e-5")
raise SystemExit(any(outcome.startswith("raises") for outcome in outcomes.values()))
