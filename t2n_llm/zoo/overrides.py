"""What shrinking by field name cannot know of a family: config values by model type, a table.

Most rows name the layer kinds that the family mixes where its config does not, or sizes that its own checks tie together.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from t2n_llm.source.small_sizes import VOCABULARY

_KINDS = ("sliding_attention", "full_attention")
_MIXED = ["full_attention", "sliding_attention", "full_attention"]
_SHARING = ["sliding_attention", "sliding_attention", *_MIXED]  # the last two read keys and values of the others
_GEMMA_4 = {"num_hidden_layers": 5, "layer_types": _SHARING, "num_kv_shared_layers": 2, "global_head_dim": 32}


def _backbone(model_type: str, stages: list[int], **further: Any) -> Mapping[str, Any]:
    """Return what makes a detector take one of transformers' own backbones, and which of its stages."""
    return {
        "backbone_config": {"model_type": model_type, "out_indices": stages, **further},
        "use_timm_backbone": False,
        "use_pretrained_backbone": False,
        "backbone": None,
    }


# What a default config needs to be a causal decoder at all.
FULL_SIZE_OVERRIDES: Mapping[str, Mapping[str, Any]] = {
    "big_bird": {"attention_type": "original_full"},
    "bigbird_pegasus": {"attention_type": "original_full"},
    "xmod": {"default_language": "en_XX"},
}

