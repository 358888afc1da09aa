"""Experts of quantized checkpoints: against the dequantized model in Transformers, and which method runs them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from models_quantized import FORMATS, check_that_bits_do_not_follow_chunks, logits_of, quantize
from safetensors.torch import load_file, save_file

from quire_models import DecoderLM, ModelConfig, load_model
from quire_models.ledger import weight_ledger
from quire_models.quantization_config import BLOCK_BYTES
from quire_ops import OpRequest, op_table, ops
from quire_testkit.parity.cases import CASES
from quire_testkit.parity.oracle import write_checkpoint

TOKENS = [5, 9, 20, 31, 7, 7, 7, 60, 50, 3]
CASE = CASES["Qwen3MoeForCausalLM"]
WIDE = dataclasses.replace(CASE, fields={**CASE.fields, "moe_intermediate_size": 64, "num_hidden_layers": 2})
ORDERED = "each_expert (fused_moe: inputs are gathered in another order) for 1"
EXPECTED = {
    "packed": "fused_moe for 1",
    "packed zeros": "fused_moe for 1",
    "packed ordered": ORDERED,
    "awq": "fused_moe for 1",
    "int8": "fused_moe for 1",
    "fp8 block": "fused_moe for 1",
    "mxfp4": "fused_moe for 1",
    "nvfp4": "fused_moe for 1",
}


def make(folder: Path, name: str, *, without: str = "") -> Any:
    """A checkpoint with experts in the format, and Transformers' model with the weights they stand for."""
    torch.manual_seed(0)
    oracle = write_checkpoint(folder, "Qwen3MoeForCausalLM", WIDE).float()
    tensors = load_file(folder / "model.safetensors")
    experts = oracle.model.layers[1].mlp.experts
    inner = WIDE.fields["moe_intermediate_size"]
    for full in [full for full in tensors if ".experts." in full and not (without and without in full)]:
        *_, number, kind, _ = full.split(".")
        stored, restored = quantize(name, tensors.pop(full).float())
        tensors |= {f"{full.removesuffix('.weight')}.{part}": one.contiguous() for part, one in stored.items()}
        stacked = (experts.down_proj if kind == "down_proj" else experts.gate_up_proj).data[int(number)]
        half = {"gate_proj": slice(0, inner), "up_proj": slice(inner, None), "down_proj": slice(None)}[kind]
        stacked[half] = restored
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    ignored = [
        "lm_head",
        "re:.*self_attn.*",
        r"re:.*mlp\.gate$",
        r"re:.*layers\.0\..*",
        *([without] if without else []),
    ]
    names = {"ignore": ignored, "modules_to_not_convert": ["self_attn", "model.layers.0"]}
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": {**FORMATS[name], **names}}))
    return oracle


def load(folder: Path, *disabled: str, dtype: str = "float32") -> DecoderLM:
    model = load_model(ModelConfig.from_path(folder), folder, dtype=dtype, disabled_linear_kernels=disabled)
    assert isinstance(model, DecoderLM)
    return model


@pytest.mark.parametrize("name", EXPECTED)
def test_logits_are_those_of_the_dequantized_model(name: str, tmp_path: Path) -> None:
    oracle = make(tmp_path, name)
    with torch.no_grad():
        tokens = oracle.generate(torch.tensor([TOKENS]), max_new_tokens=6, do_sample=False, eos_token_id=None)
        expected = oracle(tokens).logits[0]
    model = load(tmp_path)
    assert model.expert_methods == EXPECTED[name]
    got = logits_of(model, tokens[0].tolist())
    assert (got - expected).abs().max() <= 1e-3 * expected.abs().max()
    assert torch.equal(got.argmax(1)[len(TOKENS) - 1 : -1], tokens[0, len(TOKENS) :])
    check_that_bits_do_not_follow_chunks(model, tokens[0].tolist())


