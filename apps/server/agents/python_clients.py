"""Client libraries from the Python registry against a running server: what each does unchanged.

    quire serve --port 8000                                            # the demo model, in another terminal
    python apps/server/agents/python_clients.py --url http://127.0.0.1:8000 [CLIENT ...]

Each library is installed into an environment of its own (by `uv run --with`), where this file runs again with
`--inside`. Prints a table: library, version, and what was done with it: a chat, a stream of the same text, a tool that
was called and answered, an object of a schema, vectors of texts, as far as the library has each. Ends with status 1 if
one failed.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.metadata
import json
import os
import subprocess
import sys
import traceback
import urllib.request
from collections.abc import Callable
from typing import Any

QUESTION = "What is your name?"
CITY = "What is the weather in Paris?"
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 10}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def same(whole: str, parts: list[str]) -> None:
    """A stream has more than one part, and their text is that of the whole answer."""
    assert whole
    assert "".join(parts) == whole, (whole, parts)
    assert len(parts) > 1, parts


def use_openai(url: str, model: str) -> list[str]:
    from openai import OpenAI
    from pydantic import BaseModel, Field

    class Person(BaseModel):
        name: str = Field(max_length=10)
        age: int

    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    asked: Any = {"model": model, "messages": [{"role": "user", "content": QUESTION}], "temperature": 0}
    whole = client.chat.completions.create(**asked).choices[0].message.content
    same(whole, [each.choices[0].delta.content or "" for each in client.chat.completions.create(**asked, stream=True)])
    answer = client.chat.completions.create(**asked, tools=[TOOL], tool_choice="required", max_tokens=60)
    (call,) = answer.choices[0].message.tool_calls
    assert "city" in json.loads(call.function.arguments)
    parsed = client.chat.completions.parse(**asked, response_format=Person, max_tokens=60)
    assert isinstance(parsed.choices[0].message.parsed, Person)
    text = client.responses.create(model=model, input=QUESTION, temperature=0).output_text
    assert text == whole
    return ["chat", "stream", "tool", "schema", "responses"]


def use_anthropic(url: str, model: str) -> list[str]:
    from anthropic import Anthropic

    client = Anthropic(base_url=url, api_key="none")
    asked: Any = {"model": model, "max_tokens": 60, "extra_body": {"temperature": 0}}
    asked["messages"] = [{"role": "user", "content": QUESTION}]
    whole = client.messages.create(**asked).content[0].text
    with client.messages.stream(**asked) as stream:
        same(whole, list(stream.text_stream))
    tool = {"name": "get_weather", "input_schema": TOOL["function"]["parameters"]}
    answer = client.messages.create(**asked, tools=[tool], tool_choice={"type": "any"})
    (call,) = [each for each in answer.content if each.type == "tool_use"]
    assert "city" in call.input
    assert client.messages.count_tokens(model=model, messages=asked["messages"]).input_tokens > 0
    return ["chat", "stream", "tool", "token count"]


def use_ollama(url: str, model: str) -> list[str]:
    from ollama import Client

    client, asked = Client(url), [{"role": "user", "content": QUESTION}]
    options = {"temperature": 0}
    whole = client.chat(model, asked, options=options).message.content
    same(whole, [each.message.content or "" for each in client.chat(model, asked, options=options, stream=True)])
    answer = client.chat(model, asked, options={**options, "num_predict": 60}, format=SCHEMA)
    assert set(json.loads(answer.message.content)) == {"name", "age"}
    assert [each.model for each in client.list().models]
    return ["chat", "stream", "schema", "list"]


def use_litellm(url: str, model: str) -> list[str]:
    import litellm

    asked: Any = {"model": f"openai/{model}", "api_base": f"{url}/v1", "api_key": "none", "temperature": 0}
    asked["messages"] = [{"role": "user", "content": QUESTION}]
    whole = litellm.completion(**asked).choices[0].message.content
    same(whole, [each.choices[0].delta.content or "" for each in litellm.completion(**asked, stream=True)])
    answer = litellm.completion(**asked, tools=[TOOL], tool_choice="required", max_tokens=60)
    assert answer.choices[0].message.tool_calls[0].function.name == "get_weather"
    hosted = litellm.completion(**{**asked, "model": f"hosted_vllm/{model}"})
    assert hosted.choices[0].message.content == whole
    return ["chat", "stream", "tool", "as hosted_vllm"]


def use_langchain(url: str, model: str) -> list[str]:
    from langchain_core.messages import ToolMessage
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI

    @tool
    def get_weather(city: str) -> str:
        """The weather in a city."""
        return f"It rains in {city}."

    chat = ChatOpenAI(model=model, base_url=f"{url}/v1", api_key="none", temperature=0, max_tokens=60)
    whole = chat.invoke(QUESTION).content
    same(whole, [each.content for each in chat.stream(QUESTION)])
    answer = chat.bind_tools([get_weather], tool_choice="any").invoke(CITY)
    (call,) = answer.tool_calls
    result = ToolMessage(get_weather.invoke(call["args"]), tool_call_id=call["id"])
    assert chat.bind_tools([get_weather]).invoke([("user", CITY), answer, result]).response_metadata
    found = chat.with_structured_output({"title": "person", **SCHEMA}, method="json_schema").invoke("Name somebody.")
    assert set(found) == {"name", "age"}
    return ["chat", "stream", "tool and its result", "schema"]


def use_llama_index(url: str, model: str) -> list[str]:
    from llama_index.core.llms import ChatMessage
    from llama_index.llms.openai_like import OpenAILike

    chat = OpenAILike(
        model=model, api_base=f"{url}/v1", api_key="none", is_chat_model=True, temperature=0, context_window=2048
    )
    asked = [ChatMessage(role="user", content=QUESTION)]
    whole = chat.chat(asked).message.content
    same(whole, [each.delta for each in chat.stream_chat(asked)])
    assert chat.complete(QUESTION).text
    return ["chat", "stream", "complete"]


def use_instructor(url: str, model: str) -> list[str]:
    import instructor
    from openai import OpenAI
    from pydantic import BaseModel, Field

    class Person(BaseModel):
        name: str = Field(max_length=10)
        age: int = Field(le=99)

    done = []
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        client = instructor.from_openai(OpenAI(base_url=f"{url}/v1", api_key="none"), mode=mode)
        asked: Any = {"model": model, "messages": [{"role": "user", "content": "Name somebody."}], "max_tokens": 80}
        assert isinstance(client.chat.completions.create(**asked, response_model=Person, temperature=0), Person)
        done.append(f"object by {mode.name}")
    return done


def use_pydantic_ai(url: str, model: str) -> list[str]:
    from pydantic import BaseModel, Field
    from pydantic_ai import Agent, NativeOutput
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    class Person(BaseModel):
        name: str = Field(max_length=10)
        age: int = Field(le=99)

    chat = OpenAIChatModel(model, provider=OpenAIProvider(base_url=f"{url}/v1", api_key="none"))
    settings: Any = {"temperature": 0, "max_tokens": 80}
    whole = Agent(chat, model_settings=settings).run_sync(QUESTION).output

    async def stream() -> list[str]:
        async with Agent(chat, model_settings=settings).run_stream(QUESTION) as run:
            return [each async for each in run.stream_text(delta=True, debounce_by=None)]

    assert "".join(asyncio.run(stream())) == whole  # it hands on what came together in one part
    found = Agent(chat, output_type=NativeOutput(Person), model_settings=settings).run_sync("Name somebody.").output
    assert isinstance(found, Person)
    return ["chat", "stream", "schema"]


def use_openai_agents(url: str, model: str) -> list[str]:
    from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool
    from agents import set_tracing_disabled as disable_tracing
    from openai import AsyncOpenAI

    disable_tracing(True)
    calls = []

    @function_tool
    def get_weather(city: str) -> str:
        """The weather in a city."""
        calls.append(city)
        return "rain"

    client, done = AsyncOpenAI(base_url=f"{url}/v1", api_key="none"), []
    for kind in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
        chat = kind(model=model, openai_client=client)
        settings = ModelSettings(temperature=0, max_tokens=60)
        assert Runner.run_sync(Agent(name="a", model=chat, model_settings=settings), QUESTION).final_output
        forced = ModelSettings(temperature=0, max_tokens=60, tool_choice="required")
        agent = Agent(name="b", model=chat, tools=[get_weather], model_settings=forced)
        assert Runner.run_sync(agent, CITY).final_output is not None
        assert calls
        calls.clear()
        done.append(f"chat and a tool by {kind.__name__.removeprefix('OpenAI').removesuffix('Model')}")
    return done


def use_haystack(url: str, model: str) -> list[str]:
    from haystack.components.generators.chat import OpenAIChatGenerator
    from haystack.dataclasses import ChatMessage
    from haystack.utils import Secret

    parts: list[str] = []
    key, settings = Secret.from_token("none"), {"temperature": 0}
    chat = OpenAIChatGenerator(api_key=key, model=model, api_base_url=f"{url}/v1", generation_kwargs=settings)
    whole = chat.run([ChatMessage.from_user(QUESTION)])["replies"][0].text
    chat.run([ChatMessage.from_user(QUESTION)], streaming_callback=lambda chunk: parts.append(chunk.content))
    same(whole, [each for each in parts if each])
    return ["chat", "stream"]


def use_cohere(url: str, model: str) -> list[str]:
    import cohere

    client = cohere.ClientV2(base_url=url, api_key="none")
    asked: Any = {"model": model, "messages": [{"role": "user", "content": QUESTION}], "temperature": 0}
    whole = client.chat(**asked).message.content[0].text
    events = [each for each in client.chat_stream(**asked) if each.type == "content-delta"]
    same(whole, [each.delta.message.content.text for each in events])
    return ["chat", "stream"]


def use_semantic_kernel(url: str, model: str) -> list[str]:
    from openai import AsyncOpenAI
    from semantic_kernel.connectors.ai.open_ai import OpenAIChatCompletion, OpenAIChatPromptExecutionSettings
    from semantic_kernel.contents import ChatHistory

    client = OpenAIChatCompletion(model, async_client=AsyncOpenAI(base_url=f"{url}/v1", api_key="none"))
    history = ChatHistory()
    history.add_user_message(QUESTION)
    settings = OpenAIChatPromptExecutionSettings(temperature=0)
    assert str(asyncio.run(client.get_chat_message_content(history, settings)))
    return ["chat"]


def use_dspy(url: str, model: str) -> list[str]:
    import dspy

    chat = dspy.LM(f"openai/{model}", api_base=f"{url}/v1", api_key="none", temperature=0, max_tokens=60, cache=False)
    assert chat(QUESTION)[0]
    return ["chat"]


def use_lm_eval(url: str, model: str) -> list[str]:
    from lm_eval.api.instance import Instance
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    client = LocalCompletionsAPI(
        model=model, base_url=f"{url}/v1/completions", tokenizer_backend=None, max_length=1024, num_concurrent=2
    )
    arguments = ("One two", {"until": ["."], "max_gen_toks": 8, "temperature": 0})
    (text,) = client.generate_until([Instance("generate_until", {}, arguments, 0)], disable_tqdm=True)
    assert isinstance(text, str)
    return ["generate_until"]


CLIENTS: dict[str, tuple[str, Callable[[str, str], list[str]]]] = {
    "openai": ("openai", use_openai),
    "anthropic": ("anthropic", use_anthropic),
    "ollama": ("ollama", use_ollama),
    "litellm": ("litellm", use_litellm),
    "langchain-openai": ("langchain-openai", use_langchain),
    "llama-index-llms-openai-like": ("llama-index-llms-openai-like", use_llama_index),
    "instructor": ("instructor", use_instructor),
    "pydantic-ai-slim": ("pydantic-ai-slim[openai]", use_pydantic_ai),
    "openai-agents": ("openai-agents", use_openai_agents),
    "haystack-ai": ("haystack-ai", use_haystack),
    "cohere": ("cohere", use_cohere),
    "semantic-kernel": ("semantic-kernel", use_semantic_kernel),
    "dspy": ("dspy", use_dspy),
    "lm-eval": ("lm-eval[api]", use_lm_eval),
}
"""Distribution -> what is installed, and what is done with it."""


def run_inside(name: str, url: str, model: str) -> int:
    """Use one library, in its environment. Its last line is what came of it."""
    status, done = 0, []
    try:
        done = CLIENTS[name][1](url, model)
    except Exception as error:
        traceback.print_exc()
        status, done = 1, [f"FAILED: {type(error).__name__}: {str(error).splitlines()[0][:150] if str(error) else ''}"]
    print(json.dumps({"version": importlib.metadata.version(name), "done": done}), flush=True)
    return status


def run_all(names: list[str], url: str, model: str) -> int:
    failed = 0
    print("| library | version | what was done |\n|---|---|---|")
    for name in names:
        inside = [__file__, "--inside", "--url", url, "--model", model, name]
        command = ["uv", "run", "--no-project", "--isolated", "--with", CLIENTS[name][0], "python", *inside]
        own = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
        run = subprocess.run(command, capture_output=True, text=True, env=own)
        try:
            result = json.loads(run.stdout.splitlines()[-1])
        except (IndexError, ValueError):
            result = {"version": "?", "done": ["NOT INSTALLED"]}
        if run.returncode:
            failed += 1
            print(run.stderr[-2000:], file=sys.stderr)
        print(f"| {name} | {result['version']} | {', '.join(result['done'])} |", flush=True)
    return 1 if failed else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("clients", nargs="*", metavar="CLIENT", help=f"of {', '.join(CLIENTS)}; all, if none is named")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", help="its name on the server; the first one, if none is named")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if unknown := set(args.clients) - CLIENTS.keys():
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    if args.inside:
        return run_inside(args.clients[0], args.url, args.model)
    with urllib.request.urlopen(f"{args.url}/v1/models") as response:
        model = args.model or json.load(response)["data"][0]["id"]
    return run_all(args.clients or list(CLIENTS), args.url, model)


if __name__ == "__main__":
    sys.exit(main())
