"""LongCat-Flash with n-gram embeddings, held to Transformers' LongCat-Flash, which gets the embeddings that this file
makes as the published description says (arXiv:2601.21204, sec. 2); and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from models_paged_driver import PagedDriver
from safetensors.torch import load_file, save_file

from quire_interfaces import CheckpointError
from quire_models import ModelConfig, load_model
from quire_models.ledger import num_parameters
from quire_testkit.parity.cases import CASES
from quire_testkit.parity.oracle import write_checkpoint

NAME = "LongcatFlashNgramForCausalLM"
VOCAB, LENGTHS, SPLITS, RATIO, EOS = 200, 3, 2, 0.3, 2
OWN = {"ngram_vocab_size_ratio": RATIO, "emb_neighbor_num": LENGTHS, "emb_split_num": SPLITS, "eos_token_id": EOS}
TEXT = [7, 19, *(3 + 11 * token % 190 for token in range(20)), EOS, 5, EOS, EOS, 6, 5, 19, 7, 44]


def ngram_ids(text: list[int], length: int, size: int) -> list[int]:
    """Row of each token's n-gram of a length: its tokens are the digits of a number, the last one first; those behind
    the end of another text are zeros."""
    rows = []
    for place in range(len(text)):
        number = text[place]
        for back in range(1, length):
            if place - back < 0 or text[place - back] == EOS:
                break
            number += text[place - back] * VOCAB**back
        rows.append(number % size)
    return rows


def made(folder: Path) -> Any:
    """Transformers' network without n-grams, whose checkpoint gets tables and projections."""
    oracle = write_checkpoint(folder, "LongcatFlashForCausalLM", CASES["LongcatFlashForCausalLM"])
    weights = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(4)
    for table in range(SPLITS * (LENGTHS - 1)):
        rows, at = int(RATIO * VOCAB + 2 * table + 1), "model.ngram_embeddings"
        weights[f"{at}.embedders.{table}.weight"] = torch.randn(rows, 16, generator=generator)
        weights[f"{at}.post_projs.{table}.weight"] = torch.randn(64, 16, generator=generator) * 0.2
    save_file(weights, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | OWN | {"architectures": [NAME]}))
    return oracle


def test_ngrams_are_added_to_the_embedding(tmp_path: Path) -> None:
    oracle = made(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    embedded = weights["model.embed_tokens.weight"][TEXT].double()
    for table in range(SPLITS * (LENGTHS - 1)):
        rows = weights[f"model.ngram_embeddings.embedders.{table}.weight"]
        found = rows[ngram_ids(TEXT, 2 + table // SPLITS, len(rows))].double()
        embedded += found @ weights[f"model.ngram_embeddings.post_projs.{table}.weight"].double().T
    with torch.inference_mode():
        expected = oracle(inputs_embeds=(embedded / (1 + SPLITS * (LENGTHS - 1))).float()[None]).logits[0]
    config = ModelConfig.from_path(tmp_path)
    assert num_parameters(config) == sum(map(torch.Tensor.numel, weights.values())) - 2 * (4 * 2 * 32 * 64 + 10)
    network = load_model(config, tmp_path, dtype="float32")
    for chunk in (len(TEXT), 1, 5):
        driver = PagedDriver(network, block_size=4, shuffle=True)
        sequence = driver.add(TEXT)
        driver.run(sequence, chunk)
        assert (torch.stack(sequence.logits) - expected).abs().max() < 1e-5 * expected.abs().max()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"emb_split_num": 3, "emb_neighbor_num": 4}, r"hidden_size \(64\) must be a multiple of 9 tables"),
        ({"emb_neighbor_num": None}, "emb_neighbor_num"),
        ({"eos_token_id": [2, 3]}, r"eos_token_id must be one token, where n-grams end, is \[2, 3\]"),
        ({"use_longcat_dsa": True}, "use_longcat_dsa True is not supported"),
        ({"zero_expert_type": "copy"}, "zero_expert_type 'copy' is not supported"),
        ({"moe_topk": 11}, r"moe_topk \(11\) must be at most 10"),
    ],
)
def test_what_is_refused(fields: dict[str, Any], message: str) -> None:
    values = {**CASES["LongcatFlashForCausalLM"].fields, **OWN, "architectures": [NAME], **fields}
    with pytest.raises(CheckpointError, match=message):
        ModelConfig.from_dict({**values, "model_type": "longcat_flash_ngram"})
