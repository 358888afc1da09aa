"""Anthropic's Messages API, as the official client reads, accumulates and strictly checks it."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import pytest
from anthropic.types import ErrorResponse, Message, ModelInfo, RawMessageStreamEvent
from pydantic import TypeAdapter

WEATHER: dict[str, Any] = {
    "name": "get_weather",
    "description": "Weather of a city",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
CLOCK: dict[str, Any] = {"name": "now", "input_schema": {"type": "object"}}
PARIS = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
WEB_SEARCH = {"type": "web_search_20250305", "name": "web_search"}
PDF = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "JVBERg=="}}
EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)


@pytest.fixture(scope="module")
def client(scripted):
    with scripted.anthropic() as client:
        yield client


def say(text):
    return [{"role": "user", "content": f"¤{text}¥"}]


def ask(client, text, **arguments):
    return client.messages.create(
        **{"model": "tiny", "max_tokens": 200, "messages": say(text), "tools": [WEATHER, CLOCK], **arguments}
    )


def streamed(client, text, **arguments):
    """What the client's own accumulator makes of a stream."""
    arguments = {"model": "tiny", "max_tokens": 200, "messages": say(text), "tools": [WEATHER, CLOCK], **arguments}
    with client.messages.stream(**arguments) as stream:
        for _ in stream:
            pass
        return stream.get_final_message()


def prompt_tokens(usage):
    return usage.input_tokens + usage.cache_creation_input_tokens + usage.cache_read_input_tokens


def plain(message):
    blocks = []
    for block in message.content:
        values = block.to_dict()
        values.pop("id", None)
        blocks.append({key: value for key, value in values.items() if value is not None})
    return blocks, message.stop_reason, message.stop_sequence, message.usage.output_tokens


@pytest.mark.parametrize(
    ("text", "blocks", "reason"),
    [
        ("Hello.", [{"type": "text", "text": "Hello."}], "end_turn"),
        (PARIS, [{"type": "tool_use", "name": "get_weather", "input": {"city": "Paris"}}], "tool_use"),
        (
            f"<think>\nBoth.\n</think>\n\nI look.\n{PARIS}\n{NOW}",
            [
                {"type": "thinking", "thinking": "Both.", "signature": ""},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "name": "get_weather", "input": {"city": "Paris"}},
                {"type": "tool_use", "name": "now", "input": {}},
            ],
            "tool_use",
        ),
        ("", [], "end_turn"),
    ],
)
def test_answers_whole_and_streamed(client, text, blocks, reason):
    whole = ask(client, text)
    assert plain(whole)[:3] == (blocks, reason, None)
    assert plain(streamed(client, text)) == plain(whole)
    ids = [block.id for block in whole.content if block.type == "tool_use"]
    assert len(set(ids)) == len(ids)
    assert (whole.type, whole.role, whole.model) == ("message", "assistant", "tiny")


@pytest.mark.parametrize("text", ["Hello.", f"<think>\nBoth.\n</think>\n\nI look.\n{PARIS}\n{NOW}"])
def test_every_event_and_answer_is_what_the_client_s_types_say(scripted, text):
    body = {"model": "tiny", "max_tokens": 200, "messages": say(text), "tools": [WEATHER, CLOCK]}
    Message.model_validate_json(scripted.post("/v1/messages", body).text, strict=True, extra="forbid")
    with scripted.client.stream("POST", "/v1/messages", json={**body, "stream": True}) as response:
        pieces = response.read().decode().split("\n\n")
    assert pieces.pop() == ""
    kinds = []
    for piece in pieces:
        first, second = piece.split("\n")
        data = json.loads(second.removeprefix("data: "))
        assert first == f"event: {data['type']}"
        kinds.append(data["type"])
        if data["type"] != "ping":
            EVENT.validate_json(second.removeprefix("data: "), strict=True, extra="forbid")
        if data["type"] == "message_start":
            assert data["message"]["usage"]["output_tokens"] == 0
            assert prompt_tokens(Message.model_validate(data["message"]).usage) > 0
    assert (kinds[0], kinds[-2:]) == ("message_start", ["message_delta", "message_stop"])
    assert kinds.count("content_block_start") == kinds.count("content_block_stop")


def test_system_and_block_lists_are_the_same_prompt(client):
    def count(**arguments):
        return client.messages.count_tokens(**{"model": "tiny", "messages": say("x"), **arguments}).input_tokens

    plainly = count(system="Be short.", messages=[{"role": "user", "content": "one two"}])
    blocks = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    listed = count(system=[{"type": "text", "text": "Be short."}], messages=[{"role": "user", "content": blocks}])
    assert plainly == listed > count(messages=[{"role": "user", "content": "one two"}])
    answer = ask(client, "Hi")
    assert prompt_tokens(answer.usage) == count(messages=say("Hi"), tools=[WEATHER, CLOCK])


