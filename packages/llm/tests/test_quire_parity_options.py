"""What the configurations of further families can say, beyond the cases that every architecture has: each against
Transformers, in every situation.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from quire_testkit.parity.cases import CASES
from quire_testkit.parity.verify import verify_architecture

OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "falcon-7b": (
        "FalconForCausalLM",
        {"new_decoder_architecture": False, "multi_query": True, "num_kv_heads": None, "bias": False},
    ),
    "falcon-sequential": (
        "FalconForCausalLM",
        {"new_decoder_architecture": False, "multi_query": False, "num_kv_heads": None, "parallel_attn": False},
    ),
    "falcon-one-norm": ("FalconForCausalLM", {"num_ln_in_parallel_attn": 1}),
    "neox-sequential": ("GPTNeoXForCausalLM", {"use_parallel_residual": False, "attention_bias": False}),
    "phi3-partial": ("Phi3ForCausalLM", {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}),
    "stablelm-parallel": ("StableLmForCausalLM", {"use_parallel_residual": True, "qk_layernorm": False}),
    "starcoder-many-heads": ("GPTBigCodeForCausalLM", {"multi_query": False}),
    "bloom-8-heads": ("BloomForCausalLM", {"n_head": 8, "hidden_size": 64}),
    "cohere-plain": ("CohereForCausalLM", {"use_qk_norm": False, "attention_bias": True}),
    "exaone4-full": ("Exaone4ForCausalLM", {"sliding_window": None, "layer_types": ["full_attention"] * 4}),
    "gemma3-scaled": (
        "Gemma3ForCausalLM",
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            }
        },
    ),
    "olmo2-biases": ("Olmo2ForCausalLM", {"attention_bias": True, "num_key_value_heads": 4}),
}
"""Name -> architecture, and fields that differ from its case."""


@pytest.mark.parametrize("option", OPTIONS)
def test_option_is_transformers(option: str) -> None:
    architecture, fields = OPTIONS[option]
    case = CASES[architecture]
    assert verify_architecture(architecture, dataclasses.replace(case, fields={**case.fields, **fields})).failures == {}
