"""Quantized checkpoints as published: against the dequantized model in Transformers, and what damaged ones are told."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models_packers import MICROSCALED, awq, bitsandbytes, gptq, microscaled, packed, torchao_int4, torchao_layer
from models_paged_driver import PagedDriver
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from quire_interfaces import CheckpointError, ConfigError, Fields
from quire_models import CausalLM, ModelConfig, load_model
from quire_models.layers.fused import split_rows
from quire_models.layers.stored_layouts import LAYOUTS, StoredLayer
from quire_models.ledger import num_parameters, weight_ledger
from quire_models.quantization_formats import parse_quantization
from quire_ops import OpRequest, op_table
from quire_quantization.numbers import in_every_case
from quire_quantization.stored import GroupedWeight, read_awq, read_gptq, read_packed
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


def logits_of(model: CausalLM, tokens: list[int], chunk: int = 7) -> Tensor:
    driver = PagedDriver(model, block_size=4, shuffle=True)
    sequence = driver.add(tokens)
    while len(sequence.logits) < len(tokens):
        driver.run(sequence, min(chunk, len(tokens) - len(sequence.logits)))
    return torch.stack(sequence.logits)


def check_that_bits_do_not_follow_chunks(model: CausalLM, tokens: list[int]) -> None:
    """Where kernels serve that promise it."""
    assert model.batch_invariant == op_table().choose("linear", OpRequest(device="cpu"))[0].batch_invariant
    if model.batch_invariant:
        whole = logits_of(model, tokens, len(tokens))
        assert torch.equal(logits_of(model, tokens, 1), whole)
        assert torch.equal(logits_of(model, tokens, 3), whole)


@pytest.mark.parametrize("name", FORMATS)
def test_logits_are_those_of_the_dequantized_model(name: str, tmp_path: Path) -> None:
    oracle = make(tmp_path, name).float()
    config = ModelConfig.from_path(tmp_path)
    with torch.no_grad():
        tokens = oracle.generate(torch.tensor([TOKENS]), max_new_tokens=6, do_sample=False, eos_token_id=None)
        expected = oracle(tokens).logits[0]
    model = load_model(config, tmp_path, dtype="float32")
    assert name not in INPUTS_STAY or "inputs stay as they are" in model.linear_kernels
    got = logits_of(model, tokens[0].tolist())
    errors = (got - expected).abs().amax(dim=1) / expected.abs().max()
    if name in ("w8a8", "w8a8 static"):  # an input near the middle of two steps may be rounded the other way
        assert errors.median() <= 1e-5
        assert errors.max() <= 0.02
    else:
        assert errors.max() <= 1e-3
    assert torch.equal(got.argmax(1)[len(TOKENS) - 1 : -1], tokens[0, len(TOKENS) :])
    check_that_bits_do_not_follow_chunks(model, tokens[0].tolist())
    model = load_model(config, tmp_path, dtype="bfloat16")
    check_that_bits_do_not_follow_chunks(model, tokens[0].tolist())
    rounded = logits_of(model, tokens[0].tolist())
    # What bfloat16 rounds may cross the middle of two steps of int8, and then moves by a whole one.
    tolerance = 0.16 if name in ("w8a8", "w8a8 static") else 0.08
    assert (rounded - expected).abs().max() <= tolerance * expected.abs().max()
    ledger = weight_ledger(config, "bfloat16")
    whole = 3 * 3 * 320 * 128 * 2
    widened = name.endswith("nvfp4") or name in ("nf4", "fp4 nested", "torchao plain int4", "torchao tiles")
    assert ledger["MLP"] == whole if widened else 0 < ledger["MLP"] < 0.8 * whole
    assert num_parameters(config) == sum(p.numel() for p in oracle.parameters())
    check_that_damage_is_named(tmp_path, config)


def check_that_damage_is_named(folder: Path, config: ModelConfig) -> None:
    """A layer that lacks one of its tensors, and one that has less of them."""
    whole, at = load_file(folder / "model.safetensors"), "model.layers.1.mlp.up_proj"
    assert config.quantization is not None
    layer = StoredLayer(at, 320, 128, config.quantization)
    tensors = LAYOUTS[config.quantization.layout].tensors(layer, torch.float32)
    needed = [f"{at}.{part}" for part, stored in tensors.items() if not stored.optional]
    for gone in needed:
        save_file({name: one for name, one in whole.items() if name != gone}, folder / "model.safetensors")
        with pytest.raises(CheckpointError, match=rf"1 missing: {gone}"):
            load_model(config, folder)
    save_file({**whole, needed[0]: whole[needed[0]][:-1].contiguous()}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"1 of the wrong shape: {needed[0]} is .*, should be"):
        load_model(config, folder)


def forms_of(model: CausalLM) -> dict[str, Any]:
    """Of each layer, what multiplies with its weight, and the names, shapes and dtypes of what that is given."""
    return {
        layer.name: (layer._method.op, {name: (one.shape, one.dtype) for name, one in layer._weights.items()})
        for layer in model.linears
    }


@pytest.mark.parametrize("name", ["gptq planes ordered", "w8a8 static", "float block", "fp4 nested", "torchao int4"])
def test_forms_are_known_without_numbers(name: str, tmp_path: Path) -> None:
    """Whatever the numbers are, each layer's form is among those that are found without them."""
    make(tmp_path, name)
    config = ModelConfig.from_path(tmp_path)
    found: list[dict[str, Any]] = []

    def load() -> None:
        with FakeTensorMode():
            found.append(forms_of(load_model(config, tmp_path, dtype="bfloat16", load_format="dummy")))

    in_every_case(load)
    for layer, form in forms_of(load_model(config, tmp_path, dtype="bfloat16")).items():
        assert form in [forms[layer] for forms in found]


