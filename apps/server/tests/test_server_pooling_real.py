"""Sparse embeddings and late interaction over HTTP, equal to sentence-transformers on folders that it wrote."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, BertConfig, BertForMaskedLM

from quire import QuireConfig
from quire.assemble import FACTORY as REAL_FACTORY
from quire_testkit.real_checkpoints import MINILM, real_checkpoint

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import sentence_transformers

QUERY = "What is a quire of paper?"
TEXTS = [
    "A quire is a gathering of sheets, folded once.",
    "The capital of France is Paris; it rains.",
    "Paper is sold in reams, of twenty quires each.",
]


def serve(make_live: Any, folder: Path) -> Any:
    settings = QuireConfig.of(model=str(folder), dtype="float32", num_threads=1)
    return make_live(folder=folder, factory=REAL_FACTORY, engine=settings.to_dict())


def test_scores_of_late_interaction_on_minilm(make_live: Any, tmp_path: Path) -> None:
    modules = sentence_transformers.sentence_transformer.modules
    late = sentence_transformers.multi_vector_encoder.modules
    torch.manual_seed(0)
    parts = [
        modules.Transformer(str(real_checkpoint(MINILM))),
        modules.Dense(
            384, 48, bias=False, activation_function=torch.nn.Identity(), module_input_name="token_embeddings"
        ),
        modules.Normalize(module_input_name="token_embeddings"),
        late.MultiVectorMask(skiplist_words=list(".,;?")),
    ]
    model = sentence_transformers.MultiVectorEncoder(modules=parts, device="cpu")
    model.save_pretrained(str(tmp_path / "saved"))
    (query,), documents = model.encode_query([QUERY]), model.encode_document(TEXTS)
    expected = [float((torch.as_tensor(query) @ torch.as_tensor(each).T).amax(1).sum()) for each in documents]
    live = serve(make_live, tmp_path / "saved")
    scores = [each["score"] for each in live.post("/score", {"queries": QUERY, "documents": TEXTS}).json()["data"]]
    assert scores == pytest.approx(expected, abs=2e-5)
    ranking = live.post("/rerank", {"query": QUERY, "documents": TEXTS}).json()["results"]
    assert [each["index"] for each in ranking] == sorted(range(3), key=lambda index: -expected[index])
    assert expected[0] > expected[1]
    tokens = live.post("/pooling", {"input": TEXTS, "task": "token_embed"}).json()["data"]
    for each, document in zip(tokens, documents, strict=True):
        assert torch.allclose(torch.tensor(each["data"]), torch.as_tensor(document), atol=2e-6)
    whole = live.post("/embed_all", {"inputs": TEXTS[0]}).json()
    assert len(whole[0]) == len(documents[0])
    refused = live.post("/pooling", {"input": QUERY, "task": "embed"}).json()["error"]
    assert refused["message"].startswith("Unsupported task: 'embed'")


def test_sparse_embeddings_are_those_of_splade(make_live: Any, tmp_path: Path) -> None:
    modules = sentence_transformers.sparse_encoder.modules
    tokenizer = AutoTokenizer.from_pretrained(real_checkpoint(MINILM))
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(tokenizer), hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96,
        max_position_embeddings=128, initializer_range=0.2,
    )  # fmt: skip
    network = BertForMaskedLM(config).eval()
    network.save_pretrained(tmp_path / "network")
    tokenizer.save_pretrained(tmp_path / "network")
    parts = [modules.MLMTransformer(str(tmp_path / "network")), modules.SpladePooling()]
    model = sentence_transformers.SparseEncoder(modules=parts, device="cpu")
    model.save_pretrained(str(tmp_path / "saved"))
    expected = model.encode(TEXTS, convert_to_tensor=True, convert_to_sparse_tensor=False)
    live = serve(make_live, tmp_path / "saved")
    answer = live.post("/embed_sparse", {"inputs": TEXTS})
    assert answer.status_code == 200, answer.text
    for text, pairs, vector in zip(TEXTS, answer.json(), expected, strict=True):
        assert [each["index"] for each in pairs] == vector.nonzero()[:, 0].tolist()
        inputs = tokenizer([text], return_tensors="pt")
        exact = network.double()(**inputs).logits[0].relu().log1p().max(dim=0).values[vector != 0]
        values = torch.tensor([each["value"] for each in pairs], dtype=torch.float64)
        # sentence-transformers is up to 6e-6 from the same network in float64.
        assert torch.allclose(values, exact, rtol=0, atol=5e-6)
    (one,) = live.post("/embed_sparse", {"inputs": TEXTS[0]}).json()
    assert one == answer.json()[0]
