"""`quire serve` as a user starts it: the demo model, the banner, an answer through the official client, a clean end."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import PIL.Image
import PIL.ImageDraw
import pytest
from anthropic import Anthropic
from openai import BadRequestError, OpenAI

from quire_demo_model import checkpoint_path
from quire_testkit.seeing_models import data_url


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory):
    """(address, process, file with its output)."""
    log = tmp_path_factory.mktemp("demo") / "log"
    environment = {**os.environ, "QUIRE_NUM_GPU_BLOCKS_OVERRIDE": "512", "QUIRE_RESPONSE_STORE": ":memory:"}
    with log.open("w") as output:
        process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "quire_server.cli",
                "serve",
                "--port",
                "0",
                "--max-num-seqs",
                "16",
                "--num-threads",
                "1",
            ],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
        )
    try:
        end, found = time.monotonic() + 180, None
        while found is None:
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < end, log.read_text()
            time.sleep(0.05)
            found = re.search(r"OpenAI API:\s+(http://\S+/v1)", log.read_text())
        yield found[1], process, log
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        process.wait(60)


def test_the_answer_says_whether_it_would_come_again(served):
    address, _, log = served
    promised = "depend on nothing else" in log.read_text()
    with OpenAI(base_url=address, api_key="none", max_retries=0) as client:
        ask = {"model": client.models.list().data[0].id, "messages": [{"role": "user", "content": "Hello"}]}
        ask["max_tokens"] = 5
        for more, expected in (({"seed": 3}, promised), ({"temperature": 0}, promised), ({"temperature": 1}, False)):
            assert client.chat.completions.create(**ask, **more).model_extra["deterministic"] is expected
            for chunk in client.chat.completions.create(stream=True, **ask, **more):
                assert chunk.model_extra["deterministic"] is expected
        completion = client.completions.create(model=ask["model"], prompt="Hello", max_tokens=3, seed=1)
        assert completion.model_extra["deterministic"] is promised
        with pytest.raises(BadRequestError, match="seed"):
            client.chat.completions.create(**ask, temperature=1, extra_body={"deterministic": True})
        wish = {"extra_body": {"deterministic": True}, "seed": 3}
        if promised:
            client.chat.completions.create(**ask, **wish)
        else:
            with pytest.raises(BadRequestError, match="cannot promise"):
                client.chat.completions.create(**ask, **wish)


def test_demo_model_calls_a_tool_and_thinks_over_messages(served):
    address, _, _ = served
    tool = {"name": WEATHER["name"], "description": WEATHER["description"], "input_schema": WEATHER["parameters"]}
    with Anthropic(base_url=address.removesuffix("/v1"), api_key="none", max_retries=0) as client:
        arguments = {"model": client.models.list().data[0].id, "max_tokens": 200, "extra_body": {"temperature": 0.0}}
        messages = [{"role": "user", "content": QUESTION}]
        whole = client.messages.create(messages=messages, tools=[tool], **arguments)
        with client.messages.stream(messages=messages, tools=[tool], **arguments) as stream:
            streamed = stream.get_final_message()
        for answer in (whole, streamed):
            (use,) = answer.content
            assert (use.name, use.input, answer.stop_reason) == ("get_weather", {"city": "Paris"}, "tool_use")
        result = {"type": "tool_result", "tool_use_id": whole.content[0].id}
        result["content"] = '{"temperature": 21, "condition": "sunny"}'
        messages += [{"role": "assistant", "content": whole.content}, {"role": "user", "content": [result]}]
        last = client.messages.create(messages=messages, tools=[tool], **arguments)
        assert "21" in last.content[0].text
        thought = client.messages.create(
            messages=[{"role": "user", "content": SUM}],
            thinking={"type": "enabled", "budget_tokens": 1024},
            **arguments,
        )
        assert [block.type for block in thought.content] == ["thinking", "text"]
        assert thought.content[1].text == "17 + 25 = 42."


def test_demo_model_calls_a_tool_and_thinks_over_responses(served):
    address, _, _ = served
    with OpenAI(base_url=address, api_key="none", max_retries=0) as client:
        tools = [{"type": "function", "strict": False, **WEATHER}]
        arguments = {"model": client.models.list().data[0].id, "temperature": 0, "tools": tools}
        whole = client.responses.create(input=QUESTION, **arguments)
        with client.responses.stream(input=QUESTION, **arguments) as stream:
            for _ in stream:
                pass
            streamed = stream.get_final_response()
        for answer in (whole, streamed):
            (call,) = answer.output
            assert (call.type, call.name, json.loads(call.arguments)) == (
                "function_call",
                "get_weather",
                {"city": "Paris"},
            )
        result = {"type": "function_call_output", "call_id": whole.output[0].call_id}
        result["output"] = '{"temperature": 21, "condition": "sunny"}'
        last = client.responses.create(input=[result], previous_response_id=whole.id, **arguments)
        assert "21" in last.output_text
        thought = client.responses.create(input=SUM, reasoning={"effort": "low"}, **{**arguments, "tools": []})
        assert [item.type for item in thought.output] == ["reasoning", "message"]
        assert thought.output_text == "17 + 25 = 42."


def test_it_serves_the_embedded_checkpoint():
    assert (checkpoint_path() / "config.json").is_file()


WEATHER = {
    "name": "get_weather",
    "description": "Get the weather of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
QUESTION = "What is the weather in Paris?"
SUM = "What is 17 + 25?"


def test_demo_model_calls_a_tool_and_uses_its_answer_over_chat(served):
    address, _, _ = served
    with OpenAI(base_url=address, api_key="none", max_retries=0) as client:
        arguments = {"model": client.models.list().data[0].id, "tools": [{"type": "function", "function": WEATHER}]}
        messages = [{"role": "user", "content": QUESTION}]
        whole = client.chat.completions.create(messages=messages, temperature=0, **arguments)
        with client.chat.completions.stream(messages=messages, temperature=0, **arguments) as stream:
            for _ in stream:
                pass
            streamed = stream.get_final_completion()
        for answer in (whole, streamed):
            (choice,) = answer.choices
            (call,) = choice.message.tool_calls
            assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Paris"})
            assert choice.finish_reason == "tool_calls"
        call = whole.choices[0].message.tool_calls[0]
        messages += [
            whole.choices[0].message.to_dict(),
            {"role": "tool", "tool_call_id": call.id, "content": '{"temperature": 21, "condition": "sunny"}'},
        ]
        last = client.chat.completions.create(messages=messages, temperature=0, **arguments).choices[0]
        assert last.finish_reason == "stop"
        assert "21" in last.message.content


def test_demo_model_thinks_in_its_own_field_over_chat(served):
    address, _, _ = served
    with OpenAI(base_url=address, api_key="none", max_retries=0) as client:
        model = client.models.list().data[0].id
        messages = [{"role": "user", "content": SUM}]
        for extra in (
            {"reasoning_effort": "high"},
            {"extra_body": {"chat_template_kwargs": {"enable_thinking": True}}},
        ):
            message = (
                client.chat.completions.create(model=model, messages=messages, temperature=0, **extra)
                .choices[0]
                .message
            )
            assert message.content == "17 + 25 = 42."
            assert "4" in message.model_extra["reasoning"]
            assert message.model_extra["reasoning"] == message.model_extra["reasoning_content"]
        plain = client.chat.completions.create(model=model, messages=messages, temperature=0).choices[0].message
        assert plain.model_extra["reasoning"] is None
        assert "42" in plain.content


THOUGHT = "ones 7 + 5 = 12, tens 1 + 2 + 1 = 4."
ANSWER = {"type": "object", "properties": {"answer": {"type": "integer", "minimum": 0, "maximum": 99}}}
ANSWER |= {"required": ["answer"], "additionalProperties": False}


def chat_thought(client, *, stream, question=SUM, **arguments):
    """(reasoning, text, arguments of the call, finish reason), whole or put together from a stream."""
    messages = [{"role": "user", "content": question}]
    values = {"model": "quire-demo", "messages": messages, "temperature": 0, "reasoning_effort": "high", **arguments}
    if not stream:
        [choice] = client.chat.completions.create(**values).choices
        extra, calls = choice.message.model_extra, choice.message.tool_calls or []
        called = "".join(call.function.arguments for call in calls)
        return extra.get("reasoning") or "", choice.message.content or "", called, choice.finish_reason
    found, kinds, reason = {"reasoning": "", "content": "", "call": ""}, [], None
    for chunk in client.chat.completions.create(stream=True, **values):
        for choice in chunk.choices:
            parts = {"reasoning": choice.delta.model_extra.get("reasoning"), "content": choice.delta.content}
            parts["call"] = "".join(call.function.arguments for call in choice.delta.tool_calls or ())
            for kind, part in parts.items():
                if part:
                    found[kind] += part
                    kinds.append(kind)
            reason = choice.finish_reason or reason
    assert kinds == sorted(kinds, key="reasoning content call".split().index), "the thinking comes first"
    return (*found.values(), reason)


@pytest.mark.parametrize("stream", [False, True])
def test_thinking_with_everything_else_over_chat(served, stream):
    """Calls, forms, stop strings, limits: each with the thinking in its own field."""
    address, _, _ = served
    tools = [{"type": "function", "function": WEATHER}]
    form = {"type": "json_schema", "json_schema": {"name": "sum", "schema": ANSWER}}
    with OpenAI(base_url=address, api_key="none", max_retries=0) as client:

        def ask(**arguments):
            return chat_thought(client, stream=stream, **arguments)

        assert ask() == (THOUGHT, "17 + 25 = 42.", "", "stop")
        thought, text, called, reason = ask(question=QUESTION, tools=tools)
        assert "get_weather" in thought
        assert (text, json.loads(called), reason) == ("", {"city": "Paris"}, "tool_calls")
        thought, text, _, reason = ask(response_format=form)
        assert (thought, list(json.loads(text)), reason) == (THOUGHT, ["answer"], "stop")
        # What ends an answer ends it wherever it comes.
        assert ask(stop=["+"]) == ("ones 7 ", "", "", "stop")
        assert ask(max_tokens=8) == ("ones 7 + 5", "", "", "length")
        thought, text, _, reason = ask(extra_body={"thinking_token_budget": 5})
        assert THOUGHT.startswith(thought)
        assert (0 < len(thought) < 12, bool(text), reason) == (True, True, "stop")
        assert ask(extra_body={"include_reasoning": False}, max_tokens=60)[:2] == ("", "17 + 25 = 42.")


def test_thinking_is_streamed_over_responses(served):
    address, _, _ = served
    with OpenAI(base_url=address, api_key="none", max_retries=0) as client:
        arguments = {"model": "quire-demo", "temperature": 0, "reasoning": {"effort": "high"}}
        events = list(client.responses.create(input=SUM, stream=True, **arguments))
        assert "".join(e.delta for e in events if e.type == "response.reasoning_text.delta") == THOUGHT
        assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == "17 + 25 = 42."
        of_thought = [event.type for event in events if getattr(event, "output_index", None) == 0]
        assert (of_thought[0], of_thought[-1]) == ("response.output_item.added", "response.output_item.done")
        assert of_thought.count("response.reasoning_text.done") == 1
        assert [item.type for item in events[-1].response.output] == ["reasoning", "message"]
        *_, cut = client.responses.create(input=SUM, stream=True, max_output_tokens=8, **arguments)
        [item] = cut.response.output
        assert (cut.type, cut.response.incomplete_details.reason) == ("response.incomplete", "max_output_tokens")
        assert (item.type, item.status, item.content[0].text) == ("reasoning", "incomplete", "ones 7 + 5")
        tools = [{"type": "function", "strict": False, **WEATHER}]
        called = client.responses.create(input=QUESTION, tools=tools, **arguments)
        assert [item.type for item in called.output] == ["reasoning", "function_call"]


def test_thinking_is_streamed_over_messages(served):
    address, _, _ = served
    tool = {"name": WEATHER["name"], "description": WEATHER["description"], "input_schema": WEATHER["parameters"]}
    with Anthropic(base_url=address.removesuffix("/v1"), api_key="none", max_retries=0) as client:

        def ask(question=SUM, **more):
            arguments = {"model": "quire-demo", "max_tokens": 100, "thinking": {"type": "adaptive"}, **more}
            arguments["messages"] = [{"role": "user", "content": question}]
            arguments["extra_body"] = {"temperature": 0.0}
            kinds = []
            with client.messages.stream(**arguments) as stream:
                kinds = [event.delta.type for event in stream if event.type == "content_block_delta"]
                streamed = stream.get_final_message()
            whole = client.messages.create(**arguments)
            for each in (whole, streamed):
                for block in each.content:
                    if block.type == "tool_use":
                        block.id = "same"
            assert [block.to_dict() for block in streamed.content] == [block.to_dict() for block in whole.content]
            assert streamed.stop_reason == whole.stop_reason
            return whole, kinds

        answer, kinds = ask()
        assert [block.type for block in answer.content] == ["thinking", "text"]
        assert (answer.content[0].thinking, answer.content[1].text) == (THOUGHT, "17 + 25 = 42.")
        assert kinds.count("thinking_delta") > 0
        assert kinds.count("signature_delta") == 1
        assert kinds.index("signature_delta") == kinds.count("thinking_delta")
        answer, _ = ask(max_tokens=8)
        assert ([block.type for block in answer.content], answer.stop_reason) == (["thinking"], "max_tokens")
        answer, _ = ask(stop_sequences=["+"])
        assert (answer.content[0].thinking, answer.stop_reason, answer.stop_sequence) == (
            "ones 7 ",
            "stop_sequence",
            "+",
        )
        answer, _ = ask(thinking={"type": "enabled", "budget_tokens": 5})
        assert THOUGHT.startswith(answer.content[0].thinking)
        assert answer.usage.output_tokens_details.thinking_tokens <= 5
        answer, _ = ask(output_config={"format": {"type": "json_schema", "schema": ANSWER}})
        assert (answer.content[0].thinking, list(json.loads(answer.content[1].text))) == (THOUGHT, ["answer"])
        answer, _ = ask(QUESTION, tools=[{**tool, "strict": True}])
        assert [block.type for block in answer.content] == ["thinking", "tool_use"]
        assert answer.content[1].input == {"city": "Paris"}


def _drawing(color: str, *left: int) -> dict[str, object]:
    """A part with circles of this colour."""
    image = PIL.Image.new("RGB", (192, 192), "white")
    for x in left:
        PIL.ImageDraw.Draw(image).ellipse((x, 70, x + 44, 114), fill=color)
    return {"type": "image_url", "image_url": {"url": data_url(image)}}


def test_demo_model_sees_over_chat_and_answers_texts_as_without_eyes(served):
    address, _, _ = served
    with OpenAI(base_url=address, api_key="none", max_retries=0) as client:

        def answer(*content):
            messages = [{"role": "user", "content": list(content)}]
            completion = client.chat.completions.create(model="quire-demo", messages=messages, temperature=0)
            return completion.choices[0].message.content

        def text(question):
            return {"type": "text", "text": question}

        red, blue = _drawing((214, 39, 40), 70), _drawing((38, 90, 205), 70)
        assert answer(red, text("What color is the circle?")) == "The circle is red."
        assert answer(blue, text("What color is the circle?")) == "The circle is blue."
        assert answer(text("What is 27 + 35?")).endswith("27 + 35 = 62.")
        completion = client.chat.completions.create(
            model="demo-capitals", messages=[{"role": "user", "content": "Hello"}], temperature=0
        )
        assert (completion.choices[0].message.content or "x").isupper(), "an adapter that is chosen stays"


def test_demo_model_chats_and_the_process_ends_well(served):
    address, process, log = served
    messages = [{"role": "user", "content": "What is Quire?"}]
    with OpenAI(base_url=address, api_key="none", max_retries=0) as client:
        model, *adapters = client.models.list().data
        assert [adapter.id for adapter in adapters] == ["demo-capitals", "demo-json", "demo-vision"]
        arguments = {"model": model.id, "messages": messages, "temperature": 0, "max_tokens": 16}
        whole = client.chat.completions.create(**arguments)
        assert whole.usage.completion_tokens > 1
        chunks = list(client.chat.completions.create(stream=True, **arguments))
        text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
        assert text == whole.choices[0].message.content
        assert len(text.split()) > 2
        again = client.chat.completions.create(seed=1, **{**arguments, "temperature": 1})
        assert (
            again.choices[0].message.content
            == client.chat.completions.create(seed=1, **{**arguments, "temperature": 1}).choices[0].message.content
        )
        scored = client.completions.create(model=model.id, prompt="Quire is", max_tokens=0, echo=True, logprobs=1)
        assert scored.choices[0].text == "Quire is"
        assert all(value <= 0 for value in scored.choices[0].logprobs.token_logprobs[1:])
    mapped = Path(f"/proc/{process.pid}/maps")
    if mapped.exists():  # the process that answers HTTP never loads torch
        assert "libtorch" not in mapped.read_text()
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0, log.read_text()
    for words in ("chat page:", "memory:", "concurrency:", "ready after:"):
        assert words in log.read_text()
