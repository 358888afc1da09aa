"""Encoders in one call: which networks get it, and that it gives what they give layer by layer."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from models_packers import bitsandbytes
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import WhisperConfig, WhisperForConditionalGeneration

from quire_attention import EncoderBatch
from quire_interfaces import ConfigError
from quire_models import ModelConfig, load_model
from quire_models.families.whisper_layers import WhisperForConditionalGeneration as Whisper
from quire_models.layers.encoder_only import EncoderOnly
from quire_ops import OpRequest, op_report
from quire_testkit.parity.encoder_cases import ENCODER_CASES
from quire_testkit.parity.oracle import write_checkpoint

SERVED = op_report(OpRequest(sizes={"head_dim": 64}))
IS_SERVED = any(choice.op == "encoder_stack" and choice.backend != "reference" for choice in SERVED)
NAMES = [name for name in ENCODER_CASES if name.endswith("Model") and name != "DebertaV2Model"]
TEXTS = [[3, 4, 5], [6] * 40, [9], list(range(3, 90))]


def load_encoder(folder: Path, **options: Any) -> EncoderOnly:
    network = load_model(ModelConfig.from_path(folder), folder, **options)
    assert isinstance(network, EncoderOnly)
    return network


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_call_gives_what_the_layers_give(tmp_path: Path, name: str, dtype: str) -> None:
    """In float32 to its last digits; in bfloat16 as near to float32 as the layers."""
    write_checkpoint(tmp_path, name, ENCODER_CASES[name])
    network = load_encoder(tmp_path, dtype=dtype)
    assert network.in_one_call == IS_SERVED
    together = network.read(TEXTS)
    network.run_layers = network.layer_by_layer
    assert not network.in_one_call
    layered = network.read(TEXTS)
    assert [hidden.dtype for hidden in together] == [hidden.dtype for hidden in layered]
    one_call, by_layers = (torch.cat(hidden).double() for hidden in (together, layered))
    if dtype == "float32":
        assert (one_call - by_layers).abs().max() <= 1e-5 * by_layers.abs().max()
        return
    exact = torch.cat(load_encoder(tmp_path, dtype="float32").read(TEXTS)).double()
    assert (one_call - exact).norm() <= 1.1 * (by_layers - exact).norm()


@pytest.mark.parametrize(("method", "is_taken"), [("int8", True), ("w8a8", False), ("int4", False)])
def test_quantized_weights_have_a_scale_per_output(tmp_path: Path, method: str, is_taken: bool) -> None:
    write_checkpoint(tmp_path, "BertModel", ENCODER_CASES["BertModel"])
    network = load_encoder(tmp_path, dtype="bfloat16", linear_method=method)
    assert network.in_one_call == (IS_SERVED and is_taken)
    together = torch.cat(network.read(TEXTS)).float()
    network.run_layers = network.layer_by_layer
    assert torch.nn.functional.cosine_similarity(together, torch.cat(network.read(TEXTS)).float()).min() > 0.999


def test_weights_in_blocks_are_multiplied_layer_by_layer(tmp_path: Path) -> None:
    """As those that they stand for."""
    write_checkpoint(tmp_path / "plain", "BertModel", ENCODER_CASES["BertModel"])
    said = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    packed: dict[str, Tensor] = {}
    restored: dict[str, Tensor] = {}
    for name, tensor in load_file(tmp_path / "plain/model.safetensors").items():
        restored[name] = packed[name] = tensor
        if tensor.ndim == 2 and name.startswith("encoder.") and name.endswith(".weight"):
            tensors, restored[name] = bitsandbytes(tensor, said)
            packed |= {f"{name.removesuffix('weight')}{part}": value for part, value in tensors.items()}
    config = json.loads((tmp_path / "plain/config.json").read_text())
    (tmp_path / "packed").mkdir()
    (tmp_path / "packed/config.json").write_text(json.dumps({**config, "quantization_config": said}))
    save_file({name: one.contiguous() for name, one in packed.items()}, tmp_path / "packed/model.safetensors")
    save_file({name: one.contiguous() for name, one in restored.items()}, tmp_path / "plain/model.safetensors")
    plain, blocks = (load_encoder(tmp_path / each, dtype="float32") for each in ("plain", "packed"))
    assert len(restored) < len(packed)
    got, wanted = (torch.cat(network.read(TEXTS)) for network in (blocks, plain))
    assert (got - wanted).abs().max() <= 1e-5 * wanted.abs().max()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.skipif(not IS_SERVED, reason="no backend has op encoder_stack here")
def test_weights_and_inputs_in_8_bits(tmp_path: Path, name: str) -> None:
    """What the layers give with the same weights and inputs as they are, but for a dozen roundings to 255 steps, of
    half a percent each. Gates multiply them."""
    write_checkpoint(tmp_path, name, ENCODER_CASES[name])
    network = load_encoder(tmp_path, dtype="float32", linear_method="w8a8-g64")
    assert network.in_one_call
    rounded = torch.cat(network.read(TEXTS))
    network.run_layers = network.layer_by_layer
    as_they_are = torch.cat(network.read(TEXTS))
    error = float((rounded - as_they_are).norm() / as_they_are.norm())
    assert 0.002 < error < 0.06


def test_networks_that_cannot_round_inputs_are_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "deberta", "DebertaV2Model", ENCODER_CASES["DebertaV2Model"])
    with pytest.raises(ConfigError, match=r"w8a8-g64' is for encoders .*op encoder_stack does not .*use int8") as error:
        load_encoder(tmp_path / "deberta", dtype="float32", linear_method="w8a8-g64")
    assert error.value.field == "quantization"
    bert = ENCODER_CASES["BertModel"]
    wide = dataclasses.replace(bert, fields={**bert.fields, "hidden_size": 320, "num_attention_heads": 1})
    write_checkpoint(tmp_path / "wide", "BertModel", wide)
    with pytest.raises(ConfigError, match=r"no compiled kernel takes them here.*use int8"):  # heads are too wide
        load_encoder(tmp_path / "wide", dtype="float32", linear_method="w8a8-g64")


@pytest.fixture(scope="module")
def whisper(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whisper")
    torch.manual_seed(0)
    config = WhisperConfig(
        vocab_size=300, d_model=128, encoder_layers=3, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=200, decoder_ffn_dim=96, num_mel_bins=16, max_source_positions=100,
        max_target_positions=64, pad_token_id=2, bos_token_id=2, eos_token_id=2, decoder_start_token_id=5, init_std=0.1,
    )  # fmt: skip
    WhisperForConditionalGeneration(config).save_pretrained(folder)
    return folder


def heard(folder: Path, **options: Any) -> tuple[Tensor, Tensor]:
    """What Whisper's encoder makes of two windows in one call, and layer by layer."""
    network = load_model(ModelConfig.from_path(folder), folder, dtype="float32", **options)
    assert isinstance(network, Whisper)
    features = tuple(torch.randn(16, 200, generator=torch.Generator().manual_seed(each)) for each in range(2))
    no_tokens = torch.empty(0, dtype=torch.int64)
    inputs = EncoderBatch(input_ids=no_tokens, positions=no_tokens, lens=[100, 100], features=features)
    with torch.inference_mode():
        x = network.encoder_input(inputs)
        return network.run_encoder(x, inputs.lens), network.layer_by_layer(x, inputs.lens)


def test_whisper_hears_in_one_call_what_its_layers_hear(whisper: Path) -> None:
    one_call, by_layers = heard(whisper)
    assert (one_call - by_layers).abs().max() <= 1e-5 * by_layers.abs().max()
    assert torch.equal(one_call, by_layers) != IS_SERVED  # sums are in another order


def test_whisper_rounds_in_groups_with_w8a8(whisper: Path) -> None:
    exact = heard(whisper)[1]
    rounded, as_they_are = heard(whisper, linear_method="w8a8")
    error, of_weights = (float((each - exact).norm() / exact.norm()) for each in (rounded, as_they_are))
    assert of_weights < error < 0.03
