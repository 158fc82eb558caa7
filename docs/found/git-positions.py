"""A single step of git adds the cache length to positions that already count it, and fails where there are none.

Exit 1 if the fault shows.
"""

import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

SIZES = {"vocab_size": 101, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2}
VISION = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
config = AutoConfig.for_model(
    "git",
    vision_config={**VISION, "image_size": 28, "patch_size": 14},
    **SIZES,
    num_attention_heads=4,
    max_position_embeddings=64,
    bos_token_id=1,
    eos_token_id=None,
    pad_token_id=0,
)
torch.manual_seed(0)
model = AutoModelForCausalLM.from_config(config, dtype=torch.float64, attn_implementation="eager").eval()
for weight in model.parameters():
    if weight.dim() > 1:
        torch.nn.init.normal_(weight, std=1.8 / weight.shape[-1] ** 0.5)
ids = torch.randint(3, 101, (1, 12))
outcomes = {}
with torch.no_grad():
    expected = model(ids, use_cache=False).logits[:, -1]
    for name, positions in (("given", torch.tensor([[11]])), ("left out", None)):
        cache = DynamicCache(config=config)
        try:
            given = {"attention_mask": torch.ones_like(ids), "past_key_values": cache, "use_cache": True}
            model(ids[:, :11], **{**given, "attention_mask": torch.ones_like(ids[:, :11])})
            actual = model(ids[:, 11:], position_ids=positions, **given).logits[:, -1]
            outcomes[name] = f"relative gap {float((actual - expected).abs().max() / expected.abs().max()):.1e}"
        except TypeError as error:
            outcomes[name] = f"raises {type(error).__name__}"
    settings = {"max_new_tokens": 3, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    out = model.generate(ids[:, :8], **settings)
    expected = model(out.sequences[:, :-1], use_cache=False).logits[0, 7:]
gap = float((torch.cat(out.logits) - expected).abs().max() / expected.abs().max())
listed = "; ".join(f"positions {name}: {outcome}" for name, outcome in outcomes.items())
print(f"git: {listed}; generate(): relative gap {gap:.1e}; expected below 1e-5")
raise SystemExit(gap > 1e-5 or any("raises" in outcome for outcome in outcomes.values()))
