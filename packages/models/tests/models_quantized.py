"""Checkpoints in every format that is read, and the model in Transformers that has the weights they stand for."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from models_packers import MICROSCALED, awq, bitsandbytes, gptq, microscaled, packed, torchao_int4, torchao_layer
from models_paged_driver import PagedDriver
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire_models import DecoderLM
from quire_ops import OpRequest, op_table, ops
from quire_testkit.hf_checkpoints import tiny_hf_checkpoint

TOKENS = [5, 9, 200, 31, 7, 7, 7, 100, 250, 3]
CT: dict[str, Any] = {"quant_method": "compressed-tensors", "ignore": ["lm_head"]}
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}

INT8 = {"num_bits": 8, "type": "int", "strategy": "channel"}


def ct(layout: str, weights: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {**CT, "format": layout, "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, **more}}}


def quark(weight: dict[str, Any]) -> dict[str, Any]:
    return {"quant_method": "quark", "global_quant_config": {"weight": weight}, "exclude": ["lm_head"]}


INTX = {
    "weight_dtype": {"_type": "torch.dtype", "_data": "int4"},
    "granularity": {"_type": "PerGroup", "_version": 1, "_data": {"group_size": 32}},
    "intx_packing_format": {"_type": "IntxPackingFormat", "_data": "UNPACKED_TO_INT8"},
}


def torchao(kind: str, **data: Any) -> dict[str, Any]:
    return {"quant_method": "torchao", "quant_type": {"default": {"_type": kind, "_version": 2, "_data": data}}}


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
    "gptq 2 bits": {"quant_method": "gptq", "bits": 2, "group_size": 32},
    "gptq 3 bits": {"quant_method": "gptq", "bits": 3, "group_size": 64, "desc_act": False},
    "gptq planes ordered": {
        "quant_method": "gptq",
        "bits": 5,
        "group_size": 32,
        "desc_act": True,
        "checkpoint_format": "gptq_p",
    },
    "mxfp4": ct("mxfp4-pack-quantized", {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}),
    "mxfp8": ct("mxfp8-quantized", {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32}),
    "nvfp4": ct("nvfp4-pack-quantized", {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}),
    "modelopt fp8": {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head*"]},
    "modelopt mxfp8": {"quant_method": "modelopt", "quant_algo": "MXFP8", "exclude_modules": ["lm_head"]},
    "modelopt nvfp4": {"quant_method": "modelopt", "quant_algo": "NVFP4", "exclude_modules": ["lm_head"]},
    "quark tensor": quark({"dtype": "fp8_e4m3", "qscheme": "per_tensor"}),
    "quark channel": quark({"dtype": "fp8_e4m3", "qscheme": "per_channel"}),
    "quark fp4": quark({"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0"}),
    "nf4": {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "fp4 nested": {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_use_double_quant": True},
    "bnb int8": {"quant_method": "bitsandbytes", "load_in_8bit": True},
    "torchao int8": torchao("Int8WeightOnlyConfig"),
    "torchao float8": torchao("Float8WeightOnlyConfig", granularity={"_type": "PerTensor", "_data": {}}),
    "torchao int4": torchao(
        "IntxWeightOnlyConfig", **INTX, mapping_type={"_type": "MappingType", "_data": "ASYMMETRIC"}
    ),
    "torchao plain int4": torchao("Int4WeightOnlyConfig", group_size=64),
    "torchao tiles": torchao(
        "Int4WeightOnlyConfig",
        group_size=32,
        int4_packing_format={"_type": "Int4PackingFormat", "_data": "TILE_PACKED_TO_4D"},
    ),
}


INPUTS_STAY = ("modelopt fp8", "fp8 tensor")


def quantize(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """A layer's tensors in a format, and the weight they stand for."""
    config, (outputs, inputs) = FORMATS[name], weight.shape
    if name in MICROSCALED:
        return microscaled(name, weight)
    if config["quant_method"] == "bitsandbytes":
        return bitsandbytes(weight, config)
    if name.startswith(("float", "fp8", "modelopt", "quark")):
        return _float8(name, weight)
    if name in ("torchao plain int4", "torchao tiles"):
        return torchao_int4(weight, 32 if "tiles" in name else 64, tiles="tiles" in name)
    if config["quant_method"] == "torchao":
        return torchao_layer(weight, name.split()[1])
    if name == "int8" or name.startswith("w8a8"):
        scale = weight.abs().amax(1, keepdim=True) / 127
        scale = scale if name == "int8" else scale.bfloat16().float()  # other scales cannot stay beside rounded inputs
        elements = (weight / scale).round().clamp(-128, 127).to(torch.int8)
        stored = {"weight": elements, "weight_scale": scale}
        return (stored | {"input_scale": torch.tensor([0.05])} if name == "w8a8 static" else stored), elements * scale
    bits = config.get("bits", 4)
    assert config["quant_method"] in ("gptq", "awq", "compressed-tensors")
    size = config.get("group_size", 32)
    size = inputs if size == -1 else size
    groups = torch.arange(inputs) // size
    if "ordered" in name:
        groups = groups[torch.randperm(inputs)]
    scale = (torch.rand(outputs, inputs // size) * weight.std() + 1e-3).half().float() * min(1.0, 2.0 ** (3 - bits))
    scale = scale.half().float()
    zero = torch.randint(1, 1 << bits, scale.shape)
    if config["quant_method"] == "compressed-tensors" and name != "packed zeros":
        zero = torch.full_like(zero, 1 << (bits - 1))
    q = (weight / scale[:, groups] + zero[:, groups]).round().clamp(0, (1 << bits) - 1).long()
    restored = scale[:, groups] * (q - zero[:, groups])
    if name.startswith("gptq"):
        planes = "planes" in name
        return gptq(q, zero, scale, groups, bits, minus=int(name != "gptq 2" and not planes), planes=planes), restored
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
    stored = {"weight": elements, "weight_scale_inv" if name == "fp8 block" else "weight_scale": scale}
    if name in INPUTS_STAY:  # a scale of inputs, which stay as they are
        stored["input_scale"] = torch.tensor(0.01)
    return stored, elements.float() * wide


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


def make_mixed(folder: Path, config: dict[str, Any], form_of: Callable[[str], str]) -> Any:
    """The same with a form for each layer, "" for none."""
    torch.manual_seed(3)
    oracle = tiny_hf_checkpoint(folder, "llama", hidden_size=128, intermediate_size=320, vocab_size=320)
    tensors = load_file(folder / "model.safetensors")
    for name, module in oracle.named_modules():
        if isinstance(module, torch.nn.Linear) and (form := form_of(name)):
            stored, restored = quantize(form, tensors.pop(f"{name}.weight"))
            tensors |= {f"{name}.{part}": tensor.contiguous() for part, tensor in stored.items()}
            module.weight.data.copy_(restored)
    save_file(tensors, folder / "model.safetensors")
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**values, "quantization_config": config}))
    return oracle.float()


def logits_of(model: DecoderLM, tokens: list[int], chunk: int = 7) -> Tensor:
    driver = PagedDriver(model, block_size=4, shuffle=True)
    sequence = driver.add(tokens)
    while len(sequence.logits) < len(tokens):
        driver.run(sequence, min(chunk, len(tokens) - len(sequence.logits)))
    return torch.stack(sequence.logits)


def check_that_bits_do_not_follow_chunks(model: DecoderLM, tokens: list[int]) -> None:
    """Where kernels serve that promise it."""
    assert model.batch_invariant == op_table().choose(ops.linear, OpRequest(device="cpu")).batch_invariant
    if model.batch_invariant:
        whole = logits_of(model, tokens, len(tokens))
        assert torch.equal(logits_of(model, tokens, 1), whole)
        assert torch.equal(logits_of(model, tokens, 3), whole)
