"""generate() counts positions from 0; the models' own default starts after the padding index.

Types: roberta, camembert, xlm-roberta, xlm-roberta-xl, roberta-prelayernorm, data2vec-text, xmod.
Exit 1 if the fault shows.
"""

import torch
from transformers import AutoConfig, AutoModelForCausalLM

TYPES = ("roberta", "camembert", "xlm-roberta", "xlm-roberta-xl", "roberta-prelayernorm", "data2vec-text", "xmod")
SIZES = {"vocab_size": 101, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
MORE = {"intermediate_size": 48, "max_position_embeddings": 64, "is_decoder": True, "pad_token_id": 1}


def relative_gap(model_type: str) -> float:
    torch.manual_seed(0)
    languages = {"languages": ["en_XX"], "default_language": "en_XX"} if model_type == "xmod" else {}
    config = AutoConfig.for_model(model_type, **SIZES, **MORE, **languages, eos_token_id=None, bos_token_id=0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64, attn_implementation="eager").eval()
    for weight in model.parameters():
        if weight.dim() == 2:
            torch.nn.init.normal_(weight, std=1.8 / weight.shape[-1] ** 0.5)
    ids = torch.randint(3, 101, (1, 8))
    with torch.no_grad():
        settings = {
            "max_new_tokens": 4,
            "do_sample": False,
            "output_logits": True,
            "return_dict_in_generate": True,
        }
        out = model.generate(ids, **settings)
        expected = model(out.sequences[:, :-1], use_cache=False).logits[0, 7:]
    actual = torch.cat(out.logits).to(expected)
    return float((actual - expected).abs().max() / expected.abs().max())


gaps = {model_type: relative_gap(model_type) for model_type in TYPES}
print("; ".join(f"{name}: relative gap {gap:.1e}" for name, gap in gaps.items()) + "; expected below 1e-5")
raise SystemExit(max(gaps.values()) > 1e-5)
