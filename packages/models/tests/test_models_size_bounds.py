"""Sizes that no network has are refused by name, before anything is made of them."""

from __future__ import annotations

from typing import Any

import pytest

from quire_interfaces import CheckpointError
from quire_models import ModelConfig
from quire_models.size_bounds import check_sizes
from quire_testkit.checkpoints import checkpoint_config

LAYER_FIELDS = ("num_hidden_layers", "n_layer", "num_layers", "decoder_layers", "encoder_layers", "n_layers",
                "num_nextn_predict_layers", "num_local_experts", "num_attention_heads")  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers must be at most 10000, is 1e+09"),
        ({"num_hidden_layers": 1e9}, "num_hidden_layers must be at most 10000, is 1e+09"),
        ({"num_hidden_layers": 10**40}, "num_hidden_layers must be at most 10000"),
        ({"vocab_size": 10**12}, "vocab_size must be at most 2147483647, is 1e+12"),
        ({"hidden_size": 10**18}, "hidden_size must be at most"),
        ({"num_attention_heads": 10**9}, "num_attention_heads must be at most 1048576"),
        ({"max_position_embeddings": 10**30}, "max_position_embeddings must be at most"),
        ({"num_hidden_layers": -4}, "num_hidden_layers must be at least 1, is -4"),
        ({"num_attention_heads": 0}, "num_attention_heads must be at least 1, is 0"),
        ({"num_hidden_layers": "4"}, "num_hidden_layers must be a whole number, is '4'"),
        ({"num_hidden_layers": float("nan")}, "num_hidden_layers must be a whole number"),
        ({"hidden_size": 66}, "hidden_size (66) is not a multiple"),
        ({"rope_theta": float("nan")}, "rope_theta"),
        ({"rope_scaling": [1]}, "rope_scaling"),
    ],
)
def test_it_is_refused_by_name(fields: dict[str, Any], words: str) -> None:
    config = checkpoint_config("llama", "tiny") | {"head_dim": None} | fields
    with pytest.raises(CheckpointError) as error:
        ModelConfig.from_dict(config)
    assert words in str(error.value)


@pytest.mark.parametrize("name", LAYER_FIELDS)
def test_numbers_of_layers_are_bounded_under_every_name(name: str) -> None:
    with pytest.raises(CheckpointError, match=rf"config\.json: text_config\.{name} must be at most"):
        check_sizes({"text_config": {name: 10**9}}, "config.json")
    check_sizes({name: 512}, "config.json")


def test_what_only_looks_large_is_left_alone() -> None:
    check_sizes(
        {"rope_theta": 1e12, "max_position_embeddings": 10_485_760, "routed_scaling_factor": 1e30 + 0.5,
         "pad_token_id": 2**40, "torch_dtype": "x", "initializer_range": 0.02, "layer_types": ["a"] * 3,
         "vocab_size": 262_144, "model_max_length": 10**18, "flag": True, "none": None, "huge": float("inf")},
        "config.json",
    )  # fmt: skip


def test_fields_that_should_be_objects_are_refused_by_name() -> None:
    base = {"architectures": ["MptForCausalLM"], "d_model": 64, "n_heads": 4, "n_layers": 2, "vocab_size": 99}
    with pytest.raises(CheckpointError, match="attn_config must be an object, is -1"):
        ModelConfig.from_dict(base | {"expansion_ratio": 4, "max_seq_len": 64, "attn_config": -1})