def test_stop_sequences_and_length(client):
    for make in (ask, streamed):
        message = make(client, "one two three", stop_sequences=["two"])
        assert plain(message)[:3] == ([{"type": "text", "text": "one "}], "stop_sequence", "two")
        cut = make(client, "one two three four five six seven", max_tokens=3)
        assert (cut.stop_reason, cut.usage.output_tokens) == ("max_tokens", 3)


def test_tool_choice(client):
    rest = '{"city": "Rome"}}\n</tool_call>'
    for make in (ask, streamed):
        named = make(client, rest, tool_choice={"type": "tool", "name": "get_weather"})
        assert plain(named)[0] == [{"type": "tool_use", "name": "get_weather", "input": {"city": "Rome"}}]
        required = make(client, f'get_weather", "arguments": {rest}', tool_choice={"type": "any"})
        assert plain(required)[:2] == plain(named)[:2]
        none = make(client, NOW, tool_choice={"type": "none"})
        assert plain(none)[:2] == ([{"type": "text", "text": NOW}], "end_turn")
        one = make(client, PARIS + NOW, tool_choice={"type": "auto", "disable_parallel_tool_use": True})
        assert [block["name"] for block in plain(one)[0]] == ["get_weather"]


def test_a_conversation_with_tools_and_thoughts_goes_on(client):
    messages: list[Any] = say(f"<think>\nhm\n</think>\n\nI look.\n{PARIS}")
    answer = ask(client, "", messages=messages)
    use = answer.content[-1]
    messages += [
        {"role": "assistant", "content": [block.to_dict() for block in answer.content]},
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": use.id, "content": [{"type": "text", "text": "sunny"}]},
                {"type": "text", "text": "¤It is sunny.¥"},
            ],
        },
    ]
    assert plain(ask(client, "", messages=messages))[0] == [{"type": "text", "text": "It is sunny."}]


def test_a_prefilled_answer_is_continued(scripted):
    body = {
        "model": "tiny",
        "max_tokens": 50,
        "messages": [*say(" upon a time"), {"role": "assistant", "content": "Once"}],
    }
    assert scripted.post("/v1/messages", body).json()["content"] == [{"type": "text", "text": " upon a time"}]


def test_the_prefix_cache_is_reported(client, scripted):
    mark = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    long = [{"type": "text", "text": "many words " * 60, **mark}, {"type": "text", "text": "¤ok¥", **mark}]
    arguments = {"messages": [{"role": "user", "content": long}], "tools": [{**CLOCK, **mark}]}
    arguments["system"] = [{"type": "text", "text": "Be short.", **mark}]
    assert scripted.call(scripted.llm.client.reset_prefix_cache())  # other tests' prompts may begin alike
    first, second = ask(client, "", **arguments).usage, streamed(client, "", **arguments).usage
    block = scripted.llm.engine.info.block_size
    total = prompt_tokens(first)
    assert total == prompt_tokens(second) == client.messages.count_tokens(model="tiny", **arguments).input_tokens
    assert (first.cache_read_input_tokens, first.cache_creation_input_tokens) == (0, total - total % block)
    found = (total - 1) // block * block
    assert (second.cache_read_input_tokens, second.cache_creation_input_tokens) == (
        found,
        total - total % block - found,
    )
    assert 0 <= second.input_tokens < block