@pytest.mark.parametrize("name", ["gptq planes ordered", "int8", "float block", "nvfp4", "fp4 nested"])
def test_weights_are_read_on_the_host_and_put_on_the_device(name: str, tmp_path: Path) -> None:
    """With torch's device without memory, which takes tensors and gives no numbers back."""
    make(tmp_path, name)
    config = ModelConfig.from_path(tmp_path)
    here = load_model(config, tmp_path, dtype="bfloat16")
    attention = here.attention_backend  # none serves there
    there = load_model(config, tmp_path, dtype="bfloat16", device="meta", attention_backend=attention)
    assert there.linear_kernels == here.linear_kernels
    for wanted, layer in zip(here.linears, there.linears, strict=True):
        assert layer.shape == wanted.shape
        kept = layer._weights
        assert {name: (one.shape, one.dtype) for name, one in kept.items()} == {
            name: (one.shape, one.dtype) for name, one in wanted._weights.items()
        }
        assert {one.device.type for one in kept.values()} == {"meta"}


def test_a_head_takes_hidden_states_as_they_are(tmp_path: Path) -> None:
    """Where its weight is stored in int8 like the layers', whose inputs are rounded."""
    oracle = make_mixed(tmp_path, {**FORMATS["w8a8"], "ignore": []}, lambda _: "w8a8")
    for name, module in oracle.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            module.register_forward_pre_hook(round_inputs)
    model = load_model(ModelConfig.from_path(tmp_path), tmp_path, dtype="float32")
    assert model.linear_kernels.startswith("w8a8_linear for 21, int8_linear for 1 (w8a8_linear: inputs stay")
    with torch.no_grad():
        expected = oracle(torch.tensor([TOKENS])).logits[0]
    errors = (logits_of(model, TOKENS) - expected).abs().amax(dim=1) / expected.abs().max()
    assert errors.median() <= 1e-5
    assert errors.max() <= 0.02


def test_modelopt_says_it_in_a_file_of_its_own(tmp_path: Path) -> None:
    make(tmp_path, "modelopt fp8")
    wanted = logits_of(load_model(ModelConfig.from_path(tmp_path), tmp_path, dtype="float32"), TOKENS)
    values = json.loads((tmp_path / "config.json").read_text())
    del values["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(values))
    said = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}
    said_there = {"producer": {"name": "modelopt"}, "quantization": said}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(said_there))
    config = ModelConfig.from_path(tmp_path)
    assert config.stored_cache_dtype == "fp8_e4m3"
    assert torch.equal(logits_of(load_model(config, tmp_path, dtype="float32"), TOKENS), wanted)


