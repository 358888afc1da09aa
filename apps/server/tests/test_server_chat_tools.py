"""Tools and reasoning through chat completions, as the official client reads and accumulates them."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CLOCK: dict[str, Any] = {"type": "function", "function": {"name": "now"}}
PARIS = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


@pytest.fixture(scope="module")
def client(scripted):
    with scripted.openai() as client:
        yield client


def say(text: str) -> list[Any]:
    return [{"role": "user", "content": f"¤{text}¥"}]


def ask(client, text, **arguments):
    return client.chat.completions.create(
        **{"model": "tiny", "messages": say(text), "tools": [WEATHER, CLOCK], **arguments}
    )


def streamed(client, text, **arguments):
    """What the client's own accumulator makes of a stream."""
    arguments = {"model": "tiny", "messages": say(text), "tools": [WEATHER, CLOCK], **arguments}
    with client.chat.completions.stream(**arguments) as stream:
        for _ in stream:
            pass
        return stream.get_final_completion()


def plain(completion):
    """The parts of all choices that must not depend on streaming."""
    parts = []
    for choice in completion.choices:
        message = choice.message
        calls = [(call.type, call.function.name, call.function.arguments) for call in message.tool_calls or ()]
        reasoning = message.model_extra.get("reasoning")
        assert reasoning == message.model_extra.get("reasoning_content")
        parts.append((message.role, message.content or "", calls, reasoning, choice.finish_reason))
    return parts


@pytest.mark.parametrize(
    ("text", "content", "calls", "reasoning", "reason"),
    [
        ("Hello.", "Hello.", [], None, "stop"),
        (PARIS, "", [("get_weather", {"city": "Paris"})], None, "tool_calls"),
        (f"I look.\n{PARIS}\n{NOW}", "I look.", [("get_weather", {"city": "Paris"}), ("now", {})], None, "tool_calls"),
        (f"<think>\nWhich?\n</think>\n\n{PARIS}", "", [("get_weather", {"city": "Paris"})], "Which?", "tool_calls"),
        ("<think>\nEasy.\n</think>\n\nFour.", "Four.", [], "Easy.", "stop"),
        ('<tool_call>\n{"name": "now", "argum', '<tool_call>\n{"name": "now", "argum', [], None, "stop"),
        (
            '<tool_call>\n{"name": "get_weather", "arguments": {"city": oh}}\n</tool_call>',
            '"city": oh}}', [("get_weather", {})], None, "stop",
        ),
    ],
)  # fmt: skip
def test_answers_whole_and_streamed(client, text, content, calls, reasoning, reason):
    whole = ask(client, text)
    ((role, said, made, thought, ended),) = plain(whole)
    assert (role, said, thought, ended) == ("assistant", content, reasoning, reason)
    assert [(name, json.loads(arguments)) for _, name, arguments in made] == calls
    assert plain(streamed(client, text)) == plain(whole)
    ids = [call.id for call in whole.choices[0].message.tool_calls or ()]
    assert len(set(ids)) == len(calls)
    if calls and not content:
        assert whole.choices[0].message.content is None


def test_the_stream_is_in_pieces_and_never_shows_markup(make_scripted):
    slow = make_scripted(engine={"step_time_s": 0.02})
    with slow.openai() as client:
        check_pieces(client)


def check_pieces(client):
    text = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "' + "Paris, or Rome " * 8 + '"}}\n</tool_call>'
    chunks = list(ask(client, text, stream=True, stream_options={"include_usage": True}))
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    pieces = [call for delta in deltas for call in delta.tool_calls or ()]
    assert len(pieces) > 8
    assert (pieces[0].index, pieces[0].type, pieces[0].function.name) == (0, "function", "get_weather")
    assert pieces[0].id
    assert all(piece.id is None and piece.function.name is None for piece in pieces[1:])
    assert not any(delta.content for delta in deltas)
    assert chunks[-1].usage.completion_tokens > 40
    chunks = ask(client, "<think>\n" + "Which city? " * 8 + "\n</think>\n\nFour.", stream=True)
    thoughts = [choice.delta.model_extra.get("reasoning") for chunk in chunks for choice in chunk.choices]
    assert len(list(filter(None, thoughts))) > 8


