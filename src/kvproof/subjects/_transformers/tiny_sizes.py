"""The sizes of the tiny models: data only, read by `_tiny`.

Names that a configuration class does not know are skipped, so one table works for every type and release.
Measured on transformers 4.57.6, 5.17.0 and 5.24.0.
"""

from collections.abc import Mapping
from typing import Final

NUM_LAYERS: Final = 4  #: two of each kind in the usual alternation of two kinds
VOCAB_SIZE: Final = 101
CONTEXT_LEN: Final = 128
WINDOW: Final = 8  #: small, so that a short run goes past it
ROPE_CONTEXT_LEN: Final = 64  #: the trained length for scaled rotary tables
ROPE_FACTOR: Final = CONTEXT_LEN / ROPE_CONTEXT_LEN

_WIDTH: Final = 64
_HEADS: Final = 4
_HEAD_WIDTH: Final = 16
_FEED_FORWARD: Final = 48
_EXPERTS: Final = 4
_EXPERT_WIDTH: Final = 24

#: The names of the number of layers in configuration classes; the first that a class knows applies.
LAYER_COUNTS: Final = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers")

_VOCABULARY: Final[Mapping[str, object]] = {
    **dict.fromkeys(
        ("vocab_size", "decoder_vocab_size", "unpadded_vocab_size", "vocab_size_per_layer_input"), VOCAB_SIZE
    ),
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
    "type_vocab_size": 2,
}

_CONTEXT: Final[Mapping[str, object]] = {
    **dict.fromkeys(
        (
            "max_position_embeddings",
            "n_positions",
            "n_ctx",
            "max_seq_len",
            "model_max_length",
            "context_length",
            "max_source_positions",
            "max_target_positions",
        ),
        CONTEXT_LEN,
    ),
    "original_max_position_embeddings": ROPE_CONTEXT_LEN,
    **dict.fromkeys(
        (
            "sliding_window",
            "sliding_window_size",
            "window_size",
            "local_attention",
            "attention_window_size",
            "attention_chunk_size",
        ),
        WINDOW,
    ),
    "use_sliding_window": True,
    "max_window_layers": NUM_LAYERS // 2,
    "block_size": 8,
}

_WIDTHS: Final[Mapping[str, object]] = {
    **dict.fromkeys(
        ("hidden_size", "d_model", "n_embd", "emb_dim", "embedding_dim", "word_embed_proj_dim", "embedding_size"),
        _WIDTH,
    ),
    **dict.fromkeys(
        (*LAYER_COUNTS, "encoder_layers", "num_decoder_layers", "num_encoder_layers"),
        NUM_LAYERS,
    ),
    **dict.fromkeys(
        (
            "intermediate_size",
            "ffn_dim",
            "decoder_ffn_dim",
            "encoder_ffn_dim",
            "dim_ff",
            "dff",
            "d_inner",
            "ffn_hidden_size",
            "n_inner",
            "intermediate_size_mlp",
            "dense_intermediate_size",
            "feed_forward_size",
            "prefix_dense_intermediate_size",
        ),
        _FEED_FORWARD,
    ),
    "hidden_size_per_layer_input": 8,
    "laurel_rank": 8,
}

_ATTENTION: Final[Mapping[str, object]] = {
    **dict.fromkeys(
        (
            "num_attention_heads",
            "n_head",
            "n_heads",
            "attention_heads",
            "decoder_attention_heads",
            "encoder_attention_heads",
            "num_decoder_attention_heads",
            "num_encoder_attention_heads",
            "num_heads",
        ),
        _HEADS,
    ),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), _HEADS // 2),
    **dict.fromkeys(("head_dim", "d_head", "kv_channels", "dim_head", "attention_head_size"), _HEAD_WIDTH),
    "rotary_dim": 8,
    # latent attention: keys and values through a low rank
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "qk_head_dim": 24,
    "v_head_dim": 16,
    # sparse attention: an indexer picks so few tokens that a short run drops some; a score is a sum of ReLUs, and
    # with few heads many scores would be exactly 0: ties, which depend on the length of the tensor
    "index_head_dim": 16,
    "index_n_heads": 16,
    "index_topk": 8,
}

_MIXTURE: Final[Mapping[str, object]] = {
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"), _EXPERTS),
    **dict.fromkeys(
        ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "top_k_experts"), _EXPERTS // 2
    ),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"), 1),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group"), 1),
    **dict.fromkeys(
        (
            "moe_intermediate_size",
            "expert_ffn_hidden_size",
            "shared_expert_intermediate_size",
            "shared_intermediate_size",
            "moe_shared_expert_intermediate_size",
        ),
        _EXPERT_WIDTH,
    ),
    "zero_expert_num": 2,
    "first_k_dense_replace": 1,
    "num_dense_layers": 1,
    "expert_layer_period": 2,
    "expert_layer_offset": 1,
}

