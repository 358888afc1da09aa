"""Counts are true: tokens of thinking, shown or not, in all protocols; and what clients read as attributes is there."""

from __future__ import annotations

import json
from typing import Any

import pytest

THOUGHT = "one two three four five six"
SCRIPT = f"<think>{THOUGHT}</think>Done now."


def num_tokens(server: Any, text: str) -> int:
    return server.post("/tokenize", {"prompt": text, "add_special_tokens": False}).json()["count"]


def chat(server: Any, text: str = SCRIPT, **changes: Any) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": f"¤{text}¥"}], "return_token_ids": True, **changes}
    answer = server.post("/v1/chat/completions", body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def reasoning_tokens(usage: dict[str, Any]) -> int:
    return usage["completion_tokens_details"]["reasoning_tokens"]


def test_hidden_reasoning_is_counted(scripted: Any) -> None:
    expected = num_tokens(scripted, THOUGHT)
    shown = chat(scripted)
    assert (shown["choices"][0]["message"]["reasoning"], reasoning_tokens(shown["usage"])) == (THOUGHT, expected)
    hidden = chat(scripted, include_reasoning=False)
    assert (hidden["choices"][0]["message"]["reasoning"], reasoning_tokens(hidden["usage"])) == (None, expected)
    several = chat(scripted, include_reasoning=False, n=3)
    assert reasoning_tokens(several["usage"]) == 3 * expected
    for show in (True, False):
        body = {"messages": [{"role": "user", "content": f"¤{SCRIPT}¥"}], "include_reasoning": show}
        events = scripted.events("/v1/chat/completions", {**body, "stream_options": {"include_usage": True}})
        assert reasoning_tokens(events[-1]["usage"]) == expected
    responses = scripted.post("/v1/responses", {"input": f"¤{SCRIPT}¥", "include_reasoning": False}).json()
    assert responses["usage"]["output_tokens_details"]["reasoning_tokens"] == expected
    assert [item["type"] for item in responses["output"]] == ["message"]


@pytest.mark.parametrize("display", [None, "omitted"])
def test_omitted_thinking_of_messages_is_counted(scripted: Any, display: str | None) -> None:
    thinking = {"type": "adaptive"} | ({} if display is None else {"display": display})
    body = {"model": "tiny", "max_tokens": 200, "thinking": thinking}
    body["messages"] = [{"role": "user", "content": f"¤{SCRIPT}¥"}]
    expected = num_tokens(scripted, THOUGHT)
    assert scripted.post("/v1/messages", body).json()["usage"]["output_tokens_details"] == {"thinking_tokens": expected}
    with scripted.client.stream("POST", "/v1/messages", json={**body, "stream": True}) as response:
        lines = [line for line in response.iter_lines() if line.startswith("data: ")]
    [delta] = [event for event in map(json.loads, (line[6:] for line in lines)) if event["type"] == "message_delta"]
    assert delta["usage"]["output_tokens_details"] == {"thinking_tokens": expected}


@pytest.mark.parametrize("max_tokens", [None, 6, 14])
@pytest.mark.parametrize("budget", [0, 1, 2, 7, 1000])
def test_thinking_has_exactly_the_tokens_of_its_budget(scripted: Any, budget: int, max_tokens: int | None) -> None:
    opening, full = num_tokens(scripted, "<think>"), num_tokens(scripted, THOUGHT)
    room = full if max_tokens is None else max(0, max_tokens - opening)
    for stream in (False, True):
        asked = {"thinking_token_budget": budget, "max_tokens": max_tokens, "logprobs": True}
        answer = chat(scripted, **asked)
        [choice], usage = answer["choices"], answer["usage"]
        assert reasoning_tokens(usage) == min(budget, full, room)
        assert len(choice["logprobs"]["content"]) == len(choice["token_ids"]) == usage["completion_tokens"]
        assert max_tokens is None or usage["completion_tokens"] == max_tokens
        if stream:
            body = {"messages": [{"role": "user", "content": f"¤{SCRIPT}¥"}], **asked, "return_token_ids": True}
            events = scripted.events("/v1/chat/completions", {**body, "stream_options": {"include_usage": True}})
            told = [each for event in events for choice in event["choices"] for each in choice["token_ids"]]
            assert (told, reasoning_tokens(events[-1]["usage"])) == (choice["token_ids"], reasoning_tokens(usage))


@pytest.mark.parametrize("stop", ["three", "four five", "ee fo"])
def test_a_stop_string_within_the_budget_and_behind_it(scripted: Any, stop: str) -> None:
    free = chat(scripted, stop=stop)
    assert free["choices"][0]["stop_reason"] == stop
    for budget in (1, 3, 1000):
        bounded = chat(scripted, stop=stop, thinking_token_budget=budget, logprobs=True)
        [choice] = bounded["choices"]
        assert len(choice["logprobs"]["content"]) == len(choice["token_ids"])
        assert reasoning_tokens(bounded["usage"]) == min(budget, reasoning_tokens(free["usage"]))


def test_best_of_bounded_answers(scripted: Any) -> None:
    answer = chat(scripted, best_of=3, n=2, thinking_token_budget=4, temperature=1, seed=3)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert [choice["logprobs"] for choice in answer["choices"]] == [None, None]
    assert reasoning_tokens(answer["usage"]) == 8
    body = {"messages": [{"role": "user", "content": "x"}], "best_of": 2, "stream": True, "thinking_token_budget": 4}
    refused = scripted.post("/v1/chat/completions", body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "best_of")


def test_a_call_within_the_thinking_is_none_of_it(scripted: Any) -> None:
    call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    tools = [{"type": "function", "function": {"name": "now"}}]
    answer = chat(scripted, f"<think>one two{call}</think>Done.", tools=tools)
    [choice] = answer["choices"]
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "now"
    assert choice["message"]["reasoning"] == "one two"
    assert reasoning_tokens(answer["usage"]) == num_tokens(scripted, "one two")


def test_responses_have_an_entry_for_each_token_of_the_text(scripted: Any) -> None:
    include = {"include": ["message.output_text.logprobs"], "top_logprobs": 1}
    for text, said in (("Hello <thi there.", "Hello <thi there."), (SCRIPT, "Done now.")):
        body = {"input": f"¤{text}¥", **include}
        answer = scripted.post("/v1/responses", body).json()
        entries = answer["output"][-1]["content"][0]["logprobs"]
        assert "".join(entry["token"] for entry in entries).removesuffix("<|im_end|>") == said
        with scripted.client.stream("POST", "/v1/responses", json={**body, "stream": True}) as response:
            lines = [json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: ")]
        assert lines[-1]["response"]["output"][-1]["content"][0]["logprobs"] == entries
        if text == said:
            assert len(entries) == answer["usage"]["output_tokens"]


MESSAGE = ("refusal", "annotations", "audio", "function_call", "tool_calls", "reasoning", "reasoning_content")
COMPLETION = ("system_fingerprint", "service_tier", "kv_transfer_params")


def test_what_clients_read_is_null_where_there_is_nothing(live: Any) -> None:
    messages: list[Any] = [{"role": "user", "content": "x"}]
    with live.openai() as client:
        answer = client.chat.completions.create(model="tiny", messages=messages, max_tokens=2)
        [choice] = answer.choices
        text = client.completions.create(model="tiny", prompt="x", max_tokens=2)
        chunks = list(client.chat.completions.create(model="tiny", messages=messages, max_tokens=2, stream=True))
        pieces = list(client.completions.create(model="tiny", prompt="x", max_tokens=2, stream=True))
        assert client.chat.completions.create(
            model="tiny", messages=[*messages, choice.message.model_dump(), *messages], max_tokens=2
        ).choices
    several = ("logprobs", "stop_reason", "token_ids")
    for holder, names in (
        (answer, (*COMPLETION, "prompt_logprobs", "prompt_token_ids", "metadata")),
        (choice, several),
        (choice.message, MESSAGE),
        (text, COMPLETION),
        (text.choices[0], (*several, "prompt_logprobs", "prompt_token_ids")),
        (text.usage, ("completion_tokens_details",)),
        *((each, ("system_fingerprint", "service_tier", "usage")) for each in (*chunks, *pieces)),
        *((each.choices[0], several) for each in (*chunks, *pieces)),
    ):
        told = holder.model_dump(exclude_unset=True)
        assert {name: told[name] for name in names} == dict.fromkeys(names)
    assert answer.usage.completion_tokens_details.reasoning_tokens == 0
    for chunk in chunks:
        assert chunk.choices[0].delta.model_dump(exclude_unset=True).keys() <= {"role", "content"}
    assert all("prompt_token_ids" not in chunk.model_dump() for chunk in chunks[1:])


def test_echo_repeats_the_message_that_is_continued(scripted: Any) -> None:
    messages = [{"role": "user", "content": "¤ and more¥"}, {"role": "assistant", "content": "Here"}]
    body = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}
    plain = scripted.post("/v1/chat/completions", body).json()["choices"][0]["message"]["content"]
    echoed = scripted.post("/v1/chat/completions", {**body, "echo": True}).json()["choices"][0]["message"]["content"]
    assert echoed == "Here" + plain
    events = scripted.events("/v1/chat/completions", {**body, "echo": True})
    assert "".join(event["choices"][0]["delta"].get("content") or "" for event in events) == echoed
    anew = scripted.post("/v1/chat/completions", {"messages": messages[:1], "echo": True}).json()
    assert "Here" not in anew["choices"][0]["message"]["content"]
