"""Images in chat completions over HTTP: answers are those of Transformers after its processor's joint call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quire.assemble import FACTORY as REAL_FACTORY
from quire.config import QuireConfig
from quire_testkit.seeing_models import SeeingModel, drawing, image_part, text_part

NUM_TOKENS = 8
OPTIONS = {"temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True, "return_token_ids": True}


def seeing(make_live: Any, folder: Path, server: dict[str, Any] | None = None, **settings: Any) -> Any:
    """A server of this model."""
    own = {"dtype": "float32", "max_model_len": 256, "kv_cache_memory_bytes": 1 << 24, **settings}
    config = QuireConfig.of(model=str(folder), **own)
    return make_live(folder=folder, factory=REAL_FACTORY, engine=config.to_dict(), config=own, **(server or {}))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> SeeingModel:
    return SeeingModel(tmp_path_factory.mktemp("seeing"))


@pytest.fixture(scope="module")
def server(make_live: Any, model: SeeingModel) -> Any:
    return seeing(make_live, model.folder)


def answered(server: Any, content: Any, **more: Any) -> Any:
    body = {"messages": [{"role": "user", "content": content}], **OPTIONS, **more}
    response = server.post("/v1/chat/completions", body)
    assert response.status_code == 200, response.text
    return response.json()


def rendered(content: str) -> str:
    return f"<|im_start|>user\n{content}<|im_end|>\n<|im_start|>assistant\n"


def test_an_answer_is_that_of_transformers(model: SeeingModel, server: Any) -> None:
    answer = answered(server, [text_part("What is "), image_part(1), text_part("and "), image_part(2)])
    seen = [drawing(1), drawing(2)]
    text = rendered("What is <image>and <image>")
    assert answer["choices"][0]["token_ids"] == model.expected(text, seen, NUM_TOKENS)
    other = answered(server, [text_part("What is "), image_part(2), text_part("and "), image_part(1)])
    assert other["choices"][0]["token_ids"] == model.expected(text, seen[::-1], NUM_TOKENS)
    assert other["choices"][0]["token_ids"] != answer["choices"][0]["token_ids"]
