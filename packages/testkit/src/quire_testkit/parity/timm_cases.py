"""Tiny configurations of architectures whose classes have a tower of the package timm: only where it is installed."""

from __future__ import annotations

from importlib.util import find_spec

from quire_testkit.parity.case import ParityCase
from quire_testkit.parity.media_parts import text

__all__ = ["TIMM_CASES"]

_CASES: dict[str, ParityCase] = {
    "Gemma3nForConditionalGeneration": ParityCase(
        config="Gemma3nConfig",
        fields={
            "text_config": text(
                "gemma3n_text",
                head_dim=16,
                sliding_window=20,
                num_hidden_layers=4,
                layer_types=["sliding_attention", "full_attention"] * 2,
                vocab_size_per_layer_input=188,
                hidden_size_per_layer_input=16,
                num_kv_shared_layers=2,
                laurel_rank=8,
            ),
            "vision_config": {
                "architecture": "test_convnext",
                "hidden_size": 64,
                "vocab_offset": 188,
                "vocab_size": 4,
                "model_args": {},
            },
            "audio_config": {
                "vocab_offset": 192,
                "vocab_size": 8,
                "input_feat_size": 16,
                "hidden_size": 32,
                "conf_attention_chunk_size": 4,
                "conf_attention_context_left": 5,
                "conf_num_attention_heads": 2,
                "conf_num_hidden_layers": 2,
                "conf_reduction_factor": 2,
                "sscp_conv_channel_size": [8, 4],
            },
            "image_token_id": 190,
            "audio_token_id": 191,
            "vision_soft_tokens_per_image": 4,
            "audio_soft_tokens_per_image": 10,
            "tie_word_embeddings": True,
        },
    ),
}

TIMM_CASES: dict[str, ParityCase] = _CASES if find_spec("timm") is not None else {}
"""Architecture -> its case; empty without timm."""