CHANNEL8 = {"num_bits": 8, "type": "float", "strategy": "channel"}
MIXED: dict[str, tuple[dict[str, Any], dict[str, str], str]] = {
    "compressed-tensors": (
        {
            "quant_method": "compressed-tensors",
            "format": "mixed-precision",
            "ignore": ["lm_head", r"re:.*layers\.0\.mlp\.down_proj"],
            "config_groups": {
                "group_0": {
                    "targets": [r"re:.*self_attn\.(q|k|v|o)_proj$"],
                    "format": "float-quantized",
                    "weights": CHANNEL8,
                    "input_activations": {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True},
                },
                "group_1": {"targets": ["Linear"], "format": "pack-quantized", "weights": INT4},
                "group_2": {
                    "targets": ["model.layers.1.mlp.up_proj", "model.layers.1.self_attn.q_proj"],
                    "format": "int-quantized",
                    "weights": INT8,
                    "input_activations": None,
                },
            },
        },
        {
            "layers.0.mlp.down_proj": "", "lm_head": "", "layers.1.mlp.up_proj": "int8",
            "layers.1.self_attn.q_proj": "int8", "self_attn": "float channel", "mlp": "packed",
        },
        "fp8, 8 bits, channel and packed, 4 bits, groups of 32 and int8, 8 bits, channel",
    ),
    "quark": (
        {
            "quant_method": "quark",
            "exclude": ["lm_head"],
            "global_quant_config": {"weight": {"dtype": "fp8_e4m3", "qscheme": "per_tensor"}},
            "layer_type_quant_config": {"Linear": {"weight": {"dtype": "fp8_e4m3", "qscheme": "per_channel"}}},
            "layer_quant_config": {
                "*.0.mlp.down_proj": {"weight": None},
                "*.mlp.*": {
                    "weight": {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0"},
                    "input_tensors": {
                        "dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0",
                        "is_dynamic": True,
                    },
                },
            },
        },
        {"layers.0.mlp.down_proj": "", "lm_head": "", "mlp": "quark fp4", "self_attn": "quark channel"},
        "fp8, 8 bits, channel and mxfp4, 4 bits, groups of 32",
    ),
}  # fmt: skip
"""Method -> its configuration, the form of a layer by the first part that its name has, and what that is called."""


@pytest.mark.parametrize("name", MIXED)
def test_layers_of_one_checkpoint_in_several_forms(name: str, tmp_path: Path) -> None:
    values, forms, called = MIXED[name]
    oracle = make_mixed(tmp_path, values, lambda layer: next(form for part, form in forms.items() if part in layer))
    config = ModelConfig.from_path(tmp_path)
    assert config.quantization is not None
    assert config.quantization.name == called
    with torch.no_grad():
        tokens = oracle.generate(torch.tensor([TOKENS]), max_new_tokens=6, do_sample=False, eos_token_id=None)
        expected = oracle(tokens).logits[0]
    model = load_model(config, tmp_path, dtype="float32")
    got = logits_of(model, tokens[0].tolist())
    assert (got - expected).abs().max() <= 1e-3 * expected.abs().max()
    assert torch.equal(got.argmax(1)[len(TOKENS) - 1 : -1], tokens[0, len(TOKENS) :])
    assert "inputs stay as they are" in model.linear_kernels  # they are meant to be rounded, which no kernel does
    kept = [layer.stack_weights() for layer in model.linears]
    kept_bytes = sum(one.nbytes for layer in kept if layer is not None for one in layer if isinstance(one, Tensor))
    ledger = weight_ledger(config, "float32")
    assert ledger["attention"] + ledger["MLP"] == pytest.approx(kept_bytes, rel=0.02)


@pytest.mark.parametrize("name", FORMATS)
def test_stored_layers_are_read_to_the_bit(name: str) -> None:
    tensors, restored = quantize(name, torch.randn(64, 256) * 0.1)
    config = parse_quantization(Fields({"quantization_config": FORMATS[name]}, "config.json"))
    assert config is not None
    layer = StoredLayer("x", 64, 256, config)
    assert torch.equal(LAYOUTS[config.layout].read(layer, tensors).dequantized(), restored)


def test_kernels_are_chosen_with_reasons_and_may_be_disabled(tmp_path: Path) -> None:
    make(tmp_path, "w8a8")
    config = ModelConfig.from_path(tmp_path)
    wanted = logits_of(load_model(config, tmp_path, dtype="float32"), TOKENS)

    def load(*disabled: str) -> CausalLM:
        return load_model(config, tmp_path, dtype="float32", disabled_linear_kernels=disabled)

    assert load().linear_kernels == "w8a8_linear for 21"
    weight_only = load("w8a8_linear", "int8_linear")
    assert weight_only.linear_kernels == (
        "grouped_linear for 21, inputs stay as they are (w8a8_linear: disabled; int8_linear: disabled; "
        "fp8_linear: takes no int8)"
    )
    widened = load("w8a8_linear", "int8_linear", "grouped_linear")
    assert "linear for 21" in widened.linear_kernels
    same = logits_of(weight_only, TOKENS)
    assert (logits_of(widened, TOKENS) - same).abs().max() <= 1e-4 * same.abs().max()
    assert (wanted - same).abs().max() > 1e-4 * same.abs().max()  # inputs were rounded before
    with pytest.raises(ConfigError, match=r"no linear kernel is left .* \(w8a8_linear: disabled; .*enable one"):
        load("w8a8_linear", "int8_linear", "grouped_linear", "linear")
    tiny_hf_checkpoint(tmp_path / "plain", "llama")
    plain = ModelConfig.from_path(tmp_path / "plain")
    online = load_model(plain, tmp_path / "plain", linear_method="w8a8", disabled_linear_kernels=["w8a8_linear"])
    assert online.linear_kernels == "int8_linear for 21, inputs stay as they are (w8a8_linear: disabled)"
    with pytest.raises(ConfigError, match="no linear kernel 'marlin'; choose of w8a8_linear, int8_linear"):
        load("marlin")


@pytest.mark.parametrize("name", ["gptq ordered", "awq", "packed", "float block", "float tensor"])
def test_projections_in_one_matrix_are_taken_apart(name: str) -> None:
    """What Phi-3 and others have: queries, keys and values quantized together."""
    tensors, restored = quantize(name, torch.randn(512, 128) * 0.1)
    parts = {"q_proj": 256, "k_proj": 128, "v_proj": 128}
    config = parse_quantization(Fields({"quantization_config": FORMATS[name]}, "config.json"))
    assert config is not None
    found: dict[str, dict[str, Tensor]] = {part: {} for part in parts}
    for kind, tensor in tensors.items():
        for full, piece in split_rows(f"self_attn.qkv_proj.{kind}", tensor, {"qkv_proj": parts}):
            found[full.split(".")[1]][kind] = piece
    for (part, outputs), wanted in zip(parts.items(), restored.split(list(parts.values())), strict=True):
        layer = StoredLayer(part, outputs, 128, config)
        assert torch.equal(LAYOUTS[config.layout].read(layer, found[part]).dequantized(), wanted)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("shape", [(32, 64), (64, 128)])
def test_packed_integers_are_read_to_the_bit(bits: int, shape: tuple[int, int]) -> None:
    q = torch.randint(0, 1 << bits, shape)
    zero, scale = torch.randint(1, 1 << bits, (shape[0], shape[1] // 32)), torch.rand(shape[0], shape[1] // 32)
    scale = scale.half().float()
    groups = (torch.arange(shape[1]) // 32)[torch.randperm(shape[1])]
    wanted = scale[:, groups] * (q - zero[:, groups])
    read: list[GroupedWeight] = [
        read_gptq(**gptq(q, zero, scale, groups, bits), bits=bits, zero_offset=1, name="x"),
        read_packed(words["weight_packed"], scale, words["weight_zero_point"], words["weight_g_idx"],
                    bits=bits, inputs=shape[1], name="x") if (words := packed(q, zero, scale, groups, bits)) else None,
    ]  # fmt: skip
    for one in read:
        assert torch.equal(one.dequantized(), wanted)
    if bits == 4:
        plain = torch.arange(shape[1]) // 32
        assert torch.equal(read_awq(**awq(q, zero, scale)).dequantized(), scale[:, plain] * (q - zero[:, plain]))


@pytest.mark.parametrize("bits", range(2, 9))
def test_gptq_of_all_bits_is_read_to_the_bit(bits: int) -> None:
    """Inputs group by group and in any order, in words and in planes."""
    q, zero = torch.randint(0, 1 << bits, (64, 96)), torch.randint(1, 1 << bits, (64, 3))
    scale, plain = torch.rand(64, 3).half().float(), torch.arange(96) // 32
    for groups in (plain, plain[torch.randperm(96)]):
        wanted = scale[:, groups] * (q - zero[:, groups])
        for planes in (False, True) if bits in (2, 3, 4, 8) else (True,):
            stored = gptq(q, zero, scale, groups, bits, minus=int(not planes), planes=planes)
            read = read_gptq(**stored, bits=bits, zero_offset=int(not planes), name="x", planes=planes)
            assert torch.equal(read.dequantized(), wanted)
    words = gptq(q, zero, scale, plain, bits, planes=True)["qweight"]
    assert words.shape == (96 * bits // 32, 64)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            torchao("Int4WeightOnlyConfig", int4_packing_format="preshuffled"),
            "int4_packing_format preshuffled .plain and tile_packed_to_4d are. of torchao is not supported; Int8Weight",
        ),
        (torchao("Float8WeightOnlyConfig", weight_dtype="float8_e5m2"), "weight_dtype float8_e5m2 of torchao is not"),
        (
            {"quant_method": "torchao", "quant_type": "int8_weight_only"},
            "quant_type 'int8_weight_only' of torchao is not",
        ),
        ({"quant_method": "bitblas"}, "quant_method 'bitblas' is not supported; compressed-tensors .* are read"),
        (
            {"quant_method": "gptq", "bits": 5, "group_size": 128},
            "gptq with 5 bits in checkpoint_format 'gptq' .5, 6 and 7 bits are in 'gptq_p'.",
        ),
        ({"quant_method": "gptq", "bits": 9, "group_size": 128, "checkpoint_format": "gptq_p"}, "gptq with 9 bits"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 48}, "group_size 48"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin_24"}, "checkpoint_format 'marlin_24'"),
        ({"quant_method": "gptq"}, "bits is missing"),
        ({"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemv"}, "version 'gemv'"),
        ({"quant_method": "fp8", "weight_block_size": [128, 100]}, "block of 128 x 100"),
        (ct("marlin-24", INT4), "format 'marlin-24'"),
        (ct("mxfp6-pack-quantized", {"num_bits": 6, "type": "float"}), "format 'mxfp6-pack-quantized'"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, r"quant_algo 'W4A8_AWQ' of modelopt"),
        ({"quant_method": "quark", "global_quant_config": {}}, r"global_quant_config.weight must be an object"),
        (quark({"dtype": "int4", "qscheme": "per_group"}), "dtype 'int4' with qscheme 'per_group' of quark"),
        (
            {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "af4"},
            "bitsandbytes with 'af4'",
        ),
        (ct("pack-quantized", {"num_bits": 2, "type": "int"}), "int2 in format 'pack-quantized'"),
        ({**ct("pack-quantized", INT4), "sparsity_config": {"format": "sparse-24-bitmask"}}, "'sparse-24-bitmask'"),
        (ct("int-quantized", INT8, input_activations={"num_bits": 6}), "input_activations in int6"),
        (ct("int-quantized", INT8, input_activations={"num_bits": 8, "strategy": "row"}), "with strategy 'row'"),
        ({**CT, "format": "int-quantized", "config_groups": {}}, "config_groups must be an object of groups, is {}"),
        (
            {**CT, "format": "int-quantized", "config_groups": {"a": {"weights": INT8, "targets": ["Embedding"]}}},
            "config_groups.a: target 'Embedding' .names of layers, .* is not supported",
        ),
        (
            {**CT, "format": "int-quantized", "config_groups": {"a": {"weights": INT8, "targets": "Linear"}}},
            "config_groups.a.targets must be a list of names, is 'Linear'",
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


def as_bytes(text: str) -> Tensor:
    return torch.tensor(list(text.encode()), dtype=torch.uint8)


DAMAGES: dict[str, list[tuple[str, Tensor, str]]] = {
    "nvfp4": [("weight_global_scale", torch.zeros(1), r"up_proj: its global scale is 0.0, should be above 0")],
    "mxfp4": [
        ("weight_scale", torch.full((320, 4), 255, dtype=torch.uint8), r"up_proj: it has scales that are no numbers"),
        (
            "weight_packed",
            torch.zeros(320, 32, dtype=torch.uint8),
            r"is \[320, 32\], should be \[320, 64\]",
        ),
    ],
    "nf4": [
        ("weight.quant_state.bitsandbytes__nf4", as_bytes("{"), r"up_proj: its quant_state cannot be read"),
        ("weight.quant_state.bitsandbytes__nf4", as_bytes('{"a": 1}'), r"cannot be read \(incomplete\)"),
        (
            "weight.quant_state.bitsandbytes__nf4",
            as_bytes('{"shape": [3, 3], "blocksize": 64}'),
            r"state is of \[3",
        ),
        ("weight.absmax", torch.ones(639), r"has 639 scales, 40960 elements in blocks of 64 need 640"),
    ],
}


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
    for name, damages in DAMAGES.items():
        make(tmp_path, name)
        config, whole = ModelConfig.from_path(tmp_path), load_file(tmp_path / "model.safetensors")
        for part, tensor, message in damages:
            save_file({**whole, at + part: tensor}, tmp_path / "model.safetensors")
            with pytest.raises(CheckpointError, match=message):
                load_model(config, tmp_path)
    save_file(whole, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match="quantized already"):
        load_model(config, tmp_path, linear_method="int8")
