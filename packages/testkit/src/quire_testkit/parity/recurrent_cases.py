"""Parity cases of architectures with recurrent layers: state space, linear attention, short convolution, and hybrids.

Their logits are held to 1e-3: a prompt's tokens go through the state one by one or in chunks, which Transformers and
Quire cut differently, and every later token reads what was rounded on the way.
"""

from __future__ import annotations

from quire_testkit.parity.case import LLAMA_FIELDS, ParityCase

__all__ = ["RECURRENT_CASES"]

DELTA_FIELDS = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
}

RECURRENT_CASES: dict[str, ParityCase] = {
    "Mamba2ForCausalLM": ParityCase(
        config="Mamba2Config",
        fields={
            "vocab_size": 200,
            "hidden_size": 48,
            "num_hidden_layers": 3,
            "num_heads": 6,
            "head_dim": 16,
            "state_size": 24,
            "n_groups": 2,
            "chunk_size": 32,
        },
        tolerance=1e-3,
    ),
    "Qwen3NextForCausalLM": ParityCase(
        config="Qwen3NextConfig",
        fields={
            **LLAMA_FIELDS,
            "num_hidden_layers": 4,
            "head_dim": 16,
            **DELTA_FIELDS,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 40,
            "mlp_only_layers": [1],
        },
        tolerance=1e-3,
        weight_scale=0.1,
    ),
}
