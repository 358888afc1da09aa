"""The experts that routers chose, over HTTP, as vLLM's clients read them."""

from __future__ import annotations

import base64
import dataclasses
import io
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from numpy.typing import NDArray

from quire_testkit.parity.cases import CASES
from quire_testkit.parity.oracle import write_checkpoint
from quire_testkit.tokenizers import write_tokenizer

CHAT_TEMPLATE = "{% for message in messages %}{{ message.content }} {% endfor %}"


def experts_of(choice: dict[str, Any]) -> NDArray[Any]:
    found: NDArray[Any] = np.load(io.BytesIO(base64.b64decode(choice["routed_experts"])), allow_pickle=False)
    return found


@pytest.fixture(scope="module")
def client(quire_serve: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("model")
    case = CASES["MixtralForCausalLM"]
    write_checkpoint(folder, "MixtralForCausalLM", dataclasses.replace(case, fields={**case.fields, "vocab_size": 300}))
    write_tokenizer(folder, vocab_size=300)
    template = Path(folder) / "template.jinja"
    template.write_text(CHAT_TEMPLATE)
    flags = ("--enable-return-routed-experts", "--chat-template", str(template), "--max-model-len", "128")
    process = quire_serve("--model", str(folder), *flags, "--num-gpu-blocks-override", "64")
    with httpx.Client(base_url=process.url(), timeout=60) as client:
        yield client


def test_completions_chats_and_tokens_tell_them(client: httpx.Client) -> None:
    model = client.get("/v1/models").json()["data"][0]["id"]
    common = {"model": model, "max_tokens": 5, "temperature": 0, "ignore_eos": True}
    prompt = list(range(3, 40))
    (choice,) = client.post("/v1/completions", json={**common, "prompt": prompt}).json()["choices"]
    experts = experts_of(choice)
    assert experts.shape == (len(prompt) + 5 - 1, CASES["MixtralForCausalLM"].fields["num_hidden_layers"], 2)
    assert experts.dtype == np.uint8

    body = {"token_ids": prompt, "sampling_params": {"max_tokens": 5, "temperature": 0, "ignore_eos": True}}
    (choice,) = client.post("/inference/v1/generate", json=body).json()["choices"]
    np.testing.assert_array_equal(experts_of(choice), experts)

    chat = {**common, "messages": [{"role": "user", "content": "Hello there"}], "return_token_ids": True}
    answer = client.post("/v1/chat/completions", json=chat).json()
    whole = experts_of(answer["choices"][0])
    assert len(whole) == answer["usage"]["total_tokens"] - 1


def test_streams_tell_them_with_their_end(client: httpx.Client) -> None:
    model = client.get("/v1/models").json()["data"][0]["id"]
    body = {"model": model, "prompt": [5, 6, 7], "max_tokens": 4, "temperature": 0, "ignore_eos": True, "stream": True}
    whole = client.post("/v1/completions", json={**body, "stream": False}).json()["choices"][0]
    with client.stream("POST", "/v1/completions", json=body) as stream:
        lines = [line.removeprefix("data: ") for line in stream.iter_lines() if line.startswith("data: {")]
    told = ["routed_experts" in line for line in lines]
    assert told == [False] * (len(lines) - 1) + [True]
    assert whole["routed_experts"] in lines[-1]
