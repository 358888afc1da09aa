"""/v1/completions with echo and nothing generated, up to a full context; refusals that name the prompt."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture(scope="module")
def context(live: Any) -> int:
    return int(live.client.get("/v1/models").json()["data"][0]["max_model_len"])


def ids(count: int) -> list[int]:
    return [(7 * i * i + 11 * i) % 90 + 5 for i in range(count)]


@pytest.mark.parametrize("room", [0, 1, 5])
def test_a_prompt_that_fills_the_context_is_echoed_and_scored(live: Any, context: int, room: int) -> None:
    prompt = ids(context - room)
    body = {"prompt": prompt, "max_tokens": 0, "echo": True, "logprobs": 1, "return_token_ids": True}
    answer = live.post("/v1/completions", body)
    assert answer.status_code == 200, answer.text
    [choice] = answer.json()["choices"]
    scores = choice["logprobs"]["token_logprobs"]
    assert len(scores) == len(prompt)
    assert scores[0] is None
    assert all(score <= 0 for score in scores[1:])
    assert choice["token_ids"] == []
    assert choice["finish_reason"] == "length"
    assert answer.json()["usage"] == {
        **answer.json()["usage"], "prompt_tokens": len(prompt), "completion_tokens": 0, "total_tokens": len(prompt),
    }  # fmt: skip
    if room > 0:
        more = live.post("/v1/completions", {**body, "max_tokens": 1}).json()["choices"][0]["logprobs"]
        assert scores == pytest.approx([None, *more["token_logprobs"][1:-1]], abs=1e-4)
    streamed = live.events("/v1/completions", body)
    assert [each["logprobs"]["token_logprobs"] for event in streamed for each in event["choices"]] == [scores]


def test_prompt_logprobs_alone_may_be_asked_for(live: Any, context: int) -> None:
    answer = live.post("/v1/completions", {"prompt": ids(context), "max_tokens": 0, "prompt_logprobs": 0})
    assert answer.status_code == 200, answer.text
    [choice] = answer.json()["choices"]
    assert choice["text"] == ""
    assert len(choice["prompt_logprobs"]) == context


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a", "max_tokens": 0}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 0}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 0}),
    ],
)
def test_elsewhere_one_token_is_the_least(live: Any, path: str, body: dict[str, Any]) -> None:
    answer = live.post(path, body)
    assert answer.status_code == 400
    assert "max_tokens must be at least 1, got 0" in answer.json()["error"]["message"]


def test_one_token_more_than_the_context_is_refused(live: Any, context: int) -> None:
    answer = live.post("/v1/completions", {"prompt": ids(context + 1), "max_tokens": 0, "echo": True})
    assert answer.status_code == 400
    assert (
        f"has {context + 1} tokens, but this model's context is {context} tokens" in answer.json()["error"]["message"]
    )


def test_a_refusal_names_the_prompt_of_a_batch(live: Any, context: int) -> None:
    for wrong, text in ((ids(context), f"prompt[1]: the prompt has {context} tokens"), ([10**6], "prompt[1]: prompt")):
        answer = live.post("/v1/completions", {"prompt": [[5, 6], wrong], "max_tokens": 2})
        assert answer.status_code == 400
        assert text in answer.json()["error"]["message"]
        assert answer.json()["error"]["param"].startswith("prompt")
    alone = live.post("/v1/completions", {"prompt": ids(context), "max_tokens": 2}).json()["error"]["message"]
    assert f"(the prompt has {context} tokens" in alone
