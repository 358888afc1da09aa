"""Parity cases of dense decoder-only architectures."""

from __future__ import annotations

from quire_testkit.parity.case import LLAMA_FIELDS, ParityCase

__all__ = ["DENSE_CASES"]

_FOUR_LAYERS = {**LLAMA_FIELDS, "num_hidden_layers": 4}
_WINDOWS = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]

_GPT_FIELDS = {
    "vocab_size": 200,
    "n_positions": 256,
    "n_embd": 64,
    "n_layer": 3,
    "n_head": 4,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

DENSE_CASES: dict[str, ParityCase] = {
    "CohereForCausalLM": ParityCase(config="CohereConfig", fields={**LLAMA_FIELDS, "use_qk_norm": True}),
    "Cohere2ForCausalLM": ParityCase(config="Cohere2Config", fields={**_FOUR_LAYERS, "sliding_window": 20}),
    "GemmaForCausalLM": ParityCase(config="GemmaConfig", fields={**LLAMA_FIELDS, "head_dim": 32}),
    "Gemma2ForCausalLM": ParityCase(
        config="Gemma2Config",
        fields={
            **LLAMA_FIELDS,
            "head_dim": 32,
            "sliding_window": 20,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 10.0,
        },
    ),
    "Gemma3ForCausalLM": ParityCase(
        config="Gemma3TextConfig",
        fields={**_FOUR_LAYERS, "head_dim": 32, "sliding_window": 20, "layer_types": _WINDOWS},
    ),
    "GlmForCausalLM": ParityCase(config="GlmConfig", fields={**LLAMA_FIELDS, "head_dim": 16}),
    "Glm4ForCausalLM": ParityCase(config="Glm4Config", fields={**LLAMA_FIELDS, "head_dim": 16}),
    "GraniteForCausalLM": ParityCase(
        config="GraniteConfig",
        fields={
            **LLAMA_FIELDS,
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.6,
            "logits_scaling": 4.0,
        },
    ),
    "OlmoForCausalLM": ParityCase(config="OlmoConfig", fields={**LLAMA_FIELDS, "clip_qkv": 1.5}),
    "Olmo2ForCausalLM": ParityCase(config="Olmo2Config"),
    "Olmo3ForCausalLM": ParityCase(
        config="Olmo3Config",
        fields={
            **_FOUR_LAYERS,
            "sliding_window": 20,
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "yarn",
                    "rope_theta": 500000.0,
                    "factor": 4.0,
                    "original_max_position_embeddings": 64,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 500000.0},
            },
        },
    ),
    "PhiForCausalLM": ParityCase(config="PhiConfig", fields={**LLAMA_FIELDS, "qk_layernorm": True}),
    "Phi3ForCausalLM": ParityCase(config="Phi3Config", fields={**LLAMA_FIELDS, "sliding_window": 20}),
    "Starcoder2ForCausalLM": ParityCase(config="Starcoder2Config", fields={**LLAMA_FIELDS, "sliding_window": 20}),
    "LlamaForCausalLM": ParityCase(config="LlamaConfig"),
    "MistralForCausalLM": ParityCase(config="MistralConfig", fields={**LLAMA_FIELDS, "sliding_window": 20}),
    "Qwen2ForCausalLM": ParityCase(
        config="Qwen2Config",
        fields={**LLAMA_FIELDS, "use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1},
    ),
    "Qwen3ForCausalLM": ParityCase(config="Qwen3Config", fields={**LLAMA_FIELDS, "head_dim": 16}),
    "GPT2LMHeadModel": ParityCase(config="GPT2Config", fields={**_GPT_FIELDS, "scale_attn_by_inverse_layer_idx": True}),
    "GPTBigCodeForCausalLM": ParityCase(config="GPTBigCodeConfig", fields=_GPT_FIELDS),
    "GPTNeoXForCausalLM": ParityCase(config="GPTNeoXConfig", fields=LLAMA_FIELDS),
    "GPTJForCausalLM": ParityCase(config="GPTJConfig", fields={**_GPT_FIELDS, "rotary_dim": 8}),
    "CodeGenForCausalLM": ParityCase(config="CodeGenConfig", fields={**_GPT_FIELDS, "rotary_dim": 8}),
    "OPTForCausalLM": ParityCase(config="OPTConfig", fields={**LLAMA_FIELDS, "ffn_dim": 96, "word_embed_proj_dim": 64}),
    "BioGptForCausalLM": ParityCase(config="BioGptConfig"),
    "XGLMForCausalLM": ParityCase(
        config="XGLMConfig",
        fields={
            "vocab_size": 200,
            "max_position_embeddings": 256,
            "d_model": 64,
            "ffn_dim": 96,
            "num_layers": 3,
            "attention_heads": 4,
        },
    ),
    "StableLmForCausalLM": ParityCase(
        config="StableLmConfig", fields={**LLAMA_FIELDS, "use_qkv_bias": True, "qk_layernorm": True}
    ),
    "NemotronForCausalLM": ParityCase(config="NemotronConfig"),
    "Exaone4ForCausalLM": ParityCase(config="Exaone4Config", fields={**_FOUR_LAYERS, "sliding_window": 20}),
    "SmolLM3ForCausalLM": ParityCase(config="SmolLM3Config", fields=_FOUR_LAYERS),
    "HunYuanDenseV1ForCausalLM": ParityCase(
        config="HunYuanDenseV1Config",
        fields={
            **LLAMA_FIELDS,
            "head_dim": 16,
            "rope_parameters": {"rope_type": "dynamic", "alpha": 50.0, "factor": 1.0, "rope_theta": 10000.0},
        },
    ),
    "SeedOssForCausalLM": ParityCase(config="SeedOssConfig", fields={**LLAMA_FIELDS, "head_dim": 16}),
    "MinistralForCausalLM": ParityCase(
        config="MinistralConfig", fields={**_FOUR_LAYERS, "head_dim": 16, "sliding_window": 20, "layer_types": _WINDOWS}
    ),
    "Ministral3ForCausalLM": ParityCase(
        config="Ministral3Config",
        fields={
            **LLAMA_FIELDS,
            "head_dim": 16,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 32,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.3,
            },
        },
    ),
    "ArceeForCausalLM": ParityCase(config="ArceeConfig"),
    "HeliumForCausalLM": ParityCase(config="HeliumConfig", fields={**LLAMA_FIELDS, "head_dim": 16}),
    "ApertusForCausalLM": ParityCase(config="ApertusConfig"),
    "PersimmonForCausalLM": ParityCase(config="PersimmonConfig"),
    "BloomForCausalLM": ParityCase(
        config="BloomConfig", fields={"vocab_size": 200, "hidden_size": 48, "n_layer": 3, "n_head": 6}
    ),
    "MptForCausalLM": ParityCase(
        config="MptConfig",
        fields={
            "vocab_size": 200,
            "d_model": 48,
            "n_layers": 3,
            "n_heads": 6,
            "max_seq_len": 256,
            "attn_config": {"clip_qkv": 2.0},
        },
    ),
    "FalconForCausalLM": ParityCase(
        config="FalconConfig",
        fields={
            **LLAMA_FIELDS,
            "new_decoder_architecture": True,
            "num_kv_heads": 2,
            "ffn_hidden_size": 96,
            "bias": True,
        },
    ),
}
