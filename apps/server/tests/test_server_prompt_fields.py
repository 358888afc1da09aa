"""Fields of vLLM's requests that change what the model reads or how tokens are named: none is passed over."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quire import QuireConfig
from quire.assemble import FACTORY as REAL_FACTORY
from quire_testkit.checkpoints import make_checkpoint

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "one two three four five six"}]


def prompt_ids(server: Any, path: str, **fields: Any) -> list[int]:
    body = {"max_tokens": 4, "return_token_ids": True, "ignore_eos": True, **fields}
    response = server.post(path, body)
    assert response.status_code == 200, response.text
    answer = response.json()
    ids = answer["prompt_token_ids"] if path == CHAT else answer["choices"][0]["prompt_token_ids"]
    assert answer["usage"]["prompt_tokens"] == len(ids)
    return list(ids)


@pytest.fixture(scope="module")
def real(make_live: Any, tiny_folder: Path) -> Any:
    """A server with the whole engine."""
    config = QuireConfig.of(model=str(tiny_folder), max_model_len=64, num_threads=1)
    return make_live(factory=REAL_FACTORY, engine=config.to_dict())


@pytest.mark.parametrize(("path", "prompt"), [(CHAT, {"messages": MESSAGES}), (TEXT, {"prompt": list(range(5, 30))})])
def test_prompts_are_cut_where_that_is_asked_for(live: Any, path: str, prompt: dict[str, Any]) -> None:
    whole = prompt_ids(live, path, **prompt)
    assert prompt_ids(live, path, **prompt, truncate_prompt_tokens=5) == whole[-5:]
    assert prompt_ids(live, path, **prompt, truncate_prompt_tokens=5, truncation_side="right") == whole[:5]
    assert prompt_ids(live, path, **prompt, truncate_prompt_tokens=len(whole)) == whole
    assert prompt_ids(live, path, **prompt, truncate_prompt_tokens=-1) == whole
    for wrong in (0, -2):
        response = live.post(path, {**prompt, "truncate_prompt_tokens": wrong})
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "truncate_prompt_tokens"
    assert live.post(path, {**prompt, "truncation_side": "middle"}).status_code == 400


def test_a_prompt_that_is_too_long_is_cut_to_what_fits(live: Any) -> None:
    ids = [5 + place % 900 for place in range(600)]  # the context has 512
    assert live.post(TEXT, {"prompt": ids, "max_tokens": 12}).status_code == 400
    assert prompt_ids(live, TEXT, prompt=ids, max_tokens=12, truncate_prompt_tokens=-1) == ids[-500:]


def test_what_is_echoed_is_what_was_read(live: Any) -> None:
    text = "one two three four five six"
    whole = live.post(TEXT, {"prompt": text, "max_tokens": 0, "echo": True}).json()["choices"][0]["text"]
    cut = live.post(TEXT, {"prompt": text, "max_tokens": 0, "echo": True, "truncate_prompt_tokens": 3}).json()
    assert whole == text
    assert 0 < len(cut["choices"][0]["text"]) < len(text)
    assert text.endswith(cut["choices"][0]["text"])


def test_tokens_are_named_by_their_ids(real: Any) -> None:
    fields = {"max_tokens": 3, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    fields |= {"return_tokens_as_token_ids": True}
    answer = real.post(TEXT, {"prompt": [7, 8], "echo": True, "logprobs": 2, **fields}).json()["choices"][0]
    ids = [7, 8, *answer["token_ids"]]
    assert answer["logprobs"]["tokens"] == [f"token_id:{token_id}" for token_id in ids]
    for token_id, top in list(zip(ids, answer["logprobs"]["top_logprobs"], strict=True))[1:]:
        assert f"token_id:{token_id}" in top
        assert all(name.removeprefix("token_id:").isdigit() for name in top)
    body = {"messages": MESSAGES, "logprobs": True, "top_logprobs": 2, **fields}
    chat = real.post(CHAT, body).json()["choices"][0]
    assert [each["token"] for each in chat["logprobs"]["content"]] == [f"token_id:{i}" for i in chat["token_ids"]]
    streamed = real.events(CHAT, body)
    named = [each for event in streamed for choice in event["choices"] if choice["logprobs"]
             for each in choice["logprobs"]["content"]]  # fmt: skip
    assert named == chat["logprobs"]["content"]


def test_documents_reach_the_template(make_live: Any, tmp_path: Path) -> None:
    template = (
        "{% for each in documents or [] %}{{ each.title }}: {{ each.text }}\n{% endfor %}{{ messages[-1].content }}"
    )
    folder = make_checkpoint(tmp_path / "model")
    (folder / "chat_template.jinja").write_text(template)
    server = make_live(folder=folder)
    documents = [{"title": "a", "text": "b"}, {"title": "c", "text": "d"}]
    with_them = prompt_ids(server, CHAT, messages=MESSAGES, documents=documents)
    told = prompt_ids(server, TEXT, prompt=f"a: b\nc: d\n{MESSAGES[0]['content']}", add_special_tokens=False)
    assert with_them == told


@pytest.mark.parametrize(("path", "prompt"), [(CHAT, {"messages": MESSAGES}), (TEXT, {"prompt": "x"})])
def test_what_is_not_there_is_the_requests_error(real: Any, path: str, prompt: dict[str, Any]) -> None:
    for fields, words in (
        ({"prompt_embeds": "AAAA"}, "--enable-prompt-embeds" if path == TEXT else "/v1/completions"),
        ({"logits_processors": ["none_such"]}, "there is no logits processor 'none_such'"),
    ):
        for stream in (False, True):
            response = real.post(path, {**prompt, "max_tokens": 2, "stream": stream, **fields})
            assert response.status_code == 400, response.text
            error = response.json()["error"]
            assert error["type"] == "invalid_request_error"
            assert words in error["message"]
            assert error["message"].startswith(("this server", "prompts that are", "there is no"))
            assert error["param"] == next(iter(fields))
            assert error["code"] in ("unsupported", "invalid_request")
    assert real.client.get("/health").status_code == 200


def test_defaults_of_the_templates_variables(make_live: Any, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model")
    (folder / "chat_template.jinja").write_text("{{ mood }}{{ tone }}{{ messages[-1].content }}")
    server = make_live(folder=folder, default_chat_template_kwargs={"mood": "calm ", "tone": "low "})

    def read(mood: str) -> list[int]:
        text = f"{mood}low {MESSAGES[0]['content']}"
        return prompt_ids(server, TEXT, prompt=text, add_special_tokens=False)

    assert prompt_ids(server, CHAT, messages=MESSAGES) == read("calm ")
    asked = {"messages": MESSAGES, "chat_template_kwargs": {"mood": "wild "}}
    assert prompt_ids(server, CHAT, **asked) == read("wild ")
    assert server.post("/tokenize", asked).json()["tokens"] == read("wild ")
    counted = server.post("/v1/messages/count_tokens", {"model": "tiny", "messages": MESSAGES}).json()
    assert counted["input_tokens"] == len(read("calm "))
