"""Heads of encoders' classes come with the network's weights, and give the logits of Transformers."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from models_pooled import logits_of_text, logits_of_tokens
from torch import Tensor

from quire_interfaces import CheckpointError
from quire_models import ModelConfig, load_model
from quire_models.layers.encoder_only import EncoderOnly
from quire_models.layers.network import Network
from quire_models.ledger import num_parameters, weight_ledger
from quire_testkit.parity.encoder_cases import ENCODER_CASES
from quire_testkit.parity.oracle import write_checkpoint

TOLERANCE = 1e-5
"""Of the largest logit: both sides compute hidden states in float32."""
TEXT = random.Random(1).choices(range(3, 200), k=12)

HEADS = ["ForSequenceClassification", "ForTokenClassification", "ForMaskedLM"]
STEMS = [name.removesuffix("Model") for name in ENCODER_CASES if name.endswith("Model") and "Encoder" not in name]
CLASSES: dict[str, dict[str, Any]] = {
    **{f"{stem}{head}": {} for stem in STEMS for head in HEADS},
    "ModernBertForSequenceClassification": {"classifier_pooling": "mean", "norm_bias": True, "classifier_bias": True},
}
"""Class -> fields of its configuration."""


def write(folder: Path, architecture: str, **fields: Any) -> Any:
    """A random checkpoint of a class with a head, of the sizes that its body's case has."""
    stem = architecture.partition("For")[0]
    case = ENCODER_CASES[f"{stem}Model"]
    case = dataclasses.replace(case, fields={**case.fields, "num_labels": 3, **fields})
    return write_checkpoint(folder, architecture, case)


def load(folder: Path, **fields: Any) -> Network:
    return load_model(ModelConfig.from_path(folder), folder, **{"dtype": "float32", **fields})


@torch.inference_mode()
def expected_logits(oracle: Any) -> Tensor:
    logits: Tensor = oracle(input_ids=torch.tensor([TEXT])).logits[0]
    return logits


def our_logits(network: Network) -> Tensor:
    assert isinstance(network, EncoderOnly)
    hidden = network.read([TEXT])[0]
    pooler = network.config.network.pooler
    assert pooler is not None
    is_of_text = "classify" in pooler.tasks
    return logits_of_text(network, hidden) if is_of_text else logits_of_tokens(network, hidden)


def relative_error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).abs().max() / expected.abs().max())


@pytest.mark.parametrize("architecture", CLASSES)
def test_logits_are_those_of_transformers(architecture: str, tmp_path: Path) -> None:
    oracle = write(tmp_path, architecture, **CLASSES[architecture])
    network = load(tmp_path)
    assert relative_error(our_logits(network), expected_logits(oracle)) < TOLERANCE
    assert num_parameters(network.config) == sum(parameter.numel() for parameter in oracle.parameters())
    assert network.config.num_labels == (0 if architecture.endswith("MaskedLM") else 3)


@pytest.mark.parametrize("pooling", ["bos", "mean"])
def test_eurobert_pools_as_its_config_says(pooling: str, tmp_path: Path) -> None:
    oracle = write(tmp_path, "EuroBertForSequenceClassification", classifier_pooling=pooling)
    assert relative_error(our_logits(load(tmp_path)), expected_logits(oracle)) < TOLERANCE


@pytest.mark.parametrize("legacy", [True, False])
def test_both_heads_of_deberta_for_words(legacy: bool, tmp_path: Path) -> None:
    oracle = write(tmp_path, "DebertaV2ForMaskedLM", legacy=legacy)
    assert relative_error(our_logits(load(tmp_path)), expected_logits(oracle)) < TOLERANCE


def test_a_masked_language_model_may_have_a_matrix_of_its_own(tmp_path: Path) -> None:
    oracle = write(tmp_path, "BertForMaskedLM", tie_word_embeddings=False)
    network = load(tmp_path)
    assert "cls.predictions.decoder.weight" in network.head_weights
    assert relative_error(our_logits(network), expected_logits(oracle)) < TOLERANCE


def test_heads_stay_in_float32_and_are_counted(tmp_path: Path) -> None:
    write(tmp_path, "BertForSequenceClassification")
    network = load(tmp_path, dtype="bfloat16")
    assert {tensor.dtype for tensor in network.head_weights.values()} == {torch.float32}
    counted = weight_ledger(network.config, "bfloat16")["pooling head"]
    assert counted == sum(tensor.nbytes for tensor in network.head_weights.values()) == 4 * (64 * 64 + 64 + 3 * 64 + 3)


def test_a_body_alone_has_no_head_and_takes_no_tensors_of_one(tmp_path: Path) -> None:
    write(tmp_path, "BertForMaskedLM")
    config = ModelConfig.from_path(tmp_path, overrides={"architectures": ["BertModel"]})
    assert load_model(config, tmp_path).head_weights == {}
    assert config.network.pooler is None
    assert not config.generates
    assert config.is_encoder


LABELS: list[tuple[dict[str, Any], tuple[str, ...], str, set[str]]] = [
    ({}, ("LABEL_0", "LABEL_1"), "softmax", {"classify"}),
    ({"id2label": {"0": "no", "1": "yes"}}, ("no", "yes"), "softmax", {"classify"}),
    ({"id2label": {"0": "LABEL_0"}}, ("LABEL_0",), "sigmoid", {"classify", "score"}),
    ({"num_labels": 1, "problem_type": "regression"}, ("LABEL_0",), "identity", {"classify", "score"}),
    ({"num_labels": 3, "problem_type": "multi_label_classification"}, ("LABEL_0", "LABEL_1", "LABEL_2"), "sigmoid",
     {"classify"}),
    ({"num_labels": 1, "sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}, ("LABEL_0",),
     "identity", {"classify", "score"}),
    ({"num_labels": 1, "sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}, ("LABEL_0",),
     "identity", {"classify", "score"}),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "labels", "activation", "tasks"), LABELS)
def test_config_json_names_classes_and_their_activation(
    fields: dict[str, Any], labels: tuple[str, ...], activation: str, tasks: set[str]
) -> None:
    case = ENCODER_CASES["BertModel"]
    values = {**case.fields, "architectures": ["BertForSequenceClassification"], **fields}
    config = ModelConfig.from_dict(values)
    pooler = config.network.pooler
    assert pooler is not None
    assert (config.labels, pooler.activation, pooler.tasks) == (labels, activation, tasks)
    assert config.problem_type == fields.get("problem_type", "")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"id2label": {"1": "a"}}, "id2label must name classes by their numbers from 0 on"),
        ({"sentence_transformers": {"activation_fn": "my.own.Function"}}, "activation 'my.own.Function' is not supp"),
        ({"sentence_transformers": {"activation_fn": "my.Sigmoid"}}, "activation 'my.Sigmoid' is not supported"),
    ],
)
def test_labels_that_are_not_clear_are_refused(fields: dict[str, Any], message: str) -> None:
    values = {**ENCODER_CASES["BertModel"].fields, "architectures": ["BertForSequenceClassification"], **fields}
    with pytest.raises(CheckpointError, match=message):
        ModelConfig.from_dict(values)


def test_a_missing_head_is_named(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "BertModel", ENCODER_CASES["BertModel"])
    config = ModelConfig.from_path(tmp_path, overrides={"architectures": ["BertForSequenceClassification"]})
    with pytest.raises(CheckpointError, match=r"missing: classifier\.weight, classifier\.bias"):
        load_model(config, tmp_path)
