"""DeepSeek-V4: as published and as Transformers spells it, what it keeps of tokens, and what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from models_quantized import logits_of
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire_interfaces import CheckpointError, ConfigError, LatentAttentionSpec, SlidingLatentSpec
from quire_kv_cache import plan_kv_cache
from quire_models import DecoderLM, ModelConfig, load_model
from quire_models.families.deepseek_v4 import WindowAttentionSpec
from quire_models.layers.fused import named_tensors
from quire_models.ledger import num_parameters
from quire_testkit.parity.cases import CASES
from quire_testkit.parity.oracle import write_checkpoint

FLASH: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "dtype": "bfloat16",
    "vocab_size": 129280,
    "hidden_size": 4096,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 43,
    "num_attention_heads": 64,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 1024,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 6,
    "scoring_func": "sqrtsoftplus",
    "routed_scaling_factor": 1.5,
    "max_position_embeddings": 1048576,
    "rope_theta": 10000.0,
    "compress_rope_theta": 160000.0,
    "rope_scaling": {"type": "yarn", "factor": 16, "original_max_position_embeddings": 65536,
                     "beta_fast": 32, "beta_slow": 1},
    "compress_ratios": [0, 0, *([4, 128] * 21)],
    "num_hash_layers": 3,
    "num_nextn_predict_layers": 1,
    "sliding_window": 128,
    "swiglu_limit": 10.0,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 512,
}  # fmt: skip
"""Sizes of DeepSeek-V4-Flash under the first names of their fields; ratios may go on behind the last layer."""


def attentions(config: ModelConfig) -> list[WindowAttentionSpec]:
    return [mixer for mixer in config.network.mixers if isinstance(mixer, WindowAttentionSpec)]


def test_published_fields_are_read() -> None:
    config = ModelConfig.from_dict(FLASH)
    own = attentions(config)
    rates = [0 if each.compressor is None else each.compressor.rate for each in own]
    assert rates == [0, 0, *([4, 128] * 21)][:43]
    assert [each.index is not None for each in own] == [rate == 4 for rate in rates]
    assert {each.rope.theta for each in own if each.compressor is None} == {10000.0}
    of_entries = {each.rope for each in own if each.compressor is not None}
    assert {(rope.kind, rope.theta, rope.factor, rope.attention_factor) for rope in of_entries} == {
        ("yarn", 160000.0, 16.0, 1.0)
    }
    assert {each.rotary_dim for each in own} == {64}
    assert num_parameters(config) == pytest.approx(284e9, rel=5e-3)  # "284B parameters"
    assert config.max_model_len == 1048576


def test_layers_take_turns_where_nothing_is_said() -> None:
    fields = {name: value for name, value in FLASH.items() if name != "compress_ratios"}
    rates = [each.compressor.rate for each in attentions(ModelConfig.from_dict(fields)) if each.compressor]
    assert rates == [128, 128, *([128, 4] * 21)][:43]
    rates_of_kinds = {"compressed_sparse_attention": 8, "heavily_compressed_attention": 32}
    other = fields | {"compress_rates": rates_of_kinds, "compress_rate_hca": 64}  # the latter wins, as in Transformers
    assert {each.compressor.rate for each in attentions(ModelConfig.from_dict(other)) if each.compressor} == {8, 64}


def test_what_is_kept_of_a_long_request_is_entries_alone() -> None:
    config = ModelConfig.from_dict(FLASH)
    numbers = {128: 21 * (512 + 128) / 4 + 20 * 512 / 128, 16: 21 * (512 + 128) / 4 + 20 * 512 / 16}
    for block_size, per_token in numbers.items():
        specs = config.kv_cache_specs(block_size, "bfloat16")
        (entries,) = (spec for spec in specs.values() if type(spec) is LatentAttentionSpec)
        assert entries.block_bytes == 2 * block_size * per_token
        windows = [spec for spec in specs.values() if isinstance(spec, SlidingLatentSpec)]
        assert {(spec.width, spec.sliding_window) for spec in windows} == {
            (512, 128),
            (512 + 2 * 1024 + 2 * 256, 128),
            (512 + 2 * 512, 128),
        }
        # Every block is as large as that of the entries: nothing else is stored beside them.
        plan = plan_kv_cache(specs, num_blocks=100)
        assert plan.tensor_block_bytes == (entries.block_bytes,)
        assert len(plan.groups) == 44


def test_open_windows_are_kept_where_they_are_longer_than_the_window() -> None:
    kept = [each.kept_tokens for each in attentions(ModelConfig.from_dict(FLASH | {"sliding_window": 5}))]
    assert kept == [5, 5, *([8, 128] * 21)][:43]


@pytest.mark.parametrize("dtype", ["fp8_e4m3", "int8"])
def test_other_caches_are_refused(dtype: str) -> None:
    with pytest.raises(ConfigError, match=f"compressed attention keeps nothing in {dtype}") as refusal:
        ModelConfig.from_dict(FLASH).kv_cache_specs(16, dtype)
    assert refusal.value.field == "kv_cache_dtype"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"compress_ratios": [0, 4]}, "compress_ratios must be 0, 4 or 128 for each of 43 layers"),
        ({"compress_ratios": [2] * 43}, "compress_ratios must be 0, 4 or 128 for each of 43 layers"),
        ({"compress_ratios": [[4]] * 43}, "compress_ratios must be 0, 4 or 128 for each of 43 layers"),
        ({"layer_types": ["full_attention"] * 43}, "layer_types must name one of sliding_attention, compressed_sparse"),
        ({"o_groups": 7}, r"o_groups \(7\) must divide num_attention_heads \(64\)"),
        ({"index_head_dim": 32}, r"index_head_dim \(32\) must be at least the 64 dimensions that are rotated"),
        ({"qk_rope_head_dim": 63}, "an even number of each head's 512 dimensions must be rotated"),
        ({"scoring_func": "softmax"}, "scoring_func 'softmax' is not supported"),
        ({"n_shared_experts": 2}, "n_shared_experts 2 is not supported"),
        ({"attention_bias": True}, "attention_bias True is not supported"),
        ({"mlp_layer_types": ["dense"] * 43}, "mlp_layer_types must name moe or hash_moe for each of 43 layers"),
        ({"rope_scaling": 3}, "rope_scaling must be an object, is 3"),
    ],
)
def test_wrong_fields_are_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        ModelConfig.from_dict(FLASH | fields)


def test_published_names_are_those_of_the_network() -> None:
    network = ModelConfig.from_dict(FLASH).network
    names = {weight.name for weight in network.weights()} | {network.embedding_name, "lm_head.weight"}
    names = {name.replace("*", "7") for name in names}
    published = {
        "embed.weight", "head.weight", "norm.weight", "hc_head_fn", "layers.2.hc_attn_base", "layers.2.hc_ffn_scale",
        "layers.2.attn.wq_a.weight", "layers.2.attn.q_norm.weight", "layers.2.attn.wq_b.weight",
        "layers.2.attn.wkv.weight", "layers.2.attn.kv_norm.weight", "layers.2.attn.attn_sink",
        "layers.2.attn.wo_a.weight", "layers.2.attn.wo_b.weight", "layers.2.attn.compressor.ape",
        "layers.2.attn.compressor.wkv.weight", "layers.2.attn.compressor.wgate.weight",
        "layers.2.attn.compressor.norm.weight", "layers.2.attn.indexer.wq_b.weight",
        "layers.2.attn.indexer.weights_proj.weight", "layers.2.attn.indexer.compressor.ape",
        "layers.2.attn.indexer.compressor.norm.weight", "layers.2.attn_norm.weight", "layers.2.ffn_norm.weight",
        "layers.2.ffn.gate.tid2eid", "layers.3.ffn.gate.bias", "layers.3.ffn.gate.weight",
        "layers.3.ffn.experts.7.w1.weight", "layers.3.ffn.shared_experts.w2.weight",
    }  # fmt: skip
    for name in published:
        ((own, _),) = named_tensors(network.checkpoint, network.head.name, name, torch.empty(0))
        assert own in names, f"{name} became {own}"
    assert not list(named_tensors(network.checkpoint, network.head.name, "mtp.0.norm.weight", torch.empty(0)))


E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
FLOAT8 = re.compile(r"\.attn\.w\w+\.weight$|\.indexer\.wq_b\.weight$|\.shared_experts\.w\d\.weight$")
EXPERTS = re.compile(r"\.experts\.\d+\.w\d\.weight$")


def float8(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """In blocks of 32 x 128 whose scales are powers of two."""
    outputs, inputs = weight.shape
    scale = torch.exp2(torch.randint(-9, -6, (-(-outputs // 32), -(-inputs // 128))).float())
    wide = scale.repeat_interleave(32, 0)[:outputs].repeat_interleave(128, 1)[:, :inputs]
    elements = (weight / wide).to(torch.float8_e4m3fn)
    return {"weight": elements, "scale": scale.to(torch.float8_e8m0fnu)}, elements.float() * wide


def float4(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Two elements in a byte, the first one lower, with a power of two for each 32 inputs."""
    scale = torch.exp2(torch.randint(-5, -3, (len(weight), weight.shape[1] // 32)).float())
    wide = scale.repeat_interleave(32, 1)
    numbers = ((weight / wide).abs()[..., None] - E2M1).abs().argmin(dim=-1)
    restored = E2M1[numbers] * torch.where(weight < 0, -1.0, 1.0) * wide
    numbers = numbers + 8 * (weight < 0)
    packed = (numbers[:, 0::2] + 16 * numbers[:, 1::2]).to(torch.uint8).view(torch.int8)
    return {"weight": packed, "scale": scale.to(torch.float8_e8m0fnu)}, restored


def test_published_formats_are_read(tmp_path: Path) -> None:
    """FP8 in blocks and experts in FP4, with scales and tables as they are published."""
    torch.manual_seed(2)
    write_checkpoint(tmp_path, "DeepseekV4ForCausalLM", CASES["DeepseekV4ForCausalLM"])
    tensors = load_file(tmp_path / "model.safetensors")
    fields = json.loads((tmp_path / "config.json").read_text())
    kinds = set()
    plain, stored = dict(tensors), {}
    for name, tensor in tensors.items():
        if name.endswith("tid2eid"):
            stored[name] = tensor.to(torch.int32)
        elif FLOAT8.search(name) or EXPERTS.search(name):
            parts, plain[name] = (float4 if EXPERTS.search(name) else float8)(tensor)
            kinds.add(re.sub(r"\d+", "N", name.removeprefix("model.layers.")[2:]))
            stored |= {f"{name.removesuffix('.weight')}.{part}": one.contiguous() for part, one in parts.items()}
        else:
            stored[name] = tensor
    assert {"attn.wo_a.weight", "attn.indexer.wq_b.weight", "ffn.experts.N.wN.weight"} <= kinds
    logits = []
    said = {"quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0", "weight_block_size": [32, 128],
            "activation_scheme": "dynamic"}  # fmt: skip
    for folder, values, more in (
        (tmp_path / "plain", plain, {}),
        (tmp_path / "stored", stored, {"expert_dtype": "fp4", "quantization_config": said}),
    ):
        folder.mkdir()
        save_file({name: tensor.contiguous() for name, tensor in values.items()}, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps({**fields, **more}))
        model = load_model(ModelConfig.from_path(folder), folder, dtype="float32")
        assert isinstance(model, DecoderLM)
        logits.append(logits_of(model, [5, 9, 20, 31, 7, 7, 7, 60, 50, 3] * 4))
    error = (logits[0] - logits[1]).abs().max() / logits[0].abs().max()
    assert error <= 1e-4
    quantization = model.config.quantization
    assert quantization is not None
    assert quantization.name == "fp8, 8 bits, block and mxfp4, 4 bits, groups of 32"
    assert model.expert_methods == "each_expert (fused_moe: knows no limits) for 4"
    with pytest.raises(CheckpointError, match="expert_dtype 'int4' is not supported"):
        ModelConfig.from_dict(FLASH | {"quantization_config": said | {"expert_dtype": "int4"}})