_RECURRENT: Final[Mapping[str, object]] = {
    "mamba_d_state": 8,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_chunk_size": 8,
    "mamba_dt_rank": 8,
    "num_mem_blocks": 2,
    "state_size": 8,
    "time_step_rank": 8,
    "conv_kernel": 4,
    "chunk_size": 8,
    "expand": 2,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_num_heads": 4,
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
}

_SWITCHES: Final[Mapping[str, object]] = {
    "is_decoder": True,
    "num_nextn_predict_layers": 0,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "layerdrop": 0.0,
    "use_mamba_kernels": False,
}

#: The size of each attribute in any type that has it.
SIZES: Final[Mapping[str, object]] = {
    **_VOCABULARY,
    **_CONTEXT,
    **_WIDTHS,
    **_ATTENTION,
    **_MIXTURE,
    **_RECURRENT,
    **_SWITCHES,
}

_SLIDING: Final = ("sliding_attention", "full_attention")
_LINEAR: Final = ("linear_attention", "full_attention")

#: Attributes with one entry for each layer: by configuration type, a pattern that repeats over the layers.
PER_LAYER: Final[Mapping[str, Mapping[str, tuple[object, ...]]]] = {
    "cohere_compass_text": {"layer_types": _SLIDING},
    "deepseek_v4": {
        "layer_types": (
            "sliding_attention",
            "sliding_attention",
            "compressed_sparse_attention",
            "heavily_compressed_attention",
            "compressed_sparse_attention",
        ),
        "mlp_layer_types": ("hash_moe", "hash_moe", "moe", "moe", "moe"),
    },
    "dory": {"layer_types": _SLIDING},
    "dots1": {"layer_types": _SLIDING},
    "dots3_note_text": {"layer_types": ("indexed_attention", "sliding_attention")},
    "gemma3n_text": {"intermediate_size": (_FEED_FORWARD,)},
    "glm_moe_dsa": {"indexer_types": ("full", "shared")},
    "granite_swa": {"layer_rope_theta": (10000.0,)},
    "granitemoe_swa": {"layer_rope_theta": (10000.0,)},
    "granitemoehybrid": {"layer_types": _LINEAR},
    "hy_v4": {"indexer_types": ("full", "shared")},
    "laguna": {"layer_types": _SLIDING, "num_attention_heads_per_layer": (_HEADS,)},
    "lfm2": {"layer_types": ("conv", "full_attention")},
    "lfm2_moe": {"layer_types": ("conv", "full_attention")},
    "llama4_text": {"no_rope_layers": (1, 0)},
    "mellum": {"layer_types": _SLIDING},
    "minimax_m3_vl_text": {"layer_types": ("full_attention", "minimax_m3_sparse")},
    "modernbert-decoder": {"layer_types": _SLIDING},
    "qwen4_exp_text": {
        "layer_types": ("linear_attention", "qwen_sparse_attention", "linear_attention", "full_attention")
    },
    "zamba": {"layers_block_type": ("linear_attention", "linear_attention", "hybrid")},
    "zamba2": {"layers_block_type": ("linear_attention", "linear_attention", "hybrid")},
    "zaya": {"layer_types": ("hybrid", "hybrid_sliding")},
}

#: The names before 5.0 of the kinds of layers listed above, by configuration type.
OLD_KINDS: Final[Mapping[str, Mapping[str, str]]] = {
    "granitemoehybrid": {"linear_attention": "mamba", "full_attention": "attention"},
    "zamba": {"linear_attention": "mamba"},
    "zamba2": {"linear_attention": "mamba"},
}

#: Latent attention: every head has its own key, and only the rotary part is a head wide.
_LATENT: Final[Mapping[str, object]] = {"num_key_value_heads": _HEADS, "head_dim": 8}
_ORIGINAL_ATTENTION: Final[Mapping[str, object]] = {"attention_type": "original_full"}
#: One shared cache for the last two layers, one of each kind; six layers leave four with their own.
_SHARED_CACHE: Final[Mapping[str, object]] = {"num_hidden_layers": 6, "num_kv_shared_layers": 2}
_VISION: Final[Mapping[str, object]] = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "image_size": 28,
    "patch_size": 14,
}
_BLT_PART: Final[Mapping[str, object]] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": _WIDTH,
    "num_attention_heads": _HEADS,
    "num_key_value_heads": _HEADS,
    "num_hidden_layers": 2,
    "intermediate_size": _FEED_FORWARD,
    "max_position_embeddings": CONTEXT_LEN,
}

