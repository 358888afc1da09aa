"""Keys of quantization_config: each is read, known to make no difference, named in the report, or refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from models_quantized import FORMATS, INT4, INT8, TOKENS, ct, logits_of, make, quark, torchao
from safetensors.torch import load_file, save_file

from quire_interfaces import CheckpointError, Fields
from quire_models import ModelConfig, load_model
from quire_models.quantization_config import QuantizationConfig
from quire_models.quantization_formats import parse_kv_cache, parse_quantization
from quire_testkit.hf_checkpoints import tiny_hf_checkpoint

GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 32}
KV_SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}


def parse(config: Any, key: str = "quantization_config") -> QuantizationConfig | None:
    return parse_quantization(Fields({key: config}, "config.json"))


def transform(*locations: str) -> dict[str, Any]:
    apply = [{"targets": ["Linear"], "location": location, "inverse": False, "ignore": []} for location in locations]
    return {"config_groups": {"R1": {"type": "hadamard", "apply": apply, "randomize": False}}}


@pytest.mark.parametrize("name", FORMATS)
def test_a_key_that_is_not_read_is_named_and_one_that_changes_layers_is_refused(name: str) -> None:
    plain = parse(FORMATS[name])
    assert plain is not None
    assert "not read" not in plain.notes
    named = parse({**FORMATS[name], "some_new_key": 3, "another": False, "third": None})
    assert named is not None
    assert named.notes.endswith("not read of quantization_config: some_new_key")
    with pytest.raises(CheckpointError, match=r"online_rotation \({'size': 64}\), which may change"):
        parse({**FORMATS[name], "online_rotation": {"size": 64}})


def test_keys_of_objects_inside_are_looked_at() -> None:
    config = ct("pack-quantized", {**INT4, "observer": "mse", "odd": 1}, output_activations={"num_bits": 8})
    found = parse({**config, "transform_config": {}, "global_compression_ratio": 1.5, "quantization_status": "frozen"})
    assert found is not None
    assert found.notes == (
        "outputs that are meant to be rounded stay as they are; "
        "not read of quantization_config: config_groups.group_0.weights.odd"
    )
    weight = {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "observer_cls": "PerTensorMinMaxObserver", "odd": "x"}
    found = parse(quark(weight))
    assert found is not None
    assert found.notes == "not read of quantization_config: global_quant_config.weight.odd"
    found = parse(torchao("Int8WeightOnlyConfig", set_inductor_config=True, odd=2))
    assert found is not None
    assert found.notes.endswith("quant_type.default._data.odd")


def test_groups_of_attention_leave_it_as_it_is() -> None:
    """llm-compressor names the class whose inputs, and keys and values, are rounded."""
    config = ct("pack-quantized", INT4)
    of_attention = {"targets": ["LlamaAttention"], "weights": None, "input_activations": KV_SCHEME}
    config["config_groups"]["group_1"] = of_attention
    found = parse({**config, "kv_cache_scheme": KV_SCHEME})
    assert found is not None
    assert found.name == "packed, 4 bits, groups of 32"
    assert found.notes == "inputs of attention that are meant to be rounded stay as they are"
    assert found.of_layer("model.layers.0.self_attn.q_proj") is not None


@pytest.mark.parametrize("location", ["k_cache", "q_attn", None])
def test_transforms_of_attention_are_refused(location: str) -> None:
    with pytest.raises(CheckpointError, match=rf"transform_config has a transform at '?{location}'? of \['Linear'\]"):
        parse({**ct("pack-quantized", INT4), "transform_config": transform("weight_output", location)})


def test_transforms_in_the_weights_need_nothing() -> None:
    found = parse({**ct("pack-quantized", INT4), "transform_config": transform("weight_input", "weight_output")})
    assert found == parse(ct("pack-quantized", INT4))


@pytest.mark.parametrize("config", [{"type": "hadamard"}, [1], {"config_groups": {"a": 3}}])
def test_transforms_in_another_form_are_refused(config: Any) -> None:
    with pytest.raises(CheckpointError, match="transform_config"):
        parse({**ct("pack-quantized", INT4), "transform_config": config})


KV_ONLY: dict[str, dict[str, Any]] = {
    "no targets": {
        "quant_method": "compressed-tensors",
        "format": "dense",
        "config_groups": {"group_0": {"targets": [], "weights": None, "input_activations": None}},
        "kv_cache_scheme": KV_SCHEME,
    },
    "no groups": {"quant_method": "compressed-tensors", "format": "dense", "kv_cache_scheme": KV_SCHEME, "ignore": []},
    "outputs of projections": {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": {"targets": ["re:.*k_proj"], "weights": None, "output_activations": KV_SCHEME}},
        "kv_cache_scheme": KV_SCHEME,
    },
    "modelopt": {"quant_method": "modelopt", "quant_algo": None, "kv_cache_quant_algo": "FP8"},
}


@pytest.mark.parametrize("name", KV_ONLY)
def test_checkpoints_of_which_only_keys_and_values_have_scales(name: str, tmp_path: Path) -> None:
    oracle = tiny_hf_checkpoint(tmp_path, "llama")
    tensors = load_file(tmp_path / "model.safetensors")
    for layer in range(3):
        for kind in "kv":
            tensors[f"model.layers.{layer}.self_attn.{kind}_scale"] = torch.tensor([0.02])
    save_file(tensors, tmp_path / "model.safetensors")
    values = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**values, "quantization_config": KV_ONLY[name]}))
    config = ModelConfig.from_path(tmp_path)
    assert config.quantization is None
    assert config.stored_cache_dtype == "fp8_e4m3"
    model = load_model(config, tmp_path, dtype="float32")
    assert model.num_kv_scales == 3
    with torch.no_grad():
        expected = oracle.float()(torch.tensor([TOKENS])).logits[0]
    assert (logits_of(model, TOKENS) - expected).abs().max() <= 1e-4 * expected.abs().max()
    with pytest.raises(CheckpointError, match=r"quantization_config: new_way \(3\) is set, .* take the key away if"):
        parse({**KV_ONLY[name], "new_way": 3})


def test_older_names_of_the_whole_object(tmp_path: Path) -> None:
    wanted = parse(FORMATS["packed"])
    older = {**FORMATS["packed"], "quant_method": "sparseml"}
    assert parse(older, "compression_config") == wanted
    nested = {
        "quant_method": "compressed-tensors",
        "quantization_config": older,
        "sparsity_config": {"format": "dense"},
    }
    assert parse(nested) == wanted
    with pytest.raises(CheckpointError, match="'sparse-24-bitmask'"):
        parse({**nested, "sparsity_config": {"format": "sparse-24-bitmask"}})
    scheme = {**nested, "quantization_config": {**older, "kv_cache_scheme": KV_SCHEME}}
    assert parse_kv_cache(Fields({"compression_config": scheme}, "config.json")) == "fp8_e4m3"
    make(tmp_path, "packed")
    values = json.loads((tmp_path / "config.json").read_text())
    expected = logits_of(load_model(ModelConfig.from_path(tmp_path), tmp_path, dtype="float32"), TOKENS)
    values["compression_config"] = values.pop("quantization_config")
    (tmp_path / "config.json").write_text(json.dumps(values))
    found = logits_of(load_model(ModelConfig.from_path(tmp_path), tmp_path, dtype="float32"), TOKENS)
    assert torch.equal(found, expected)


TELLING = "desc_act config_groups quant_algo global_quant_config load_in_4bit load_in_8bit quant_type".split()


@pytest.mark.parametrize("name", FORMATS)
def test_the_method_is_known_without_its_name(name: str) -> None:
    """Where a key tells it."""
    values = {key: value for key, value in FORMATS[name].items() if key != "quant_method"}
    telling = {
        "desc_act",
        "config_groups",
        "quant_algo",
        "global_quant_config",
        "load_in_4bit",
        "load_in_8bit",
        "quant_type",
    }
    if values.keys() & telling:
        assert parse(values) == parse(FORMATS[name])
    else:
        with pytest.raises(CheckpointError, match=r"quant_method '\(none\)' is not supported"):
            parse(values)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({**GPTQ, "bits": 3.5}, "bits must be a whole number, is 3.5"),
        ({**GPTQ, "bits": "4"}, "bits must be a whole number, is '4'"),
        ({**GPTQ, "bits": 0}, "gptq with 0 bits"),
        ({**GPTQ, "group_size": 0}, "group_size 0 .groups of 32, 64, 128"),
        ({**GPTQ, "group_size": -7}, "group_size -7 "),
        ({**GPTQ, "sym": "yes"}, "sym must be true or false, is 'yes'"),
        ({**GPTQ, "is_marlin_format": True}, "is_marlin_format of gptq"),
        ({**GPTQ, "pack_dtype": "int8"}, "pack_dtype 'int8' is not supported"),
        ({**GPTQ, "dynamic": ["-:x"]}, "dynamic must be an object of expressions"),
        ({**GPTQ, "dynamic": {"+:(": {}}}, r"dynamic: '\+:\(' is no regular expression"),
        ({**GPTQ, "dynamic": {"a": 3}}, "dynamic: 'a' must be an object of settings, is 3"),
        ({**GPTQ, "dynamic": {"a": {"bits": 5}}}, "dynamic: 'a': gptq with 5 bits"),
        ({**GPTQ, "dynamic": {"a": {"new_way": 5}}}, r"dynamic: 'a': new_way \(5\) is set, which is not supported"),
        ({**GPTQ, "modules_in_block_to_quantize": "mlp"}, "modules_in_block_to_quantize must be lists"),
        ({"quant_method": "awq", "bits": 4, "group_size": 0}, "group_size 0"),
        ({"quant_method": "awq", "bits": 3, "group_size": 128}, "awq with 3 bits"),
        ({"quant_method": "awq", "group_size": 128}, "bits is missing"),
        ({"quant_method": "auto-round", "bits": 4, "packing_format": "rrq"}, "packing_format 'rrq' of"),
        ({"quant_method": "auto-round", "bits": 4, "data_type": "mx_fp"}, "data_type 'mx_fp' is not supported"),
        (
            {"quant_method": "auto-round", "bits": 8, "packing_format": "auto_round:auto_awq"},
            "auto-round with 8 bits in the layout of awq",
        ),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt 'e5m2' is not supported"),
        ({"quant_method": "fp8", "weight_block_size": [0, 128]}, "a block of 0 x 128"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 32}, "group_size 32 is not supported"),
        ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}, "MIXED_PRECISION' without quantized_layers"),
        ({"quant_method": "hqq"}, "quant_method 'hqq' is not supported; .* use a checkpoint in one of these, or the"),
        (ct("pack-quantized", {**INT4, "num_bits": 3}), "int3 in format 'pack-quantized'"),
        (ct("pack-quantized", {**INT4, "group_size": 0}), "group_size 0"),
        (ct("int-quantized", INT4), "int4 in format 'int-quantized'"),
        (ct("nvfp4-pack-quantized", {"num_bits": 4, "type": "float", "group_size": 32}), "group_size 32 is not"),
        ({**ct("int-quantized", INT8), "ignore": ["re:("]}, r"ignore: 're:\(' is no regular expression"),
        ({**FORMATS["quark tensor"], "algo_config": [{"name": "rotation"}]}, "rotates tokens"),
    ],
)  # fmt: skip
def test_contradictory_values_are_refused_by_name(config: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=rf"^config\.json: quantization_config.*{message}"):
        parse(config)


def test_groups_that_do_not_divide_a_layer_are_refused_by_its_name(tmp_path: Path) -> None:
    make(tmp_path, "packed")
    values = json.loads((tmp_path / "config.json").read_text())
    values["quantization_config"]["config_groups"]["group_0"]["weights"]["group_size"] = 256
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match=r"layers\.0\.self_attn\.q_proj: 64 x 128 does not fit packed, 4 bits"):
        load_model(ModelConfig.from_path(tmp_path), tmp_path)
