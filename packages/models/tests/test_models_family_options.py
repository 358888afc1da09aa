"""What a configuration of one family can say beyond its parity case: logits of a text beside those of Transformers."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from models_paged_driver import PagedDriver

from quire_models import DecoderLM, ModelConfig, load_model
from quire_testkit.parity.cases import CASES
from quire_testkit.parity.oracle import write_checkpoint

TEXT = [3 + 7 * token % 190 for token in range(40)]

FACTORS = [1.0 + 0.3 * pair for pair in range(8)]

OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "bailing-open-decays": ("BailingHybridForCausalLM", {"kda_safe_gate": False}),
    "cohere-sigmoids": (
        "Cohere2MoeForCausalLM",
        {
            "expert_selection_fn": "sigmoid",
            "shared_expert_combination_strategy": "sum",
            "rms_norm_eps": 1e-6,
            "first_k_dense_replace": 2,
            "prefix_dense_sliding_window_pattern": 2,
        },
    ),
    "dbrx-plain-weights": (
        "DbrxForCausalLM",
        {
            "ffn_config": {
                "hidden_size": 64, "ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2,
                "moe_normalize_expert_weights": None,
            }
        },
    ),
    "hyperclova-norms-in-front": ("HyperCLOVAXForCausalLM", {"use_post_norm": False}),
    "inkling-padded-tables": (
        "InklingForCausalLM",
        {"vocab_size": 216, "unpadded_vocab_size": 200, "log_scaling_n_floor": None, "n_shared_experts": 1},
    ),
    "olmo-without-positions": ("OlmoHybridForCausalLM", {"linear_allow_neg_eigval": False, "rope_parameters": None}),
    "qwen4-without-ngrams": (
        "Qwen4ExpForCausalLM",
        {
            "ple_layer_ids": None, "output_gate_type": None, "eos_token_id": None, "indexer_compress_ratio": 1,
            "layer_types": ["full_attention", "linear_attention", "indexed_attention", "linear_attention"],
        },
    ),
    "qwen4-of-four-tokens": (
        "Qwen4ExpForCausalLM",
        {"ngram_size": 4, "ple_conv_kernel_size": 2, "split_ngram_parts": 1},
    ),
    "phimoe-longrope": (  # Transformers divides by the short factors in long texts, too
        "PhimoeForCausalLM",
        {
            "rope_parameters": {
                "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 16,
                "short_mscale": 1.3, "long_mscale": 1.3, "short_factor": FACTORS, "long_factor": FACTORS,
            }
        },
    ),
}  # fmt: skip
"""Name -> architecture, and fields that differ from its case."""


@pytest.mark.parametrize("option", OPTIONS)
def test_option_is_transformers(option: str, tmp_path: Path) -> None:
    architecture, fields = OPTIONS[option]
    case = CASES[architecture]
    oracle = write_checkpoint(tmp_path, architecture, dataclasses.replace(case, fields={**case.fields, **fields}))
    network = load_model(ModelConfig.from_path(tmp_path), tmp_path, dtype="float32")
    assert isinstance(network, DecoderLM)
    driver = PagedDriver(network, block_size=8, shuffle=True)
    sequence = driver.add(TEXT)
    driver.run(sequence, 17)
    with torch.inference_mode():
        expected = oracle(input_ids=torch.tensor([TEXT])).logits[0]
    assert (torch.stack(sequence.logits) - expected).abs().max() < 1e-5 * expected.abs().max()