#: What a configuration type needs besides or instead of `SIZES`.
EXCEPTIONS: Final[Mapping[str, Mapping[str, object]]] = {
    "afmoe": {"global_attn_every_n_layers": 2},
    "axk1": _LATENT,
    "axk2": {**_LATENT, "gated_norm_rank": 8},
    "bailing_hybrid": {"num_key_value_heads": _HEADS, "layer_group_size": 2},
    "bamba": {"attn_layer_indices": [1, 3]},
    "big_bird": _ORIGINAL_ATTENTION,
    "bigbird_pegasus": _ORIGINAL_ATTENTION,
    "blt": {
        "cross_attn_k": 2,
        "encoder_hash_byte_group_vocab": 211,
        "encoder_hash_byte_group_size": [2, 3],
        "patch_size": 4,
        "patcher_config": _BLT_PART,
        "encoder_config": {**_BLT_PART, "hidden_size_global": 2 * _WIDTH},
        "decoder_config": {**_BLT_PART, "hidden_size_global": 2 * _WIDTH},
        "global_config": {**_BLT_PART, "hidden_size": 2 * _WIDTH},
    },
    "cohere_compass_text": {
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": theta, "mrope_section": [2, 3, 3]}
            for kind, theta in (("sliding_attention", 10000.0), ("full_attention", 50000.0))
        },
    },
    "cpmant": {
        "prompt_length": 4,
        "prompt_types": 4,
        "segment_types": 4,
        "position_bias_num_buckets": 32,
        "position_bias_max_distance": 64,
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": _FEED_FORWARD, "moe_num_experts": _EXPERTS, "moe_top_k": 2},
    },
    "deepseek_v2": _LATENT,
    "deepseek_v3": _LATENT,
    "deepseek_v32": _LATENT,
    "deepseek_v4": {
        "num_hidden_layers": 5,
        "head_dim": 32,
        "num_key_value_heads": 1,
        "o_groups": 2,
        "o_lora_rank": 16,
        "hc_mult": 2,
        "hc_sinkhorn_iters": 3,
        "index_topk": 4,
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
    },
    "doge": {"keep_window_size": WINDOW},
    "dory": {"n_input_layers": 1, "n_output_layers": 1},
    "dots3_note": {"vision_config": {"adapter_out_dim": _WIDTH}, "audio_config": {"adapter_out_dim": _WIDTH}},
    "dots3_note_text": {
        "num_key_value_heads": _HEADS,
        "head_dim": 24,
        "per_layer_config": {
            layer: {
                "num_attention_heads": 2,
                "num_key_value_heads": 2,
                "q_lora_rank": 24,
                "kv_lora_rank": 16,
                "head_dim": 24,
                "qk_nope_head_dim": 16,
                "qk_rope_head_dim": 8,
                "v_head_dim": 16,
            }
            for layer in range(1, NUM_LAYERS, 2)  # the sliding ones
        },
    },
    "electra": {"embedding_size": 32},
    "ernie4_5_moe": {"moe_layer_start_index": 1, "moe_layer_end_index": 3},
    "falcon": {"new_decoder_architecture": True},
    "falcon_h1": {"mamba_d_ssm": 128},
    "gemma3": {"vision_config": _VISION},
    "gemma3n_text": {
        **_SHARED_CACHE,
        "activation_sparsity_pattern": [0.5, 0.5, 0.0, 0.0, 0.0, 0.0],
        "altup_num_inputs": 3,
    },
    "gemma4_text": {**_SHARED_CACHE, "per_layer_config": {}},
    "gemma4_unified_text": {**_SHARED_CACHE, "per_layer_config": {}},
    "git": {"vision_config": _VISION},
    "glm4_moe_lite": _LATENT,
    "glm_moe_dsa": _LATENT,
    "got_ocr2": {
        "vision_config": {
            "hidden_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "output_channels": 16,
            "image_size": 32,
            "patch_size": 16,
            "mlp_dim": 32,
        },
    },
    "gpt_neo": {"attention_types": [[["global", "local"], NUM_LAYERS // 2]]},
    "granitemoehybrid": {"position_embedding_type": "rope"},
    "hrm_text": {"num_hidden_layers": 2, "prefix_lm": False},
    "hy_v4": {"hc_mult": 2},
    "inkling_text": {
        "swa_num_attention_heads": _HEADS,
        "swa_num_key_value_heads": _HEADS // 2,
        "swa_head_dim": _HEAD_WIDTH,
        "d_rel": 4,
        "rel_extent": 16,
        "local_layer_ids": [0, 2],
    },
    "kimi_linear": _LATENT,
    "lfm2": {"block_multiple_of": 8},
    "llama4_text": {"floor_scale": 8, "moe_layers": [0, 2], "interleave_moe_layer_step": 2},
    "longcat_flash": {**_LATENT, "num_layers": 2, "num_hidden_layers": NUM_LAYERS},
    "mamba2": {"num_heads": 8, "n_groups": 2},
    "minicpm3": _LATENT,
    "minimax": {"sliding_window": None},
    # each index head chooses blocks for one key head
    "minimax_m3_vl_text": {"index_n_heads": _HEADS // 2, "index_block_size": 4, "index_topk_blocks": 2},
    "mllama_text_model": {
        "cross_attention_layers": [],
        "rope_scaling": {"rope_type": "default"},  # without it, 4.57 cannot build the model
    },
    "moshi": {"sliding_window": 64},
    "mpt": {"attn_config": {}},
    "musicgen_decoder": {"num_codebooks": 1},  # one codebook is one row of ids, as in any other type
    "musicgen_melody_decoder": {"num_codebooks": 1},
    "nemotron_h": {  # the length of this list is its number of layers
        "layers_block_type": [
            "linear_attention",
            "full_attention",
            "moe",
            "mlp",
            "linear_attention",
            "full_attention",
        ],
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "n_groups": 2,
        "ssm_state_size": 8,
        "moe_latent_size": None,
    },
    "olmo_hybrid": {"linear_num_key_heads": _HEADS},
    "phi4_multimodal": {
        "vision_config": {**_VISION, "num_hidden_layers": 2, "crop_size": 28},
        "audio_config": {
            "hidden_size": 32,
            "num_blocks": 1,
            "num_attention_heads": 2,
            "intermediate_size": 32,
            "nemo_conv_channels": 16,
            "input_size": 16,
            "ext_pw_out_channel": 32,
            "depthwise_separable_out_channel": 32,
        },
    },
    "prophetnet": {"num_buckets": 8, "relative_max_distance": 32},
    "qwen4_exp_text": {
        "hc_count": 2,
        "hc_lowrank": 8,
        "ple_layer_ids": [1],
        "ple_embed_dim": 32,
        "ngram_vocab_size_base": 50,
        "heads_per_ngram": 2,
        "split_ngram_parts": 1,
        "make_ngram_vocab_size_divisible_by": 8,
        "indexer_n_heads": 16,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 8,
        "indexer_compress_ratio": 4,
        "output_gate_type": "sigmoid",
    },
    "recurrent_gemma": {
        "lru_width": _WIDTH,
        "block_types": ["recurrent", "recurrent", "attention"],
        "num_hidden_layers": 6,
    },
    "reformer": {
        "axial_pos_shape": [8, 16],
        "axial_pos_embds_dim": [32, 32],
        "attn_layers": ["local", "lsh", "local", "lsh"],
        "num_attention_heads": 2,
        "attention_head_size": 32,
        "num_buckets": 2,
        "num_hashes": 1,
        "hash_seed": 0,
        "local_attn_chunk_length": 4,
        "lsh_attn_chunk_length": 4,
        "local_attention_probs_dropout_prob": 0.0,
        "lsh_attention_probs_dropout_prob": 0.0,
    },
    "rembert": {"input_embedding_size": 32, "output_embedding_size": _WIDTH},
    "roc_bert": {
        "pronunciation_embed_dim": 16,
        "pronunciation_vocab_size": 31,
        "shape_embed_dim": 16,
        "shape_vocab_size": 37,
    },
    "rwkv": {"attention_hidden_size": _WIDTH, "rescale_every": 0},
    "whisper": {"suppress_tokens": None, "begin_suppress_tokens": None},
    "xlm": {"causal": True, "n_langs": 1, "use_lang_emb": False, "is_encoder": True},
    "xlnet": {"mem_len": None, "attn_type": "uni"},
    "xlstm": {"num_blocks": NUM_LAYERS, "qk_dim_factor": 1.0, "chunkwise_kernel": "chunkwise--native_autograd"},
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX"},
    "youtu": _LATENT,
    "zamba": {
        "num_hidden_layers": 6,
        "attention_head_dim": 32,
        "attention_hidden_size": 2 * _WIDTH,
        "n_mamba_heads": 2,
        "attn_layer_period": 3,
    },
    "zamba2": {
        "num_hidden_layers": 6,
        "attention_head_dim": 32,
        "attention_hidden_size": 2 * _WIDTH,
        "num_key_value_heads": _HEADS,
        "num_query_groups": _HEADS,
        "mamba_headdim": 16,
        "n_mamba_heads": 8,
        "mamba_ngroups": 2,
        "hybrid_layer_ids": [2, 5],
        "adapter_rank": 8,
    },
    "zaya": {"router_hidden_size": 16, "num_hidden_layers": 6, "num_experts_per_tok": 1},
}

#: Causal-LM types that cannot be audited alone, and why.
REFUSED: Final[Mapping[str, str]] = {
    "gemma4_assistant": "it drafts for another model and reads that model's states and cache",
    "gemma4_unified_assistant": "it drafts for another model and reads that model's states and cache",
}
