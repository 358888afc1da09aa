"""Tiny configurations of architectures that take media, each with a language model and its towers."""

from __future__ import annotations

from typing import Any

from quire_testkit.parity.case import LLAMA_FIELDS, ParityCase

__all__ = ["MEDIA_CASES"]


def _text(model_type: str, **fields: Any) -> dict[str, Any]:
    """A tiny language model of this type."""
    return {**LLAMA_FIELDS, "model_type": model_type, "tie_word_embeddings": False, **fields}


def _vision(model_type: str, **fields: Any) -> dict[str, Any]:
    """A tiny vision tower of this type: four patches on each side of an image."""
    return {
        "model_type": model_type,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 32,
        "patch_size": 8,
        **fields,
    }


_QWEN_VISION: dict[str, Any] = {
    "depth": 2,
    "embed_dim": 32,
    "hidden_size": 64,
    "num_heads": 2,
    "patch_size": 4,
    "mlp_ratio": 2,
}
_MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
_IMAGE = {"image_token_id": 190}

MEDIA_CASES: dict[str, ParityCase] = {
    "LlavaForConditionalGeneration": ParityCase(
        config="LlavaConfig",
        fields={
            "text_config": _text("llama"),
            "vision_config": _vision("clip_vision_model", projection_dim=32),
            "image_token_index": 190,
        },
    ),
    "LlavaNextForConditionalGeneration": ParityCase(
        config="LlavaNextConfig",
        fields={
            "text_config": _text("mistral", sliding_window=None),
            "vision_config": _vision("clip_vision_model", projection_dim=32),
            "image_grid_pinpoints": [[32, 64], [64, 32], [64, 64]],
            "image_token_index": 190,
        },
    ),
    "LlavaOnevisionForConditionalGeneration": ParityCase(
        config="LlavaOnevisionConfig",
        fields={
            "text_config": _text("qwen2"),
            "vision_config": _vision("siglip_vision_model"),
            "image_grid_pinpoints": [[32, 64], [64, 32], [64, 64]],
            "image_token_index": 190,
            "video_token_index": 191,
        },
    ),
    "Gemma3ForConditionalGeneration": ParityCase(
        config="Gemma3Config",
        fields={
            "text_config": _text(
                "gemma3_text", head_dim=16, sliding_window=6, query_pre_attn_scalar=16, num_hidden_layers=6
            ),
            "vision_config": _vision("siglip_vision_model", vision_use_head=False),
            "mm_tokens_per_image": 4,
            "image_token_index": 190,
            "tie_word_embeddings": True,
        },
    ),
    "Mistral3ForConditionalGeneration": ParityCase(
        config="Mistral3Config",
        fields={
            "text_config": _text("mistral", head_dim=16, sliding_window=None),
            "vision_config": _vision("pixtral", head_dim=16),
            "image_token_index": 190,
        },
    ),
    "Idefics3ForConditionalGeneration": ParityCase(
        config="Idefics3Config",
        fields={
            "text_config": _text("llama"),
            "vision_config": _vision("idefics3_vision"),
            "scale_factor": 2,
            "image_token_id": 190,
        },
    ),
    "SmolVLMForConditionalGeneration": ParityCase(
        config="SmolVLMConfig",
        fields={
            "text_config": _text("llama"),
            "vision_config": _vision("smolvlm_vision"),
            "scale_factor": 2,
            "image_token_id": 190,
        },
    ),
    "InternVLForConditionalGeneration": ParityCase(
        config="InternVLConfig",
        fields={
            "text_config": _text("qwen2"),
            "vision_config": _vision("internvl_vision", image_size=[32, 32], patch_size=[8, 8]),
            "image_token_id": 190,
        },
    ),
    "Qwen2VLForConditionalGeneration": ParityCase(
        config="Qwen2VLConfig",
        fields={
            "text_config": _text("qwen2_vl_text", rope_parameters=_MROPE),
            "vision_config": _QWEN_VISION,
            **_IMAGE,
            "video_token_id": 191,
            "vision_start_token_id": 192,
            "vision_end_token_id": 193,
        },
    ),
    "Qwen2_5_VLForConditionalGeneration": ParityCase(
        config="Qwen2_5_VLConfig",
        fields={
            "text_config": _text("qwen2_5_vl_text", rope_parameters=_MROPE),
            "vision_config": {
                "depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "patch_size": 4,
                "out_hidden_size": 64, "window_size": 16, "fullatt_block_indexes": [1],
            },
            **_IMAGE,
            "video_token_id": 191,
            "vision_start_token_id": 192,
            "vision_end_token_id": 193,
        },
    ),
    "Qwen3VLForConditionalGeneration": ParityCase(
        config="Qwen3VLConfig",
        fields={
            "text_config": _text("qwen3_vl_text", head_dim=16, rope_parameters={**_MROPE, "mrope_interleaved": True}),
            "vision_config": {
                "depth": 3, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "patch_size": 4,
                "out_hidden_size": 64, "deepstack_visual_indexes": [0, 1], "num_position_embeddings": 16,
            },
            **_IMAGE,
            "video_token_id": 191,
            "vision_start_token_id": 192,
            "vision_end_token_id": 193,
        },
    ),
    "Qwen3VLMoeForConditionalGeneration": ParityCase(
        config="Qwen3VLMoeConfig",
        fields={
            "text_config": _text(
                "qwen3_vl_moe_text", head_dim=16, rope_parameters={**_MROPE, "mrope_interleaved": True},
                num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48,
            ),
            "vision_config": {
                "depth": 3, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "patch_size": 4,
                "out_hidden_size": 64, "deepstack_visual_indexes": [0, 1], "num_position_embeddings": 16,
            },
            **_IMAGE,
            "video_token_id": 191,
            "vision_start_token_id": 192,
            "vision_end_token_id": 193,
        },
    ),
    "Qwen3_5ForConditionalGeneration": ParityCase(
        config="Qwen3_5Config",
        fields={
            "text_config": _text(
                "qwen3_5_text", head_dim=16, num_hidden_layers=4, linear_num_key_heads=2, linear_num_value_heads=4,
                linear_key_head_dim=16, linear_value_head_dim=16,
                rope_parameters={**_MROPE, "mrope_section": [1, 1, 0], "partial_rotary_factor": 0.25},
            ),
            "vision_config": {
                "depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "patch_size": 4,
                "out_hidden_size": 64, "num_position_embeddings": 16,
            },
            **_IMAGE,
            "video_token_id": 191,
            "vision_start_token_id": 192,
            "vision_end_token_id": 193,
        },
    ),
    "Llama4ForConditionalGeneration": ParityCase(
        config="Llama4Config",
        fields={
            "text_config": _text(
                "llama4_text", head_dim=16, intermediate_size_mlp=112, num_hidden_layers=4, num_local_experts=4,
                attention_chunk_size=32, pad_token_id=None,
            ),
            "vision_config": {
                "hidden_size": 32, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
                "image_size": 32, "patch_size": 8, "vision_output_dim": 48, "projector_input_dim": 48,
                "projector_output_dim": 48, "pixel_shuffle_ratio": 0.5,
            },
            "image_token_index": 190,
        },
    ),
    "AyaVisionForConditionalGeneration": ParityCase(
        config="AyaVisionConfig",
        fields={
            "text_config": _text("cohere2", sliding_window=32, num_hidden_layers=4, logit_scale=1.0),
            "vision_config": _vision("siglip_vision_model"),
            "image_token_index": 190,
        },
    ),
    "Glm4vForConditionalGeneration": ParityCase(
        config="Glm4vConfig",
        fields={
            "text_config": _text("glm4v_text", rope_parameters={**_MROPE, "partial_rotary_factor": 0.5,
                                                                "mrope_section": [1, 1, 2]}),
            "vision_config": {
                "depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "patch_size": 4,
                "out_hidden_size": 64, "image_size": 32,
            },
            "image_token_id": 190, "video_token_id": 191, "image_start_token_id": 192, "image_end_token_id": 193,
            "video_start_token_id": 194, "video_end_token_id": 195,
        },
    ),
    "Ovis2ForConditionalGeneration": ParityCase(
        config="Ovis2Config",
        fields={
            "text_config": _text("qwen2"),
            "vision_config": _vision("", vocab_size=24, hidden_stride=2, num_visual_indicator_tokens=5),
            "hidden_size": 64, "vocab_size": 200, "image_token_id": 190,
            "visual_indicator_token_ids": [191, 192, 193, 194, 195],
        },
    ),
    "Qwen2AudioForConditionalGeneration": ParityCase(
        config="Qwen2AudioConfig",
        fields={
            "text_config": _text("qwen2"),
            "audio_config": {
                "model_type": "qwen2_audio_encoder", "d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 2,
                "encoder_ffn_dim": 48, "num_mel_bins": 16, "max_source_positions": 30,
            },
            "audio_token_index": 190,
        },
    ),
    "VoxtralForConditionalGeneration": ParityCase(
        config="VoxtralConfig",
        fields={
            "text_config": _text("llama", head_dim=16),
            "audio_config": {
                "model_type": "voxtral_encoder", "hidden_size": 32, "intermediate_size": 128, "num_hidden_layers": 2,
                "num_attention_heads": 2, "num_mel_bins": 16, "max_source_positions": 32,
            },
            "audio_token_id": 190,
        },
    ),
}  # fmt: skip
"""Architecture -> its case."""
