"""Language models inside checkpoints that take media: text is served, whatever the parts are called."""

from __future__ import annotations

import dataclasses
import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models_paged_driver import PagedDriver
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire_interfaces import CheckpointError, ConfigError
from quire_models import ModelConfig, load_model
from quire_models.composite import language_names
from quire_models.ledger import num_parameters, weight_ledger
from quire_models.text_defaults import TEXT_DEFAULTS
from quire_testkit.parity.media_cases import MEDIA_CASES
from quire_testkit.parity.media_prompts import oracle_inputs
from quire_testkit.parity.oracle import write_checkpoint

TOKENS = [random.Random(3).randrange(3, 180) for _ in range(60)]
NO_TEXT = {"VoxtralRealtimeForConditionalGeneration"}
"""Classes that take no text without a sound."""
LLAVA = "LlavaForConditionalGeneration"
QWEN = "Qwen2VLForConditionalGeneration"


def logits_of(folder: Path, *, chunk: int = 7) -> Tensor:
    model = load_model(ModelConfig.from_path(folder), folder, dtype="float32", language_model_only=True)
    driver = PagedDriver(model, block_size=16, shuffle=True)
    seq = driver.add(TOKENS)
    driver.run(seq, chunk)
    return torch.stack(seq.logits)


def oracle_logits(model: Any) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(**oracle_inputs(model, TOKENS, {}, has_whole_spans=False)).logits[0]
    return logits


@pytest.mark.parametrize("architecture", sorted(MEDIA_CASES.keys() - NO_TEXT))
def test_text_is_that_of_transformers(architecture: str, tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path, architecture, MEDIA_CASES[architecture])
    expected, logits = oracle_logits(model), logits_of(tmp_path)
    assert (logits - expected).abs().max() <= 1e-4 * expected.abs().max()


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tensor]:
    folder = tmp_path_factory.mktemp("llava")
    return folder, oracle_logits(write_checkpoint(folder, LLAVA, MEDIA_CASES[LLAVA]))


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tensor]:
    folder = tmp_path_factory.mktemp("qwen")
    return folder, oracle_logits(write_checkpoint(folder, QWEN, MEDIA_CASES[QWEN]))


def copied(source: Path, target: Path, rename: Callable[[str], str] = str, **fields: Any) -> None:
    """A checkpoint with other names of tensors, and other fields in its config.json; None takes one away."""
    target.mkdir(exist_ok=True)
    tensors = load_file(source / "model.safetensors")
    save_file({rename(name): tensor for name, tensor in tensors.items()}, target / "model.safetensors")
    config = json.loads((source / "config.json").read_text()) | fields
    (target / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


def plain(name: str) -> str:
    """A name in the layout of today's classes: "model.language_model.layers.0", "model.vision_tower", "lm_head"."""
    name = re.sub(r"^language_model\.lm_head\.", "lm_head.", name)
    name = re.sub(r"^language_model\.(model\.)?", "model.language_model.", name)
    return re.sub(r"^(vision_tower|multi_modal_projector|visual)\.", r"model.\1.", name)


LAYOUTS: dict[str, Callable[[str], str]] = {
    "today": plain,
    "causal lm inside": lambda name: re.sub(
        r"^model\.", "", re.sub(r"^(lm_head\.|model\.language_model\.(?!lm_head))", _inner, plain(name))
    ),
    "text_model": lambda name: plain(name).replace("language_model", "text_model"),
    "thinker": lambda name: "thinker." + plain(name).replace("model.language_model.", "model."),
    "llm": lambda name: re.sub(r"^(lm_head\.|model\.language_model\.)", lambda m: "llm." + _inner(m)[15:], plain(name)),
}  # fmt: skip


def _inner(match: re.Match[str]) -> str:
    return "language_model.lm_head." if match[1] == "lm_head." else "language_model.model."


@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_are_found_whatever_their_prefix_is(layout: str, llava: tuple[Path, Tensor], tmp_path: Path) -> None:
    folder, expected = llava
    copied(folder, tmp_path, LAYOUTS[layout])
    assert (logits_of(tmp_path) - expected).abs().max() <= 1e-4 * expected.abs().max()


def test_a_flat_configuration_with_names_of_its_time(qwen: tuple[Path, Tensor], tmp_path: Path) -> None:
    """As Qwen2-VL was published: fields of the language model beside the towers', and no prefix of its own."""
    folder, expected = qwen
    text = json.loads((folder / "config.json").read_text())["text_config"]
    text.pop("model_type")
    rope = text.pop("rope_parameters")
    scaling = {"type": "mrope", "mrope_section": rope["mrope_section"]}
    flat = {**text, "text_config": None, "rope_theta": rope["rope_theta"], "rope_scaling": scaling}
    copied(folder, tmp_path, lambda name: plain(name).replace("model.language_model", "model"), **flat)
    assert ModelConfig.from_path(tmp_path).text_architecture == "Qwen2ForCausalLM"
    assert (logits_of(tmp_path) - expected).abs().max() <= 1e-4 * expected.abs().max()


def test_missing_and_unknown_language_weights_are_named(llava: tuple[Path, Tensor], tmp_path: Path) -> None:
    copied(llava[0], tmp_path, lambda name: plain(name).replace("layers.1.self_attn.q_proj", "layers.1.self_attn.r"))
    with pytest.raises(CheckpointError, match=r"1 missing: model.layers.1.self_attn.q_proj.weight; 1 not known: model"):
        logits_of(tmp_path)


def test_planners_count_language_model_and_towers_apart(llava: tuple[Path, Tensor]) -> None:
    config, tensors = ModelConfig.from_path(llava[0]), load_file(llava[0] / "model.safetensors")
    assert config.language_names is not None
    towers = sum(tensor.numel() for name, tensor in tensors.items() if config.language_names(name) is None)
    assert weight_ledger(config, "bfloat16")["towers"] == towers * 2
    assert weight_ledger(config, "bfloat16", "int8")["towers"] == towers * 2
    assert num_parameters(config) == sum(tensor.numel() for tensor in tensors.values())
    assert num_parameters(dataclasses.replace(config, media=None)) == num_parameters(config) - towers


def test_a_published_file_leaves_sizes_out() -> None:
    """LLaVA 1.5's: what is not said is what the class begins with."""
    text = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 32064, "rms_norm_eps": 1e-5,
            "max_position_embeddings": 4096, "torch_dtype": "float16"}  # fmt: skip
    config = ModelConfig.from_dict({"architectures": [LLAVA], "text_config": text, "vision_config": {}})
    assert (config.hidden_size, config.num_layers, config.max_model_len, config.dtype) == (4096, 32, 4096, "float16")


