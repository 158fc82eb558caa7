"""In bfloat16 an uncached pass of a whole chunk or more raises: its new state is float32, its keys bfloat16.

With a new cache, whose state is bfloat16, the same tokens pass. Exit 1 if the fault shows.
"""

import torch
from transformers import AutoConfig, AutoModelForCausalLM

SIZES = {"vocab_size": 101, "hidden_size": 64, "num_blocks": 2, "num_heads": 4, "qk_dim_factor": 1.0}


def outcome(length: int, use_cache: bool) -> str:
    try:
        with torch.no_grad():
            model(ids[:, :length], use_cache=use_cache)
    except RuntimeError as error:
        return f"raises ({error})"
    return "passes"


torch.manual_seed(0)
config = AutoConfig.for_model("xlstm", **SIZES, chunk_size=8)
model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
ids = torch.randint(3, 101, (1, 12))
outcomes = {
    f"{length} tokens, {name}": outcome(length, use_cache)
    for length in (7, 8, 12)
    for name, use_cache in (("uncached", False), ("cached", True))
}
print("; ".join(f"{name}: {text}" for name, text in outcomes.items()) + "; expected to pass")
raise SystemExit(any(text != "passes" for text in outcomes.values()))
