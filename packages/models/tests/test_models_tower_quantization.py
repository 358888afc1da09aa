"""Weights of towers in int8: near the checkpoint's, whatever form the language model's weights have, and counted."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from models_native_towers import NATIVE, embeddings

from quire_interfaces import ConfigError
from quire_models import ModelConfig, load_media_towers, load_model
from quire_models.layers.linear import Linear
from quire_models.ledger import num_parameters, weight_ledger
from quire_models.towers.native import NativeTowers
from quire_testkit.parity.media_cases import MEDIA_CASES
from quire_testkit.parity.media_items import media_item
from quire_testkit.parity.oracle import write_checkpoint

LLAVA = "LlavaForConditionalGeneration"


@pytest.mark.parametrize("architecture", NATIVE)
def test_embeddings_are_near_those_of_float32(architecture: str, tmp_path: Path) -> None:
    """On random towers; of patches that a scale of each layer multiplies (InternVL), and of every connector."""
    write_checkpoint(tmp_path, architecture, MEDIA_CASES[architecture])
    config = ModelConfig.from_path(tmp_path)
    items = [media_item(architecture, index) for index in range(5)]
    exact = embeddings(load_model(config, tmp_path, dtype="float32").towers, items)
    for linear_method in ("int8", "w8a8"):
        quantized = config.with_tower_weights(linear_method)
        towers = load_model(quantized, tmp_path, dtype="float32").towers
        packed = embeddings(towers, items)
        similarity = torch.cosine_similarity(torch.cat(packed), torch.cat(exact), dim=-1)
        assert 0.9995 <= similarity.mean() < 1
        assert similarity.min() >= 0.999
        (alone,) = embeddings(towers, items[1:2])
        assert (packed[1] - alone).abs().max() <= 1e-5 * alone.abs().max()


@pytest.mark.parametrize("architecture", [LLAVA, "Lfm2VlForConditionalGeneration", "Qwen3VLForConditionalGeneration"])
def test_planners_count_the_bytes_that_are_kept(architecture: str, tmp_path: Path) -> None:
    case = MEDIA_CASES[architecture]
    vision = {**case.fields["vision_config"], "intermediate_size": 64}  # no padding
    write_checkpoint(tmp_path, architecture, dataclasses.replace(case, fields={**case.fields, "vision_config": vision}))
    config = ModelConfig.from_path(tmp_path).with_tower_weights("int8")
    towers = load_media_towers(config, tmp_path, dtype="bfloat16")
    assert isinstance(towers, NativeTowers)
    linears = [layer for layer in towers._scope.layers if isinstance(layer, Linear)]
    kept = sum(tensor.nbytes for layer in linears for name, tensor in layer._weights.items() if name != "bias")
    others = towers.num_parameters - sum(layer.shape[0] * layer.shape[1] for layer in linears)
    assert weight_ledger(config, "bfloat16")["towers"] == kept + 2 * others
    assert num_parameters(config) == num_parameters(ModelConfig.from_path(tmp_path))


def test_language_model_and_towers_have_forms_of_their_own(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, LLAVA, MEDIA_CASES[LLAVA])
    config = ModelConfig.from_path(tmp_path)
    items = [media_item(LLAVA, 0)]
    plain, quantized_text, quantized_towers = (
        load_model(model, tmp_path, dtype="float32", linear_method=method)
        for model, method in ((config, "plain"), (config, "int8"), (config.with_tower_weights("int8"), "plain"))
    )
    assert torch.equal(embeddings(quantized_text.towers, items)[0], embeddings(plain.towers, items)[0])
    assert not torch.equal(embeddings(quantized_towers.towers, items)[0], embeddings(plain.towers, items)[0])
    assert quantized_towers.linear_kernels == plain.linear_kernels != quantized_text.linear_kernels


def test_towers_that_are_not_described_are_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, LLAVA, MEDIA_CASES[LLAVA])
    values = json.loads((tmp_path / "config.json").read_text())
    values["vision_config"]["hidden_act"] = "mish"
    config = ModelConfig.from_dict(values)
    with pytest.raises(ConfigError, match="LlavaForConditionalGeneration runs Transformers' towers") as error:
        config.with_tower_weights("int8")
    assert error.value.field == "mm_encoder_quantization"
    with pytest.raises(ConfigError, match="has no towers that are built"):
        dataclasses.replace(config, media=None).with_tower_weights("int8")