def test_defaults_are_those_of_transformers() -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    for model_type, defaults in TEXT_DEFAULTS.items():
        config = CONFIG_MAPPING[model_type]()
        if model_type == "voxtral_realtime_text":  # the whole has defaults of its own for its part
            config = CONFIG_MAPPING["voxtral_realtime"]().text_config
            assert config.rope_parameters["rope_theta"] == defaults["rope_theta"]
        names = defaults.keys() - {"norm_topk_prob", "rope_theta"}
        assert {name: getattr(config, name) for name in names} == {name: defaults[name] for name in names}, model_type


def test_overrides_are_those_of_the_language_model(llava: tuple[Path, Tensor]) -> None:
    config = ModelConfig.from_path(llava[0], overrides={"text_config": {"max_position_embeddings": 99}})
    assert config.max_model_len == 99
    with pytest.raises(ConfigError, match="hf_overrides has 'max_positions'"):
        ModelConfig.from_path(llava[0], overrides={"text_config": {"max_positions": 99}})
    with pytest.raises(ConfigError, match="hf_overrides has 'max_position_embeddings'"):
        ModelConfig.from_path(llava[0], overrides={"max_position_embeddings": 99})


def test_quantized_language_model_beside_plain_towers(llava: tuple[Path, Tensor], tmp_path: Path) -> None:
    """FP8 weights of the language model, with one scale each; the towers stay as they are."""
    folder, expected = llava
    tensors, stored = load_file(folder / "model.safetensors"), {}
    for name, tensor in tensors.items():
        if re.search(r"language_model.*layers.*_proj\.weight$", name):
            scale = tensor.abs().max() / 448
            stored[name] = (tensor / scale).to(torch.float8_e4m3fn)
            stored[name + "_scale"] = scale.reshape(1)
        else:
            stored[name] = tensor
    quantization = {"quant_method": "fp8", "activation_scheme": "dynamic", "modules_to_not_convert": ["vision_tower"]}
    copied(folder, tmp_path, quantization_config=quantization)
    save_file(stored, tmp_path / "model.safetensors")
    config = ModelConfig.from_path(tmp_path)
    assert config.quantization is not None
    assert not any("vision" in name for name in config.quantization.held)
    assert (logits_of(tmp_path) - expected).abs().max() <= 0.2 * expected.abs().max()


def test_names_of_towers_are_none() -> None:
    names = language_names(ModelConfig.from_dict({
        "architectures": ["LlamaForCausalLM"], "vocab_size": 9, "hidden_size": 8, "intermediate_size": 8,
        "num_hidden_layers": 1, "num_attention_heads": 1, "max_position_embeddings": 8,
    }).network)  # fmt: skip
    for tower in ("visual.blocks.0.norm1.weight", "model.visual.merger.mlp.0.weight", "vision_tower.model.layers.0.w",
                  "model.vision_tower.norm.weight", "multi_modal_projector.linear_1.weight", "talker.model.norm.weight",
                  "model.connector.modality_projection.proj.weight", "audio_tower.layers.0.fc1.weight"):  # fmt: skip
        assert names(tower) is None
    assert names("lm_head.weight") == "lm_head.weight"
    assert names("thinker.model.norm.weight") == "model.norm.weight"


def test_a_configuration_without_its_class_is_refused(llava: tuple[Path, Tensor]) -> None:
    values = json.loads((llava[0] / "config.json").read_text())
    del values["architectures"]
    with pytest.raises(CheckpointError, match="architectures is missing"):
        ModelConfig.from_dict(values)
