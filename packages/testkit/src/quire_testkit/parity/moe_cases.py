"""Parity cases of architectures with mixtures of experts."""

from __future__ import annotations

from quire_testkit.parity.case import LLAMA_FIELDS, ParityCase, case, without

__all__ = ["MOE_CASES"]

MOE_FIELDS = {**LLAMA_FIELDS, "intermediate_size": 48, "num_experts_per_tok": 2}

GROUPED_FIELDS = {
    **MOE_FIELDS,
    "head_dim": 16,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
}
LATENT_FIELDS = {
    **GROUPED_FIELDS,
    "intermediate_size": 112,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
}
GRANITE_FIELDS = {
    **MOE_FIELDS,
    "num_local_experts": 6,
    "embedding_multiplier": 6.0,
    "attention_multiplier": 0.3,
    "residual_multiplier": 0.4,
    "logits_scaling": 3.0,
}


MOE_CASES: dict[str, ParityCase] = {
    "Llama4ForCausalLM": case(
        "Llama4TextConfig",
        num_hidden_layers=4,
        head_dim=16,
        intermediate_size=48,
        intermediate_size_mlp=112,
        num_local_experts=4,
        interleave_moe_layer_step=2,
        attention_chunk_size=32,
        floor_scale=16,
        attn_scale=0.5,
    ),
    "DeepseekV2ForCausalLM": case(
        "DeepseekV2Config",
        without(LATENT_FIELDS, "norm_topk_prob", "head_dim"),
        q_lora_rank=None,
        topk_method="group_limited_greedy",
        attention_bias=True,
    ),
    "DeepseekV3ForCausalLM": case(
        "DeepseekV3Config",
        without(LATENT_FIELDS, "head_dim"),
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "mscale": 1.0,
            "mscale_all_dim": 0.7,
        },
    ),
    "DeepseekV32ForCausalLM": case(
        "DeepseekV32Config",
        without(LATENT_FIELDS, "head_dim"),
        index_n_heads=8,
        index_head_dim=20,
        index_topk=12,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    ),
    "GlmMoeDsaForCausalLM": case(
        "GlmMoeDsaConfig",
        without(LATENT_FIELDS, "head_dim"),
        num_hidden_layers=4,
        index_n_heads=8,
        index_head_dim=20,
        index_topk=12,
        indexer_types=["full", "shared", "full", "shared"],
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    ),
    "Dots1ForCausalLM": case("Dots1Config", GROUPED_FIELDS, sliding_window=20, max_window_layers=2),
    "Ernie4_5_MoeForCausalLM": case(
        "Ernie4_5_MoeConfig",
        use_bias=True,
        num_hidden_layers=4,
        moe_intermediate_size=32,
        moe_num_experts=6,
        moe_k=2,
        moe_num_shared_experts=1,
        moe_layer_interval=2,
    ),
    "ExaoneMoeForCausalLM": case(
        "ExaoneMoeConfig",
        without(GROUPED_FIELDS, "n_routed_experts", "n_shared_experts"),
        num_experts=8,
        num_shared_experts=2,
        sliding_window=20,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "FlexOlmoForCausalLM": case("FlexOlmoConfig", MOE_FIELDS, num_experts=6, norm_topk_prob=False, weight_scale=0.1),
    "Glm4MoeForCausalLM": case("Glm4MoeConfig", GROUPED_FIELDS, use_qk_norm=True, attention_bias=True),
    "GraniteMoeForCausalLM": case("GraniteMoeConfig", GRANITE_FIELDS, weight_scale=0.1),
    "GraniteMoeSharedForCausalLM": case("GraniteMoeSharedConfig", GRANITE_FIELDS, shared_intermediate_size=40),
    "GraniteMoeSWAForCausalLM": case(
        "GraniteMoeSWAConfig", GRANITE_FIELDS, sliding_window=20, layer_rope_theta=[10000.0, 500.0, 0]
    ),
    "Glm4MoeLiteForCausalLM": case(
        "Glm4MoeLiteConfig",
        without(LATENT_FIELDS, "head_dim", "first_k_dense_replace"),
        mlp_layer_types=["sparse", "dense", "sparse"],
    ),
    "MiniCPM3ForCausalLM": case(
        "MiniCPM3Config",
        {
            name: value
            for name, value in LATENT_FIELDS.items()
            if name in LLAMA_FIELDS or "_dim" in name or "_rank" in name
        },
        scale_emb=3,
        dim_model_base=32,
    ),
    "HYV3ForCausalLM": case(
        "HYV3Config",
        MOE_FIELDS,
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=32,
        num_shared_experts=2,
        router_scaling_factor=1.5,
        mlp_layer_types=["sparse", "dense", "sparse"],
        weight_scale=0.1,
    ),
    "Cohere2MoeForCausalLM": case(
        "Cohere2MoeConfig",
        MOE_FIELDS,
        head_dim=16,
        num_hidden_layers=4,
        num_experts=6,
        num_shared_experts=2,
        sliding_window=20,
        sliding_window_pattern=2,
        first_k_dense_replace=1,
        prefix_dense_intermediate_size=80,
        logit_scale=0.5,
    ),
    "PhimoeForCausalLM": case(
        "PhimoeConfig",
        MOE_FIELDS,
        num_local_experts=6,
        router_jitter_noise=0.2,
        sliding_window=20,
        attention_bias=True,
        lm_head_bias=True,
        weight_scale=0.05,
    ),
    "DbrxForCausalLM": case(
        "DbrxConfig",
        {},
        vocab_size=200,
        max_seq_len=256,
        d_model=64,
        n_heads=4,
        n_layers=3,
        attn_config={"rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 1.5},
        ffn_config={"hidden_size": 64, "ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
        eos_token_id=2,
        weight_scale=0.1,
    ),
    "MiMoV2FlashForCausalLM": case(
        "MiMoV2FlashConfig",
        head_dim=24,
        v_head_dim=16,
        sliding_window=20,
        moe_intermediate_size=48,
        n_routed_experts=8,
        num_experts_per_tok=2,
        layer_types=["full_attention", "sliding_attention", "full_attention"],
        weight_scale=0.1,
    ),
    "MiniMaxM2ForCausalLM": case(
        "MiniMaxM2Config",
        MOE_FIELDS,
        head_dim=32,
        rotary_dim=16,
        num_local_experts=8,
        num_experts_per_tok=3,
        weight_scale=0.1,
    ),
    "OlmoeForCausalLM": case("OlmoeConfig", MOE_FIELDS, num_experts=8),
    "SolarOpenForCausalLM": case(
        "SolarOpenConfig", without(GROUPED_FIELDS, "first_k_dense_replace", "intermediate_size"), weight_scale=0.1
    ),
    "GptOssForCausalLM": case(
        "GptOssConfig",
        MOE_FIELDS,
        head_dim=16,
        num_hidden_layers=4,
        num_local_experts=6,
        num_experts_per_tok=3,
        sliding_window=20,
        swiglu_limit=1.5,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 4.0,
            "truncate": False,
            "original_max_position_embeddings": 64,
        },
        weight_scale=0.1,
    ),
    "MixtralForCausalLM": case("MixtralConfig", MOE_FIELDS, num_local_experts=6),
    "Qwen2MoeForCausalLM": case(
        "Qwen2MoeConfig",
        MOE_FIELDS,
        num_experts=6,
        moe_intermediate_size=40,
        shared_expert_intermediate_size=72,
        mlp_only_layers=[1],
    ),
    "Qwen3MoeForCausalLM": case(
        "Qwen3MoeConfig",
        MOE_FIELDS,
        head_dim=32,
        num_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=32,
        norm_topk_prob=True,
        decoder_sparse_step=2,
    ),
}
