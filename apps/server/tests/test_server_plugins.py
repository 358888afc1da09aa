"""A server with plug-ins: a format of calls, one of thinking, a middleware and an IO processor of other packages."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire_testkit.plugin_packages import install_package, on_path

EXAMPLES = Path(__file__).resolve().parents[3] / "examples" / "plugins"
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}


@pytest.fixture(scope="module")
def served(make_scripted: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("site")
    for name in ("quire-dialect", "quire-greeting"):
        install_package(EXAMPLES / name, folder)
    with on_path(folder):
        yield make_scripted(
            engine={"pooling_tasks": ["embed"]},
            config={"tool_call_parser": "arrow", "reasoning_parser": "musing"},
            middleware=("quire_greeting.middleware.greet",),
            io_processor_plugin="greetings",
        )


@pytest.mark.parametrize("stream", [False, True])
def test_calls_and_thinking_in_a_dialect(served: Any, stream: bool) -> None:
    script = '(musing)where?(/musing)Let me see. ->weather {"city": "Rome"}<-'
    body = {
        "messages": [{"role": "user", "content": f"¤{script}¥"}],
        "tools": [WEATHER],
        "max_tokens": 100,
        "stream": stream,
    }
    if stream:
        deltas = [event["choices"][0]["delta"] for event in served.events("/v1/chat/completions", body)]
        text = "".join(delta.get("content") or "" for delta in deltas)
        thinking = "".join(delta.get("reasoning") or "" for delta in deltas)
        parts = [call["function"] for delta in deltas for call in delta.get("tool_calls") or ()]
        name, arguments = parts[0]["name"], "".join(part.get("arguments") or "" for part in parts)
    else:
        response = served.post("/v1/chat/completions", body)
        assert response.headers["X-Greeting"] == "hello"
        message = response.json()["choices"][0]["message"]
        text, thinking = message["content"], message["reasoning"]
        (call,) = message["tool_calls"]
        name, arguments = call["function"]["name"], call["function"]["arguments"]
    assert (text.strip(), thinking) == ("Let me see.", "where?")
    assert (name, arguments) == ("weather", '{"city": "Rome"}')


def test_an_io_processor(served: Any) -> None:
    response = served.post("/pooling", {"task": "plugin", "data": ["Ada", "Grace"]})
    assert response.status_code == 200, response.text
    assert response.json()["data"]["greetings"].keys() == {"Ada", "Grace"}
    refused = served.post("/pooling", {"task": "plugin", "data": "Ada"})
    assert (refused.status_code, refused.json()["error"]["message"]) == (400, "data: give a list of names")
