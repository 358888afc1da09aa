"""Parity cases of architectures with recurrent layers: state space, linear attention, short convolution, and hybrids.

Their logits are held to 1e-3: a prompt's tokens go through the state one by one or in chunks, which Transformers and
Quire cut differently, and every later token reads what was rounded on the way.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from quire_testkit.parity.case import LLAMA_FIELDS, ParityCase, case, without

__all__ = ["INKLING2_FIELDS", "INKLING_FIELDS", "QWEN4_FIELDS", "RECURRENT_CASES"]

DELTA_FIELDS: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
}

MAMBA2_FIELDS: dict[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 24,
    "mamba_chunk_size": 32,
}

_KIMI_FIELDS: dict[str, Any] = {
    **LLAMA_FIELDS,
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "n_group": 4,
    "topk_group": 2,
}

INKLING_FIELDS: dict[str, Any] = {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "swa_num_attention_heads": 6,
    "swa_num_key_value_heads": 3,
    "swa_head_dim": 8,
    "sliding_window_size": 24,
    "d_rel": 6,
    "rel_extent": 40,
    "log_scaling_n_floor": 20,
    "layer_types": ["hybrid_sliding", "hybrid", "hybrid_sliding", "hybrid"],
    "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "n_shared_experts": 2,
    "moe_intermediate_size": 24,
    "route_scale": 2.0,
    "logits_mup_width_multiplier": 3.0,
}

INKLING2_FIELDS: dict[str, Any] = {
    **without(
        INKLING_FIELDS, "mlp_layer_types", "n_shared_experts", "logits_mup_width_multiplier", "moe_intermediate_size"
    ),
    "num_hidden_layers": 5,
    "layer_types": ["hybrid", "hybrid_sliding", "hybrid_sliding", "hybrid", "hybrid_sliding"],
    "intermediate_size": 24,
    "n_layers_per_attn_res_block": 2,
    "qk_l2_clip_threshold": 1.0,
    "rel_l2_clip_threshold": 0.5,
    "mlp_gate_softcap": 1.5,
    "mlp_up_softcap": 2.0,
    "final_logit_softcapping": 3.0,
    "unpadded_vocab_size": 200,
}

QWEN4_FIELDS: dict[str, Any] = {
    "num_hidden_layers": 4,
    "eos_token_id": [196, 2],  # in the prompt: n-grams end there
    "head_dim": 16,
    **DELTA_FIELDS,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
    "output_gate_type": "sigmoid",
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    "indexer_n_heads": 6,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 12,
    "indexer_budget": 20,
    "indexer_compress_ratio": 4,
    "hc_count": 3,
    "hc_lowrank": 20,
    "ple_layer_ids": [1, 3],
    "ple_embed_dim": 48,
    "ngram_size": 3,
    "heads_per_ngram": 2,
    "ngram_vocab_size_base": 50,
    "make_ngram_vocab_size_divisible_by": 8,
    "split_ngram_parts": 3,
}

_recurrent = partial(case, tolerance=1e-3)

RECURRENT_CASES: dict[str, ParityCase] = {
    "Mamba2ForCausalLM": _recurrent(
        "Mamba2Config",
        {},
        vocab_size=200,
        hidden_size=48,
        num_hidden_layers=3,
        num_heads=6,
        head_dim=16,
        state_size=24,
        n_groups=2,
        chunk_size=32,
    ),
    "Qwen3NextForCausalLM": _recurrent(
        "Qwen3NextConfig",
        num_hidden_layers=4,
        head_dim=16,
        **DELTA_FIELDS,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        shared_expert_intermediate_size=40,
        mlp_only_layers=[1],
        weight_scale=0.1,
    ),
    "KimiLinearForCausalLM": _recurrent(
        "KimiLinearConfig",
        _KIMI_FIELDS,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        linear_head_dim=12,
        linear_num_heads=3,
        weight_scale=0.1,
    ),
    "BailingHybridForCausalLM": _recurrent(
        "BailingHybridConfig",
        _KIMI_FIELDS,
        head_dim=12,
        layer_group_size=2,
        first_k_dense_replace=1,
        num_mtp_layers=0,
        weight_scale=0.05,
    ),
    "OlmoHybridForCausalLM": _recurrent(
        "OlmoHybridConfig",
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        # Queries, keys and values as wide as each other: Transformers writes the convolution in three equal parts.
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=24,
        linear_value_head_dim=12,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    ),
    "BambaForCausalLM": _recurrent(
        "BambaConfig", **MAMBA2_FIELDS, attn_layer_indices=[1], mlp_bias=True, uses_cache=False
    ),
    "Lfm2ForCausalLM": _recurrent(
        "Lfm2Config", layer_types=["conv", "full_attention", "conv"], block_multiple_of=16, conv_bias=True
    ),
    "Lfm2MoeForCausalLM": _recurrent(
        "Lfm2MoeConfig",
        layer_types=["conv", "full_attention", "conv"],
        num_dense_layers=1,
        num_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        conv_bias=True,
        weight_scale=0.1,
    ),
    "MambaForCausalLM": _recurrent(
        "MambaConfig", {}, vocab_size=200, hidden_size=40, num_hidden_layers=3, state_size=12, use_bias=True
    ),
    "JambaForCausalLM": _recurrent(
        "JambaConfig",
        attn_layer_period=3,
        attn_layer_offset=1,
        expert_layer_period=2,
        expert_layer_offset=1,
        num_experts=4,
        mamba_d_state=12,
        use_mamba_kernels=False,
    ),
    "FalconMambaForCausalLM": _recurrent(
        "FalconMambaConfig", {}, vocab_size=200, hidden_size=40, num_hidden_layers=3, state_size=12
    ),
    "Qwen3_5ForCausalLM": _recurrent(
        "Qwen3_5TextConfig", num_hidden_layers=4, head_dim=16, **DELTA_FIELDS, weight_scale=0.1
    ),
    "Qwen3_5MoeForCausalLM": _recurrent(
        "Qwen3_5MoeTextConfig",
        num_hidden_layers=4,
        head_dim=16,
        **DELTA_FIELDS,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        shared_expert_intermediate_size=40,
        weight_scale=0.1,
        seed=1,
    ),
    "Qwen4ExpForCausalLM": _recurrent("Qwen4ExpTextConfig", **QWEN4_FIELDS, weight_scale=0.1),
    "GraniteMoeHybridForCausalLM": _recurrent(
        "GraniteMoeHybridConfig",
        **MAMBA2_FIELDS,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        num_local_experts=4,
        num_experts_per_tok=2,
        shared_intermediate_size=40,
        embedding_multiplier=1.5,
        residual_multiplier=0.7,
        attention_multiplier=0.3,
        logits_scaling=2.0,
        weight_scale=0.1,
    ),
    "FalconH1ForCausalLM": _recurrent(
        "FalconH1Config",
        **MAMBA2_FIELDS,
        mamba_d_ssm=128,
        mamba_rms_norm=True,
        ssm_multipliers=[0.9, 1.1, 0.8, 1.2, 0.7],
        mlp_multipliers=[0.9, 1.2],
        key_multiplier=0.8,
        ssm_in_multiplier=1.1,
        ssm_out_multiplier=0.9,
        attention_in_multiplier=0.8,
        attention_out_multiplier=1.1,
        embedding_multiplier=1.3,
        lm_head_multiplier=0.6,
    ),
    "Zamba2ForCausalLM": _recurrent(
        "Zamba2Config",
        without(LLAMA_FIELDS, "num_key_value_heads"),
        num_hidden_layers=4,
        layers_block_type=["linear_attention", "hybrid", "hybrid", "hybrid"],
        num_mem_blocks=2,
        use_shared_attention_adapter=True,
        adapter_rank=8,
        use_mem_rope=True,
        n_mamba_heads=8,
        mamba_d_state=24,
        mamba_ngroups=2,
        chunk_size=32,
        weight_scale=0.1,
        uses_cache=False,
    ),
    "NemotronHForCausalLM": _recurrent(
        "NemotronHConfig",
        without(LLAMA_FIELDS, "num_hidden_layers"),
        layers_block_type=["linear_attention", "moe", "full_attention", "linear_attention", "mlp"],
        head_dim=16,
        mamba_num_heads=8,
        mamba_head_dim=16,
        ssm_state_size=24,
        n_groups=2,
        chunk_size=32,
        n_routed_experts=4,
        moe_intermediate_size=24,
        moe_shared_expert_intermediate_size=40,
        moe_latent_size=32,
        routed_scaling_factor=1.5,
        weight_scale=0.1,
        uses_cache=False,
    ),
    "MiniMaxForCausalLM": _recurrent(
        "MiniMaxConfig",
        head_dim=24,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        block_size=16,
        num_local_experts=4,
        full_attn_alpha_factor=1.3,
        full_attn_beta_factor=0.8,
        linear_attn_alpha_factor=1.2,
        linear_attn_beta_factor=0.9,
        mlp_alpha_factor=1.1,
        mlp_beta_factor=0.7,
        weight_scale=0.1,
        uses_cache=False,
    ),
    "Inkling2ForCausalLM": replace(
        _recurrent("Inkling2TextConfig", {**LLAMA_FIELDS, **INKLING2_FIELDS}, tolerance=1e-5, weight_scale=0.05),
        wide=("mlp.gate.weight", "conv1d", "attention_input", "mlp_input", "final_input"),
    ),
    "InklingForCausalLM": _recurrent(
        "InklingTextConfig", {**LLAMA_FIELDS, **INKLING_FIELDS}, tolerance=1e-5, weight_scale=0.1
    ),
    "RwkvForCausalLM": _recurrent(
        "RwkvConfig",
        {},
        vocab_size=200,
        hidden_size=40,
        attention_hidden_size=48,
        intermediate_size=72,
        num_hidden_layers=4,
        context_length=256,
        rescale_every=2,
        uses_cache=False,
    ),
}
