"""Parity cases of dense decoder-only architectures."""

from __future__ import annotations

from quire_testkit.parity.case import LLAMA_FIELDS, ParityCase, case

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
    "CohereForCausalLM": case("CohereConfig", use_qk_norm=True),
    "Cohere2ForCausalLM": case("Cohere2Config", _FOUR_LAYERS, sliding_window=20),
    "GemmaForCausalLM": case("GemmaConfig", head_dim=32),
    "Gemma2ForCausalLM": case(
        "Gemma2Config",
        head_dim=32,
        sliding_window=20,
        query_pre_attn_scalar=24,
        attn_logit_softcapping=5.0,
        final_logit_softcapping=10.0,
    ),
    "Gemma3ForCausalLM": case("Gemma3TextConfig", _FOUR_LAYERS, head_dim=32, sliding_window=20, layer_types=_WINDOWS),
    "GlmForCausalLM": case("GlmConfig", head_dim=16),
    "Glm4ForCausalLM": case("Glm4Config", head_dim=16),
    "GraniteForCausalLM": case(
        "GraniteConfig", embedding_multiplier=3.0, attention_multiplier=0.2, residual_multiplier=0.6, logits_scaling=4.0
    ),
    "GraniteSWAForCausalLM": case(
        "GraniteSWAConfig", sliding_window=20, attention_multiplier=0.2, layer_rope_theta=[10000.0, 500.0, 0]
    ),
    "HyperCLOVAXForCausalLM": case(
        "HyperCLOVAXConfig",
        embedding_multiplier=3.0,
        attention_multiplier=0.2,
        residual_multiplier=0.6,
        logits_scaling=4.0,
    ),
    "OlmoForCausalLM": case("OlmoConfig", clip_qkv=1.5),
    "Olmo2ForCausalLM": case("Olmo2Config"),
    "Olmo3ForCausalLM": case(
        "Olmo3Config",
        _FOUR_LAYERS,
        sliding_window=20,
        rope_parameters={
            "full_attention": {
                "rope_type": "yarn",
                "rope_theta": 500000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 500000.0},
        },
    ),
    "PhiForCausalLM": case("PhiConfig", qk_layernorm=True),
    "Phi3ForCausalLM": case("Phi3Config", sliding_window=20),
    "Starcoder2ForCausalLM": case("Starcoder2Config", sliding_window=20),
    "LlamaForCausalLM": case("LlamaConfig"),
    "MistralForCausalLM": case("MistralConfig", sliding_window=20),
    "Qwen2ForCausalLM": case("Qwen2Config", use_sliding_window=True, sliding_window=20, max_window_layers=1),
    "Qwen3ForCausalLM": case("Qwen3Config", head_dim=16),
    "GPT2LMHeadModel": case("GPT2Config", _GPT_FIELDS, scale_attn_by_inverse_layer_idx=True),
    "GPTBigCodeForCausalLM": case("GPTBigCodeConfig", _GPT_FIELDS),
    "GPTNeoXForCausalLM": case("GPTNeoXConfig"),
    "GPTJForCausalLM": case("GPTJConfig", _GPT_FIELDS, rotary_dim=8),
    "CodeGenForCausalLM": case("CodeGenConfig", _GPT_FIELDS, rotary_dim=8),
    "OPTForCausalLM": case("OPTConfig", ffn_dim=96, word_embed_proj_dim=64),
    "BioGptForCausalLM": case("BioGptConfig"),
    "XGLMForCausalLM": case(
        "XGLMConfig",
        {},
        vocab_size=200,
        max_position_embeddings=256,
        d_model=64,
        ffn_dim=96,
        num_layers=3,
        attention_heads=4,
    ),
    "StableLmForCausalLM": case("StableLmConfig", use_qkv_bias=True, qk_layernorm=True),
    "NemotronForCausalLM": case("NemotronConfig"),
    "Exaone4ForCausalLM": case("Exaone4Config", _FOUR_LAYERS, sliding_window=20),
    "SmolLM3ForCausalLM": case("SmolLM3Config", _FOUR_LAYERS),
    "HunYuanDenseV1ForCausalLM": case(
        "HunYuanDenseV1Config",
        head_dim=16,
        rope_parameters={"rope_type": "dynamic", "alpha": 50.0, "factor": 1.0, "rope_theta": 10000.0},
    ),
    "SeedOssForCausalLM": case("SeedOssConfig", head_dim=16),
    "MinistralForCausalLM": case("MinistralConfig", _FOUR_LAYERS, head_dim=16, sliding_window=20, layer_types=_WINDOWS),
    "Ministral3ForCausalLM": case(
        "Ministral3Config",
        head_dim=16,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 32,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.3,
        },
    ),
    "ArceeForCausalLM": case("ArceeConfig"),
    "HeliumForCausalLM": case("HeliumConfig", head_dim=16),
    "ApertusForCausalLM": case("ApertusConfig"),
    "PersimmonForCausalLM": case("PersimmonConfig"),
    "BloomForCausalLM": case("BloomConfig", {}, vocab_size=200, hidden_size=48, n_layer=3, n_head=6),
    "MptForCausalLM": case(
        "MptConfig",
        {},
        vocab_size=200,
        d_model=48,
        n_layers=3,
        n_heads=6,
        max_seq_len=256,
        attn_config={"clip_qkv": 2.0},
    ),
    "FalconForCausalLM": case(
        "FalconConfig", new_decoder_architecture=True, num_kv_heads=2, ffn_hidden_size=96, bias=True
    ),
}
