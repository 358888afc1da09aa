"""`--kv-transfer-config`: a prompt is computed in one server and answered by another, as routers ask for it."""

from __future__ import annotations

import importlib.util
import json
from typing import Any

import httpx
import pytest

LONG = " ".join(f"the quire gathers page {number}" for number in range(12))
BODY = {"prompt": LONG, "max_tokens": 12, "temperature": 1, "seed": 5, "ignore_eos": True}
NOBODY = {"remote_engine_id": None, "remote_block_ids": None, "remote_host": None, "remote_port": None}
ASKS = {"do_remote_decode": True, "do_remote_prefill": False, **NOBODY}
"""What routers send to the prefill server."""


def post(url: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
    return dict(httpx.post(url + path, json=body, timeout=60).raise_for_status().json())


def cached_tokens(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


@pytest.mark.parametrize("connector", ["SocketConnector", "NixlConnector"])
def test_one_server_prefills_and_another_decodes(quire_serve: Any, tiny_folder: Any, connector: str) -> None:
    if connector == "NixlConnector" and importlib.util.find_spec("nixl") is None:
        pytest.skip("nixl is not installed (pip install nixl): no blocks were read by NIXL")
    flags = [str(tiny_folder), "--max-model-len", "512", "--kv-transfer-config"]
    servers = [
        quire_serve(*flags, json.dumps({"kv_connector": connector, "kv_role": role}))
        for role in ("kv_producer", "kv_both")
    ]
    prefill, decode = (server.url() for server in servers)
    expected = post(prefill, "/v1/completions", BODY)
    whole_blocks = (expected["usage"]["prompt_tokens"] - 1) // 16 * 16

    first = post(prefill, "/v1/completions", {**BODY, "max_tokens": 1, "kv_transfer_params": ASKS})
    transfer = first["kv_transfer_params"]
    assert transfer["do_remote_prefill"]
    answer = post(decode, "/v1/completions", {**BODY, "kv_transfer_params": transfer})
    assert answer["choices"][0]["text"] == expected["choices"][0]["text"]
    assert cached_tokens(answer) == whole_blocks > 0
    assert answer["kv_transfer_params"] is None

    chat = {"messages": [{"role": "user", "content": LONG[::-1]}], "max_tokens": 8, "temperature": 0}
    expected = post(prefill, "/v1/chat/completions", chat)
    first = post(prefill, "/v1/chat/completions", {**chat, "max_tokens": 1, "kv_transfer_params": ASKS})
    answer = post(decode, "/v1/chat/completions", {**chat, "kv_transfer_params": first["kv_transfer_params"]})
    assert answer["choices"][0]["message"] == expected["choices"][0]["message"]
    assert cached_tokens(answer) > 0

    tokens = {"token_ids": list(range(3, 80)), "sampling_params": {"max_tokens": 1}, "kv_transfer_params": ASKS}
    first = post(prefill, "/inference/v1/generate", tokens)
    transfer = first["kv_transfer_params"]
    post(decode, "/inference/v1/generate", {**tokens, "kv_transfer_params": transfer})
    metrics = httpx.get(decode + "/metrics").text
    hits = next(line for line in metrics.splitlines() if line.startswith("quire:external_prefix_cache_hits_total"))
    assert float(hits.split()[-1]) >= whole_blocks + 64

    refused = httpx.post(decode + "/v1/completions", json={**BODY, "kv_transfer_params": "x"})
    assert refused.status_code == 400
    assert "kv_transfer_params must be an object" in refused.text
    for server in servers:
        server.popen.terminate()
        assert server.end() == 0


def test_a_server_without_a_connector_says_so(live: Any) -> None:
    answer = live.post("/v1/completions", {**BODY, "kv_transfer_params": ASKS})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "kv_transfer_params"
    assert "--kv-transfer-config" in answer.text
