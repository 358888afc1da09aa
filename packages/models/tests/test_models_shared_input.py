"""Layers that take the same input in one product: what they have and give is what they have and give apart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from models_paged_driver import PagedDriver
from models_quantized import INT8, ct, make, make_mixed
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire_interfaces import CheckpointError
from quire_lora import Adapter
from quire_lora.adapter import LinearAdapter
from quire_models import ModelConfig, Network, build_model, load_weights
from quire_models.layers.linear import Linear
from quire_models.layers.scope import AdjacentParameters, Parameter
from quire_models.weights import load_dummy_weights
from quire_ops import OpRequest, op_table, ops
from quire_quantization import linear_method_names
from quire_testkit.hf_checkpoints import tiny_hf_checkpoint

TOKENS = [5, 9, 200, 31, 7, 7, 7, 100, 250, 3]


@pytest.fixture(scope="module", params=["llama", "qwen2", "qwen3"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Qwen2 has biases."""
    folder = tmp_path_factory.mktemp(request.param)
    tiny_hf_checkpoint(folder, request.param)
    return folder


def build(folder: Path, *, joined: bool, **options: Any) -> Any:
    """Without ops that take several layers at once, which have no use for one product."""
    config = ModelConfig.from_path(folder)
    return build_model(config, join_products=joined, attention_backend="torch", **options)


def load(folder: Path, *, joined: bool, **options: Any) -> Any:
    model = build(folder, joined=joined, **options)
    load_weights(model, folder)
    assert model._stack is None
    return model


def pairs(apart: Network, joined: Network) -> list[tuple[Linear, Linear]]:
    assert [layer.name for layer in apart.linears] == [layer.name for layer in joined.linears]
    return list(zip(apart.linears, joined.linears, strict=True))


def groups(model: Any) -> list[Any]:
    return [group for layer in model.layers for group in (layer.mixer._qkv, layer.feed_forward.gate_and_up)]


def logits_of(model: Any) -> Tensor:
    driver = PagedDriver(model, block_size=4, shuffle=True)
    seq = driver.add(TOKENS)
    driver.run(seq, 6)
    return torch.stack(seq.logits)


def same_weights(apart: Network, joined: Network) -> None:
    for one, other in pairs(apart, joined):
        assert one._weights.keys() == other._weights.keys()
        for name, tensor in one._weights.items():
            assert torch.equal(tensor, other._weights[name]), (one.name, name)
            assert tensor.is_contiguous()


