"""Calls that are forced: begun for the model, behind its thinking where that is on, and never half as text."""

from __future__ import annotations

import json
from typing import Any

import pytest

WEATHER: dict[str, Any] = {
    "name": "get_weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
TOOLS = [{"type": "function", "function": WEATHER}]
NAMED = {"type": "function", "function": {"name": "get_weather"}}
# The scripted model says its script from the end of each prompt on: behind what was written, it begins anew.
REST = '{"city": "Rome"}}\n</tool_call>'
THINKS = "<think>one two three</think>\n\nDone."


def body(text: str, **changes: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"¤{text}¥"}]
    return {"messages": messages, "tools": TOOLS, "tool_choice": NAMED, "return_token_ids": True, **changes}


def folded(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The choices of a stream, put together as clients do."""
    wholes: dict[int, dict[str, Any]] = {}
    for choice in [choice for event in events for choice in event["choices"]]:
        whole = wholes.setdefault(
            choice["index"], {"content": "", "reasoning": "", "calls": {}, "token_ids": [], "logprobs": 0, "end": None}
        )
        whole["content"] += choice["delta"].get("content") or ""
        whole["reasoning"] += choice["delta"].get("reasoning") or ""
        for call in choice["delta"].get("tool_calls") or ():
            made = whole["calls"].setdefault(call["index"], ["", ""])
            made[0] += call["function"].get("name") or ""
            made[1] += call["function"].get("arguments") or ""
        whole["token_ids"] += choice.get("token_ids") or []
        whole["logprobs"] += len((choice["logprobs"] or {"content": []})["content"])
        whole["end"] = choice["finish_reason"] or whole["end"]
    return [whole for _, whole in sorted(wholes.items())]


def whole_choices(answer: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {
            "content": choice["message"]["content"] or "",
            "reasoning": choice["message"]["reasoning"] or "",
            "calls": {
                place: [call["function"]["name"], call["function"]["arguments"]]
                for place, call in enumerate(choice["message"]["tool_calls"] or ())
            },
            "token_ids": choice["token_ids"],
            "logprobs": len((choice["logprobs"] or {"content": []})["content"]),
            "end": choice["finish_reason"],
        }
        for choice in answer["choices"]
    ]


def ask(server: Any, request: dict[str, Any]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The choices and the usage, which a stream must have, too."""
    answer = server.post("/v1/chat/completions", request)
    assert answer.status_code == 200, answer.text
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = server.events("/v1/chat/completions", {**request, "stream_options": options})
    choices = whole_choices(answer.json())
    assert folded(events) == choices
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts[0] == 0
    assert counts == sorted(counts)
    thought = [event["usage"]["completion_tokens_details"]["reasoning_tokens"] for event in events]
    assert thought == sorted(thought)
    usage = answer.json()["usage"]
    for name in ("prompt_tokens", "completion_tokens", "completion_tokens_details"):
        assert events[-1]["usage"][name] == usage[name]
    assert sum(len(choice["token_ids"]) for choice in choices) == usage["completion_tokens"]
    return choices, usage


@pytest.mark.parametrize("choice", ["required", NAMED])
@pytest.mark.parametrize("max_tokens", [1, 2, 5, 8, 14, 20, 30])
def test_a_call_that_is_cut_is_no_text(scripted: Any, choice: Any, max_tokens: int) -> None:
    text = REST if choice == NAMED else f'get_weather", "arguments": {REST}'
    [whole], _ = ask(scripted, body(text, tool_choice=choice))
    assert whole["calls"] == {0: ["get_weather", '{"city": "Rome"}']}
    assert whole["end"] == "tool_calls"
    [cut], usage = ask(scripted, body(text, tool_choice=choice, max_tokens=max_tokens, logprobs=True))
    assert (cut["content"], cut["reasoning"], cut["end"]) == ("", "", "length")
    assert usage["completion_tokens"] == max_tokens == cut["logprobs"]
    assert cut["token_ids"] == whole["token_ids"][:max_tokens]
    for name, arguments in cut["calls"].values():
        assert name == "get_weather"
        json.loads(arguments)


def test_all_protocols_have_the_partial_call(scripted: Any) -> None:
    size = len(ask(scripted, body(REST))[0][0]["token_ids"]) - 22
    old = {**body(REST), "functions": [WEATHER], "function_call": {"name": "get_weather"}, "max_tokens": size}
    del old["tools"], old["tool_choice"]
    [choice] = scripted.post("/v1/chat/completions", old).json()["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("", "length")
    assert choice["message"]["function_call"]["name"] == "get_weather"
    tool = {"name": "get_weather", "input_schema": WEATHER["parameters"]}
    asked = {"messages": body(REST)["messages"], "max_tokens": size}
    made = scripted.post(
        "/v1/messages",
        {**asked, "model": "tiny", "tools": [tool], "tool_choice": {"type": "tool", "name": "get_weather"}},
    ).json()
    assert [block["type"] for block in made["content"]] == ["tool_use"]
    assert (made["stop_reason"], made["usage"]["output_tokens"]) == ("max_tokens", size)
    response = scripted.post(
        "/v1/responses",
        {
            "input": body(REST)["messages"],
            "tools": [{"type": "function", **WEATHER}],
            "tool_choice": {"type": "function", "name": "get_weather"},
            "max_output_tokens": size,
        },
    ).json()
    assert [(item["type"], item["status"]) for item in response["output"]] == [("function_call", "incomplete")]
    assert (response["status"], response["usage"]["output_tokens"]) == ("incomplete", size)


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_the_model_thinks_before_a_forced_call(scripted: Any, choice: Any) -> None:
    thinking = {"chat_template_kwargs": {"enable_thinking": True}}
    [made], usage = ask(scripted, body(THINKS, tool_choice=choice, logprobs=True, **thinking))
    assert (made["reasoning"], made["content"]) == ("one two three", "")
    assert made["logprobs"] == usage["completion_tokens"] == len(made["token_ids"])
    [free], free_usage = ask(scripted, body(THINKS, tool_choice="none", **thinking))
    assert free["reasoning"] == "one two three"
    details = usage["completion_tokens_details"]
    assert details == free_usage["completion_tokens_details"]
    # Whatever bounds the answer, no more of it than that comes, and nothing of the call is text.
    for max_tokens in range(1, usage["completion_tokens"], 3):
        [cut], cut_usage = ask(scripted, body(THINKS, tool_choice=choice, max_tokens=max_tokens, **thinking))
        assert (cut["content"], cut["end"], cut_usage["completion_tokens"]) == ("", "length", max_tokens)
        assert cut["token_ids"] == made["token_ids"][:max_tokens]
    [none], _ = ask(scripted, body(REST, tool_choice=NAMED, **thinking))
    assert (none["reasoning"], none["calls"]) == ("", {0: ["get_weather", '{"city": "Rome"}']})


@pytest.mark.parametrize("text", ["<think>one two three", '<think>one<tool_call>\n{"name": "other"', "Hello."])
def test_whatever_the_model_does_the_call_is_begun(scripted: Any, text: str) -> None:
    [made], usage = ask(scripted, body(text, chat_template_kwargs={"enable_thinking": True}, max_tokens=100))
    assert made["calls"][0][0] == "get_weather"
    assert made["content"] == ""
    assert "tool_call" not in made["reasoning"] or "<tool_call>" in text
    assert usage["completion_tokens"] == len(made["token_ids"])


@pytest.mark.parametrize("budget", [0, 1, 2, 5, 1000])
@pytest.mark.parametrize("changes", [{}, {"n": 2, "seed": 3}, {"max_tokens": 9}, {"logprobs": True, "top_logprobs": 2}])
def test_budgets_hold_before_a_forced_call(scripted: Any, budget: int, changes: dict[str, Any]) -> None:
    thinking = {"chat_template_kwargs": {"enable_thinking": True}, "thinking_token_budget": budget}
    choices, usage = ask(scripted, body("<think>one two three four five six</think>", **thinking, **changes))
    [free], free_usage = ask(scripted, body("<think>one two three four five six</think>", tool_choice="none"))
    full = free_usage["completion_tokens_details"]["reasoning_tokens"]
    if "max_tokens" not in changes:
        expected = min(budget, full) * len(choices)
        assert usage["completion_tokens_details"]["reasoning_tokens"] == expected
        assert all(choice["calls"][0][0] == "get_weather" for choice in choices)
    else:
        assert usage["completion_tokens"] == 9
    for choice in choices:
        assert choice["content"] == ""
        assert free["reasoning"].startswith(choice["reasoning"])
        if "logprobs" in changes:
            assert choice["logprobs"] == len(choice["token_ids"])


def test_form_and_call_together(scripted: Any) -> None:
    form = {"response_format": {"type": "json_object"}}
    [made], _ = ask(scripted, body(REST, **form))
    assert made["calls"] == {0: ["get_weather", '{"city": "Rome"}']}
    assert made["content"] == ""
