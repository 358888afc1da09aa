"""What configurations of recurrent, hybrid and sparse families can say beyond the case that each architecture has: a
short continuation against Transformers, prompt in one piece and token by token.
"""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from quire_models import ModelConfig, load_model
from quire_models.ledger import num_parameters
from quire_testkit.parity.cases import CASES
from quire_testkit.parity.oracle import greedy_continuation, write_checkpoint
from quire_testkit.parity.situations import SITUATIONS, serve

NUM_PROMPT, NUM_TOKENS = 24, 6

OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "zamba2-plain": (
        "Zamba2ForCausalLM",
        {"use_shared_attention_adapter": False, "use_mem_rope": False, "num_mem_blocks": 1, "num_key_value_heads": 2},
    ),
    "zamba2-biases": ("Zamba2ForCausalLM", {"add_bias_linear": True, "num_mem_blocks": 5, "hidden_act": "silu"}),
    "nemotron-h-dense": (
        "NemotronHForCausalLM",
        {
            "layers_block_type": ["linear_attention", "mlp", "full_attention"],
            "mlp_bias": True,
            "use_bias": True,
        },
    ),
    "nemotron-h-groups": (
        "NemotronHForCausalLM",
        {"moe_latent_size": None, "n_group": 2, "topk_group": 1, "norm_topk_prob": False},
    ),
    "rwkv-plain": (
        "RwkvForCausalLM",
        {"rescale_every": 0, "attention_hidden_size": None, "intermediate_size": None, "tie_word_embeddings": True},
    ),
    "minimax-default-layers": ("MiniMaxForCausalLM", {"layer_types": None, "head_dim": None}),
    "deepseek-v4-default-layers": (
        "DeepseekV4ForCausalLM",
        {
            "layer_types": None,
            "mlp_layer_types": None,
            "compress_rates": {
                "compressed_sparse_attention": 3,
                "heavily_compressed_attention": 7,
            },  # no part of a block
            "index_topk": 512,
            "hc_mult": 2,
            "sliding_window": 4,
            "rope_parameters": None,
        },
    ),
    "deepseek-v32-all-tokens": (
        "DeepseekV32ForCausalLM",
        {
            "index_topk": 40,
            "mlp_layer_types": ["sparse", "dense", "sparse"],
            "attention_bias": True,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
                "mscale": 1.0,
                "mscale_all_dim": 0.7,
            },
        },
    ),
    "hy-v4-all-tokens": (
        "HYV4ForCausalLM",
        {
            "index_topk": 40,
            "mlp_layer_types": None,
            "indexer_types": None,
            "attention_bias": True,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
                "mscale": 1.0,
                "mscale_all_dim": 0.7,
            },
        },
    ),
}
"""Name -> architecture, and fields that differ from its case."""


@pytest.mark.parametrize("option", OPTIONS)
def test_option_is_transformers(option: str, tmp_path: Path) -> None:
    architecture, fields = OPTIONS[option]
    case = CASES[architecture]
    oracle = write_checkpoint(
        tmp_path, architecture, dataclasses.replace(case, fields={**case.fields, **fields}, seed=1)
    )
    config = ModelConfig.from_path(tmp_path)
    assert num_parameters(config) == sum(parameter.numel() for parameter in oracle.parameters())
    prompt = random.Random(option).choices(range(3, config.vocab_size), k=NUM_PROMPT)
    expected = greedy_continuation(oracle, prompt, NUM_TOKENS, uses_cache=case.uses_cache)
    network = load_model(config, tmp_path, dtype="float32")
    for situation in ("whole prefill", "chunks of 1"):
        seen = serve(network, SITUATIONS[situation], prompt, NUM_TOKENS)["greedy"]
        assert seen.token_ids == expected.token_ids
        logits = torch.stack([seen.logits[NUM_PROMPT - 1 + offset] for offset in range(NUM_TOKENS)])
        assert (logits - expected.logits).abs().max() <= case.tolerance * expected.logits.abs().max()
