"""Hidden states of requests over HTTP: a file for each sample, as soon as a request is over."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import httpx
from safetensors.torch import load_file


def test_each_request_leaves_a_file(quire_serve: Any, tmp_path: Path) -> None:
    folder = tmp_path / "states"
    flags = ["--no-enable-prefix-caching", "--extract-hidden-states", str(folder)]
    process = quire_serve(*flags, "--extract-hidden-states-layers", "1", "3", "5", "--max-model-len", "128")
    body = {"prompt": list(range(5, 45)), "max_tokens": 6, "temperature": 0, "ignore_eos": True, "n": 2, "seed": 1}
    with httpx.Client(base_url=process.url(), timeout=60) as client:
        model = client.get("/v1/models").json()["data"][0]["id"]
        answer = client.post("/v1/completions", json={**body, "model": model, "return_token_ids": True}).json()
    deadline = time.monotonic() + 60
    while len(found := sorted(folder.glob("*.safetensors"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert [path.name.split(".", 1)[1] for path in found] == ["0.0.safetensors", "0.1.safetensors"]
    for path, choice in zip(found, answer["choices"], strict=True):
        tensors = load_file(path)
        assert tensors["token_ids"].tolist() == [*body["prompt"], *choice["token_ids"]][:-1]
        assert tensors["hidden_states"].shape == (45, 3, 256)
