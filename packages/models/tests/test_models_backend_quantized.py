"""Networks that run through Transformers with quantized linear layers, against the class with the weights these stand
for."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models_quantized import FORMATS, TOKENS, logits_of, quantize
from safetensors.torch import load_file, save_file

from quire_interfaces import CheckpointError
from quire_models import ModelConfig, load_model
from quire_models.ledger import num_parameters, weight_ledger
from quire_testkit.parity.cases import CASES
from quire_testkit.parity.oracle import write_checkpoint

ARCHITECTURE = "Ernie4_5ForCausalLM"
SIZES = {"hidden_size": 128, "intermediate_size": 256, "vocab_size": 320, "num_hidden_layers": 2, "head_dim": 32}


def is_layer(name: str) -> bool:
    return name != "lm_head"


def write(
    folder: Path, form: str, architecture: str = ARCHITECTURE, chosen: Callable[[str], bool] = is_layer, **fields: Any
) -> Any:
    """A checkpoint with its linear layers in a form, and Transformers' network with the weights they stand for."""
    case = CASES[architecture]
    oracle = write_checkpoint(folder, architecture, dataclasses.replace(case, fields={**case.fields, **SIZES}))
    torch.manual_seed(3)
    tensors = load_file(folder / "model.safetensors")
    for name, module in oracle.named_modules():
        if isinstance(module, torch.nn.Linear) and chosen(name):
            stored, restored = quantize(form, tensors.pop(f"{name}.weight"))
            tensors |= {f"{name}.{part}": tensor.contiguous() for part, tensor in stored.items()}
            module.weight.data.copy_(restored)
    save_file(tensors, folder / "model.safetensors")
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**values, "quantization_config": FORMATS[form], **fields}))
    return oracle


def check(folder: Path, oracle: Any, tolerance: float = 1e-4) -> Any:
    """The network of the checkpoint has the oracle's logits; returns it."""
    network = load_model(ModelConfig.from_path(folder), folder, dtype="float32")
    with torch.inference_mode():
        expected = oracle(torch.tensor([TOKENS])).logits[0]
    found = logits_of(network, TOKENS, 4)  # type: ignore[arg-type]
    assert float((found - expected).abs().max() / expected.abs().max()) < tolerance
    return network


@pytest.mark.parametrize(
    "form",
    ["gptq ordered", "awq", "packed zeros", "int8", "float channel", "fp8 block", "nf4", "bnb int8", "mxfp4", "nvfp4"],
)
def test_quantized_checkpoints_have_the_logits_of_their_weights(form: str, tmp_path: Path) -> None:
    oracle = write(tmp_path, form)
    network = check(tmp_path, oracle)
    config = network.config
    assert not config.is_native
    assert len(network.linears) == 2 * 7
    assert network.stored_forms.startswith(config.quantization.forms[0].layout)
    assert not any(isinstance(module, torch.nn.Linear) for module in network._body.modules()), "none is kept twice"
    assert num_parameters(config) == sum(parameter.numel() for parameter in oracle.parameters())


def test_layers_that_the_checkpoint_leaves_as_they_are_stay_transformers(tmp_path: Path) -> None:
    oracle = write(tmp_path, "int8", chosen=lambda name: is_layer(name) and "down_proj" not in name)
    network = check(tmp_path, oracle)
    left = [name for name, module in network._model.named_modules() if isinstance(module, torch.nn.Linear)]
    assert left == [f"model.layers.{layer}.mlp.down_proj" for layer in range(2)] + ["lm_head"]


def test_the_plan_has_the_bytes_of_the_quantized_layers(tmp_path: Path) -> None:
    write(tmp_path, "int8")
    config = ModelConfig.from_path(tmp_path)
    network = load_model(config, tmp_path, dtype="float32")
    kept = sum(tensor.nbytes for linear in network.linears for tensor in linear._weights.values())
    plain = sum(each.numel() * 4 for name, each in network._model.named_parameters() if "embed" not in name)
    ledger = weight_ledger(config, "float32")
    assert sum(ledger.values()) - ledger["embedding"] == kept + plain


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight_scale"), "up_proj.weight_scale missing"),
        (
            lambda tensors: tensors.update({"model.layers.0.mlp.gate_proj.weight": torch.zeros(3, 3).char()}),
            r"gate_proj\.weight is \[3, 3\], should be \[256, 128\]",
        ),
        (
            lambda tensors: tensors.update({"model.layers.0.extra.weight": torch.zeros(4, 128).char()}),
            r"holds model\.layers\.0\.extra quantized .*no layer of this name.*use the unquantized checkpoint",
        ),
    ],
)
def test_what_does_not_fit_is_named(change: Callable[[Any], Any], message: str, tmp_path: Path) -> None:
    write(tmp_path, "int8")
    tensors = load_file(tmp_path / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        load_model(ModelConfig.from_path(tmp_path), tmp_path, dtype="float32")


def test_quantized_experts_are_refused_by_name(tmp_path: Path) -> None:
    write(tmp_path, "int8", architecture="HunYuanMoEV1ForCausalLM")
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.mlp.experts.0.down_proj"
    tensors[f"{name}.weight"] = torch.zeros_like(tensors[f"{name}.weight"]).char()
    tensors[f"{name}.weight_scale"] = torch.ones(128, 1)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"experts\.0\.down_proj quantized .*its experts may be one tensor"):
        load_model(ModelConfig.from_path(tmp_path), tmp_path, dtype="float32")


@pytest.mark.parametrize(("method", "steps"), [("int8", 127), ("int4-g32", 7)])
def test_weights_are_quantized_while_they_are_loaded(method: str, steps: int, tmp_path: Path) -> None:
    case = CASES["HunYuanMoEV1ForCausalLM"]
    oracle = write_checkpoint(
        tmp_path, "HunYuanMoEV1ForCausalLM", dataclasses.replace(case, fields={**case.fields, **SIZES})
    )
    config = ModelConfig.from_path(tmp_path)
    moved: list[set[str]] = []

    def watch(module: torch.nn.Module, *args: Any) -> torch.nn.Module:
        moved.append({name for name, each in module.named_modules() if isinstance(each, torch.nn.Linear)})
        return module

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.Module, "to", watch)
        network = load_model(config, tmp_path, dtype="float32", linear_method=method)
    assert moved[0] > moved[-1]  # first within the host, then what is left to the device
    assert not moved[-1] & set(network._layers)  # type: ignore[attr-defined]  # of an exchanged network
    for name, exchanged in network._layers.items():  # type: ignore[attr-defined]
        weight, rounded = oracle.get_submodule(name).weight.data, exchanged.linear.base()[0]
        assert 0 < float((weight - rounded).abs().max()) < float(weight.abs().max()) / steps
        weight.copy_(rounded)
    with torch.inference_mode():
        expected = oracle(torch.tensor([TOKENS])).logits[0]
    found = logits_of(network, TOKENS, 4)  # type: ignore[arg-type]
    assert float((found - expected).abs().max() / expected.abs().max()) < 1e-4
    kept = {name for name, module in network._model.named_modules() if isinstance(module, torch.nn.Linear)}
    assert kept >= {"lm_head"}
    assert all(name == "lm_head" or ".gate." in name or "experts" in name for name in kept)
    assert any(name.endswith(".gate.wg") for name in kept)
    ledger = weight_ledger(config, "float32", method)
    made = sum(tensor.nbytes for linear in network.linears for tensor in linear._weights.values())
    plain = sum(each.numel() * 4 for name, each in network._model.named_parameters() if "embed" not in name)
    assert sum(ledger.values()) - ledger["embedding"] == made + plain
