"""The planner's arithmetic against the real thing: loaded weights, and the linear methods' own figures."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from quire_interfaces import ConfigError
from quire_models import ModelConfig
from quire_models.ledger import WEIGHT_BYTES, num_parameters, weight_ledger
from quire_ops import OpRequest
from quire_quantization import linear_method, linear_method_names
from quire_testkit.hf_checkpoints import tiny_hf_checkpoint


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("mistral", {"num_key_value_heads": 1}),
        ("qwen2", {"tie_word_embeddings": True}),
        ("qwen3", {}),
    ],
)
def test_parameter_count_is_the_oracles(family: str, fields: dict[str, object], tmp_path: Path) -> None:
    oracle = tiny_hf_checkpoint(tmp_path, family, **fields)
    assert num_parameters(ModelConfig.from_path(tmp_path)) == sum(p.numel() for p in oracle.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(24, 40), (1, 1), (16, 128), (70, 64), (5, 300)])
@pytest.mark.parametrize("name", linear_method_names())
def test_bytes_are_those_of_the_method(name: str, shape: tuple[int, int], dtype: torch.dtype) -> None:
    method = linear_method(name, OpRequest(device="cpu", dtype=dtype))
    weights = method.make_weights(torch.randn(shape).to(dtype), None)
    assert WEIGHT_BYTES[name](*shape, dtype.itemsize) == sum(tensor.nbytes for tensor in weights.values())


def test_unknown_method_is_refused(tmp_path: Path) -> None:
    tiny_hf_checkpoint(tmp_path, "llama")
    with pytest.raises(ConfigError, match="choose one of plain, int8"):
        weight_ledger(ModelConfig.from_path(tmp_path), "float32", "int3")
