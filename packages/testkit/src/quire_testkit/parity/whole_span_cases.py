"""Tiny configurations of architectures in which the tokens of an image, or of all of a prompt, see one another."""

from __future__ import annotations

from quire_testkit.parity.case import ParityCase
from quire_testkit.parity.media_parts import text, vision

__all__ = ["WHOLE_SPAN_CASES"]

WHOLE_SPAN_CASES: dict[str, ParityCase] = {
    "Gemma3ForConditionalGeneration": ParityCase(
        config="Gemma3Config",
        fields={
            "text_config": text(
                "gemma3_text", head_dim=16, sliding_window=6, query_pre_attn_scalar=16, num_hidden_layers=6
            ),
            "vision_config": vision("siglip_vision_model", vision_use_head=False),
            "mm_tokens_per_image": 4,
            "image_token_index": 190,
            "tie_word_embeddings": True,
        },
    ),
    "Gemma4ForConditionalGeneration": ParityCase(
        config="Gemma4Config",
        fields={
            "image_token_id": 190,
            "video_token_id": 191,
            "audio_token_id": 189,
            "text_config": text(
                "gemma4_text",
                head_dim=16,
                global_head_dim=24,
                sliding_window=20,
                num_hidden_layers=4,
                layer_types=["sliding_attention", "full_attention"] * 2,
                vocab_size_per_layer_input=200,
                hidden_size_per_layer_input=16,
                use_bidirectional_attention="vision",
                num_kv_shared_layers=0,
            ),
            "vision_config": {
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "num_key_value_heads": 2,
                "head_dim": 16,
                "patch_size": 4,
                "pooling_kernel_size": 2,
                "position_embedding_size": 64,
            },
            "audio_config": None,
            "tie_word_embeddings": True,
        },
    ),
    "PaliGemmaForConditionalGeneration": ParityCase(
        config="PaliGemmaConfig",
        fields={
            "text_config": text(
                "gemma2",
                head_dim=16,
                sliding_window=20,
                query_pre_attn_scalar=16,
                num_hidden_layers=4,
                use_bidirectional_attention=False,
            ),
            "vision_config": vision("siglip_vision_model", vision_use_head=False),
            "projection_dim": 64,
            "image_token_index": 190,
            "tie_word_embeddings": False,
        },
    ),
}
"""Architecture -> its case."""
