"""Reranking by a cross-encoder over HTTP: each pair scored as Transformers does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification

from quire import QuireConfig
from quire.assemble import FACTORY as REAL_FACTORY

QUERY, DOCUMENTS = "the quire gathers", ["twelve blocks of paper", "a folded sheet", "the quire gathers twelve"]


def test_scores_of_pairs_are_transformers(make_live: Any, write_word_tokenizer: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=200, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96, num_labels=1,
        max_position_embeddings=128, architectures=["BertForSequenceClassification"],
    )  # fmt: skip
    oracle = BertForSequenceClassification(config).eval()
    oracle.save_pretrained(tmp_path)
    write_word_tokenizer(tmp_path, " ".join([QUERY, *DOCUMENTS]))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    settings = QuireConfig.of(model=str(tmp_path), dtype="float32", num_threads=1)
    live = make_live(folder=tmp_path, factory=REAL_FACTORY, engine=settings.to_dict())
    with torch.inference_mode():
        encoded = [tokenizer(QUERY, document, return_tensors="pt") for document in DOCUMENTS]
        logits = torch.cat([oracle(**each).logits[0] for each in encoded])
    answer = live.post("/score", {"queries": QUERY, "documents": DOCUMENTS, "use_activation": False})
    assert answer.status_code == 200, answer.text
    assert [each["score"] for each in answer.json()["data"]] == pytest.approx(logits.tolist(), abs=2e-6)
    ranks = live.post("/rerank", {"query": QUERY, "texts": DOCUMENTS}).json()
    assert [each["index"] for each in ranks] == logits.argsort(descending=True).tolist()
    scores = logits.sigmoid().sort(descending=True).values.tolist()
    assert [each["score"] for each in ranks] == pytest.approx(scores, abs=2e-6)
    assert answer.json()["usage"]["prompt_tokens"] == sum(each["input_ids"].numel() for each in encoded)
    num_tokens = answer.json()["usage"]["prompt_tokens"]

    def usage(**fields: Any) -> int:
        return int(
            live.post("/score", {"queries": QUERY, "documents": DOCUMENTS, **fields}).json()["usage"]["prompt_tokens"]
        )

    assert usage(max_tokens_per_query=1) == num_tokens - 2 * len(DOCUMENTS)
    assert usage(max_tokens_per_doc=1) == num_tokens - sum(len(each.split()) - 1 for each in DOCUMENTS)
    assert usage(max_tokens_per_query=0, max_tokens_per_doc=0) == num_tokens
    for field in ({"chat_template": "{{ messages[0].content }}"}, {"instruction": "Judge"}):
        error = live.post("/score", {"queries": QUERY, "documents": DOCUMENTS, **field}).json()["error"]
        assert error["param"] == ("chat_template" if "chat_template" in field else "chat_template_kwargs")
