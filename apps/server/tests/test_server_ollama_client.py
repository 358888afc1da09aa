"""Ollama's official Python client, unchanged, which checks what it reads."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

ollama = pytest.importorskip("ollama", reason="the official client is not installed: uv sync")


@pytest.fixture
def connect() -> Iterator[Any]:
    """Makes clients, which are closed at the end."""
    with contextlib.ExitStack() as clients:
        yield lambda server: clients.enter_context(ollama.Client(host=server.url))


def test_the_official_client_chats_generates_and_lists(live: Any, connect: Any) -> None:
    client = connect(live)
    options = {"num_predict": 3, "seed": 1}
    messages = [{"role": "user", "content": "Hello"}]
    whole = client.chat(model="tiny", messages=messages, options=options)
    parts = list(client.chat(model="tiny", messages=messages, options=ollama.Options(**options), stream=True))
    assert "".join(part.message.content for part in parts) == whole.message.content
    assert (parts[-1].done, parts[-1].eval_count, parts[-1].done_reason) == (True, 3, "length")
    generated = client.generate(model="tiny", prompt="Hello", options=options, keep_alive="5m")
    assert generated.response == whole.message.content
    more = client.generate(model="tiny", prompt="More", context=generated.context, options=options)
    assert more.context[: len(generated.context)] == generated.context
    assert client.generate(model="tiny").done_reason == "load"
    (listed,) = client.list().models
    shown = client.show("tiny")
    assert listed.details.family == shown.modelinfo["general.architecture"]
    assert "completion" in shown.capabilities
    assert client.ps().models[0].digest == listed.digest
    assert client.pull("tiny").status == "success"
    with pytest.raises(ollama.ResponseError) as refused:
        client.chat(model="other", messages=messages)
    assert refused.value.status_code == 404
    for refuse in (
        lambda: client.create(model="mario", from_="tiny", system="You are Mario."),
        lambda: client.copy("tiny", "x"),
        lambda: client.delete("tiny"),
        lambda: client.push("tiny"),
    ):
        with pytest.raises(ollama.ResponseError) as refused:
            refuse()
        assert refused.value.status_code == 400


def test_the_official_client_calls_tools_and_shows_thinking(scripted: Any, connect: Any) -> None:
    def weather(city: str) -> str:
        """Tell the weather.

        Args:
            city: Where.
        """
        return f"It rains in {city}."

    client = connect(scripted)
    call = '<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'
    messages: list[Any] = [{"role": "user", "content": f"¤<think>Hm.</think>{call}¥"}]
    asked = client.chat(model="tiny", messages=messages, tools=[weather], think=True, options={"num_predict": 200})
    assert asked.message.thinking.strip() == "Hm."
    (called,) = asked.message.tool_calls
    result = weather(**called.function.arguments)
    messages = [*messages, asked.message, {"role": "tool", "tool_name": called.function.name, "content": result}]
    messages.append({"role": "user", "content": "¤Take an umbrella.¥"})
    answer = client.chat(model="tiny", messages=messages, tools=[weather], options={"num_predict": 50})
    assert answer.message.content.strip() == "Take an umbrella."


def test_the_official_asynchronous_client_streams(live: Any) -> None:
    async def run() -> list[Any]:
        async with ollama.AsyncClient(host=live.url) as client:
            stream = await client.generate(model="tiny", prompt="Hello", stream=True, options={"num_predict": 3})
            return [part async for part in stream]

    assert asyncio.run(run())[-1].eval_count == 3


def test_the_official_client_embeds(make_live: Any, connect: Any) -> None:
    server = make_live(engine={"pooling_tasks": ["embed"], "runner": "pooling"})
    client = connect(server)
    assert len(client.embed(model="tiny", input=["a", "b"]).embeddings) == 2
    assert client.embeddings(model="tiny", prompt="a").embedding