# Kernel, stride and padding of each convolution, as the checkpoints of PP-OCR's text detectors have them.
_INTRACLASS = {
    "reduce_channel": [1, 1, 0],
    "return_channel": [1, 1, 0],
    **{
        f"{name}_{ratio}ratio": [kernel(size), [1, 1], [side // 2 for side in kernel(size)]]
        for name, kernel in (
            ("vertical_long_to_small_conv", lambda size: [size, 1]),
            ("horizontal_small_to_long_conv", lambda size: [1, size]),
            ("symmetric_conv_long", lambda size: [size, size]),
        )
        for ratio, size in (("long", 7), ("mid", 5), ("short", 3))
    },
}
_TEXT_DETECTOR = {
    "intraclass_block_config": _INTRACLASS,
    "scale_factor_list": [1, 2, 4, 8],
    "kernel_list": [3, 2, 2],
}
# Each of its stages has half the height and width of the one before; by default it reads lines of text, whose width stays.
_TEXT_BACKBONE = {
    "model_type": "pp_lcnet_v4",
    "out_indices": [1, 2, 3, 4],
    "stem_channels": [3, 16, 32],
    "block_configs": [
        [[3, 32, 32, 1, True]],
        [[3, 32, 32, 2, False]],
        [[3, 32, 64, 2, False], [3, 64, 64, 1, False]],
        [[3, 64, 64, 2, True]],
    ],
}
_SAM_2_BACKBONE = {
    "model_type": "sam2_hiera_det_model",
    "hidden_size": 16,
    "image_size": [64, 64],
    "blocks_per_stage": [1, 1, 2, 1],
    "embed_dim_per_stage": [16, 32, 64, 128],
    "num_attention_heads_per_stage": [1, 2, 2, 4],
    "global_attention_blocks": [3],
    "window_size_per_stage": [4, 4, 2, 2],
}
_SAM_2_VISION = {
    "backbone_config": _SAM_2_BACKBONE,
    "backbone_channel_list": [128, 64, 32, 16],
    "backbone_feature_sizes": [[16, 16], [8, 8], [4, 4]],
}


def _rotary_axes(*sections: int, **further: Any) -> Mapping[str, Any]:
    """Return the text config of a model whose positions have three coordinates, `sections` frequencies for each."""
    rotary = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": list(sections), **further}
    return {"text_config": {"rope_parameters": rotary}}


_WINDOWS = {"vision_config": {"window_size": 32, "fullatt_block_indexes": [1]}}  # of two by two joined patches
_OMNI_TOKENS = {
    "vision_start_token_id": VOCABULARY - 7,
    "audio_start_token_id": VOCABULARY - 3,
}  # their classes have none
_TILES = {"image_grid_pinpoints": [[64, 128], [128, 64], [128, 128]]}

# Tokens that stand for the codes of an image, with letters for digits, as Chameleon's tokenizer has them.
_CODES = {f"IMGIMG{chr(ord('A') + code // 10)}{chr(ord('A') + code % 10)}Z": 64 + code for code in range(32)}

# What models that see need: sizes that their parts have in common, in images of 64 pixels and patches of 8.
_SEEING: Mapping[str, Mapping[str, Any]] = {
    "aria": {"projector_patch_to_query_dict": {64: 16}},
    **{kind: _rotary_axes(3, 3, 2) for kind in ("glm46v", "glm4v", "glm_ocr", "glmga")},
    "ernie4_5_vl_moe": {"text_config": {"head_dim": 16, **_rotary_axes(3, 3, 2)["text_config"]}},
    "deepseek_ocr2": {
        "text_config": {"mlp_layer_types": ["dense", "sparse", "sparse"]},
        "vision_config": {"sam_config": {"downsample_channels": [32, 64]}},
    },
    "minicpmv4_6": {"insert_layer_id": 0},
    "minicpmv4_7": {
        "insert_layer_id": 0,
        "image_start_id": 140,
        "image_end_id": 141,
        "slice_start_id": 142,
        "slice_end_id": 143,
        "newline_id": 144,
    },
    "step3p7": {
        "text_config": {
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "swiglu_limits": [0.0, 0.0, 0.25],
            "swiglu_limits_shared": [0.0, 0.0, 0.25],
        }
    },
    "apertus1p5": {  # codes of images and of sound are tokens
        "vision_config": {"base_channels": 32, "codebook_size": 32, "num_res_blocks": 1},
        "audio_config": {"codebook_size": 8, "codebook_dim": 64, "hidden_size": 64, "num_filters": 4},
        "image_token_offset": VOCABULARY - 56,
        "audio_token_offset": VOCABULARY - 24,
    },
    "chameleon": {
        "vq_config": {"base_channels": 32, "num_embeddings": len(_CODES), "num_res_blocks": 1},
        "vocabulary_map": {"<image>": VOCABULARY - 10, **_CODES},
    },
    "granite4_vision": {
        **_TILES,
        "text_config": {"num_hidden_layers": 5},
        "downsample_rate": "2/4",
        "deepstack_layer_map": [[-2, 0]],
        "spatial_target_layers": [1, 2, 3, 4],  # one for each corner of a block of patches
    },
    "mllama": {
        "image_token_index": VOCABULARY,
        "text_config": {"num_hidden_layers": 4, "cross_attention_layers": [1, 3], "pad_token_id": 0},
        "vision_config": {
            "image_size": 32,
            "patch_size": 8,
            "hidden_size": 32,
            "attention_heads": 2,
            "intermediate_size": 48,
            "num_hidden_layers": 3,
            "num_global_layers": 2,
            "intermediate_layers_indices": [0, 2],
            "vision_output_dim": 96,
        },
    },
    "granite_docling": {"vision_config": {"deepstack_visual_indexes": [0, 2]}},
    "hy_v4_vl": _rotary_axes(2, 1, 1),
    "nemotron_h_omni": {"vision_config": {"video_temporal_patch_size": 2}},
    "muse_glimmer": {"out_hidden_size": 256},
    "muse_spark": {
        "out_hidden_size": 256,
        "audio_config": {"patch_sizes": [4, 3], "hidden_sizes": [32, 64], "depths": [1, 1], "num_hidden_layers": 2},
    },
    "glm5_next": {
        "text_config": {
            "index_kpool": 4,
            "layer_types": ["linear_attention", "indexed_attention", "indexed_attention", "linear_attention"],
            "indexer_types": ["full", "full", "shared", "full"],  # the third looks at the keys of the second
        }
    },
    "glm4v_moe": _rotary_axes(2, 1, 1),
    "hunyuan_vl": {"text_config": {"head_dim": 16, **_rotary_axes(2, 2, 2, 2)["text_config"]}},
    **dict.fromkeys(("exaone4_5", "hyperclovax_vision_v2"), _WINDOWS),
    "qwen2_vl": _rotary_axes(2, 3, 3),
    "qwen2_5_vl": {**_WINDOWS, **_rotary_axes(2, 3, 3)},
    "qwen2_5_omni_thinker": {**_WINDOWS, **_rotary_axes(2, 3, 3), **_OMNI_TOKENS},
    # transformers' cache would cut what its layers see to a window that they do not have.
    "qwen3_omni_moe_thinker": {**_OMNI_TOKENS, "text_config": {"sliding_window": None}},
    **{kind: {"mm_tokens_per_image": 16} for kind in ("gemma3", "shieldgemma2")},
    "gemma4": {
        "vision_config": {"model_type": "gemma4_vision"},
        "text_config": {"model_type": "gemma4_text"},
        "audio_config": {
            "model_type": "gemma4_audio",
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "subsampling_conv_channels": [128, 8],
            "output_proj_dims": 48,
        },
    },
    "gemma4_unified": {
        "vision_config": {"model_type": "gemma4_unified_vision", "output_proj_dims": 64},
        "text_config": {"model_type": "gemma4_unified_text"},
    },
    "llama4": {
        "vision_config": {
            "intermediate_size": 256,
            "projector_input_dim": 64,
            "projector_output_dim": 64,
            "vision_output_dim": 64,
        }
    },
    **dict.fromkeys(("llava_next", "llava_next_video", "llava_onevision"), _TILES),
    # Their encoders are of timm.
    "fast_vlm": {"vision_config": {"architecture": "fastvit_mci0", "hidden_size": 1024}},
    "gemma3n": {
        "image_token_id": 130,
        "text_config": {"vocab_size_per_layer_input": 128, "pad_token_id": 0},
        "vision_config": {
            "model_args": {"channel_multiplier": 0.125},
            "hidden_size": 2048,
            "vocab_offset": 128,
            "vocab_size": 16,
        },
        "audio_config": {"vocab_offset": 144, "vocab_size": 16},
    },
    "perception_lm": {
        "vision_config": {
            "architecture": "vit_pe_core_tiny_patch16_384",
            "model_args": {"embed_dim": 192, "img_size": [64, 64]},
        }
    },
    "fun_asr_nano": {
        "adaptor_config": {"intermediate_size": 16},
        "audio_config": {"max_position_embeddings": 2049},
    },
    **{
        kind: {
            "encoder_config": {"hidden_dim": 64, "dim_head": 16, "context_size": 20, "max_pos_emb": 32},
            "window_size": 6,
            "downsample_rate": 2,
        }
        for kind in ("granite_speech", "granite_speech_plus")
    },
    "vipllava": {"vision_feature_layers": [-1, -2]},
}

_HIFIGAN: Mapping[str, Any] = {
    "upsample_initial_channel": 64,
    "upsample_rates": [4, 2],
    "upsample_kernel_sizes": [8, 4],
    "resblock_kernel_sizes": [3, 7],
    "resblock_dilation_sizes": [[1, 3], [1, 3]],
}
_CONFORMER: Mapping[str, Any] = {
    "layers": 2,
    "num_attention_heads": 2,
    "linear_units": 96,
    "dropout_rate": 0.2,
    "positional_dropout_rate": 0.2,
    "attention_dropout_rate": 0.2,
    "normalize_before": False,
    "concat_after": False,
    "kernel_size": 7,
}

_OF_LATENTS: Mapping[str, Any] = {
    "latent_dim": 32,
    "flow_head_config": {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "latent_dim": 32,
        "condition_dim": 64,
        "frequency_embedding_size": 32,
    },
}


_CODEBOOKS: Mapping[str, Any] = {"num_codebooks": 4, "vocab_size": 64}
_OF_CODES: Mapping[str, Any] = {
    **_CODEBOOKS,
    "text_vocab_size": VOCABULARY,
    "codebook_pad_token_id": 63,
    "depth_decoder_config": {
        **_CODEBOOKS,
        "backbone_hidden_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
    "codec_config": {
        "model_type": "mimi",
        "hidden_size": 32,
        "num_filters": 4,
        "codebook_size": 64,
        "codebook_dim": 16,
        "vector_quantization_hidden_dimension": 16,
        "num_quantizers": 4,
        "num_hidden_layers": 2,
        "intermediate_size": 48,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "upsample_groups": 32,
    },
}


def _of_sound(first: int) -> Mapping[str, int]:
    """Return the tokens that stand for sound, one after another."""
    names = ("audio_prompt_token_id", "audio_bos_token_id", "audio_latent_token_id")
    return {name: first + number for number, name in enumerate(names)}


# What other tasks than text generation need beside `OVERRIDES`.
TASK_OVERRIDES: Mapping[str, Mapping[str, Any]] = {
    **_SEEING,
    "fastspeech2_conformer": {
        "encoder_config": _CONFORMER,
        "decoder_config": {**_CONFORMER, "kernel_size": 11},
        "duration_predictor_channels": 64,
        "pitch_predictor_channels": 64,
        "energy_predictor_channels": 64,
        "speech_decoder_postnet_units": 64,
    },
    "fastspeech2_conformer_hifigan": {**_HIFIGAN, "model_in_dim": 16},
    "speecht5_hifigan": _HIFIGAN,
    "csm": _OF_CODES,
    "pocket_tts": {**_OF_LATENTS, "audio_prompt_bos_token_id": VOCABULARY - 4, **_of_sound(VOCABULARY - 3)},
    "gradium_phonon_tts": {
        **_OF_LATENTS,
        "num_key_value_heads": 4,
        **_of_sound(4),
    },  # its files have thirds of projections
    "pocket_tts_audio_tokenizer": {"upsample_groups": 64, "num_filters": 4, "latent_dim": 32},
    "vits": {
        **_HIFIGAN,
        "flow_size": 32,
        "window_size": 4,
        "prior_encoder_num_wavenet_layers": 2,
        "posterior_encoder_num_wavenet_layers": 2,
    },
    **{kind: {"num_hidden_layers": 4, "out_indices": [1, 2, 3, 4]} for kind in ("beit", "data2vec-vision")},
    **{kind: _backbone("resnet", [4]) for kind in ("conditional_detr", "dab-detr", "table-transformer")},
    "detr": {**_backbone("resnet", [1, 2, 3, 4]), "encoder_attention_heads": 8, "d_model": 128},  # also of its masks
    **{kind: {"window_size": 2} for kind in ("donut-swin", "swin")},
    **{kind: {"vocab_size": 32} for kind in ("wav2vec2-bert", "wav2vec2-conformer")},
    "canine": {"local_transformer_stride": 16, "num_hash_buckets": 160},  # a molecule is within a block
    "deformable_detr": _backbone("resnet", [2, 3, 4]),
    "depth_anything": _backbone("dinov2", [1, 2, 3, 4], num_hidden_layers=4, reshape_hidden_states=False),
    "prompt_depth_anything": _backbone("dinov2", [1, 2, 3, 4], num_hidden_layers=4, reshape_hidden_states=False),
    # The image is four times as high and wide as what its encoders see at once.
    "depth_pro": {
        "patch_size": 64,
        "intermediate_hook_ids": [2, 1],
        **{
            f"{name}_model_config": {"model_type": "dinov2", "image_size": 64, "patch_size": 8}
            for name in ("image", "patch", "fov")
        },
    },
    "eomt": {"num_blocks": 2},
    "eomt_dinov3": {"num_blocks": 2},
    "videomt": {"num_blocks": 2},
    "lw_detr": {"projector_scale_factors": [1.0]},
    "pp_doclayout_v2": {
        "reading_order_config": {"pad_token_id": 1},
        "class_thresholds": [0.01, 0.01],  # far from what random weights say
        "class_order": [1, 0],
    },
    "pp_ocrv5_server_det": _TEXT_DETECTOR,
    "pp_ocrv6_medium_det": {**_TEXT_DETECTOR, "backbone_config": _TEXT_BACKBONE},
    "pp_ocrv6_small_det": {"backbone_config": _TEXT_BACKBONE, "layer_list_out_channels": [32, 32, 64, 64]},
    "sapiens2": {
        "head_config": {"upsample_out_channels": [32, 32], "conv_out_channels": [32]},
        "num_first_full_attention_layers": 1,
        "num_last_full_attention_layers": 1,
    },
    "sam2_vision_model": _SAM_2_VISION,
    "sam3_vision_model": {
        "backbone_feature_sizes": [[16, 16], [8, 8], [4, 4]]
    },  # of patches of an image of 64, four times each
    "sam3_tracker_video": {"image_size": 64},  # else its class makes maps of an image of 1008
    "zoedepth": _backbone("beit", [1, 2, 3, 4], num_hidden_layers=4, reshape_hidden_states=False),
    "upernet": _backbone("convnext", [1, 2, 3, 4]),
    "esm": {"vocab_size": 160, "mask_token_id": 32},
    "dpt": {"num_hidden_layers": 4, "backbone_out_indices": [0, 1, 2, 3]},
    "encoder-decoder": {
        "encoder": {"model_type": "bert"},
        "decoder": {"model_type": "bert", "is_decoder": True, "add_cross_attention": True},
    },
    # Of images this large its encoder's positions have room; the class itself knows no size.
    "florence2": {"image_token_id": 5, "vision_config": {"image_size": 64}},
    # The class has no such fields, checkpoints do.
    "moonshine_streaming": {"num_key_value_heads": 4, "initializer_range": 0.12},
    # T5's own rule makes weights of a useful size; a factor of 0.12 leaves logits that hardly know their source.
    "pix2struct": {"text_config": {"initializer_factor": 1.0}, "vision_config": {"initializer_factor": 1.0}},
    **{
        kind: {"initializer_factor": 1.0}
        for kind in ("pop2piano", "t5", "mt5", "umt5", "longt5", "switch_transformers")
    },
    # Narrow enough that four layers without a norm between them leave keys of a size that attention can tell apart.
    "pp_formulanet": {
        "vision_config": {
            "output_channels": 32,
            "post_conv_in_channels": 32,
            "post_conv_mid_channels": 32,
            "post_conv_out_channels": 32,
        }
    },
    # One chunk, as its checkpoints' 20,000 are: transformers' eager attention adds 1 where a chunk may look, and hides nothing.
    "seamless_m4t_v2": {"speech_encoder_chunk_size": 20000},
    "speech-encoder-decoder": {
        "encoder": {"model_type": "wav2vec2"},
        "decoder": {"model_type": "bert", "is_decoder": True, "add_cross_attention": True},
    },
    "vision-encoder-decoder": {
        "encoder": {"model_type": "vit"},
        "decoder": {"model_type": "bert", "is_decoder": True, "add_cross_attention": True},
    },
}

OVERRIDES: Mapping[str, Mapping[str, Any]] = {
    # Without a list of attention layers all of them are recurrent.
    "bamba": {"attn_layer_indices": [1]},
    # Block-sparse attention is no causal decoder.
    "big_bird": {"attention_type": "original_full"},
    "bigbird_pegasus": {"attention_type": "original_full"},
    "blenderbot": {"encoder_layers": 3},  # transformers sizes the decoder's cache by it
    "blt": {
        "encoder_hash_byte_group_vocab": 100,
        "encoder_hash_byte_group_size": [2, 3],
        "patching_mode": "entropy",
    },
    "cohere": {"logit_scale": 0.5, "use_qk_norm": True},
    "cohere2": {"logit_scale": 0.5},
    "cohere2_moe": {
        "logit_scale": 0.5,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "mlp_layer_types": ["dense", "sparse", "sparse"],
    },
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {kind: {"rope_type": "default", "rope_theta": 1e4} for kind in _KINDS},
    },
    "dbrx": {"attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0}},
    "deepseek_v2": {"topk_method": "group_limited_greedy", "n_group": 2, "topk_group": 1},
    # Entries of few enough tokens that the checks close several of each kind.
    "deepseek_v4": {
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 6},
        "index_topk": 3,
        "layer_types": ["heavily_compressed_attention", "compressed_sparse_attention", "sliding_attention"],
        "mlp_layer_types": ["hash_moe", "moe", "moe"],
    },
    "doge": {"is_moe": False, "keep_window_size": 8},
    "dory": {"num_hidden_layers": 4, "n_input_layers": 1, "n_recurrent_layers": 2, "n_output_layers": 1},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
    "dots3_note": {
        "vision_config": {"adapter_in_dim": 64, "adapter_out_dim": 64, "mlp_layer_types": ["dense", "dense", "dense"]},
        "audio_config": {"adapter_input_size": 64, "adapter_out_dim": 64},
    },
    "dots3_note_text": {
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_q_lora_rank": 32,
        "swa_kv_lora_rank": 32,
        "swa_head_dim": 24,
        "swa_qk_nope_head_dim": 16,
        "swa_v_head_dim": 16,
    },
    "emu3": {
        "vq_config": {"base_channels": 32, "codebook_size": 64, "hidden_size": 128},
        "vocabulary_map": {
            "<image>": 5,
            "<|extra_200|>": 6,
            **{f"<|visual token {code:06}|>": 64 + code for code in range(64)},
        },
    },
    "falcon": {"new_decoder_architecture": True},
    "gemma3n_text": {
        "num_hidden_layers": 5,
        "layer_types": _SHARING,
        "num_kv_shared_layers": 2,
        "activation_sparsity_pattern": [0.95, 0.0, 0.0, 0.0, 0.0],
    },
    "gemma4_text": _GEMMA_4,
    "gemma4_unified_text": _GEMMA_4,
    "gemma4_assistant": {
        "text_config": {
            "model_type": "gemma4_text",
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 0,
            "num_kv_shared_layers": 3,
        }
    },
    "gpt_neo": {"num_layers": 4, "attention_types": [[["global", "local"], 2]]},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention", "linear_attention"]},
    "granitemoeshared": {"shared_intermediate_size": 32},
    "granitemoe_swa": {"shared_intermediate_size": 32},
    "hrm_text": {"num_hidden_layers": 1},
    "jamba": {"num_hidden_layers": 4, "attn_layer_period": 3, "attn_layer_offset": 1},
    "laguna": {"layer_types": _MIXED},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"], "block_auto_adjust_ff_dim": False},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"]},
    "longcat_flash": {"head_dim": 8},  # what it rotates
    "mamba2": {"head_dim": 32},
    "mellum": {"layer_types": _MIXED},
    "mimo_v2_flash": {"v_head_dim": 8},
    "minimax_m3_vl_text": {
        "layer_types": ["full_attention", "minimax_m3_sparse", "full_attention"],
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "index_block_size": 4,
        "index_topk_blocks": 2,
    },
    "olmo": {"clip_qkv": 8.0},
    "olmoe": {"clip_qkv": 8.0},
    "opt": {"word_embed_proj_dim": 32},
    "phi4_multimodal": {"audio_config": {"nemo_conv_channels": 16, "ext_pw_out_channel": 64}},
    "phi": {"qk_layernorm": True},
    "prophetnet": {"pad_token_id": 0},  # it insists that positions begin with 1
    "reformer": {
        "attn_layers": ["local", "lsh", "local"],
        "axial_pos_shape": (16, 16),
        "axial_pos_embds_dim": (32, 32),
        "local_attn_chunk_length": 8,
        "lsh_attn_chunk_length": 8,
        "num_buckets": 4,
    },
    "qwen3_asr": {"audio_config": {"output_dim": 64}},
    "voxtral": {"audio_config": {"hidden_size": 64, "intermediate_size": 256}},  # four positions are one token
    "qwen4_exp_text": {
        "indexer_n_heads": 16,  # with few, the best of many scores of zero are arbitrary
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 8,
        "indexer_compress_ratio": 4,
        "ple_layer_ids": [1],
        "ngram_vocab_size_base": 50,
        "heads_per_ngram": 2,
        "make_ngram_vocab_size_divisible_by": 8,
        "split_ngram_parts": 2,
    },
    "stablelm": {"qk_layernorm": True},
    "xmod": {"default_language": "en_XX"},
    "xlstm": {"hidden_size": 128},  # key widths are rounded up to multiples of 64
    "zamba": {
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
    },
    "zamba2": {
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
        "num_key_value_heads": 4,
        "use_mem_rope": True,
        "use_shared_attention_adapter": True,
    },
    "zaya": {"num_experts_per_tok": 1, "layer_types": ["hybrid", "hybrid_sliding", "hybrid"]},
}
