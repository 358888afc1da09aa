"""Quantized checkpoints as published: against the dequantized model in Transformers, and what damaged ones are told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from models_packers import awq, gptq, packed
from models_quantized import (
    CT,
    FORMATS,
    INPUTS_STAY,
    INT4,
    INT8,
    TOKENS,
    check_that_bits_do_not_follow_chunks,
    ct,
    logits_of,
    make,
    make_mixed,
    quantize,
    quark,
    round_inputs,
    torchao,
)
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from quire_interfaces import CheckpointError, ConfigError, Fields
from quire_models import DecoderLM, ModelConfig, load_model
from quire_models.layers.fused import named_tensors
from quire_models.layers.stored_layouts import LAYOUTS, StoredLayer
from quire_models.ledger import num_parameters, weight_ledger
from quire_models.quantization_config import BLOCK_BYTES
from quire_models.quantization_formats import parse_quantization
from quire_models.spec import CheckpointNames, FusedRows
from quire_ops import OpRequest, is_in_blocks, op_table, ops
from quire_quantization.numbers import in_every_case
from quire_quantization.stored import GroupedWeight, read_awq, read_gptq, read_packed
from quire_testkit.hf_checkpoints import tiny_hf_checkpoint


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


def forms_of(model: DecoderLM) -> dict[str, Any]:
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
    # No op takes blocks there.
    here = load_model(config, tmp_path, dtype="bfloat16", disabled_linear_kernels=["block_linear"])
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
    in_blocks = [layer.scale for layer in kept if layer is not None and is_in_blocks(layer)]
    kept_bytes = sum(one.nbytes for layer in kept if layer is not None for one in layer if isinstance(one, Tensor))
    kept_bytes -= sum(header.nbytes for header in in_blocks)
    served = op_table().choose(ops.block_linear, OpRequest()).name != "reference"
    ledger = weight_ledger(config, "float32", in_blocks=frozenset(BLOCK_BYTES if served else ()))
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

    def load(*disabled: str) -> DecoderLM:
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
    rules = CheckpointNames(fused=(FusedRows(module="self_attn.qkv_proj", parts=tuple(parts.items())),))
    found: dict[str, dict[str, Tensor]] = {part: {} for part in parts}
    for kind, tensor in tensors.items():
        for full, piece in named_tensors(rules, "lm_head", f"self_attn.qkv_proj.{kind}", tensor):
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