def test_an_answer_that_fills_the_context_says_so(client):
    """Clients ask for as many tokens as their own models can give."""
    text = "one two three four five " * 8

    def padded(count):
        return [{"role": "user", "content": "x " * count + f"¤{text}¥"}]

    def tokens(count):
        return client.messages.count_tokens(model="tiny", messages=padded(count)).input_tokens

    per_word = (tokens(200) - tokens(100)) // 100
    messages = padded((2048 - tokens(0)) // per_word - 5)
    for make in (ask, streamed):
        message = make(client, text, max_tokens=64_000)
        assert (message.content[0].text, message.stop_reason) == (text, "end_turn")
        message = make(client, "", messages=messages, max_tokens=64_000)
        assert message.stop_reason == "model_context_window_exceeded"
        assert text.startswith(message.content[0].text)
        assert prompt_tokens(message.usage) + message.usage.output_tokens == 2048


@pytest.mark.parametrize("stream", [False, True])
def test_a_full_context_is_told_in_the_words_that_clients_know(client, stream):
    """Claude Code compacts its conversation when it reads them."""
    long = say("one two three " * 1000)
    tokens = client.messages.count_tokens(model="tiny", messages=long).input_tokens
    with pytest.raises(anthropic.BadRequestError) as caught:
        client.messages.create(model="tiny", max_tokens=64_000, messages=long, stream=stream)
    error = caught.value.body["error"]
    assert error == {"type": "invalid_request_error", "message": f"prompt is too long: {tokens} tokens > 2048 maximum"}


def test_a_prompt_that_leaves_no_token_for_the_answer_is_too_long(client):
    def text_of(tokens):
        """Two tokens a word, one a mark."""
        words, marks = divmod(tokens - count(""), 2)
        return "x " * words + "!" * marks

    def count(text):
        return client.messages.count_tokens(model="tiny", messages=[{"role": "user", "content": text}]).input_tokens

    for tokens in (2047, 2048):
        assert count(text_of(tokens)) == tokens
    answer = client.messages.create(model="tiny", max_tokens=9, messages=[{"role": "user", "content": text_of(2047)}])
    assert answer.stop_reason
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long: 2048 tokens > 2047 maximum"):
        client.messages.create(model="tiny", max_tokens=1, messages=[{"role": "user", "content": text_of(2048)}])


def test_the_thinking_is_counted_and_may_be_left_out(client):
    text = "<think>\nBoth of them.\n</think>\n\nI look."
    shown, hidden = ask(client, text), ask(client, text, thinking={"type": "adaptive", "display": "omitted"})
    assert [block.type for block in shown.content] == ["thinking", "text"]
    assert [block.type for block in hidden.content] == ["text"]
    assert ask(client, text, thinking={"type": "adaptive", "display": "updates"}).content[0].type == "thinking"
    details = shown.usage.output_tokens_details
    assert 0 < details.thinking_tokens < shown.usage.output_tokens
    assert streamed(client, text).usage.output_tokens_details == details


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, r"messages\[0\].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, r"messages\[0\].content\[0\]"),
        ({"messages": [{"role": "user", "content": [PDF]}]}, r"messages\[0\].content\[0\].*PDF"),
        ({"messages": [{"role": "user", "content": [3]}]}, r"messages\[0\].content\[0\]"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, r"messages\[0\].content\[0\].text"),
        ({"system": [{"type": "image"}]}, r"system\[0\]"),
        ({"tools": [{"type": 3, "name": "f"}]}, r"tools\[0\].type"),
        ({"tools": [{"type": "bash_20250124", "name": "a b"}]}, r"tools\[0\].name"),
        ({"tools": [WEB_SEARCH], "tool_choice": {"type": "any"}}, r"tool_choice 'any'.*tools\[0\] of type 'web_search"),
        ({"tools": [WEB_SEARCH, CLOCK], "tool_choice": {"type": "tool", "name": "web_search"}}, "tool_choice.name"),
        ({"tools": [{"name": "a b"}]}, r"tools\[0\].name"),
        ({"tool_choice": {"type": "tool", "name": "missing"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "perhaps"}}, "tool_choice.type"),
        ({"thinking": {"type": "much"}}, "thinking.type"),
        ({"thinking": {"type": "enabled", "budget_tokens": -5}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "adaptive", "display": "loud"}}, "thinking.display"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
        ({"output_format": {"type": "json_schema", "schema": 3}}, "output_format.schema"),
        ({"output_config": {"effort": 3}}, "output_config.effort"),
        ({"cache_control": 3, "metadata": 3, "service_tier": 3, "tool_choice": {}}, "tool_choice.type"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"temperature": 1000.0}, "temperature"),
        ({"n": 2}, "n must"),
    ],
)
def test_wrong_requests_are_named_in_the_client_s_shape(client, changes, named):
    body = {"model": "tiny", "max_tokens": 20, "messages": say("x"), "tools": [CLOCK], **changes}
    with pytest.raises(anthropic.BadRequestError, match=named) as caught:
        client.post("/v1/messages", body=body, cast_to=object)
    assert caught.value.body["error"]["type"] == "invalid_request_error"
    ErrorResponse.model_validate(caught.value.body, strict=True, extra="forbid")
    assert caught.value.request_id == caught.value.body["request_id"]


def test_an_image_that_a_tool_read_does_not_end_the_conversation(client):
    """As Claude Code reads one; all later requests of the conversation hold it."""
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}}
    messages = [
        *say(PARIS),
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "now", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": [image]}]},
        {"role": "assistant", "content": "I see nothing."},
        {"role": "user", "content": [image]},
        {"role": "user", "content": [{"type": "text", "text": "¤Well.¥"}]},
    ]
    for count in (3, 6):
        assert client.messages.count_tokens(model="tiny", messages=messages[:count]).input_tokens > 0
    assert ask(client, "", messages=messages).content[0].text == "Well."


