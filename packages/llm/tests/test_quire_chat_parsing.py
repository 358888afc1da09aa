"""`LLM.parse`: the demo model's answers as messages, in this process."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from quire import LLM, SamplingParams

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
GREEDY = SamplingParams(temperature=0, max_tokens=120)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(max_model_len=512, max_num_seqs=4, num_threads=1) as made:
        yield made


def test_the_formats_are_recognised(llm: LLM) -> None:
    assert llm.renderer.chat_format.tool_parser == "hermes"
    assert llm.renderer.chat_format.reasoning_parser == "qwen3"


def test_calls_are_told_apart_when_tools_were_offered(llm: LLM) -> None:
    question = [{"role": "user", "content": "What is the weather in Paris?"}]
    (output,) = llm.chat(question, GREEDY, tools=[WEATHER], use_tqdm=False)
    (message,) = llm.parse(output, tools=[WEATHER])
    (call,) = message.calls
    assert (call.name, json.loads(call.arguments), call.complete) == ("get_weather", {"city": "Paris"}, True)
    assert message.text == ""
    (unparsed,) = llm.parse(output)
    assert (unparsed.text, unparsed.calls) == (output.outputs[0].text, [])


def test_reasoning_is_told_apart(llm: LLM) -> None:
    thinking = {"enable_thinking": True}
    question = [{"role": "user", "content": "What is 17 + 25?"}]
    (output,) = llm.chat(question, GREEDY, chat_template_kwargs=thinking, use_tqdm=False)
    (message,) = llm.parse(output, chat_template_kwargs=thinking)
    assert message.text == "17 + 25 = 42."
    assert message.reasoning.startswith("ones 7 + 5 = 12")
