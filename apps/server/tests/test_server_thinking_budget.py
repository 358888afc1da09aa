"""Bounded thinking: after the budget the thinking is closed for the model, which then answers; one answer to see."""

from __future__ import annotations

from typing import Any

import pytest

# The scripted model says its script from the prompt's end on, so that after the thinking was closed it begins anew.
SCRIPT = "<think>one two three four five six seven eight</think>Done."


@pytest.fixture(scope="module")
def client(scripted):
    with scripted.openai() as client:
        yield client


def ask(client, budget, **arguments):
    extra = {"thinking_token_budget": budget, **arguments.pop("extra_body", {})}
    messages: list[Any] = [{"role": "user", "content": f"¤{SCRIPT}¥"}]
    return client.chat.completions.create(model="tiny", messages=messages, extra_body=extra, **arguments)


def reasoning_and_text(choice):
    return choice.message.model_extra.get("reasoning"), choice.message.content


def streamed(client, budget, **arguments):
    found: dict[int, list[str]] = {}
    for chunk in ask(client, budget, stream=True, **arguments):
        for choice in chunk.choices:
            pair = found.setdefault(choice.index, ["", ""])
            pair[0] += choice.delta.model_extra.get("reasoning") or ""
            pair[1] += choice.delta.content or ""
    return [tuple(pair) for _, pair in sorted(found.items())]


def test_enough_budget_changes_nothing(client):
    free = ask(client, None).choices[0]
    assert reasoning_and_text(free) == ("one two three four five six seven eight", "Done.")
    bounded = ask(client, 1000)
    assert reasoning_and_text(bounded.choices[0]) == reasoning_and_text(free)
    assert streamed(client, 1000) == [reasoning_and_text(free)]


@pytest.mark.parametrize("budget", [5, 8, 12])
def test_thinking_ends_with_the_budget(client, budget):
    answer = ask(client, budget)
    reasoning, text = reasoning_and_text(answer.choices[0])
    assert "one two three four five six seven eight".startswith(reasoning)
    assert reasoning != "one two three four five six seven eight"
    # A whole second request answers; in this test it says the script again, as text.
    assert text == SCRIPT
    assert streamed(client, budget) == [(reasoning, text)]
    assert answer.choices[0].finish_reason == "stop"


def test_more_budget_is_more_thinking(client):
    lengths = [len(reasoning_and_text(ask(client, budget).choices[0])[0] or "") for budget in (4, 10, 16, 22)]
    assert lengths == sorted(lengths)
    assert lengths[0] < lengths[-1]


def test_no_budget_at_all(client):
    reasoning, text = reasoning_and_text(ask(client, 0).choices[0])
    assert len(reasoning or "") <= 3
    assert text == SCRIPT


def test_usage_logprobs_and_limits_are_those_of_the_whole_answer(client):
    free = ask(client, None).usage
    bounded = ask(client, 10, logprobs=True, extra_body={"return_token_ids": True})
    usage, choice = bounded.usage, bounded.choices[0]
    assert usage.prompt_tokens == free.prompt_tokens
    assert usage.completion_tokens == len(choice.model_extra["token_ids"]) > free.completion_tokens
    assert len(choice.logprobs.content) == usage.completion_tokens
    cut = ask(client, 10, max_tokens=20)
    assert (cut.choices[0].finish_reason, cut.usage.completion_tokens) == ("length", 20)


def test_several_answers_are_bounded_each(client):
    whole = ask(client, 10, n=3)
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    pairs = [reasoning_and_text(choice) for choice in whole.choices]
    assert pairs == [pairs[0]] * 3
    assert streamed(client, 10, n=3) == pairs
    assert whole.usage.completion_tokens == 3 * ask(client, 10).usage.completion_tokens


def test_an_open_prompt_is_closed_at_once(scripted):
    body = {
        "messages": [{"role": "user", "content": f"¤{SCRIPT}¥"}, {"role": "assistant", "content": "<think>\n"}],
        "continue_final_message": True,
        "add_generation_prompt": False,
        "thinking_token_budget": 0,
    }
    message = scripted.post("/v1/chat/completions", body).json()["choices"][0]["message"]
    assert (message.get("reasoning"), message["content"]) == (None, SCRIPT)


def test_a_client_that_leaves_ends_both_requests(scripted):
    body = {"messages": [{"role": "user", "content": f"¤{SCRIPT * 20}¥"}], "thinking_token_budget": 5, "stream": True}
    with scripted.client.stream("POST", "/v1/chat/completions", json=body) as response:
        next(response.iter_bytes())
    scripted.wait_idle()
