"""Frequencies against Transformers' beyond the original context, and independence of chunks for the dynamic kind."""

from __future__ import annotations

import math

import pytest
import torch

from quire_interfaces import Fields
from quire_models import RopeConfig
from quire_models.layers.rotary import RotaryTable, inverse_frequencies
from quire_models.rope_config import parse_rope
from quire_testkit.hf_checkpoints import ROPE_VARIATIONS

HEAD_DIM = 32


def table(rope: RopeConfig) -> RotaryTable:
    return RotaryTable(rope, HEAD_DIM, dtype=torch.float32, device=torch.device("cpu"))


@pytest.mark.parametrize("rope", ["default", "linear", "llama3", "yarn", "dynamic"])
@pytest.mark.parametrize("length", [60, 250, 700])
def test_equals_transformers(rope: str, length: int) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    parameters = {"rope_theta": 5e4, **ROPE_VARIATIONS[rope]}
    oracle = LlamaRotaryEmbedding(
        LlamaConfig(head_dim=HEAD_DIM, max_position_embeddings=256, rope_parameters=dict(parameters))
    )
    positions = torch.arange(length)
    cos, sin = oracle(torch.zeros(1, 1), positions[None])
    ours = parse_rope(Fields({"rope_parameters": parameters}, "config.json"), max_position_embeddings=256)
    got_cos, got_sin = table(ours)(positions, length)
    # The dynamic kind, once longer than the original context: Transformers takes every token's base from the longest.
    rows = slice(length - 1, length) if rope == "dynamic" and length > 256 else slice(None)
    half = HEAD_DIM // 2
    assert (got_cos[rows, 0] - cos[0, rows]).abs().max() <= 2e-4
    assert (got_sin[rows, 0, half:] - sin[0, rows, half:]).abs().max() <= 2e-4
    assert torch.equal(got_sin[:, 0, :half], -got_sin[:, 0, half:])


@pytest.mark.parametrize("max_model_len", [64, 65])
def test_longrope_equals_transformers(max_model_len: int) -> None:
    from transformers import Phi3Config
    from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

    rng = torch.Generator().manual_seed(3)
    factors = (1 + 4 * torch.rand(2, HEAD_DIM // 2, generator=rng)).tolist()
    values = {
        "original_max_position_embeddings": 64,
        "rope_scaling": {"type": "longrope", "short_factor": factors[0], "long_factor": factors[1]},
    }
    oracle = Phi3RotaryEmbedding(
        Phi3Config(hidden_size=4 * HEAD_DIM, num_attention_heads=4, max_position_embeddings=256, **values)
    )
    positions = torch.arange(max_model_len)
    cos, sin = oracle(torch.zeros(1, 1), positions[None])
    rope = parse_rope(Fields(values, "config.json"), max_position_embeddings=256).within(max_model_len)
    # As Transformers rotates the longest sequence that there can be, this engine rotates all of them.
    got_cos, got_sin = table(rope)(positions, max_model_len)
    assert (got_cos[:, 0] - cos[0]).abs().max() <= 2e-5
    assert (got_sin[:, 0, HEAD_DIM // 2 :] - sin[0, :, HEAD_DIM // 2 :]).abs().max() <= 2e-5
    assert got_cos[0, 0, 0] == pytest.approx(math.sqrt(1 + math.log(4) / math.log(64)))


def test_dynamic_does_not_depend_on_what_comes_along() -> None:
    rope = RopeConfig(kind="dynamic", factor=2.0, original_max_position_embeddings=64)
    positions = torch.arange(150)
    together = table(rope)(positions, 150)
    for begin, end in ((0, 1), (60, 70), (149, 150)):
        alone = table(rope)(positions[begin:end], end)
        assert torch.equal(alone[0], together[0][begin:end])
        assert torch.equal(alone[1], together[1][begin:end])
    early = table(RopeConfig())(positions[:64], 64)
    assert (together[0][:64] - early[0]).abs().max() <= 1e-5
    assert (together[0][100:] - table(RopeConfig())(positions, 150)[0][100:]).abs().max() > 0.1


def test_kinds_differ() -> None:
    kinds = {
        name: inverse_frequencies(
            parse_rope(Fields({"rope_parameters": parameters}, "test"), max_position_embeddings=256), HEAD_DIM
        )
        for name, parameters in ROPE_VARIATIONS.items()
        if name != "dynamic"
    }
    names = list(kinds)
    for i, one in enumerate(names):
        for other in names[i + 1 :]:
            assert not torch.allclose(kinds[one], kinds[other])