@pytest.mark.parametrize("method", [name for name in linear_method_names() if name != "w8a8-g64"])  # of encoders
def test_weights_and_logits_are_those_of_layers_apart(folder: Path, method: str) -> None:
    apart, joined = (load(folder, joined=each, linear_method=method) for each in (False, True))
    assert all(group.is_joined for group in groups(joined))
    assert not any(group.is_joined for group in groups(apart))
    same_weights(apart, joined)
    torch.testing.assert_close(logits_of(joined), logits_of(apart), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_there_is_one_copy_of_the_weights(folder: Path, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each group is one piece of memory as large as its layers, from when its first tensor arrives."""
    made: list[int] = []
    memory = AdjacentParameters.memory

    def noted(self: AdjacentParameters, parameter: Parameter, dtype: torch.dtype, device: torch.device) -> Tensor:
        place = memory(self, parameter, dtype, device)
        made.append(place.untyped_storage().data_ptr())
        return place

    def refused(*_: Any) -> None:
        raise AssertionError("a second copy was made")

    model = build(folder, joined=True, dtype=dtype)
    monkeypatch.setattr(AdjacentParameters, "memory", noted)
    monkeypatch.setattr(torch, "cat", refused)
    load_weights(model, folder)
    monkeypatch.undo()
    for group in groups(model):
        parts = [layer._weights for layer in group._layers]
        for name, whole in group._weights.items():
            storage = whole.untyped_storage()
            assert storage.data_ptr() in made
            assert storage.nbytes() == sum(part[name].nbytes for part in parts)
            begins = np.cumsum([0] + [part[name].nbytes for part in parts[:-1]]) + storage.data_ptr()
            assert [part[name].data_ptr() for part in parts] == begins.tolist()
    tensors = load_file(folder / "model.safetensors")
    for layer in model.linears:
        assert torch.equal(layer.plain(), tensors[layer.name].to(model.dtype))


def test_parameters_that_were_filled_elsewhere_are_put_together(folder: Path) -> None:
    """And dummy weights are the same numbers."""
    apart, joined = (build(folder, joined=each) for each in (False, True))
    load_dummy_weights(apart)
    load_dummy_weights(joined)
    same_weights(apart, joined)
    by_hand = build(folder, joined=True, dtype="float32")
    tensors = load_file(folder / "model.safetensors")
    for parameter in by_hand.parameters:
        parameter.tensor = tensors[parameter.name].float()
    by_hand.finish_loading()
    assert all(group.is_joined for group in groups(by_hand))
    torch.testing.assert_close(logits_of(by_hand), logits_of(load(folder, joined=True, dtype="float32")))


def test_missing_tensors_are_named(tmp_path: Path) -> None:
    tiny_hf_checkpoint(tmp_path, "llama")
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.self_attn.k_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"1 missing: model\.layers\.1\.self_attn\.k_proj\.weight"):
        load(tmp_path, joined=True)


@pytest.mark.parametrize("method", ["plain", "int8", "w8a8"])
def test_adapters_add_to_their_layer(folder: Path, method: str) -> None:
    """Each its own low ranks and scales, beside tokens of another adapter and of none."""

    def adapted(*, joined: bool) -> Tensor:
        model = load(folder, joined=joined, linear_method=method, max_loras=2, max_lora_rank=4)
        generator = torch.Generator().manual_seed(4)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator) * shape[-1] ** -0.5

        for slot in range(2):
            linears = {
                name: LinearAdapter(
                    a=random(2 + slot, site.shape[1]),
                    b=random(2 + slot, site.shape[0]),
                    scale=1 + random(site.shape[0]) if slot else None,
                )
                for name, site in model.adapters.linears.items()
            }
            model.adapters.place(slot, str(slot), Adapter(linears=linears))
        driver = PagedDriver(model, block_size=4, shuffle=True)
        sequences = [driver.add(TOKENS[i:]) for i in range(3)]
        for count in (6, 1):
            lora = model.adapters.tokens_of(np.repeat(np.array([0, -1, 1], dtype=np.int32), count))
            driver.step(*((sequence, count) for sequence in sequences), lora=lora)
        return torch.stack([row for sequence in sequences for row in sequence.logits])

    apart = adapted(joined=False)
    torch.testing.assert_close(adapted(joined=True), apart, rtol=1e-4, atol=1e-4)
    plain = logits_of(load(folder, joined=True, linear_method=method))
    assert not torch.allclose(apart[:7], plain[:7], atol=0.1)


def test_a_layer_can_be_changed_in_place(folder: Path) -> None:
    """As adapters are put into weights."""
    apart, joined = (load(folder, joined=each, dtype="float32", max_loras=1) for each in (False, True))
    before = logits_of(joined)
    for model in (apart, joined):
        for name in ("model.layers.1.self_attn.k_proj", "model.layers.0.mlp.up_proj"):
            weight = model.adapters.linears[name].plain()
            weight.copy_(weight.flip(0))
    assert not torch.allclose(logits_of(joined), before, atol=0.1)
    torch.testing.assert_close(logits_of(joined), logits_of(apart), rtol=1e-5, atol=1e-5)
    for one, other in pairs(apart, joined):
        for got, wanted in zip(other.base(), one.base(), strict=True):
            assert (got is None) == (wanted is None)
            assert got is None or wanted is None or torch.equal(got, wanted)


def test_layers_of_odd_sizes_or_methods_of_their_own_stay_apart(tmp_path: Path) -> None:
    tiny_hf_checkpoint(tmp_path, "llama", head_dim=12, intermediate_size=100)
    odd = load(tmp_path, joined=True)
    assert not any(group.is_joined for group in groups(odd))
    same_weights(load(tmp_path, joined=False), odd)

    even = tmp_path / "even"
    even.mkdir()
    tiny_hf_checkpoint(even, "llama")
    model = build(even, joined=True)
    model.linears[1].set_method(build(even, joined=True, linear_method="int8").linears[0].method)
    load_weights(model, even)
    assert [group.is_joined for group in groups(model)] == [False] + [True] * 5
    assert model.linears[1]._weights["weight"].dtype == torch.int8
    torch.testing.assert_close(logits_of(model), logits_of(load(even, joined=False)), rtol=0.1, atol=0.3)


STORED = {
    "gptq": True,
    "gptq ordered": False,
    "awq": True,
    "packed zeros": True,
    "w8a8": True,
    "w8a8 static": True,
    "float channel": True,
    "fp8 block": True,
    "mxfp4": True,
    "nf4": op_table().choose(ops.block_linear, OpRequest()).name == "reference",  # each layer has a table of its own
}
"""Format of a checkpoint -> whether it is joined: what takes inputs in an order of its own is not."""


@pytest.mark.parametrize("name", STORED)
def test_quantized_checkpoints(name: str, tmp_path: Path) -> None:
    make(tmp_path, name)
    apart, joined = (load(tmp_path, joined=each, dtype="float32") for each in (False, True))
    assert {group.is_joined for group in groups(joined)} == {STORED[name]}
    same_weights(apart, joined)
    torch.testing.assert_close(logits_of(joined), logits_of(apart), rtol=1e-4, atol=1e-4)


def test_layers_of_several_forms_stay_apart(tmp_path: Path) -> None:
    """Keys are not quantized, nor is the gate: both groups have two forms, each layer the one that it has apart."""
    ignored = ["lm_head", "re:.*k_proj", "re:.*gate_proj"]
    config = {**ct("int-quantized", INT8), "ignore": ignored}
    make_mixed(tmp_path, config, lambda name: "" if name.endswith(("lm_head", "k_proj", "gate_proj")) else "int8")
    apart, joined = (load(tmp_path, joined=each, dtype="float32") for each in (False, True))
    assert not any(group.is_joined for group in groups(joined))
    same_weights(apart, joined)
    torch.testing.assert_close(logits_of(joined), logits_of(apart), rtol=1e-4, atol=1e-4)


def test_scales_of_inputs_that_differ_keep_layers_apart(tmp_path: Path) -> None:
    make(tmp_path, "w8a8 static")
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.1.self_attn.v_proj.input_scale"] *= 2
    save_file(tensors, tmp_path / "model.safetensors")
    apart, joined = (load(tmp_path, joined=each, dtype="float32") for each in (False, True))
    assert [group.is_joined for group in groups(joined)] == [True, True, False, True, True, True]
    same_weights(apart, joined)
