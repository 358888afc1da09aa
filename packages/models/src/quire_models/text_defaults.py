"""Defaults of Transformers' configuration classes that published checkpoints of several modalities rely on in their
language model's part. Free of torch."""

from __future__ import annotations

__all__ = ["TEXT_DEFAULTS"]

_NAMES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "max_position_embeddings",
)  # fmt: skip

_SIZES: dict[str, tuple[int, ...]] = {
    "aria_text": (32000, 4096, 4096, 32, 32, 32, 2048),
    "cohere2": (256000, 8192, 22528, 40, 64, 64, 8192),
    "deepseek_v2": (102400, 4096, 11008, 32, 32, 32, 2048),
    "deepseek_v3": (129280, 7168, 18432, 61, 128, 128, 4096),
    "gemma": (256000, 3072, 24576, 28, 16, 16, 8192),
    "gemma2": (256000, 2304, 9216, 26, 8, 4, 8192),
    "gemma3_text": (262208, 2304, 9216, 26, 8, 4, 131072),
    "glm4v_moe_text": (151424, 4096, 10944, 46, 96, 8, 65536),
    "glm4v_text": (151552, 4096, 13696, 40, 32, 2, 32768),
    "glm_ocr_text": (59392, 1024, 4096, 16, 16, 8, 131072),
    "granite": (32000, 4096, 11008, 32, 32, 32, 2048),
    "hunyuan_vl_text": (290943, 4096, 11008, 32, 32, 32, 2048),
    "inkling2_text": (201024, 4608, 2304, 48, 48, 8, 1048576),
    "inkling_text": (201024, 6144, 24576, 66, 64, 8, 131072),
    "lfm2": (65536, 2560, 12288, 32, 32, 8, 128000),
    "llama": (32000, 4096, 11008, 32, 32, 32, 2048),
    "llama4_text": (202048, 5120, 8192, 48, 40, 8, 131072),
    "ministral3": (131072, 4096, 14336, 34, 32, 8, 262144),
    "mistral": (32000, 4096, 14336, 32, 32, 8, 131072),
    "mixtral": (32000, 4096, 14336, 32, 32, 8, 131072),
    "muse_glimmer_text": (202048, 6656, 19968, 52, 32, 2, 131072),
    "paddleocr_vl_text": (103424, 1024, 3072, 18, 16, 2, 131072),
    "phi3": (32064, 3072, 8192, 32, 32, 32, 4096),
    "qwen2": (151936, 4096, 22016, 32, 32, 32, 32768),
    "qwen2_5_omni_text": (152064, 3584, 18944, 28, 28, 4, 32768),
    "qwen2_5_vl_text": (152064, 8192, 29568, 80, 64, 8, 32768),
    "qwen2_vl_text": (152064, 8192, 29568, 80, 64, 8, 32768),
    "qwen3": (151936, 4096, 22016, 32, 32, 32, 32768),
    "qwen3_5_text": (248320, 4096, 12288, 32, 16, 4, 32768),
    "qwen3_vl_moe_text": (151936, 2048, 5632, 24, 16, 16, 128000),
    "qwen3_vl_text": (151936, 4096, 22016, 32, 32, 32, 128000),
    "voxtral_realtime_text": (131072, 3072, 9216, 26, 32, 8, 131072),
}

TEXT_DEFAULTS: dict[str, dict[str, float]] = {
    model_type: dict(zip(_NAMES, sizes, strict=True)) for model_type, sizes in _SIZES.items()
}
TEXT_DEFAULTS["qwen3_vl_moe_text"]["norm_topk_prob"] = True
TEXT_DEFAULTS["voxtral_realtime_text"] |= {
    "head_dim": 128, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "sliding_window": 8192
}  # fmt: skip
"""`model_type` of a language model -> the fields of its configuration that have to be known."""