def test_experts_stay_in_blocks(tmp_path: Path) -> None:
    make(tmp_path, "nvfp4")
    model = load(tmp_path, dtype="bfloat16")
    experts = model.layers[1].feed_forward.experts  # type: ignore[attr-defined]  # a sparse layer
    kept: list[Any] = [layer.stack_weights() for layer in (*experts.gate, *experts.up, *experts.down)]
    if op_table().choose(ops.block_linear, OpRequest(dtype=torch.bfloat16)).name == "reference":
        pytest.skip("nothing multiplies with weights in blocks here")
    tensors = load_file(tmp_path / "model.safetensors")
    stored = sum(tensor.nbytes for name, tensor in tensors.items() if ".1.mlp.experts." in name)
    assert sum(each.weight.nbytes + each.scale.nbytes for each in kept) <= 1.1 * stored
    router = 2 * WIDE.fields["num_experts"] * WIDE_SIZE
    plan = weight_ledger(model.config, "bfloat16", in_blocks=frozenset(BLOCK_BYTES))["experts"] - router
    assert plan == sum(each.weight.nbytes for each in kept)


def test_inputs_with_scales_of_their_own_go_expert_by_expert(tmp_path: Path) -> None:
    make(tmp_path, "w8a8 static")
    model = load(tmp_path)
    assert model.expert_methods == "each_expert (fused_moe: inputs have scales from the checkpoint) for 1"


def test_all_at_once_is_the_same_as_each_through_its_layers(tmp_path: Path) -> None:
    make(tmp_path, "packed zeros")
    each = load(tmp_path, "fused_moe")
    assert each.expert_methods == "each_expert (fused_moe: disabled) for 1"
    wanted = logits_of(each, TOKENS)
    assert (logits_of(load(tmp_path), TOKENS) - wanted).abs().max() <= 1e-5 * wanted.abs().max()


def test_experts_in_two_forms_run_one_by_one(tmp_path: Path) -> None:
    oracle = make(tmp_path, "packed", without="experts.2.up_proj")
    model = load(tmp_path)
    assert model.expert_methods == (
        "each_expert (fused_moe: takes weights of one form, not int4 in groups beside plain) for 1"
    )
    with torch.no_grad():
        expected = oracle(torch.tensor([TOKENS])).logits[0]
    assert (logits_of(model, TOKENS) - expected).abs().max() <= 1e-3 * expected.abs().max()


@pytest.mark.parametrize("name", ["packed zeros", "fp8 block", "mxfp4"])
def test_a_token_does_not_depend_on_the_others_of_its_step(name: str, tmp_path: Path) -> None:
    make(tmp_path, name)
    model = load(tmp_path, dtype="bfloat16")
    experts = model.layers[1].feed_forward.experts  # type: ignore[attr-defined]  # a sparse layer
    x, weights = torch.randn(40, WIDE.fields["hidden_size"]).bfloat16(), torch.rand(40, 3)
    ids = torch.stack([torch.randperm(WIDE.fields["num_experts"])[:3] for _ in range(40)])
    together = experts(x, ids, weights)
    alone = [experts(x[i : i + 1], ids[i : i + 1], weights[i : i + 1]) for i in range(40)]
    assert torch.equal(torch.cat(alone), together)
    assert together.abs().max() > 0


def test_one_plain_expert_matrix_that_the_configuration_does_not_name(tmp_path: Path) -> None:
    one = "model.layers.1.mlp.experts.2.up_proj"
    oracle = make(tmp_path, "packed", without=one)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"]["ignore"] = ["lm_head"]  # neither attention, nor a layer, nor that matrix
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = load(tmp_path)
    with torch.no_grad():
        expected = oracle(torch.tensor([TOKENS])).logits[0]
    got = logits_of(model, TOKENS)
    assert (got - expected).abs().max() <= 1e-3 * expected.abs().max()
    read = ModelConfig.from_path(tmp_path)
    assert read.quantization is not None
    assert read.quantization.of_layer(one) is None
    assert read.quantization.of_layer(one.replace("2.up", "1.up")) is not None
    whole, less = (weight_ledger(each, "bfloat16")["experts"] for each in (read, without_files(read)))
    form = read.quantization.bytes_of(one.replace("2.up", "1.up"), 64, WIDE_SIZE, 2)
    assert whole - less == 64 * WIDE_SIZE * 2 - form


WIDE_SIZE = CASE.fields["hidden_size"]


def without_files(config: ModelConfig) -> ModelConfig:
    """The same as far as configuration says it, with the one layer whose experts are plain left out."""
    assert config.quantization is not None
    ignored = (*config.quantization.ignored, r"re:.*layers\.0\.", "self_attn")
    return dataclasses.replace(config, quantization=dataclasses.replace(config.quantization, held={}, ignored=ignored))
