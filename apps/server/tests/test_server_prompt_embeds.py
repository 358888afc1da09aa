"""Prompts as embeddings in /v1/completions: answers are those of the text whose rows they are."""

from __future__ import annotations

import base64
import gc
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quire.assemble import FACTORY as REAL_FACTORY
from quire.config import QuireConfig
from quire_testkit.seeing_models import SeeingModel, image_part

IDS = [40, 50, 60, 70, 80, 90]
OPTIONS: dict[str, Any] = {"temperature": 0, "max_tokens": 6, "ignore_eos": True, "return_token_ids": True}


def serving(make_live: Any, folder: Path, **settings: Any) -> Any:
    own = {"dtype": "float32", "max_model_len": 256, "kv_cache_memory_bytes": 1 << 24, **settings}
    config = QuireConfig.of(model=str(folder), **own)
    return make_live(folder=folder, factory=REAL_FACTORY, engine=config.to_dict(), config=own, enable_admin_routes=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> SeeingModel:
    return SeeingModel(tmp_path_factory.mktemp("seeing"))


@pytest.fixture(scope="module")
def server(make_live: Any, model: SeeingModel) -> Any:
    return serving(make_live, model.folder, enable_prompt_embeds=True, language_model_only=True)


@pytest.fixture(autouse=True)
def nothing_held(server: Any) -> Any:
    """After each test, however its requests ended, no embeddings are held."""
    yield
    server.wait_idle()
    gc.collect()
    server.llm.media.reset()
    assert server.llm.media.preparer.num_bytes == 0


def sent(model: SeeingModel, ids: list[int], dtype: torch.dtype = torch.float32) -> str:
    """Rows of the table of embeddings, as clients send them."""
    file = io.BytesIO()
    torch.save(model.network.get_input_embeddings()(torch.tensor(ids)).detach().to(dtype), file)
    return base64.b64encode(file.getvalue()).decode()


def choices(server: Any, **fields: Any) -> list[dict[str, Any]]:
    response = server.post("/v1/completions", {**OPTIONS, **fields})
    assert response.status_code == 200, response.text
    answer: list[dict[str, Any]] = response.json()["choices"]
    return answer


def test_embeddings_come_before_prompts_of_text(server: Any, model: SeeingModel) -> None:
    (text,) = choices(server, prompt=IDS)
    (embedded,) = choices(server, prompt_embeds=sent(model, IDS))
    assert (embedded["token_ids"], embedded["text"]) == (text["token_ids"], text["text"])
    assert embedded["prompt_token_ids"] is None
    assert text["prompt_token_ids"] == IDS
    several = choices(server, prompt_embeds=[sent(model, IDS[::-1]), sent(model, IDS)], prompt=[IDS, IDS[:3]], n=2)
    assert [each["index"] for each in several] == list(range(8))
    told = choices(server, prompt=[IDS[::-1], IDS, IDS, IDS[:3]], n=2)
    assert [each["token_ids"] for each in several] == [each["token_ids"] for each in told]
    assert choices(server, prompt_embeds=sent(model, IDS, torch.bfloat16))


def test_streams_log_probabilities_and_beams(server: Any, model: SeeingModel) -> None:
    text, embeds = {"prompt": IDS}, {"prompt_embeds": sent(model, IDS)}
    for fields in ({"logprobs": 2}, {"use_beam_search": True, "n": 2}):
        known, found = choices(server, **text, **fields), choices(server, **embeds, **fields)
        assert [each["token_ids"] for each in found] == [each["token_ids"] for each in known]
        assert [each["logprobs"] for each in found] == [each["logprobs"] for each in known]
    events = server.events("/v1/completions", {**OPTIONS, **embeds, "stream": True})
    tokens = [token for event in events for choice in event["choices"] for token in choice["token_ids"]]
    assert tokens == choices(server, **text)[0]["token_ids"]


def test_usage_counts_rows_and_those_found_in_the_prefix_cache(server: Any, model: SeeingModel) -> None:
    ids = [each % 500 + 5 for each in range(100, 180)]
    assert server.post("/reset_prefix_cache", {}).status_code == 200
    counts = []
    for _ in range(2):
        usage = server.post("/v1/completions", {**OPTIONS, "prompt_embeds": sent(model, ids)}).json()["usage"]
        counts.append((usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]))
    assert counts == [(80, 0), (80, 64)]


def test_what_cannot_be_is_refused(server: Any, model: SeeingModel) -> None:
    good = sent(model, IDS)
    file = io.BytesIO()
    np.save(file, np.full((2, 3), 1.0))
    narrow = base64.b64encode(file.getvalue()).decode()
    for fields, param, words in (
        ({"prompt_embeds": "?"}, "prompt_embeds", "base64"),
        ({"prompt_embeds": [good, narrow]}, "prompt_embeds[1]", "must be [N, "),
        ({"prompt_embeds": good, "echo": True}, "echo", "no text"),
        ({"prompt_embeds": good, "prompt_logprobs": 1}, "prompt_logprobs", "no text"),
        ({"prompt_embeds": good, "suffix": "x"}, "suffix", "no text"),
        ({"prompt_embeds": sent(model, IDS * 50)}, "prompt", "context"),
        ({"prompt_embeds": []}, "prompt", "required"),
        ({"prompt_embeds": 3}, "prompt_embeds", "string"),
    ):
        response = server.post("/v1/completions", {**OPTIONS, **fields})
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, param), error
        assert words in error["message"]
    rendered = server.post("/v1/completions/render", {"prompt_embeds": good})
    assert (rendered.status_code, rendered.json()["error"]["param"]) == (400, "prompt_embeds")
    body = {"messages": [{"role": "user", "content": [image_part(1)]}]}
    refused = server.post("/v1/chat/completions", body)
    assert refused.status_code == 400
    assert "--language-model-only" in refused.json()["error"]["message"]


def test_they_are_off_unless_enabled(make_live: Any, model: SeeingModel) -> None:
    live = serving(make_live, model.folder, language_model_only=True)
    response = live.post("/v1/completions", {"prompt_embeds": sent(model, IDS)})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "prompt_embeds")
    assert "--enable-prompt-embeds" in response.json()["error"]["message"]
