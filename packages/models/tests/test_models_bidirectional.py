"""Decoders whose attention is bidirectional run as encoders, with the hidden states of Transformers."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from models_pooled import logits_of_text
from torch import Tensor

from quire_interfaces import CheckpointError
from quire_models import ModelConfig, load_model
from quire_models.layers.encoder_only import EncoderOnly
from quire_testkit.parity.cases import CASES
from quire_testkit.parity.oracle import write_checkpoint

TOLERANCE = 1e-5
"""Of the largest number: both sides compute in float32."""
TEXTS = [random.Random(length).choices(range(3, 200), k=length) for length in (60, 1, 9)]

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "LlamaModel": ("LlamaForCausalLM", {"is_causal": False}),
    "Qwen2Model": ("Qwen2ForCausalLM", {"is_causal": False, "use_sliding_window": False}),
    "Qwen3Model": ("Qwen3ForCausalLM", {"is_causal": False}),
    "Gemma3TextModel": ("Gemma3ForCausalLM", {"use_bidirectional_attention": True, "sliding_window": 16}),
}
"""Class -> the architecture whose case has its sizes, and further fields."""


def write(folder: Path, architecture: str, **fields: Any) -> Any:
    base, own = MODELS[architecture]
    case = CASES[base]
    return write_checkpoint(folder, architecture, dataclasses.replace(case, fields={**case.fields, **own, **fields}))


def set_fields(folder: Path, **fields: Any) -> None:
    """Change fields of config.json; None takes one away."""
    values = {**json.loads((folder / "config.json").read_text()), **fields}
    (folder / "config.json").write_text(
        json.dumps({name: value for name, value in values.items() if value is not None})
    )


def load(folder: Path) -> EncoderOnly:
    network = load_model(ModelConfig.from_path(folder), folder, dtype="float32")
    assert isinstance(network, EncoderOnly)
    return network


def relative_error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).abs().max() / expected.abs().max())


@torch.inference_mode()
def whole_hidden(oracle: Any, token_ids: list[int]) -> Tensor:
    """The oracle's hidden states [tokens, hidden_size] where every token sees all others, whatever its class says."""
    size = len(token_ids)
    if getattr(oracle.config, "use_bidirectional_attention", False):
        hidden: Tensor = oracle(input_ids=torch.tensor([token_ids])).last_hidden_state[0]
        return hidden
    mask = torch.zeros(1, 1, size, size)
    whole: Tensor = oracle(input_ids=torch.tensor([token_ids]), attention_mask=mask).last_hidden_state[0]
    return whole


@pytest.mark.parametrize("architecture", MODELS)
def test_every_token_sees_the_whole_text(architecture: str, tmp_path: Path) -> None:
    oracle = write(tmp_path, architecture)
    network = load(tmp_path)
    for hidden, token_ids in zip(network.read(TEXTS), TEXTS, strict=True):
        assert relative_error(hidden, whole_hidden(oracle, token_ids)) < TOLERANCE
    assert network.config.is_encoder
    assert not network.config.generates


def test_an_override_makes_an_encoder_of_a_checkpoint_for_generation(tmp_path: Path) -> None:
    """As of GTE-Qwen2, whose config.json names the class for generation."""
    case = CASES["Qwen2ForCausalLM"]
    case = dataclasses.replace(case, fields={**case.fields, "use_sliding_window": False})
    oracle = write_checkpoint(tmp_path, "Qwen2ForCausalLM", case)
    config = ModelConfig.from_path(tmp_path, overrides={"is_causal": False})
    network = load_model(config, tmp_path, dtype="float32")
    assert isinstance(network, EncoderOnly)
    assert relative_error(network.read(TEXTS)[0], whole_hidden(oracle.model, TEXTS[0])) < TOLERANCE
    assert ModelConfig.from_path(tmp_path).generates


@pytest.mark.parametrize("name", ["GritLM", "LlamaBidirectionalModel"])
def test_classes_that_are_bidirectional_by_name(name: str, tmp_path: Path) -> None:
    oracle = write(tmp_path, "LlamaModel", is_causal=True)
    set_fields(tmp_path, architectures=[name])
    assert relative_error(load(tmp_path).read(TEXTS)[0], whole_hidden(oracle, TEXTS[0])) < TOLERANCE


def test_a_bidirectional_reranker_pools_as_its_config_says(tmp_path: Path) -> None:
    base, _ = MODELS["LlamaModel"]
    case = dataclasses.replace(CASES[base], fields={**CASES[base].fields, "num_labels": 1})
    oracle = write_checkpoint(tmp_path, "LlamaForSequenceClassification", case)
    set_fields(tmp_path, architectures=["LlamaBidirectionalForSequenceClassification"], pooling="avg")
    network = load(tmp_path)
    with torch.inference_mode():
        expected = oracle.score(whole_hidden(oracle.model, TEXTS[0]).mean(0))
    assert relative_error(logits_of_text(network, network.read(TEXTS[:1])[0]), expected) < TOLERANCE


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("Qwen2ForCausalLM", {}, "a sliding window"),
    ("Gemma2ForCausalLM", {"sliding_window": None}, "soft_cap of attention"),
    ("MambaForCausalLM", {}, "a layer of another kind"),
    ("BloomForCausalLM", {}, "alibi of attention"),
    ("GPTNeoXForCausalLM", {}, "a layer of another kind"),
]


@pytest.mark.parametrize(("architecture", "fields", "what"), REFUSED)
def test_what_encoders_have_not_is_refused_by_name(
    architecture: str, fields: dict[str, Any], what: str, tmp_path: Path
) -> None:
    write_checkpoint(tmp_path, architecture, CASES[architecture])
    set_fields(tmp_path, is_causal=False, **fields)
    with pytest.raises(CheckpointError, match=f"{what}.* is not supported where attention is bidirectional"):
        ModelConfig.from_path(tmp_path)
