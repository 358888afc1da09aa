"""Quantized checkpoints as published: against the dequantized model in Transformers, and what damaged ones are told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from models_packers import awq, gptq, packed
from models_paged_driver import PagedDriver
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire_interfaces import CheckpointError, ConfigError
from quire_models import CausalLM, ModelConfig, load_model
from quire_models.ledger import num_parameters, weight_ledger
from quire_quantization.stored import GroupedIntegers, read_awq, read_gptq, read_packed
from quire_testkit.hf_checkpoints import tiny_hf_checkpoint

TOKENS = [5, 9, 200, 31, 7, 7, 7, 100, 250, 3]
CT: dict[str, Any] = {"quant_method": "compressed-tensors", "ignore": ["lm_head"]}
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}

INT8 = {"num_bits": 8, "type": "int", "strategy": "channel"}


def ct(layout: str, weights: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {**CT, "format": layout, "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, **more}}}


FORMATS: dict[str, dict[str, Any]] = {
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False},
    "gptq ordered": {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True},
    "gptq 8": {"quant_method": "gptq", "bits": 8, "group_size": 64, "desc_act": False},
    "gptq one group": {"quant_method": "gptq", "bits": 4, "group_size": -1},
    "gptq 2": {"quant_method": "gptq", "bits": 4, "group_size": 32, "checkpoint_format": "gptq_v2"},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm", "zero_point": True},
    "packed": ct("pack-quantized", INT4),
    "packed zeros": ct("pack-quantized", {**INT4, "symmetric": False}),
    "packed ordered": ct("pack-quantized", {**INT4, "actorder": "group"}),
    "int8": ct("int-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"}),
    "w8a8": ct(
        "int-quantized", INT8, input_activations={"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
    ),
    "w8a8 static": ct("int-quantized", INT8, input_activations={"num_bits": 8, "strategy": "tensor"}),
    "w8a8 asymmetric": ct("int-quantized", INT8, input_activations={"num_bits": 8, "symmetric": False}),
    "float channel": ct("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}),
    "float tensor": ct("float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"}),
    "float block": ct(
        "float-quantized", {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]}
    ),
    "fp8 block": {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"},
    "fp8 tensor": {"quant_method": "fp8", "activation_scheme": "static"},
}


def quantize(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """A layer's tensors in a format, and the weight they stand for."""
    config, (outputs, inputs) = FORMATS[name], weight.shape
    if name.startswith(("float", "fp8")):
        return _float8(name, weight)
    if name == "int8" or name.startswith("w8a8"):
        scale = weight.abs().amax(1, keepdim=True) / 127
        scale = scale if name == "int8" else scale.bfloat16().float()  # other scales cannot stay beside rounded inputs
        elements = (weight / scale).round().clamp(-128, 127).to(torch.int8)
        stored = {"weight": elements, "weight_scale": scale}
        return (stored | {"input_scale": torch.tensor([0.05])} if name == "w8a8 static" else stored), elements * scale
    bits = config.get("bits", 4)
    size = config.get("group_size", 32)
    size = inputs if size == -1 else size
    groups = torch.arange(inputs) // size
    if "ordered" in name:
        groups = groups[torch.randperm(inputs)]
    scale = (torch.rand(outputs, inputs // size) * weight.std() + 1e-3).half().float() * 2.0 ** (3 - bits)
    scale = scale.half().float()
    zero = torch.randint(1, 1 << bits, scale.shape)
    if config["quant_method"] == "compressed-tensors" and name != "packed zeros":
        zero = torch.full_like(zero, 1 << (bits - 1))
    q = (weight / scale[:, groups] + zero[:, groups]).round().clamp(0, (1 << bits) - 1).long()
    restored = scale[:, groups] * (q - zero[:, groups])
    if name.startswith("gptq"):
        return gptq(q, zero, scale, groups, bits, minus=0 if name == "gptq 2" else 1), restored
    if name == "awq":
        return awq(q, zero, scale), restored
    stored_zero, order = (zero if name == "packed zeros" else None), (groups if "ordered" in name else None)
    return packed(q, stored_zero, scale, order, bits), restored


def _float8(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    outputs, inputs = weight.shape
    if name.endswith("block"):
        scale = torch.rand(-(-outputs // 128), -(-inputs // 128)) * 0.01 + 1e-3
        wide = scale.repeat_interleave(128, 0)[:outputs].repeat_interleave(128, 1)[:, :inputs]
    else:
        scale = torch.rand(outputs, 1) * 0.01 + 1e-3 if name.endswith("channel") else torch.tensor([0.003])
        wide = scale
    elements = (weight / wide).to(torch.float8_e4m3fn)
    names = {"fp8 block": "weight_scale_inv"}
    return {"weight": elements, names.get(name, "weight_scale"): scale}, elements.float() * wide


def round_inputs(module: Any, inputs: tuple[Tensor]) -> Tensor:
    """What int8 with a scale per token leaves of the inputs."""
    step = inputs[0].abs().amax(-1, keepdim=True) / 127
    return (inputs[0] / step).round() * step


def round_inputs_to_a_scale(module: Any, inputs: tuple[Tensor]) -> Tensor:
    """The same with the scale that the checkpoint says."""
    return (inputs[0] / 0.05).round().clamp(-128, 127) * 0.05


def make(folder: Path, name: str) -> Any:
    """A checkpoint in the format, and Transformers' model with the weights it stands for."""
    torch.manual_seed(3)
    family = "qwen2" if "ordered" in name else "llama"
    oracle = tiny_hf_checkpoint(folder, family, hidden_size=128, intermediate_size=320, vocab_size=320)
    tensors = load_file(folder / "model.safetensors")
    for module_name, module in oracle.named_modules():
        if isinstance(module, torch.nn.Linear) and module_name != "lm_head":
            stored, restored = quantize(name, tensors.pop(f"{module_name}.weight"))
            tensors |= {f"{module_name}.{part}": tensor.contiguous() for part, tensor in stored.items()}
            module.weight.data.copy_(restored)
            if name in ("w8a8", "w8a8 static"):
                module.register_forward_pre_hook(round_inputs if name == "w8a8" else round_inputs_to_a_scale)
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": FORMATS[name]}))
    return oracle


def logits_of(model: CausalLM, tokens: list[int]) -> Tensor:
    driver = PagedDriver(model, block_size=4, shuffle=True)
    sequence = driver.add(tokens)
    while len(sequence.logits) < len(tokens):
        driver.run(sequence, min(7, len(tokens) - len(sequence.logits)))
    return torch.stack(sequence.logits)


@pytest.mark.parametrize("name", FORMATS)
def test_logits_are_those_of_the_dequantized_model(name: str, tmp_path: Path) -> None:
    oracle = make(tmp_path, name).float()
    config = ModelConfig.from_path(tmp_path)
    with torch.no_grad():
        tokens = oracle.generate(torch.tensor([TOKENS]), max_new_tokens=6, do_sample=False, eos_token_id=None)
        expected = oracle(tokens).logits[0]
    got = logits_of(load_model(config, tmp_path, dtype="float32"), tokens[0].tolist())
    errors = (got - expected).abs().amax(dim=1) / expected.abs().max()
    if name in ("w8a8", "w8a8 static"):  # an input near the middle of two steps may be rounded the other way
        assert errors.median() <= 1e-5
        assert errors.max() <= 0.02
    else:
        assert errors.max() <= 1e-3
    assert torch.equal(got.argmax(1)[len(TOKENS) - 1 : -1], tokens[0, len(TOKENS) :])
    rounded = logits_of(load_model(config, tmp_path, dtype="bfloat16"), tokens[0].tolist())
    # What bfloat16 rounds may cross the middle of two steps of int8, and then moves by a whole one.
    tolerance = 0.16 if name in ("w8a8", "w8a8 static") else 0.08
    assert (rounded - expected).abs().max() <= tolerance * expected.abs().max()
    ledger = weight_ledger(config, "bfloat16")
    assert 0 < ledger["MLP"] < 3 * 3 * 320 * 128 * 2
    assert num_parameters(config) == sum(p.numel() for p in oracle.parameters())


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("shape", [(32, 64), (64, 128)])
def test_packed_integers_are_read_to_the_bit(bits: int, shape: tuple[int, int]) -> None:
    q = torch.randint(0, 1 << bits, shape)
    zero, scale = torch.randint(1, 1 << bits, (shape[0], shape[1] // 32)), torch.rand(shape[0], shape[1] // 32)
    scale = scale.half().float()
    groups = (torch.arange(shape[1]) // 32)[torch.randperm(shape[1])]
    wanted = scale[:, groups] * (q - zero[:, groups])
    read: list[GroupedIntegers] = [
        read_gptq(**gptq(q, zero, scale, groups, bits), bits=bits, zero_offset=1, name="x"),
        read_packed(words["weight_packed"], scale, words["weight_zero_point"], words["weight_g_idx"],
                    bits=bits, inputs=shape[1], name="x") if (words := packed(q, zero, scale, groups, bits)) else None,
    ]  # fmt: skip
    for one in read:
        assert torch.equal(one.dequantized(), wanted)
    if bits == 4:
        plain = torch.arange(shape[1]) // 32
        assert torch.equal(read_awq(**awq(q, zero, scale)).dequantized(), scale[:, plain] * (q - zero[:, plain]))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "bitblas"}, "quant_method 'bitblas' is not supported; compressed-tensors .* are read"),
        ({"quant_method": "gptq", "bits": 3, "group_size": 128}, "gptq with 3 bits"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 48}, "group_size 48"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin_24"}, "checkpoint_format 'marlin_24'"),
        ({"quant_method": "gptq"}, "bits is missing"),
        ({"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemv"}, "version 'gemv'"),
        ({"quant_method": "fp8", "weight_block_size": [128, 100]}, "block of 128 x 100"),
        (ct("marlin-24", INT4), "format 'marlin-24'"),
        (ct("nvfp4-pack-quantized", {"num_bits": 4, "type": "float"}), "format 'nvfp4-pack-quantized'"),
        (ct("pack-quantized", {"num_bits": 2, "type": "int"}), "int2 in format 'pack-quantized'"),
        ({**ct("pack-quantized", INT4), "sparsity_config": {"format": "sparse-24-bitmask"}}, "'sparse-24-bitmask'"),
        (ct("int-quantized", INT8, input_activations={"num_bits": 4}), "input_activations other than int8"),
        (
            ct("int-quantized", INT8, input_activations={"num_bits": 8, "dynamic": True, "strategy": "group"}),
            "input_activations with strategy 'group' and dynamic true",
        ),
        ([], "must be an object"),
    ],
)
def test_formats_that_are_not_read_are_named(config: Any, message: str, tmp_path: Path) -> None:
    tiny_hf_checkpoint(tmp_path, "llama")
    values = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**values, "quantization_config": config}))
    with pytest.raises(CheckpointError, match=rf"config\.json: quantization_config.*{message}"):
        ModelConfig.from_path(tmp_path)


def test_damaged_checkpoints_are_refused_by_name(tmp_path: Path) -> None:
    make(tmp_path, "gptq ordered")
    config, whole = ModelConfig.from_path(tmp_path), load_file(tmp_path / "model.safetensors")
    at = "model.layers.1.mlp.up_proj."
    damages: list[tuple[str, Tensor | None, str]] = [
        ("scales", None, rf"1 missing: {at}scales"),
        ("qzeros", whole[f"{at}qzeros"][:2].contiguous(), rf"{at}qzeros is \[2, 40\], should be \[4, 40\]"),
        ("qweight", whole[f"{at}qweight"].float(), r"qweight is torch.float32 where quantization_config"),
        ("g_idx", torch.zeros(128, dtype=torch.int32), r"up_proj: g_idx does not put 32 inputs into each of 4"),
        ("stray", torch.zeros(1), rf"1 not known: {at}stray"),
    ]
    for part, tensor, message in damages:
        tensors = {name: value for name, value in whole.items() if name != at + part}
        save_file(tensors if tensor is None else {**tensors, at + part: tensor}, tmp_path / "model.safetensors")
        with pytest.raises(CheckpointError, match=message):
            load_model(config, tmp_path)
    save_file(whole, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match="quantized already"):
        load_model(config, tmp_path, linear_method="int8")
