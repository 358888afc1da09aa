"""Decoders without an LM head, and with a head of classes or rewards, against Transformers' classes."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from models_paged_driver import PagedDriver
from models_pooled import logits_of_text, logits_of_tokens
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire_interfaces import CheckpointError, ConfigError
from quire_models import DecoderLM, ModelConfig, load_model
from quire_models.ledger import num_parameters, weight_ledger
from quire_testkit.parity.cases import CASES
from quire_testkit.parity.oracle import write_checkpoint

TOLERANCE = 1e-5
"""Of the largest number: both sides compute in float32."""
TEXT = random.Random(2).choices(range(3, 200), k=40)

CLASSES = {
    "LlamaModel": "LlamaForCausalLM",
    "MistralModel": "MistralForCausalLM",
    "Qwen2Model": "Qwen2ForCausalLM",
    "Qwen3Model": "Qwen3ForCausalLM",
    "GPT2Model": "GPT2LMHeadModel",
    "GPTNeoXModel": "GPTNeoXForCausalLM",
    "Gemma3TextModel": "Gemma3ForCausalLM",
    "LlamaForSequenceClassification": "LlamaForCausalLM",
    "Qwen3ForSequenceClassification": "Qwen3ForCausalLM",
    "GPT2ForSequenceClassification": "GPT2LMHeadModel",
    "Gemma2ForSequenceClassification": "Gemma2ForCausalLM",
    "LlamaForTokenClassification": "LlamaForCausalLM",
    "Qwen3ForTokenClassification": "Qwen3ForCausalLM",
    "MiniCPM3ForSequenceClassification": "MiniCPM3ForCausalLM",
    "PhimoeForSequenceClassification": "PhimoeForCausalLM",
    "Mistral4ForTokenClassification": "Mistral4ForCausalLM",
    "HunYuanMoEV1ForSequenceClassification": "HunYuanMoEV1ForCausalLM",
}
"""Class -> the architecture whose case has its sizes."""


def write(folder: Path, architecture: str, **fields: Any) -> Any:
    case = CASES[CLASSES.get(architecture, architecture)]
    return write_checkpoint(folder, architecture, dataclasses.replace(case, fields={**case.fields, **fields}))


def load(folder: Path) -> DecoderLM:
    network = load_model(ModelConfig.from_path(folder), folder, dtype="float32")
    assert isinstance(network, DecoderLM)
    return network


def hidden_of(network: Any, chunk: int = 16) -> Tensor:
    """Hidden states of `TEXT`, [tokens, hidden_size], computed `chunk` tokens at a time."""
    driver = PagedDriver(network, block_size=16, shuffle=True)
    sequence = driver.add(TEXT)
    driver.run(sequence, chunk)
    return torch.stack(sequence.hidden)


def relative_error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).abs().max() / expected.abs().max())


@pytest.mark.parametrize("architecture", list(CLASSES)[:-2])
def test_hidden_states_and_logits_are_those_of_transformers(architecture: str, tmp_path: Path) -> None:
    oracle = write(tmp_path, architecture, num_labels=3)
    network = load(tmp_path)
    with torch.inference_mode():
        outputs = oracle(input_ids=torch.tensor([TEXT]))
    hidden = hidden_of(network)
    if architecture.endswith("Model"):
        assert relative_error(hidden, outputs.last_hidden_state[0]) < TOLERANCE
        assert network.config.network.pooler is None
    else:
        of_tokens = architecture.endswith("TokenClassification")
        found = (logits_of_tokens if of_tokens else logits_of_text)(network, hidden)
        assert relative_error(found, outputs.logits[0]) < TOLERANCE
    planned = num_parameters(network.config)
    assert planned == sum(parameter.numel() for parameter in oracle.parameters())
    with pytest.raises(ConfigError, match="has no LM head"):
        network.compute_logits(hidden)


@pytest.mark.parametrize("architecture", list(CLASSES)[-1:])
def test_classes_behind_networks_of_transformers(architecture: str, tmp_path: Path) -> None:
    oracle = write(tmp_path, architecture, num_labels=3)
    network = load_model(ModelConfig.from_path(tmp_path), tmp_path, dtype="float32")
    with torch.inference_mode():
        logits = oracle(input_ids=torch.tensor([TEXT])).logits[0]
    hidden = hidden_of(network)
    found = (logits_of_tokens if "Token" in architecture else logits_of_text)(network, hidden)
    assert relative_error(found, logits) < TOLERANCE
    assert not network.config.generates
    assert not network.config.is_native
    with pytest.raises(ConfigError, match="has no LM head"):
        network.compute_logits(hidden)


def test_names_with_the_prefix_of_the_body_and_an_lm_head_are_taken_too(tmp_path: Path) -> None:
    """As of a checkpoint for generation whose config.json names the body alone."""
    oracle = write(tmp_path, "LlamaForCausalLM")
    config = ModelConfig.from_path(tmp_path, overrides={"architectures": ["LlamaModel"]})
    network = load_model(config, tmp_path, dtype="float32")
    assert isinstance(network, DecoderLM)
    with torch.inference_mode():
        expected = oracle.model(input_ids=torch.tensor([TEXT])).last_hidden_state[0]
    assert relative_error(hidden_of(network), expected) < TOLERANCE
    assert weight_ledger(config, "float32")["LM head"] == 0
    assert not config.generates
    assert not config.is_encoder


def test_an_lm_head_under_its_published_name_is_left_out(tmp_path: Path) -> None:
    oracle = write(tmp_path, "DeepseekV4ForCausalLM")
    assert "head.weight" in load_file(tmp_path / "model.safetensors")
    config = ModelConfig.from_path(tmp_path, overrides={"architectures": ["DeepseekV4Model"]})
    network = load_model(config, tmp_path, dtype="float32")
    with torch.inference_mode():
        expected = oracle.model(input_ids=torch.tensor([TEXT])).last_hidden_state[0]
    assert relative_error(hidden_of(network), expected) < TOLERANCE


@pytest.mark.parametrize(("head", "num_outputs"), [("ForRewardModel", 1), ("ForProcessRewardModel", 2)])
def test_rewards_of_qwen_come_of_two_layers(head: str, num_outputs: int, tmp_path: Path) -> None:
    oracle = write(tmp_path, "Qwen2Model")
    choose = torch.Generator().manual_seed(3)
    size = oracle.config.hidden_size
    shapes = {"0.weight": (size, size), "0.bias": (size,), "2.weight": (num_outputs, size), "2.bias": (num_outputs,)}
    score = {f"score.{name}": torch.randn(*shape, generator=choose) for name, shape in shapes.items()}
    body = {f"model.{name}": tensor for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    save_file({**body, **score}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    network = load_as(tmp_path, f"Qwen2{head}")
    with torch.inference_mode():
        hidden = oracle(input_ids=torch.tensor([TEXT])).last_hidden_state[0].double()
    inner = torch.relu(hidden @ score["score.0.weight"].double().T + score["score.0.bias"].double())
    expected = inner @ score["score.2.weight"].double().T + score["score.2.bias"].double()
    assert relative_error(logits_of_tokens(network, hidden_of(network)), expected) < TOLERANCE
    pooler = network.config.network.pooler
    assert pooler is not None
    assert (pooler.token_method == "STEP") == (num_outputs == 2)
    assert network.config.num_labels == num_outputs


def write_internlm2(folder: Path) -> tuple[Any, Tensor]:
    """A checkpoint of InternLM2 with the arithmetic of a random Llama, and a layer of rewards.

    Returns:
        The Llama, and the weight of that layer.
    """
    oracle = write(folder, "LlamaForCausalLM")
    config, tensors = oracle.config, {}
    per_group, size = config.num_attention_heads // config.num_key_value_heads, config.head_dim
    names = (
        ("self_attn.o_proj", "attention.wo"), ("mlp.gate_proj", "feed_forward.w1"), ("mlp.up_proj", "feed_forward.w3"),
        ("mlp.down_proj", "feed_forward.w2"), ("input_layernorm", "attention_norm"), ("lm_head", "output"),
        ("post_attention_layernorm", "ffn_norm"), ("embed_tokens", "tok_embeddings"),
    )  # fmt: skip
    for name, tensor in load_file(folder / "model.safetensors").items():
        for old, new in names:
            name = name.replace(old, new)
        tensors[name] = tensor
    for layer in range(config.num_hidden_layers):
        parts = [tensors.pop(f"model.layers.{layer}.self_attn.{part}_proj.weight") for part in "qkv"]
        groups = [
            part.unflatten(0, (config.num_key_value_heads, count * size))
            for part, count in zip(parts, (per_group, 1, 1), strict=True)
        ]
        tensors[f"model.layers.{layer}.attention.wqkv.weight"] = torch.cat(groups, dim=1).flatten(0, 1)
    tensors["v_head.weight"] = torch.randn(1, config.hidden_size, generator=torch.Generator().manual_seed(5))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return oracle, tensors["v_head.weight"]


def test_internlm2_is_llama_in_other_names_with_a_layer_of_rewards(tmp_path: Path) -> None:
    oracle, value_head = write_internlm2(tmp_path)
    with torch.inference_mode():
        hidden = oracle.model(input_ids=torch.tensor([TEXT])).last_hidden_state[0]
        logits = oracle.lm_head(hidden)
    network = load_as(tmp_path, "InternLM2ForRewardModel")
    ours = hidden_of(network)
    assert relative_error(ours, hidden) < TOLERANCE
    assert relative_error(logits_of_tokens(network, ours), hidden.double() @ value_head.double().T) < TOLERANCE
    without_rewards = {
        name: each for name, each in load_file(tmp_path / "model.safetensors").items() if "v_" not in name
    }
    save_file(without_rewards, tmp_path / "model.safetensors", metadata={"format": "pt"})
    writer = load_as(tmp_path, "InternLM2ForCausalLM")
    assert relative_error(writer.compute_logits(hidden_of(writer)), logits) < TOLERANCE


def load_as(folder: Path, architecture: str) -> DecoderLM:
    """The network of a checkpoint as another class."""
    config = ModelConfig.from_path(folder, overrides={"architectures": [architecture]})
    network = load_model(config, folder, dtype="float32")
    assert isinstance(network, DecoderLM)
    return network


def test_what_no_decoder_has_is_refused() -> None:
    fields = dict(CASES["LlamaForCausalLM"].fields)
    with pytest.raises(CheckpointError, match="LlamaForMaskedLM is not supported: it fills gaps"):
        ModelConfig.from_dict({**fields, "architectures": ["LlamaForMaskedLM"]})
    opt = {**CASES["OPTForCausalLM"].fields, "word_embed_proj_dim": 32, "architectures": ["OPTModel"]}
    with pytest.raises(CheckpointError, match="projected to the width of its embedding"):
        ModelConfig.from_dict(opt)
