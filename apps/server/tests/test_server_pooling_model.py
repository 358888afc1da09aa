"""A second model for pooling beside one that generates, in one server."""

from __future__ import annotations

import dataclasses
import re
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI

from quire_testkit.parity.encoder_cases import ENCODER_CASES
from quire_testkit.parity.oracle import write_checkpoint
from quire_testkit.tokenizers import write_tokenizer


def test_both_models_answer(quire_serve: Any, tmp_path: Path) -> None:
    case = ENCODER_CASES["BertModel"]
    case = dataclasses.replace(case, fields={**case.fields, "vocab_size": 320})
    write_checkpoint(tmp_path, "BertModel", case)
    write_tokenizer(tmp_path, vocab_size=320)
    second = str(tmp_path)
    flags = ("--kv-cache-memory-bytes", "64M", "--enable-sleep-mode", "--enable-admin-routes")
    process = quire_serve("--pooling-model", second, *flags)
    url = process.url()
    assert re.search(rf"pooling model: +{re.escape(second)} \(.*: embed, token_embed\)", process.output)

    def refusal(path: str, **body: Any) -> str:
        response = httpx.post(f"{url}{path}", json=body, timeout=60)
        assert response.status_code == 404, response.text
        return str(response.json()["error"]["message"])

    with OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        first, *_, last = client.models.list().data
        assert last.id == second
        assert (first.pooling_tasks, last.pooling_tasks) == ([], ["embed", "token_embed"])  # type: ignore[attr-defined]
        vectors = [
            [each.embedding for each in client.embeddings.create(model=second, input=["a", "b"]).data],
            [
                each["embedding"]
                for each in httpx.post(f"{url}/v1/embeddings", json={"input": ["a", "b"]}).json()["data"]
            ],
            httpx.post(f"{url}/embed", json={"inputs": ["a", "b"]}).json(),
        ]
        assert len(vectors[0][0]) == case.fields["hidden_size"]
        for others in vectors[1:]:
            for vector, other in zip(vectors[0], others, strict=True):
                assert vector == pytest.approx(other, abs=1e-6)
        answer = client.chat.completions.create(
            model=first.id, messages=[{"role": "user", "content": "Hello"}], max_tokens=3
        )
        assert answer.usage is not None
        assert answer.usage.completion_tokens > 0
    assert "--pooling-model" in refusal("/v1/completions", model=second, prompt="a")
    assert "--convert embed" in refusal("/v1/embeddings", model=first.id, input="a")
    assert "not served here" in refusal("/v1/embeddings", model="another", input="a")
    asked = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3}
    body = {"input": "a"}
    for path, has_chat in (("/sleep", False), ("/wake_up", True), ("/pause?mode=abort", None), ("/resume", True)):
        assert httpx.post(f"{url}{path}", timeout=60).status_code == 200
        if has_chat is not None:
            answer = httpx.post(f"{url}/v1/chat/completions", json=asked, timeout=60)
            assert answer.status_code == (200 if has_chat else 503), answer.text
        for route in ("/v1/embeddings", "/invocations"):
            assert httpx.post(f"{url}{route}", json=body, timeout=60).status_code == 200, (path, route)
    ids = httpx.post(f"{url}/tokenize", json={"model": second, "prompt": "a"}).json()["tokens"]
    assert max(ids) < 320
    assert httpx.get(f"{url}/info").json()["model_id"] == second
    assert httpx.get(f"{url}/ready").status_code == 200
    metrics = httpx.get(f"{url}/metrics").text
    assert re.search(r'quire:pooling_requests_total\{[^}]*task="embed"[^}]*\} 14\.0', metrics)
    assert "quire_pooling:request_success_total" in metrics
    process.popen.send_signal(signal.SIGTERM)
    assert process.end() == 0
