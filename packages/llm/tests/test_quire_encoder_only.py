"""Encoders alone: read through Python, refused where something is to be generated; parity is verified elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from quire import LLM
from quire_interfaces import ConfigError, RequestError
from quire_models import ModelConfig, load_model
from quire_testkit.parity.encoder_cases import ENCODER_CASES
from quire_testkit.parity.oracle import write_checkpoint
from quire_testkit.tokenizers import write_tokenizer


def test_roberta_is_read_as_far_as_its_positions_go(tmp_path: Path) -> None:
    """Its table of positions has two rows that no token takes."""
    case = ENCODER_CASES["RobertaModel"]
    oracle = write_checkpoint(tmp_path, "RobertaModel", case)
    config = ModelConfig.from_path(tmp_path)
    assert config.max_encoder_len == case.fields["max_position_embeddings"] - 2
    network = load_model(config, tmp_path, dtype="float32")
    longest = list(range(3, 150)) + list(range(3, 110))
    assert len(longest) == config.max_encoder_len
    with torch.inference_mode():
        expected = oracle(input_ids=torch.tensor([longest])).last_hidden_state[0]
    short, found = network.read([[7], longest])
    assert short.shape == (1, 64)
    assert torch.allclose(found, expected, atol=1e-4)
    assert network.read([]) == []
    for wrong, message in ([*longest, 5], "input 1 has 255 tokens; give 1 to 254"), ([], "has 0 tokens"), (
        [200], "outside of the vocabulary, 0 to 199"
    ):  # fmt: skip
        with pytest.raises(RequestError, match=message):
            network.read([[7], wrong])


def test_there_is_nothing_to_serve(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "BertModel", ENCODER_CASES["BertModel"])
    write_tokenizer(tmp_path, vocab_size=320)
    with pytest.raises(ConfigError, match="BertModel is an encoder: it reads texts and has no generation"):
        LLM(tmp_path)
