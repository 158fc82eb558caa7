"""prophetnet's predict stream takes the relative position biases of other rows, later ones among them.

The biases lie by position, stream and head, and the bucket numbers by stream, head and position.
Exit 1 if the fault shows.
"""

import torch
from transformers import AutoConfig, AutoModelForCausalLM

SIZES = {"vocab_size": 101, "hidden_size": 64, "num_decoder_layers": 2, "num_decoder_attention_heads": 4}
MORE = {"decoder_ffn_dim": 64, "add_cross_attention": False, "is_encoder_decoder": False}


def relative_gaps(ngram: int) -> tuple[float, float]:
    torch.manual_seed(0)
    config = AutoConfig.for_model("prophetnet", **SIZES, **MORE, ngram=ngram)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64, attn_implementation="eager").eval()
    for weight in model.parameters():
        if weight.dim() == 2:
            torch.nn.init.normal_(weight, std=1.8 / weight.shape[-1] ** 0.5)
    ids = torch.randint(3, 101, (1, 10))
    other_end = torch.cat([ids[:, :4], torch.randint(3, 101, (1, 6))], dim=1)
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits[:, :4]
        later_changed = model(other_end, use_cache=False).logits[:, :4]
        cut = model(ids[:, :4], use_cache=False).logits
    scale = expected.abs().max()
    return float((later_changed - expected).abs().max() / scale), float((cut - expected).abs().max() / scale)


gaps = {ngram: relative_gaps(ngram) for ngram in (1, 2)}
for ngram, (changed, cut) in gaps.items():
    print(f"ngram {ngram}: later tokens changed {changed:.1e}, cut off {cut:.1e}; expected below 1e-5")
raise SystemExit(max(max(pair) for pair in gaps.values()) > 1e-5)
