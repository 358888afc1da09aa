"""Chat completions' functions, as they were before tools, and the fields of OpenAI's own service."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import openai
import pytest

from quire_testkit.checkpoints import make_checkpoint

WEATHER: dict[str, Any] = {
    "name": "get_weather",
    "description": "Weather of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
PARIS = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
TEMPLATE = """{%- for message in messages %}{{ message.role }}:{{ message.content }}
{%- for call in message.tool_calls or [] -%}
{{ call.id }}={{ call.function.name }}({{ call.function.arguments | tojson }})
{%- endfor %}{{ message.tool_call_id or '' }};{% endfor %}{{ verbosity or '' }}"""


@pytest.fixture(scope="module")
def client(scripted: Any) -> Any:
    with scripted.openai() as client:
        yield client


def ask(client: Any, text: str, **arguments: Any) -> Any:
    messages = [{"role": "user", "content": f"¤{text}¥"}]
    return client.chat.completions.create(model="tiny", messages=messages, **arguments)


def test_a_call_is_answered_in_the_old_shape(client: Any) -> None:
    (choice,) = ask(client, PARIS, functions=[WEATHER]).choices
    assert (choice.message.function_call.name, choice.message.tool_calls) == ("get_weather", None)
    assert json.loads(choice.message.function_call.arguments) == {"city": "Paris"}
    assert (choice.finish_reason, choice.message.content) == ("function_call", None)


def test_a_streamed_call_adds_up(client: Any) -> None:
    chunks = list(ask(client, PARIS, functions=[WEATHER], stream=True))
    deltas = [chunk.choices[0].delta for chunk in chunks]
    calls = [delta.function_call for delta in deltas if delta.function_call is not None]
    assert "".join(call.name or "" for call in calls) == "get_weather"
    assert json.loads("".join(call.arguments or "" for call in calls)) == {"city": "Paris"}
    assert not any(delta.tool_calls for delta in deltas)
    assert chunks[-1].choices[0].finish_reason == "function_call"


def test_function_call_chooses(client: Any) -> None:
    (choice,) = ask(client, PARIS, functions=[WEATHER], function_call="none").choices
    assert (choice.message.function_call, choice.finish_reason) == (None, "stop")
    assert choice.message.content == PARIS
    (choice,) = ask(client, "no call", functions=[WEATHER], function_call="auto").choices
    assert (choice.message.content, choice.finish_reason) == ("no call", "stop")
    forced = ask(client, '{"city": "Rome"}}\n</tool_call>', functions=[WEATHER], function_call={"name": "get_weather"})
    assert forced.choices[0].message.function_call.name == "get_weather"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"functions": []}, "functions"),
        ({"functions": [{"name": "a b"}]}, "functions[0].name"),
        ({"functions": [{"name": "a", "parameters": 3}]}, "functions[0].parameters"),
        ({"functions": [WEATHER], "function_call": {"name": "other"}}, "function_call.name"),
        ({"functions": [WEATHER], "function_call": "required"}, "function_call"),
        ({"functions": [WEATHER], "tools": [{"type": "function", "function": WEATHER}]}, "functions"),
        ({"function_call": "auto"}, "function_call"),
        ({"modalities": ["text", "audio"], "audio": {"voice": "alloy", "format": "wav"}}, "modalities"),
        ({"audio": {"voice": "alloy", "format": "wav"}}, "audio"),
        ({"prediction": {"type": "other", "content": "x"}}, "prediction.type"),
        ({"service_tier": "gold"}, "service_tier"),
        ({"verbosity": "loud"}, "verbosity"),
        ({"metadata": {"a": "b" * 513}}, "metadata.a"),
    ],
)
def test_what_cannot_be_had_is_refused_by_name(client: Any, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, "x", **fields)
    assert caught.value.param == param


def test_a_search_of_the_web_is_left_out_with_a_warning(client: Any) -> None:
    (warning,) = ask(client, "said", web_search_options={}).model_dump()["warnings"]
    assert (warning["code"], warning["param"]) == ("field_left_out", "web_search_options")


def test_bookkeeping_comes_back(client: Any) -> None:
    fields: dict[str, Any] = {"store": True, "metadata": {"run": "7"}, "service_tier": "auto", "modalities": ["text"]}
    fields["prediction"] = {"type": "content", "content": "said before"}
    answer = ask(client, "said", **fields)
    assert (answer.choices[0].message.content, answer.service_tier) == ("said", "default")
    assert answer.model_dump()["metadata"] == {"run": "7"}
    assert {chunk.service_tier for chunk in ask(client, "said", stream=True, **fields)} == {"default"}
    plain = ask(client, "said").model_dump(exclude_unset=True)
    assert (plain["metadata"], plain["service_tier"]) == (None, None)


def test_older_messages_and_verbosity_reach_the_template(make_live: Any, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    server = make_live(folder=folder, config={"tool_call_parser": "hermes"})
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "q"},
        {
            "role": "assistant",
            "content": None,
            "function_call": {"name": "get_weather", "arguments": '{"city": "Rome"}'},
        },
        {"role": "function", "name": "get_weather", "content": "sunny"},
    ]
    body = {"messages": messages, "functions": [WEATHER], "verbosity": "low"}
    rendered = server.post("/v1/chat/completions/render", body).json()
    text = server.post("/detokenize", {"tokens": rendered["token_ids"]}).json()["prompt"]
    assert text == 'user:q;assistant:call00001=get_weather({"city": "Rome"});tool:sunnycall00001;low'