def test_a_call_cut_by_the_length_is_valid_json_and_says_so(client):
    for max_tokens in range(12, 40, 3):
        whole = ask(client, PARIS.replace("Paris", "Paris and many more places"), max_tokens=max_tokens)
        (choice,) = whole.choices
        assert choice.finish_reason == "length"
        for call in choice.message.tool_calls or ():
            assert isinstance(json.loads(call.function.arguments), dict)
        assert plain(whole) == plain(
            streamed_raw(client, PARIS.replace("Paris", "Paris and many more places"), max_tokens)
        )


def streamed_raw(client, text, max_tokens):
    """The client's `stream` helper raises for finish_reason "length": accumulate with its own state machine instead."""
    from openai.lib.streaming.chat._completions import ChatCompletionStreamState

    state = ChatCompletionStreamState(input_tools=openai.omit, response_format=openai.omit)
    for chunk in ask(client, text, max_tokens=max_tokens, stream=True):
        state.handle_chunk(chunk)
    return state.current_completion_snapshot


def test_only_one_call_when_asked(client):
    for make in (ask, streamed):
        ((_, content, calls, _, reason),) = plain(make(client, f"{PARIS}{NOW}", parallel_tool_calls=False))
        assert (content, [name for _, name, _ in calls], reason) == ("", ["get_weather"], "tool_calls")


def test_no_tools_no_parsing(client):
    for arguments in ({"tools": openai.omit}, {"tool_choice": "none"}):
        ((_, content, calls, _, reason),) = plain(ask(client, PARIS, **arguments))
        assert (content, calls, reason) == (PARIS, [], "stop")


def test_a_named_tool_is_called_whatever_the_model_would_say(client):
    choice: Any = {"type": "function", "function": {"name": "get_weather"}}
    for make in (ask, streamed):
        completion = make(client, '{"city": "Rome"}}\n</tool_call>', tool_choice=choice)
        ((_, content, calls, _, reason),) = plain(completion)
        assert (content, calls, reason) == ("", [("function", "get_weather", '{"city": "Rome"}')], "tool_calls")


def test_a_call_is_required(client):
    for make in (ask, streamed):
        completion = make(client, 'now", "arguments": {}}\n</tool_call>', tool_choice="required")
        ((_, content, calls, _, reason),) = plain(completion)
        assert (content, calls, reason) == ("", [("function", "now", "{}")], "tool_calls")


def test_calls_are_left_in_the_text_where_the_server_says_so(make_scripted):
    server = make_scripted(enable_auto_tool_choice=False)
    with server.openai() as client:
        assert plain(ask(client, PARIS))[0][1:3] == (PARIS, [])
        forced = ask(client, 'now", "arguments": {}}\n</tool_call>', tool_choice="required")
        assert plain(forced)[0][2] == [("function", "now", "{}")]


def test_allowed_tools(client):
    choice: Any = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [CLOCK]}}
    assert plain(ask(client, NOW, tool_choice=choice))[0][2]
    choice["allowed_tools"]["tools"] = [{"type": "function", "function": {"name": "other"}}]
    with pytest.raises(openai.BadRequestError, match="name tools that are offered"):
        ask(client, NOW, tool_choice=choice)


def test_reasoning_can_be_left_out(client):
    extra = {"extra_body": {"include_reasoning": False}}
    for make in (ask, streamed):
        ((_, content, _, reasoning, _),) = plain(make(client, "<think>\nEasy.\n</think>\n\nFour.", **extra))
        assert (content, reasoning) == ("Four.", None)


