"""Without an attention mask moshi builds no causal one: eager attention and later blocks see later tokens.

Exit 1 if the fault shows.
"""

import torch
from transformers import AutoConfig, AutoModelForCausalLM

SIZES = {"vocab_size": 101, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 48}
MORE = {"num_key_value_heads": 4, "head_dim": 16, "max_position_embeddings": 64, "sliding_window": 64}


def relative_gap(attention: str, with_mask: bool, block: int) -> float:
    torch.manual_seed(0)
    config = AutoConfig.for_model("moshi", **SIZES, **MORE)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64, attn_implementation=attention).eval()
    for weight in model.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=1.8 / weight.shape[-1] ** 0.5)
    ids = torch.randint(3, 101, (1, 12))
    mask = torch.ones_like(ids)
    rows, cache = [], None
    with torch.no_grad():
        literal = [model(ids[:, : i + 1], attention_mask=mask[:, : i + 1]).logits[:, -1] for i in range(12)]
        for start in range(0, 12, block):
            given = mask[:, : start + block] if with_mask else None
            out = model(
                ids[:, start : start + block], attention_mask=given, past_key_values=cache, use_cache=True
            )
            cache = out.past_key_values
            rows.append(out.logits)
    actual, expected = torch.cat(rows, dim=1), torch.stack(literal, dim=1)
    return float((actual - expected).abs().max() / expected.abs().max())


gaps = {}
for attention, block in (("eager", 12), ("sdpa", 12), ("sdpa", 6)):
    gaps[f"{attention}, blocks of {block}"] = relative_gap(attention, False, block)
    gaps[f"{attention}, blocks of {block}, with mask"] = relative_gap(attention, True, block)
print("; ".join(f"{name}: {gap:.1e}" for name, gap in gaps.items()) + "; relative gaps, expected below 1e-5")
raise SystemExit(max(gaps.values()) > 1e-5)
