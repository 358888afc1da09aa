"""Tiny configurations of architectures whose towers add features in front of later layers, beside those of Qwen."""

from __future__ import annotations

from quire_testkit.parity.case import ParityCase
from quire_testkit.parity.media_parts import text, vision

__all__ = ["DEEPSTACK_CASES"]

_ROTATION = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}

DEEPSTACK_CASES: dict[str, ParityCase] = {
    "Granite4VisionForConditionalGeneration": ParityCase(
        config="Granite4VisionConfig",
        fields={
            "image_token_index": 190,
            "downsample_rate": "1/2",
            "deepstack_layer_map": [[-1, 0], [-2, 2]],
            "spatial_target_layers": [1, 3, 4, 5],
            "image_grid_pinpoints": [[32, 64], [64, 32], [64, 64]],
            "vision_feature_select_strategy": "full",
            "text_config": text(
                "granite4_vision_text", num_hidden_layers=6, embedding_multiplier=3.0, residual_multiplier=0.5
            ),
            "vision_config": vision("siglip_vision_model", hidden_size=64, num_attention_heads=1),
            "qformer_config": {
                "model_type": "blip_2_qformer",
                "hidden_size": 64,
                "num_attention_heads": 1,
                "num_hidden_layers": 1,
                "intermediate_size": 48,
                "cross_attention_frequency": 1,
                "max_position_embeddings": 64,
                "use_qformer_text_input": False,
            },
            "tie_word_embeddings": False,
        },
    ),
    "GraniteDoclingForConditionalGeneration": ParityCase(
        config="GraniteDoclingConfig",
        fields={
            "image_token_id": 190,
            "text_config": text("granite_docling_text"),
            "vision_config": vision("granite_docling_vision", out_hidden_size=64, deepstack_visual_indexes=[0]),
            "tie_word_embeddings": False,
        },
    ),
    "CohereCompassForConditionalGeneration": ParityCase(
        config="CohereCompassConfig",
        fields={
            "image_token_id": 190,
            "video_token_id": 191,
            "vision_start_token_id": 192,
            "vision_end_token_id": 193,
            "text_config": text(
                "cohere_compass_text",
                sliding_window=20,
                logit_scale=0.5,
                layer_types=["sliding_attention", "full_attention", "full_attention"],
                rope_parameters={"full_attention": _ROTATION, "sliding_attention": _ROTATION},
            ),
            "vision_config": {
                "depth": 3,
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_heads": 2,
                "patch_size": 4,
                "out_hidden_size": 64,
                "deepstack_visual_indexes": [0, 1],
                "num_position_embeddings": 16,
            },
            "tie_word_embeddings": False,
        },
    ),
}
"""Architecture -> its case."""
