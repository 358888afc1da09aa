"""Tiny configurations of architectures that take images at their own resolution, and count positions one by one."""

from __future__ import annotations

from typing import Any

from quire_testkit.parity.case import ParityCase
from quire_testkit.parity.media_parts import text, vision
from quire_testkit.parity.recurrent_cases import INKLING2_FIELDS, INKLING_FIELDS

__all__ = ["NATIVE_RESOLUTION_CASES"]

_QWEN_2_5_VISION: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": 64,
    "window_size": 16,
    "fullatt_block_indexes": [1],
}


def _minicpm(name: str, downsample_mode: str) -> ParityCase:
    """A MiniCPM-V whose patches merge in the tower (16x) or behind it alone (4x)."""
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 0], "partial_rotary_factor": 0.25}
    return ParityCase(
        config=f"{name}Config",
        fields={
            "image_token_id": 190,
            "video_token_id": 191,
            "insert_layer_id": 0,
            "downsample_mode": downsample_mode,
            "vision_config": vision(""),
            "text_config": text(
                "qwen3_5_text",
                head_dim=16,
                num_hidden_layers=4,
                linear_num_key_heads=2,
                linear_num_value_heads=4,
                linear_key_head_dim=16,
                linear_value_head_dim=16,
                rope_parameters=rope,
            ),
            "tie_word_embeddings": False,
        },
    )


