"""Latent attention beyond parity: layouts of published checkpoints, what the cache takes, stored formats."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from models_paged_driver import PagedDriver
from safetensors.torch import load_file, save_file

from quire_interfaces import CheckpointError, ConfigError
from quire_models import ModelConfig, load_model
from quire_models.ledger import num_parameters, weight_ledger
from quire_testkit.parity.cases import CASES
from quire_testkit.parity.oracle import write_checkpoint

KIMI_K2: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "kimi_k2",
    "vocab_size": 163840,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "n_routed_experts": 384,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.827,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "num_nextn_predict_layers": 0,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "rope_theta": 50000.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 1.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
"""As published."""


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("deepseek")
    write_checkpoint(folder, "DeepseekV3ForCausalLM", CASES["DeepseekV3ForCausalLM"])
    return folder


def test_kimi_k2_is_read_and_planned() -> None:
    config = ModelConfig.from_dict(KIMI_K2)
    assert num_parameters(config) == pytest.approx(1.026e12, rel=1e-3)  # "1T parameters"
    specs = config.kv_cache_specs(16, "bfloat16")
    assert len(specs) == 61
    assert {spec.block_bytes for spec in specs.values()} == {16 * (512 + 64) * 2}


SPARSE = KIMI_K2 | {
    "architectures": ["DeepseekV32ForCausalLM"],
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 2048,
}


def test_a_row_of_sparse_attention_ends_with_the_key_of_the_index() -> None:
    plain, sparse = ModelConfig.from_dict(KIMI_K2), ModelConfig.from_dict(SPARSE)
    specs = sparse.kv_cache_specs(16, "bfloat16")
    assert {spec.block_bytes for spec in specs.values()} == {16 * (512 + 64 + 128) * 2}
    index = 64 * 128 * 1536 + 128 * 7168 + 64 * 7168 + 2 * 128  # queries, key, weights of heads, norm
    assert num_parameters(sparse) - num_parameters(plain) == 61 * index


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"q_lora_rank": None}, "q_lora_rank is missing"),
        ({"index_head_dim": 32}, r"index_head_dim \(32\) must be at least qk_rope_head_dim \(64\)"),
        ({"index_topk": 0}, "index_topk must be at least 1"),
        ({"mlp_layer_types": ["dense"]}, "mlp_layer_types must name dense or sparse for each of 61 layers"),
        ({"rope_interleave": False}, "rope_interleave False is not supported"),
    ],
)
def test_wrong_fields_of_the_index_are_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        ModelConfig.from_dict(SPARSE | fields)


GLM5 = SPARSE | {"architectures": ["GlmMoeDsaForCausalLM"], "num_hidden_layers": 4}


@pytest.mark.parametrize(
    ("fields", "indexed"),
    [
        ({}, (True, True, True, True)),
        ({"indexer_types": ["full", "shared", "shared", "full"]}, (True, False, False, True)),
        ({"index_topk_pattern": "FSFS"}, (True, False, True, False)),
        ({"index_topk_freq": 2, "index_skip_topk_offset": 2}, (True, True, False, True)),
    ],
)
def test_layers_share_what_an_index_found(fields: dict[str, Any], indexed: tuple[bool, ...]) -> None:
    config = ModelConfig.from_dict(GLM5 | fields)
    assert tuple(not mixer.indexer.is_shared for mixer in config.network.mixers) == indexed  # type: ignore[attr-defined]
    index = 64 * 128 * 1536 + 128 * 7168 + 64 * 7168 + 2 * 128
    missing = num_parameters(ModelConfig.from_dict(GLM5)) - num_parameters(config)
    assert missing == indexed.count(False) * index


@pytest.mark.parametrize("kinds", [["shared", "full", "full", "full"], ["full"], ["full", "none", "full", "full"], 3])
def test_wrong_kinds_of_indices_are_named(kinds: object) -> None:
    with pytest.raises(CheckpointError, match="indexer_types must say full or shared for each of 4 layers"):
        ModelConfig.from_dict(GLM5 | {"indexer_types": kinds})


def test_rows_in_fp8_are_the_published_ones() -> None:
    """656 bytes of a token, and behind them the index's key in bfloat16."""
    wide, narrow = (ModelConfig.from_dict(KIMI_K2).kv_cache_specs(16, dtype) for dtype in ("bfloat16", "fp8_ds_mla"))
    assert {spec.block_bytes for spec in wide.values()} == {16 * 1152}
    assert {spec.block_bytes for spec in narrow.values()} == {16 * 656}
    (indexed,) = {spec.block_bytes for spec in ModelConfig.from_dict(GLM5).kv_cache_specs(16, "fp8_ds_mla").values()}
    assert indexed == 16 * (656 + 256)


def test_rows_of_every_other_format_are_refused() -> None:
    with pytest.raises(ConfigError, match="latents are not kept in fp8_e4m3") as refusal:
        ModelConfig.from_dict(KIMI_K2).kv_cache_specs(16, "fp8_e4m3")
    assert refusal.value.field == "kv_cache_dtype"


@pytest.mark.parametrize(("field", "value"), [("topk_method", "greedy"), ("scoring_func", "softmax")])
def test_other_routing_is_refused(field: str, value: object) -> None:
    with pytest.raises(CheckpointError, match=f"{field} .* is not supported"):
        ModelConfig.from_dict({**KIMI_K2, field: value})


def test_int8_weights_take_what_is_planned(deepseek: Path) -> None:
    """The projection that is absorbed stays as it is."""
    config = ModelConfig.from_path(deepseek)
    plain, int8 = (weight_ledger(config, "float32", method) for method in ("plain", "int8"))
    attention = config.network.attention
    absorbed = attention.num_heads * (attention.qk_nope_head_dim + attention.v_head_dim) * attention.kv_lora_rank
    kept = config.num_layers * absorbed * 4
    assert int8["norms"] == plain["norms"]
    assert kept < int8["attention"] < kept + (plain["attention"] - kept) / 3


def test_absorbed_projection_may_be_stored_as_integers(deepseek: Path, tmp_path: Path) -> None:
    tensors, plain = load_file(deepseek / "model.safetensors"), {}
    for name in [name for name in tensors if "self_attn" in name and "proj" in name]:
        weight = tensors[name]
        scale = weight.abs().amax(1, keepdim=True) / 127
        tensors[name] = (weight / scale).round().to(torch.int8)
        plain[name] = tensors[name] * scale
        tensors[f"{name}_scale"] = scale
    fields = json.loads((deepseek / "config.json").read_text())
    weights = {"num_bits": 8, "type": "int", "strategy": "channel"}
    stored = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "ignore": ["lm_head", "re:.*mlp.*"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }
    logits = []
    for folder, brought, more in (
        (tmp_path / "stored", tensors, {"quantization_config": stored}),
        (tmp_path / "plain", {**load_file(deepseek / "model.safetensors"), **plain}, {}),
    ):
        folder.mkdir()
        save_file(brought, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps({**fields, **more}))
        network = load_model(ModelConfig.from_path(folder), folder, dtype="float32")
        driver = PagedDriver(network, block_size=4, shuffle=True)
        shape = (len(driver.free) + 1, 4, network.config.network.attention.row_width)
        driver.caches = tuple(torch.full(shape, float("nan")) for _ in range(network.config.num_layers))
        sequence = driver.add([5, 9, 7, 100, 3, 8])
        driver.run(sequence, 3)
        logits.append(torch.stack(sequence.logits))
    assert torch.allclose(logits[0], logits[1], atol=1e-4)
