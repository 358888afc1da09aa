"""The whole engine against Hugging Face Transformers: same greedy tokens, same logits, in every situation a request can
meet; and the tokens of a seeded request do not depend on the situation at all.

Every architecture has its case in the testkit; what else a family's configuration can say is varied here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from quire_models import ARCHITECTURES
from quire_testkit.hf_checkpoints import tiny_hf_checkpoint
from quire_testkit.parity.case import ParityCase
from quire_testkit.parity.cases import CASES, SUITE
from quire_testkit.parity.oracle import write_checkpoint
from quire_testkit.parity.table import digest, read_digests
from quire_testkit.parity.verify import compare, verify_architecture

TABLE = Path(__file__).parents[3] / "docs" / "models.md"
VARIATIONS = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-mha": ("llama", {"num_key_value_heads": 4}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-linear": ("llama", {"rope": "linear"}),
    "llama-dynamic": ("llama", {"rope": "dynamic", "max_position_embeddings": 80}),
    "llama-llama3": ("llama", {"rope": "llama3"}),
    "llama-yarn": ("llama", {"rope": "yarn"}),
    "mistral": ("mistral", {}),
    "mistral-window": ("mistral", {"sliding_window": 20}),
    "qwen2": ("qwen2", {}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2-window": ("qwen2", {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}),
    "qwen2-yarn": ("qwen2", {"rope": "yarn"}),
    "qwen3": ("qwen3", {}),
    "qwen3-tied": ("qwen3", {"tie_word_embeddings": True}),
    "qwen3-window": ("qwen3", {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}),
}
"""Name -> family and fields of its configuration. With 3 layers, max_window_layers=1 mixes full and sliding layers.
With dynamic scaling, Transformers computes a prompt beyond max_position_embeddings otherwise than token by token."""


@pytest.mark.parametrize("architecture", SUITE)
def test_architecture_is_transformers(architecture: str) -> None:
    assert verify_architecture(architecture).failures == {}


@pytest.mark.parametrize("variation", VARIATIONS)
def test_every_situation_gives_the_oracles_tokens(variation: str, tmp_path: Path) -> None:
    family, fields = VARIATIONS[variation]
    oracle: Any = tiny_hf_checkpoint(tmp_path, family, **fields)
    assert compare(tmp_path, oracle, ParityCase(config="")).failures == {}


def test_a_difference_is_found(tmp_path: Path) -> None:
    oracle = write_checkpoint(tmp_path, "LlamaForCausalLM", CASES["LlamaForCausalLM"])
    with torch.no_grad():
        oracle.model.layers[1].post_attention_layernorm.weight[3] += 0.02
    verdict = compare(tmp_path, oracle, CASES["LlamaForCausalLM"])
    assert set(verdict.failures) == set(verdict.errors) - {"bfloat16", "int8 weights"}
    assert "logits are off" in verdict.failures["whole prefill"]


def test_table_is_fresh() -> None:
    """`quire verify --table docs/models.md` writes it anew."""
    assert read_digests(TABLE) == {architecture: digest(architecture) for architecture in CASES}
    assert set(ARCHITECTURES) <= set(CASES)


def test_a_digest_is_of_the_case_as_it_was_made() -> None:
    """Transformers adds `partial_rotary_factor` to the rotation that Mistral 4's configuration is given."""
    before, case = digest("Mistral4ForCausalLM"), CASES["Mistral4ForCausalLM"]
    getattr(transformers, case.config)(**case.fields)
    assert "partial_rotary_factor" in case.fields["rope_parameters"]
    assert digest("Mistral4ForCausalLM") == before
