"""Parity cases of architectures with mixtures of experts."""

from __future__ import annotations

from quire_testkit.parity.case import LLAMA_FIELDS, ParityCase

__all__ = ["MOE_CASES"]

MOE_FIELDS = {**LLAMA_FIELDS, "intermediate_size": 48, "num_experts_per_tok": 2}

MOE_CASES: dict[str, ParityCase] = {
    "GptOssForCausalLM": ParityCase(
        config="GptOssConfig",
        fields={
            **MOE_FIELDS,
            "head_dim": 16,
            "num_hidden_layers": 4,
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "sliding_window": 20,
            "swiglu_limit": 1.5,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 150000.0,
                "factor": 4.0,
                "truncate": False,
                "original_max_position_embeddings": 64,
            },
        },
        weight_scale=0.1,
    ),
    "MixtralForCausalLM": ParityCase(config="MixtralConfig", fields={**MOE_FIELDS, "num_local_experts": 6}),
    "Qwen2MoeForCausalLM": ParityCase(
        config="Qwen2MoeConfig",
        fields={
            **MOE_FIELDS,
            "num_experts": 6,
            "moe_intermediate_size": 40,
            "shared_expert_intermediate_size": 72,
            "mlp_only_layers": [1],
        },
    ),
    "Qwen3MoeForCausalLM": ParityCase(
        config="Qwen3MoeConfig",
        fields={
            **MOE_FIELDS,
            "head_dim": 32,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
            "decoder_sparse_step": 2,
        },
    ),
}
