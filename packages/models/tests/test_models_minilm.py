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
from quire_testkit.tokenizers import sample_text

TEXTS = ["A quire gathers sheets of paper.", "Yes", "Wie teuer ist das? " * 60, "0" * 300]


@pytest.fixture(scope="module")
def folder() -> Path:
    return real_checkpoint(MINILM)


def token_ids_of(folder: Path, texts: list[str]) -> list[list[int]]:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(256)
    return [each.ids for each in tokenizer.encode_batch(texts)]


def encoder(folder: Path, linear_method: str = "plain") -> EncoderOnly:
    network = load_model(ModelConfig.from_path(folder), folder, dtype="float32", linear_method=linear_method)
    assert isinstance(network, EncoderOnly)
    return network


def test_hidden_states_are_those_of_transformers(folder: Path) -> None:
    inputs, network = token_ids_of(folder, TEXTS), encoder(folder)
    reference = BertModel.from_pretrained(folder).eval()
    packed = network.read(inputs)
    for token_ids, hidden in zip(inputs, packed, strict=True):
        with torch.inference_mode():
            expected = reference(torch.tensor([token_ids])).last_hidden_state[0]
        assert (hidden - expected).abs().max() < 1e-5
        vector, wanted = (torch.nn.functional.normalize(each.mean(0), dim=0) for each in (hidden, expected))
        assert (vector - wanted).abs().max() < 2e-6
        assert (network.read([token_ids])[0] - expected).abs().max() < 1e-5


def test_weights_and_tokens_in_8_bits_cost_little(folder: Path) -> None:
    texts = [*TEXTS, *(sample_text(length, seed) for seed, length in enumerate((4, 8, 16, 16, 32, 32, 64, 64, 128)))]
    inputs = token_ids_of(folder, texts)
    vectors, wanted = (
        torch.stack([hidden.mean(0) for hidden in network.read(inputs)])
        for network in (encoder(folder, "w8a8-g64"), encoder(folder))
    )
    similarity = torch.nn.functional.cosine_similarity(vectors.double(), wanted.double())
    assert 0.9995 <= similarity.mean() < 1
