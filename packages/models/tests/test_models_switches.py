"""What the configurations of families can switch, as published checkpoints do: each against Transformers, in one
prefill and some steps of decoding. The architectures themselves are verified in every situation elsewhere.
"""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from models_paged_driver import PagedDriver

from quire_interfaces import CheckpointError
from quire_models import ModelConfig, load_model
from quire_models.ledger import num_parameters
from quire_testkit.parity.cases import CASES
from quire_testkit.parity.oracle import write_checkpoint

PROMPT_LEN, NUM_STEPS = 34, 4

SWITCHES: dict[str, tuple[str, dict[str, Any]]] = {
    "bloom-8-heads": ("BloomForCausalLM", {"n_head": 8, "hidden_size": 64}),
    "cohere-plain": ("CohereForCausalLM", {"use_qk_norm": False, "attention_bias": True}),
    "exaone4-full": ("Exaone4ForCausalLM", {"sliding_window": None, "layer_types": ["full_attention"] * 2}),
    "falcon-7b": (
        "FalconForCausalLM",
        {"new_decoder_architecture": False, "multi_query": True, "num_kv_heads": None, "bias": False},
    ),
    "falcon-sequential": (
        "FalconForCausalLM",
        {"new_decoder_architecture": False, "multi_query": False, "num_kv_heads": None, "parallel_attn": False},
    ),
    "falcon-rw": (
        "FalconForCausalLM",
        {
            "new_decoder_architecture": False,
            "multi_query": False,
            "num_kv_heads": None,
            "parallel_attn": False,
            "alibi": True,
            "num_attention_heads": 6,
            "hidden_size": 48,
        },
    ),
    "falcon-one-norm": ("FalconForCausalLM", {"num_ln_in_parallel_attn": 1}),
    "gemma3-scaled": (
        "Gemma3ForCausalLM",
        {
            "layer_types": ["full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "neox-sequential": ("GPTNeoXForCausalLM", {"use_parallel_residual": False, "attention_bias": False}),
    "olmo2-biases": ("Olmo2ForCausalLM", {"attention_bias": True, "num_key_value_heads": 4}),
    "opt-350m": ("OPTForCausalLM", {"do_layer_norm_before": False, "word_embed_proj_dim": 48}),
    "opt-galactica": ("OPTForCausalLM", {"enable_bias": False, "layer_norm_elementwise_affine": False}),
    "phi3-partial": ("Phi3ForCausalLM", {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}),
    "stablelm-parallel": ("StableLmForCausalLM", {"use_parallel_residual": True, "qk_layernorm": False}),
    "starcoder-many-heads": ("GPTBigCodeForCausalLM", {"multi_query": False}),
}
"""Name -> architecture, and fields that differ from its case."""


@pytest.mark.parametrize("switch", SWITCHES)
def test_switch_is_transformers(switch: str, tmp_path: Path) -> None:
    architecture, fields = SWITCHES[switch]
    case = CASES[architecture]
    case = dataclasses.replace(case, fields={**case.fields, "num_hidden_layers": 2, **fields})
    oracle = write_checkpoint(tmp_path, architecture, case)
    if switch == "falcon-rw":  # the eager attention of Transformers adds its slopes twice
        oracle = transformers.FalconForCausalLM.from_pretrained(tmp_path, attn_implementation="sdpa").eval()
    config = ModelConfig.from_path(tmp_path)
    assert num_parameters(config) == sum(parameter.numel() for parameter in oracle.parameters())
    driver = PagedDriver(load_model(config, tmp_path), block_size=8, shuffle=True)
    sequence = driver.add(random.Random(switch).choices(range(3, config.vocab_size), k=PROMPT_LEN))
    driver.run(sequence, PROMPT_LEN)
    driver.greedy(sequence, NUM_STEPS)
    with torch.inference_mode():
        expected = oracle(torch.tensor([sequence.token_ids]), use_cache=False).logits[0]
    error = (torch.stack(sequence.logits) - expected).abs().max()
    assert error <= case.tolerance * expected.abs().max()


REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "bamba-gelu": ("BambaForCausalLM", {"hidden_act": "gelu_new"}),
    "bloom-residual": ("BloomForCausalLM", {"apply_residual_connection_post_layernorm": True}),
    "falcon-h1-gelu": ("FalconH1ForCausalLM", {"hidden_act": "gelu_new"}),
    "granite-4-gelu": ("GraniteMoeHybridForCausalLM", {"hidden_act": "gelu_new"}),
    "jamba-gelu": ("JambaForCausalLM", {"hidden_act": "gelu_new"}),
    "nemotron-h-tied": ("NemotronHForCausalLM", {"tie_word_embeddings": True}),
    "qwen3-next-gelu": ("Qwen3NextForCausalLM", {"hidden_act": "gelu_new"}),
    "zamba2-untied": ("Zamba2ForCausalLM", {"tie_word_embeddings": False}),
}
"""What would give other logits than Transformers'."""


@pytest.mark.parametrize("switch", REFUSED)
def test_what_is_not_built_is_refused(switch: str) -> None:
    architecture, fields = REFUSED[switch]
    case = CASES[architecture]
    values = getattr(transformers, case.config)(**{**case.fields, **fields}).to_dict()
    (name,) = fields
    with pytest.raises(CheckpointError, match=f"{name} .* is not supported"):
        ModelConfig.from_dict({**values, "architectures": [architecture]})
