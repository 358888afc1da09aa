"""The real MiniLM reads texts as Transformers does, alone and packed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import BertModel

from quire_models import ModelConfig, load_model
from quire_models.layers.encoder_only import EncoderOnly
from quire_testkit.real_checkpoints import MINILM, real_checkpoint

TEXTS = ["A quire gathers sheets of paper.", "Yes", "Wie teuer ist das? " * 60, "0" * 300]


@pytest.fixture(scope="module")
def folder() -> Path:
    return real_checkpoint(MINILM)


def test_hidden_states_are_those_of_transformers(folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(256)
    inputs = [each.ids for each in tokenizer.encode_batch(TEXTS)]
    network = load_model(ModelConfig.from_path(folder), folder, dtype="float32")
    assert isinstance(network, EncoderOnly)
    reference = BertModel.from_pretrained(folder).eval()
    packed = network.read(inputs)
    for token_ids, hidden in zip(inputs, packed, strict=True):
        with torch.inference_mode():
            expected = reference(torch.tensor([token_ids])).last_hidden_state[0]
        assert (hidden - expected).abs().max() < 1e-5
        vector, wanted = (torch.nn.functional.normalize(each.mean(0), dim=0) for each in (hidden, expected))
        assert (vector - wanted).abs().max() < 2e-6
        assert (network.read([token_ids])[0] - expected).abs().max() < 1e-5