def test_reasoning_tokens_are_counted(client):
    usage = ask(client, "<think>\nOne two three four five.\n</think>\n\nFour.").usage
    assert 3 < usage.completion_tokens_details.reasoning_tokens < usage.completion_tokens
    last = list(ask(client, "<think>\nOne.\n</think>\n\nFour.", stream=True, stream_options={"include_usage": True}))[
        -1
    ]
    assert last.usage.completion_tokens_details.reasoning_tokens > 0


def test_logprobs_of_every_token_come_with_calls(client):
    whole = ask(client, f"<think>a</think>{PARIS}", logprobs=True, top_logprobs=2)
    chunks = list(ask(client, f"<think>a</think>{PARIS}", logprobs=True, top_logprobs=2, stream=True))
    tokens = [each.token for chunk in chunks for c in chunk.choices if c.logprobs for each in c.logprobs.content]
    assert tokens == [each.token for each in whole.choices[0].logprobs.content]
    assert "".join(tokens[:-1]) == f"<think>a</think>{PARIS}"


def test_several_answers_have_their_own_calls(client):
    for make in (ask, streamed):
        completion = make(client, f"x {PARIS}", n=3)
        assert [calls[0][1] for _, _, calls, _, _ in plain(completion)] == ["get_weather"] * 3
        assert len({choice.message.tool_calls[0].id for choice in completion.choices}) == 3


def test_an_agent_loop_with_odd_turns_goes_on(client):
    """Malformed calls of earlier turns, calls without content, reasoning of the model: all are taken back."""
    messages: list[Any] = say(PARIS)
    for turn in range(12):
        message = ask(client, PARIS if turn % 2 else f"<think>hm</think>{PARIS}", messages=messages).choices[0].message
        history = message.to_dict()
        if turn % 3 == 0:
            history["tool_calls"][0]["function"]["arguments"] = '{"city": "Par'
        messages = [
            *messages[-4:],
            history,
            {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sunny"},
            {"role": "user", "content": f"¤{PARIS}¥"},
        ]
    assert plain(ask(client, NOW, messages=[*messages[-3:], *say("Sunny.")]))[0][1] == "Sunny."


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "missing"}}}, "tool_choice.function.name"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.type"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": 5}]}, "tools[0].type"),
        ({"tools": [{"type": "custom"}]}, "tools[0].custom"),
        (
            {"tools": [{"type": "custom", "custom": {"name": "a", "format": {"type": "grammar", "grammar": {}}}}]},
            "tools[0].custom.format.grammar.syntax",
        ),
        ({"tool_choice": {"type": "custom", "custom": {"name": "missing"}}}, "tool_choice.custom.name"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]},
            "tools[0].function.parameters",
        ),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"thinking_token_budget": -2}, "thinking_token_budget"),
    ],
)
def test_wrong_tools_are_named(scripted, changes, param):
    response = scripted.post("/v1/chat/completions", {"messages": say("x"), "tools": [CLOCK], **changes})
    assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text


def test_a_model_without_a_known_format_cannot_be_forced(live):
    body = {"messages": say("x"), "tools": [CLOCK], "tool_choice": "required"}
    response = live.post("/v1/chat/completions", body)
    assert response.status_code == 400
    assert "--tool-call-parser" in response.json()["error"]["message"]


@pytest.mark.parametrize("text", ["Hello.", f"<think>a</think>I look.\n{PARIS}\n{NOW}"])
def test_answers_and_chunks_are_what_the_client_s_types_say(scripted, text):
    body = {"model": "tiny", "messages": say(text), "tools": [WEATHER, CLOCK], "logprobs": True, "top_logprobs": 1}
    ChatCompletion.model_validate_json(scripted.post("/v1/chat/completions", body).text, strict=True)
    for event in scripted.events("/v1/chat/completions", {**body, "stream_options": {"include_usage": True}}):
        ChatCompletionChunk.model_validate_json(json.dumps(event), strict=True)
