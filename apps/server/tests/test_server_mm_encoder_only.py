"""Servers with one folder for encoder outputs: what one of towers alone has encoded, and what a server that was killed
had, costs the next one nothing; answers are those of Transformers. And nothing of the dead stays in shared memory.
"""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest

from quire_testkit.seeing_models import SeeingModel, drawing, image_part, text_part

NUM_TOKENS = 6


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> SeeingModel:
    return SeeingModel(tmp_path_factory.mktemp("seeing"))


class Server:
    """A server process of the model, with a folder on disk."""

    def __init__(self, quire_serve: Any, model: SeeingModel, disk: Path, *flags: str) -> None:
        own = ("--dtype", "float32", "--max-model-len", "256", "--kv-disk-path", str(disk), "--kv-disk-size", "50M")
        self.process = quire_serve(str(model.folder), *own, *flags)
        self.url = self.process.url()

    def chat(self, text: str, *numbers: int, **more: Any) -> httpx.Response:
        """The answer to a text with images behind it."""
        content = [text_part(text), *map(image_part, numbers)]
        own = {"max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        body = {"messages": [{"role": "user", "content": content}], **own, **more}
        return httpx.post(f"{self.url}/v1/chat/completions", json=body, timeout=60)

    def token_ids(self, text: str, *numbers: int) -> list[int]:
        response = self.chat(text, *numbers)
        assert response.status_code == 200, response.text
        token_ids: list[int] = response.json()["choices"][0]["token_ids"]
        return token_ids

    def figure(self, name: str) -> float:
        """A counter of images at /metrics; 0 where it is not there yet."""
        text = httpx.get(f"{self.url}/metrics", timeout=60).text
        found = re.findall(rf'^quire:{name}{{[^}}]*modality="image"[^}}]*}} (.*)$', text, re.MULTILINE)
        return float(found[0]) if found else 0.0

    def costs(self) -> tuple[float, float]:
        """Items that were prepared, and that were encoded, since the start."""
        return self.figure("mm_prepared_items_total"), self.figure("mm_encoded_items_total")

    def stores(self) -> set[Path]:
        """Folders of prepared media that its processes hold open."""
        opened = []
        for each in Path(f"/proc/{self.process.popen.pid}/fd").iterdir():
            opened += [os.readlink(each)] if each.is_symlink() else []
        return {Path(each) for each in opened if "quire-media-" in each}


def expected(model: SeeingModel, text: str, *numbers: int) -> list[int]:
    rendered = f"<|im_start|>user\n{text}{'<image>' * len(numbers)}<|im_end|>\n<|im_start|>assistant\n"
    return model.expected(rendered, [drawing(number) for number in numbers], NUM_TOKENS)


def test_what_towers_alone_encoded_costs_another_server_nothing(
    quire_serve: Any, model: SeeingModel, tmp_path: Path
) -> None:
    encoder = Server(quire_serve, model, tmp_path, "--mm-encoder-only")
    answer = encoder.chat("look ", 1, 2).json()
    (choice,) = answer["choices"]
    assert (choice["message"]["content"] or "", choice["finish_reason"]) == ("", "stop")
    assert answer["usage"]["prompt_tokens"] > 32
    assert encoder.costs() == (2, 2)
    for body, param in (({}, "messages"), ({"logprobs": True}, "top_logprobs")):
        error = encoder.chat("text", *([1] if body else []), **body)
        assert error.status_code == 400
        assert "--mm-encoder-only" in error.json()["error"]["message"]
        assert error.json()["error"]["param"] == param
    streamed = encoder.chat("look ", 3, stream=True, stream_options={"include_usage": True}).text
    assert '"finish_reason":"stop"' in streamed.replace(" ", "")

    server = Server(quire_serve, model, tmp_path, "--kv-cache-memory-bytes", "16M")  # beside it
    assert server.token_ids("say ", 2, 1) == expected(model, "say ", 2, 1)
    assert server.token_ids("and ", 3) == expected(model, "and ", 3)
    assert server.costs() == (0, 0)
    assert server.figure("mm_cache_hits_total") == 3
    assert server.token_ids("new ", 4) == expected(model, "new ", 4)
    assert server.costs() == (1, 1)

    # What the server has encoded itself is there for the next one, however it ends.
    stores = server.stores()
    assert stores
    server.process.popen.kill()
    server.process.popen.wait(30)
    again = Server(quire_serve, model, tmp_path, "--kv-cache-memory-bytes", "16M")
    assert not any(store.exists() for store in stores)
    assert again.token_ids("old ", 4, 1) == expected(model, "old ", 4, 1)
    assert again.costs() == (0, 0)
    stores = again.stores() | encoder.stores()
    assert len(stores) == 2
    for each in (again, encoder):
        each.process.popen.send_signal(signal.SIGTERM)
        assert each.process.end() == 0
    assert not any(store.exists() for store in stores)


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        ([], "--kv-disk-path"),
        (["--kv-disk-path", "{disk}", "--language-model-only"], "leave one of them out"),
        (["--kv-disk-path", "{disk}", "--speculative-method", "ngram"], "speculation by ngram"),
    ],
)
def test_settings_that_towers_alone_cannot_have_end_the_start(
    quire_serve: Any, model: SeeingModel, tmp_path: Path, flags: list[str], complaint: str
) -> None:
    own = [flag.format(disk=tmp_path) for flag in flags]
    process = quire_serve(str(model.folder), "--mm-encoder-only", *own)
    assert process.end() == 2
    assert complaint in process.output
