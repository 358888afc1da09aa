"""Encoders read pairs and packed batches as Transformers does."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quire_interfaces import RequestError
from quire_models import ModelConfig, load_model
from quire_models.layers.encoder_only import EncoderOnly
from quire_testkit.parity.encoder_cases import ENCODER_CASES
from quire_testkit.parity.oracle import write_checkpoint

TOLERANCE = 1e-5
"""Of the largest number of a text's hidden states: both sides compute in float32."""


def load_encoder(folder: Path) -> EncoderOnly:
    network = load_model(ModelConfig.from_path(folder), folder, dtype="float32")
    assert isinstance(network, EncoderOnly)
    return network


def relative_error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).abs().max() / expected.abs().max())


def pair(num_first: int, num_second: int) -> tuple[list[int], list[int]]:
    """Token ids of a pair of texts, and their token types."""
    choose = random.Random(num_first).choices
    return choose(range(3, 200), k=num_first + num_second), [0] * num_first + [1] * num_second


@torch.inference_mode()
def hidden_of(oracle: Any, token_ids: list[int], **fields: list[int]) -> Tensor:
    inputs = {"input_ids": token_ids, **fields}
    hidden: Tensor = oracle(**{name: torch.tensor([ids]) for name, ids in inputs.items()}).last_hidden_state[0]
    return hidden


def test_bert_tells_the_texts_of_a_pair_apart(tmp_path: Path) -> None:
    oracle = write_checkpoint(tmp_path, "BertModel", ENCODER_CASES["BertModel"])
    network = load_encoder(tmp_path)
    pairs = [pair(7, 5), pair(1, 20), (pair(9, 0))]
    ids, types = [each[0] for each in pairs], [each[1] for each in pairs]
    found = network.read(ids, types)
    for hidden, token_ids, token_types in zip(found, ids, types, strict=True):
        assert relative_error(hidden, hidden_of(oracle, token_ids, token_type_ids=token_types)) < TOLERANCE
    assert relative_error(network.read([ids[0]])[0], found[0]) > 0.01  # they do differ
    with pytest.raises(RequestError, match="one type for each token"):
        network.read(ids, types[:2])


def test_a_network_with_one_token_type_reads_none(tmp_path: Path) -> None:
    fields = {**ENCODER_CASES["RobertaModel"].fields, "type_vocab_size": 1}
    case = ENCODER_CASES["RobertaModel"]
    oracle = write_checkpoint(tmp_path, "RobertaModel", type(case)(config=case.config, fields=fields))
    token_ids, types = pair(7, 5)
    assert (
        relative_error(load_encoder(tmp_path).read([token_ids], [types])[0], hidden_of(oracle, token_ids)) < TOLERANCE
    )