NATIVE_RESOLUTION_CASES: dict[str, ParityCase] = {
    "Glm5NextForConditionalGeneration": ParityCase(
        config="Glm5NextConfig",
        fields={
            "image_token_id": 190,
            "video_token_id": 191,
            "image_start_token_id": 192,
            "image_end_token_id": 193,
            "video_start_token_id": 194,
            "video_end_token_id": 195,
            "text_config": text(
                "glm5_next_text",
                num_key_value_heads=4,
                num_hidden_layers=5,
                layer_types=[
                    "linear_attention",
                    "indexed_attention",
                    "indexed_attention",
                    "linear_attention",
                    "indexed_attention",
                ],
                indexer_types=["full", "full", "shared", "full", "full"],
                mlp_layer_types=["dense", "sparse", "sparse", "sparse", "sparse"],
                q_lora_rank=24,
                kv_lora_rank=16,
                qk_nope_head_dim=12,
                v_head_dim=20,
                moe_intermediate_size=32,
                n_routed_experts=8,
                num_experts_per_tok=3,
                swiglu_limit=0.5,
                linear_head_dim=16,
                linear_num_heads=4,
                index_n_heads=8,
                index_head_dim=20,
                index_topk=12,
                index_kpool=4,
                hc_mult=3,
            ),
            "vision_config": {
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_heads": 2,
                "depth": 2,
                "image_size": 32,
                "patch_size": 4,
                "out_hidden_size": 64,
                "projection_intermediate_size": 48,
            },
            "tie_word_embeddings": False,
        },
    ),
    "Exaone4_5_ForConditionalGeneration": ParityCase(
        config="Exaone4_5_Config",
        fields={
            "image_token_id": 190,
            "video_token_id": 191,
            "text_config": text("exaone4", num_hidden_layers=4, sliding_window=20),
            "vision_config": {**_QWEN_2_5_VISION, "num_key_value_heads": 1},
            "tie_word_embeddings": False,
        },
    ),
    "HyperCLOVAXVisionV2ForConditionalGeneration": ParityCase(
        config="HyperCLOVAXVisionV2Config",
        fields={
            "image_token_id": 190,
            "video_token_id": 191,
            "text_config": text("hyperclovax"),
            "vision_config": {**_QWEN_2_5_VISION, "model_type": "qwen2_5_vl_vision", "out_hidden_size": 40},
            "tie_word_embeddings": False,
        },
    ),
    "MiniCPMV4_6ForConditionalGeneration": _minicpm("MiniCPMV4_6", "16x"),
    "MiniCPMOcrForConditionalGeneration": _minicpm("MiniCPMOcr", "4x"),
    "FuyuForCausalLM": ParityCase(
        config="FuyuConfig",
        fields={
            "image_token_id": 190,
            "patch_size": 8,
            "text_config": text("persimmon"),
            "tie_word_embeddings": False,
        },
    ),
    "Inkling2ForConditionalGeneration": ParityCase(
        config="Inkling2Config",
        fields={
            "image_token_id": 190,
            "vision_config": {
                "hidden_size": 32,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "patch_size": 4,
                "posemb_grid_size": 6,
                "projection_hidden_dim": 40,
                "text_hidden_size": 64,
            },
            "text_config": text("inkling2_text", **INKLING2_FIELDS),
        },
        weight_scale=0.05,
    ),
    "InklingForConditionalGeneration": ParityCase(
        config="InklingConfig",
        fields={
            "image_token_id": 190,
            "audio_token_id": 191,
            "vision_config": {"patch_size": 4, "temporal_patch_size": 2, "num_hidden_layers": 4},
            "audio_config": {"n_mel_bins": 8, "mel_vocab_size": 16},
            "text_config": text("inkling_text", **INKLING_FIELDS),
        },
        weight_scale=0.1,
    ),
    "Mistral3ForConditionalGeneration": ParityCase(
        config="Mistral3Config",
        fields={
            "text_config": text("mistral", head_dim=16, sliding_window=None),
            "vision_config": vision("pixtral", head_dim=16),
            "image_token_index": 190,
        },
    ),
    "Lfm2VlForConditionalGeneration": ParityCase(
        config="Lfm2VlConfig",
        fields={
            "image_token_id": 190,
            "vision_config": {
                "model_type": "siglip2_vision_model",
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "patch_size": 8,
            },
            "text_config": text("lfm2", conv_L_cache=3),
            "projector_hidden_size": 64,
            "tie_word_embeddings": False,
        },
    ),
    "LightOnOcrForConditionalGeneration": ParityCase(
        config="LightOnOcrConfig",
        fields={
            "image_token_id": 190,
            "vision_config": vision("pixtral", head_dim=16),
            "text_config": text("qwen3", head_dim=16, sliding_window=None),
            "tie_word_embeddings": False,
        },
    ),
    "VideoLlama3ForConditionalGeneration": ParityCase(
        config="VideoLlama3Config",
        fields={
            "image_token_id": 190,
            "video_token_id": 191,
            "text_config": text("qwen2", sliding_window=None),
            "vision_config": {
                "model_type": "video_llama_3_vision",
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "patch_size": 8,
            },
            "tie_word_embeddings": False,
        },
    ),
    "Kimi_K25ForConditionalGeneration": ParityCase(
        config="Kimi_K25Config",
        fields={
            "projection_hidden_size": 32,
            "image_token_id": 190,
            "video_token_id": 191,
            "vision_start_token_id": 192,
            "vision_end_token_id": 193,
            "text_config": text(
                "deepseek_v3",
                num_key_value_heads=4,
                head_dim=8,
                n_routed_experts=4,
                num_experts_per_tok=2,
                moe_intermediate_size=48,
                n_shared_experts=1,
                n_group=1,
                topk_group=1,
                first_k_dense_replace=1,
                q_lora_rank=24,
                kv_lora_rank=16,
                qk_rope_head_dim=8,
                qk_nope_head_dim=16,
                v_head_dim=16,
            ),
            "vision_config": {
                "model_type": "kimi_k25_vision",
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "patch_size": 8,
            },
            "tie_word_embeddings": False,
        },
    ),
    "MuseGlimmerForConditionalGeneration": ParityCase(
        config="MuseGlimmerConfig",
        fields={
            "image_token_id": 190,
            "video_token_id": 191,
            "out_hidden_size": 128,
            "projector_hidden_size": 40,
            "text_config": text("muse_glimmer_text", head_dim=16, sliding_window=20, num_hidden_layers=4),
            "vision_config": {
                "patch_size": 4,
                "pos_emb_height": 4,
                "pos_emb_width": 4,
                "num_attention_heads": 2,
                "num_hidden_layers": 2,
                "hidden_size": 32,
                "intermediate_size": 48,
                "max_position_embeddings": 64,
            },
        },
    ),
    "MiniMaxM3SparseForConditionalGeneration": ParityCase(
        config="MiniMaxM3VLConfig",
        fields={
            "image_token_index": 190,
            "video_token_index": 191,
            "projector_hidden_size": 40,
            "text_config": text(
                "minimax_m3_vl_text",
                head_dim=16,
                rotary_dim=8,
                num_local_experts=4,
                num_experts_per_tok=2,
                dense_intermediate_size=112,
                shared_intermediate_size=48,
            ),
            "vision_config": vision("", patch_size=4, temporal_patch_size=2),
        },
    ),
    "NemotronH_Omni_Reasoning_V3": ParityCase(
        config="NemotronH_Omni_Reasoning_V3_Config",
        fields={
            "image_token_id": 190,
            "video_token_id": 191,
            "audio_token_id": 189,
            "projector_hidden_size": 40,
            "vision_hidden_size": 32,
            "text_config": text("nemotron_h"),
            "vision_config": {
                "model_type": "radio",
                "hidden_size": 32,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "patch_size": 8,
                "image_size": 32,
                "max_img_size": 64,
                "num_cls_tokens": 1,
                "num_registers": 1,
                "video_temporal_patch_size": 2,
            },
            "audio_config": None,
        },
    ),
    "MuseSparkForConditionalGeneration": ParityCase(
        config="MuseSparkConfig",
        fields={
            "image_token_id": 190,
            "video_token_id": 191,
            "audio_token_id": 189,
            "out_hidden_size": 128,
            "projector_hidden_size": 40,
            "text_config": text(
                "muse_spark_text",
                head_dim=16,
                sliding_window=20,
                num_hidden_layers=4,
                num_local_experts=4,
                num_experts_per_tok=2,
                moe_intermediate_size=48,
                moe_hidden_size=32,
            ),
            "vision_config": {
                "patch_size": 4,
                "pos_emb_height": 4,
                "pos_emb_width": 4,
                "num_attention_heads": 2,
                "num_hidden_layers": 2,
                "hidden_size": 32,
                "intermediate_size": 48,
                "max_position_embeddings": 64,
            },
            "audio_config": {
                "patch_sizes": [16, 6, 5, 4],
                "hidden_sizes": [8, 8, 8, 8],
                "depths": [1, 1, 1, 1],
                "out_hidden_size": 64,
            },
        },
    ),
}
"""Architecture -> its case."""