def test_turns_of_claude_code_find_their_tokens_again(client, scripted):
    """What it sends by itself: a system prompt of marked blocks whose first line changes, a system message behind the
    user's that is a list once and a text later, tools that are loaded later, edits of the context, hidden thinking."""
    mark = {"cache_control": {"type": "ephemeral"}}
    later = {**CLOCK, "name": "later", "defer_loading": True}
    search = {"name": "ToolSearch", "input_schema": {"type": "object", "properties": {"query": {"type": "string"}}}}
    reminder = "# Environment\n - Platform: linux\n" + "Be careful. " * 20

    def turn(number, messages, tools):
        line = {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.1.{number}; cch=0{number};"}
        return client.beta.messages.create(
            model="tiny",
            max_tokens=32_000,
            system=[line, {"type": "text", "text": "You are an agent. " * 20, **mark}],
            messages=messages,
            tools=tools,
            metadata={"user_id": "{}"},
            thinking={"type": "adaptive", "display": "omitted"},
            context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            output_config={"effort": "high"},
            betas=["context-management-2025-06-27"],
        )

    assert scripted.call(scripted.llm.client.reset_prefix_cache())
    call = '<tool_call>\n{"name": "ToolSearch", "arguments": {"query": "select:later"}}\n</tool_call>'
    asked = {"role": "user", "content": [{"type": "text", "text": f"¤<think>hm</think>{call}¥"}]}
    first = turn(1, [asked, {"role": "system", "content": [{"type": "text", "text": reminder, **mark}]}], [search])
    (use,) = first.content
    assert (first.stop_reason, use.name) == ("tool_use", "ToolSearch")
    found = {
        "type": "tool_result",
        "tool_use_id": use.id,
        "content": [{"type": "tool_reference", "tool_name": "later"}],
    }
    messages = [
        asked,
        {"role": "system", "content": reminder},
        {"role": "assistant", "content": [use.to_dict()]},
        {"role": "user", "content": [{**found, **mark}]},
        {"role": "user", "content": "¤Found.¥"},
    ]
    second = turn(2, messages, [later, search])
    assert second.content[0].text == "Found."
    block = scripted.llm.engine.info.block_size
    assert second.usage.cache_read_input_tokens >= prompt_tokens(first.usage) - 2 * block


def test_edits_of_the_context_that_are_not_made_are_not_told_as_made(client):
    edits = {"edits": [{"type": "clear_tool_uses_20250919", "trigger": {"type": "input_tokens", "value": 10}}]}
    arguments = {"model": "tiny", "max_tokens": 20, "messages": say("Hi"), "context_management": edits}
    arguments["betas"] = ["context-management-2025-06-27"]
    assert client.beta.messages.create(**arguments).context_management.applied_edits == []
    with client.beta.messages.stream(**arguments) as stream:
        assert stream.get_final_message().context_management.applied_edits == []


def test_the_models_are_listed(client, scripted):
    page = client.models.list()
    assert ([model.id for model in page.data], page.has_more, page.first_id) == (["tiny"], False, "tiny")
    card = client.models.retrieve("tiny")
    assert (card.type, card.display_name, card.max_input_tokens) == ("model", "tiny", 2048)
    ModelInfo.model_validate_json(scripted.client.get("/v1/models/tiny").content, strict=True)


def test_each_refusal_has_the_client_s_shape_and_the_request_s_id(client, scripted):
    headers = {"x-request-id": "mine"}
    with pytest.raises(anthropic.NotFoundError) as caught:
        ask(client, "x", model="other", extra_headers=headers)
    assert (caught.value.body["error"]["type"], caught.value.request_id) == ("not_found_error", "mine")
    assert ask(client, "x", extra_headers=headers)._request_id == "mine"
    for method, path, kind, status in (
        ("GET", "/v1/messages", "invalid_request_error", 405),
        ("POST", "/v1/messages/batches", "not_found_error", 404),
    ):
        answer = scripted.client.request(method, path, headers=headers)
        assert answer.status_code == status
        assert ErrorResponse.model_validate_json(answer.content, strict=True).error.type == kind
        assert answer.json()["request_id"] == "mine"
    assert "type" not in scripted.client.get("/v1/messagesx").json()


def test_keys_are_taken_from_the_header_that_clients_send(make_scripted):
    server = make_scripted(api_key=("sesame",))
    with server.anthropic(api_key="sesame") as client:
        assert ask(client, "Hi").content[0].text == "Hi"
    with server.anthropic(api_key="wrong") as client, pytest.raises(anthropic.AuthenticationError) as caught:
        ask(client, "Hi")
    assert caught.value.body["error"]["type"] == "authentication_error"
