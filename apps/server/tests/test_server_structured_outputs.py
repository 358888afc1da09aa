"""Constraints over HTTP, with the official client, on the demo model: valid answers, named refusals, metrics."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import httpx
import jsonschema
import openai
import pytest
from openai import OpenAI
from pydantic import BaseModel

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 16},
        "temperature": {"type": "integer", "minimum": -50, "maximum": 50},
    },
    "required": ["city", "temperature"],
    "additionalProperties": False,
}
AS_SCHEMA = {"type": "json_schema", "json_schema": {"name": "weather", "schema": SCHEMA, "strict": True}}
ZONES = {"type": "object", "properties": {"zone": {"enum": ["UTC", "CET"]}}, "required": ["zone"]}
ZONES["additionalProperties"] = False


def tools(strict: bool = True) -> list[dict[str, object]]:
    functions = {"get_weather": ("Get the weather", SCHEMA), "get_time": ("Get the time", ZONES)}
    return [
        {"type": "function", "function": {"name": name, "description": text, "parameters": schema, "strict": strict}}
        for name, (text, schema) in functions.items()
    ]


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory):
    log = tmp_path_factory.mktemp("demo") / "log"
    command = [
        sys.executable, "-m", "quire_server.cli", "serve", "--port", "0", "--max-num-seqs", "32", "--num-threads", "1",
        "--structured-output-timeout", "5", "--structured-output-max-bytes", "100000",
    ]  # fmt: skip
    environment = {**os.environ, "QUIRE_NUM_GPU_BLOCKS_OVERRIDE": "1024", "QUIRE_RESPONSE_STORE": ":memory:"}
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
    try:
        end, found = time.monotonic() + 180, None
        while found is None:
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < end, log.read_text()
            time.sleep(0.05)
            found = re.search(r"OpenAI API:\s+(http://\S+)/v1", log.read_text())
        yield found.group(1)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0, log.read_text()
        assert "Traceback" not in log.read_text()
    finally:
        process.kill()


@pytest.fixture
def client(address):
    with OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as made:
        yield made


def ask(client: OpenAI, text: str = "How warm is it in Paris?", **arguments):
    values = {"model": "quire-demo", "max_tokens": 300, **arguments}
    return client.chat.completions.create(messages=[{"role": "user", "content": text}], **values)


def test_a_schema_holds_for_thirty_two_hot_answers_at_once(client):
    def one(seed: int) -> str:
        answer = ask(client, response_format=AS_SCHEMA, temperature=1.5, seed=seed)
        assert answer.choices[0].finish_reason == "stop"
        return answer.choices[0].message.content

    with ThreadPoolExecutor(32) as pool:
        texts = list(pool.map(one, range(64)))
    for text in texts:
        jsonschema.validate(json.loads(text), SCHEMA)
    assert len(set(texts)) > 10


def test_the_stream_is_the_same_answer(client):
    whole = ask(client, response_format=AS_SCHEMA, temperature=1.0, seed=5).choices[0].message.content
    chunks = ask(client, response_format=AS_SCHEMA, temperature=1.0, seed=5, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == whole


def test_the_client_s_own_parsing(client):
    class Weather(BaseModel):
        city: str
        sky: Literal["clear", "cloudy"]

    answer = client.chat.completions.parse(
        model="quire-demo",
        messages=[{"role": "user", "content": "How is the weather in Paris?"}],
        response_format=Weather,
        max_tokens=400,
        temperature=0,
    )
    parsed = answer.choices[0].message.parsed
    assert answer.choices[0].finish_reason == "stop"
    assert parsed.sky in ("clear", "cloudy")


@pytest.mark.parametrize(
    ("arguments", "pattern"),
    [
        ({"extra_body": {"structured_outputs": {"choice": ["red", "green"]}}}, "red|green"),
        ({"extra_body": {"structured_outputs": {"regex": "[0-9]{3}"}}}, "[0-9]{3}"),
        ({"extra_body": {"structured_outputs": {"grammar": 'root ::= "a" [0-9] "b"'}}}, "a[0-9]b"),
        ({"extra_body": {"guided_regex": "[a-c]{2}"}}, "[a-c]{2}"),
        ({"extra_body": {"guided_choice": ["red", "green"]}}, "red|green"),
        ({"extra_body": {"guided_json": {"enum": [12]}, "guided_whitespace_pattern": " "}}, "12"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": "é"}}}}, '"é"'),
        (
            {"response_format": {"type": "structural_tag", "format": {"type": "const_string", "value": "just this"}}},
            "just this",
        ),
    ],
)
def test_every_spelling(client, arguments, pattern):
    for temperature in (0, 1.5):
        answer = ask(client, temperature=temperature, **arguments)
        assert re.fullmatch(pattern, answer.choices[0].message.content), answer.choices[0].message.content
        assert answer.choices[0].finish_reason == "stop"


def test_completions_take_constraints_too(client):
    answer = client.completions.create(
        model="quire-demo",
        prompt=["The sky is", "The grass is"],
        n=2,
        temperature=1.5,
        max_tokens=20,
        logprobs=2,
        extra_body={"structured_outputs": {"choice": [" blue", " green"]}},
    )
    assert len(answer.choices) == 4
    for choice in answer.choices:
        assert choice.text in (" blue", " green")
        assert "".join(choice.logprobs.tokens).startswith(choice.text)


def test_a_json_object(client):
    answer = ask(client, response_format={"type": "json_object"}, temperature=0, max_tokens=600)
    if answer.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(answer.choices[0].message.content), dict)
    else:
        assert answer.choices[0].message.content.lstrip().startswith("{")


def test_thinking_comes_first_when_it_is_asked_for(client):
    thought = 0
    for seed in range(6):
        answer = ask(
            client,
            response_format=AS_SCHEMA,
            temperature=1.0,
            seed=seed,
            extra_body={"chat_template_kwargs": {"enable_thinking": True}},
        ).choices[0]
        if answer.finish_reason == "stop":
            jsonschema.validate(json.loads(answer.message.content), SCHEMA)
        thought += bool(getattr(answer.message, "reasoning", None))
    assert thought > 0
    plain = ask(client, response_format=AS_SCHEMA, temperature=0).choices[0].message
    assert not getattr(plain, "reasoning", None)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_time"}}])
def test_a_forced_call_follows_its_schema(client, choice):
    for seed in range(8):
        answer = ask(client, "Hi", tools=tools(strict=bool(seed % 2)), tool_choice=choice, temperature=1.5, seed=seed)
        [call] = answer.choices[0].message.tool_calls
        assert answer.choices[0].finish_reason == "tool_calls"
        schema = {"get_weather": SCHEMA, "get_time": ZONES}[call.function.name]
        jsonschema.validate(json.loads(call.function.arguments), schema)
        assert choice == "required" or call.function.name == "get_time"


@pytest.mark.parametrize("form", [{"response_format": AS_SCHEMA}, {"extra_body": {"guided_regex": "[0-9]+"}}])
def test_a_form_of_the_answer_does_not_hinder_a_forced_call(client, form):
    answer = ask(client, "Hi", tools=tools(), tool_choice="required", temperature=1.5, seed=3, **form)
    [call] = answer.choices[0].message.tool_calls
    jsonschema.validate(
        json.loads(call.function.arguments), {"get_weather": SCHEMA, "get_time": ZONES}[call.function.name]
    )
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("", "tool_calls")


def test_strict_tools_are_followed_when_the_model_calls(client):
    answer = ask(client, "What is the weather in Oslo?", tools=tools(), temperature=0)
    [call] = answer.choices[0].message.tool_calls
    assert call.function.name == "get_weather"
    jsonschema.validate(json.loads(call.function.arguments), SCHEMA)


def test_a_schema_and_tools_leave_the_model_the_choice(client):
    found = set()
    for seed in range(12):
        answer = ask(client, "Oslo", tools=tools(), response_format=AS_SCHEMA, temperature=1.5, seed=seed).choices[0]
        if answer.message.tool_calls:
            for call in answer.message.tool_calls:
                jsonschema.validate(
                    json.loads(call.function.arguments), {"get_weather": SCHEMA, "get_time": ZONES}[call.function.name]
                )
        else:
            jsonschema.validate(json.loads(answer.message.content), SCHEMA)
        found.add(answer.finish_reason)
    assert found <= {"stop", "tool_calls"}


WRONG = {"type": "object", "properties": {"x": {"type": "integer", "not": {"const": 1}}}}
WRONG_TOOL = {"type": "function", "function": {"name": "wrong", "parameters": WRONG, "strict": True}}
REFUSED = [
    ({"extra_body": {"guided_regex": "(a"}}, "guided_regex", "unclosed group"),
    ({"extra_body": {"structured_outputs": {"regex": "(a"}}}, "structured_outputs.regex", "unclosed group"),
    ({"extra_body": {"structured_outputs": {"grammar": "start: x"}}}, "structured_outputs.grammar", "x"),
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": {"if": {}, "then": {"const": 1}}},
            }
        },
        "response_format.json_schema.schema",
        "at /if: the keyword if, then",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["x" * 200_000]}}}},
        "response_format.json_schema.schema",
        "100000",
    ),
    (
        {"extra_body": {"guided_json": {"items": {"uniqueItems": True, "items": {"type": "string"}}}}},
        "guided_json",
        "guided_json cannot be used: at /items/uniqueItems: the keyword uniqueItems is not supported",
    ),
    (
        {"extra_body": {"structured_outputs": {"json": {"not": {"const": 1}}}}},
        "structured_outputs.json",
        "structured_outputs.json cannot be used: at /not: ",
    ),
    (
        {"tools": [tools()[0], WRONG_TOOL], "tool_choice": "required"},
        "tools[1].function.parameters",
        "tools[1].function.parameters cannot be used: at /properties/x/not: the keyword not",
    ),
    (
        {"extra_body": {"allowed_token_ids": [5], "guided_choice": ["yes", "no"]}},
        None,
        "no token can be sampled",
    ),
    ({"extra_body": {"guided_regex": "a", "guided_choice": ["b"]}}, "guided_regex", "exactly one"),
    ({"response_format": AS_SCHEMA, "extra_body": {"guided_regex": "a"}}, "response_format", "exclude each other"),
    ({"response_format": AS_SCHEMA, "extra_body": {"min_tokens": 3}}, "min_tokens", "cannot be combined"),
    ({"response_format": {"type": "structural_tag", "format": {"type": "poem"}}}, "response_format", "format.type"),
]


@pytest.mark.parametrize(("arguments", "param", "text"), REFUSED)
@pytest.mark.parametrize("stream", [False, True])
def test_refusals_have_status_400_and_name_the_field(client, arguments, param, text, stream):
    with pytest.raises(openai.BadRequestError) as error:
        ask(client, stream=stream, **arguments)
    assert error.value.param == param
    assert text in error.value.body["message"]


ELSEWHERE = [
    ("responses", {"text": {"format": {"type": "json_schema", "name": "x", "schema": WRONG}}}, "text.format.schema"),
    (
        "responses",
        {"tools": [{"type": "function", "name": "w", "parameters": WRONG, "strict": True}], "tool_choice": "required"},
        "tools[0].parameters",
    ),
    (
        "messages",
        {"output_config": {"format": {"type": "json_schema", "schema": WRONG}}},
        "output_config.format.schema",
    ),
    (
        "messages",
        {"tools": [{"name": "w", "input_schema": WRONG, "strict": True}], "tool_choice": {"type": "any"}},
        "tools[0].input_schema",
    ),
]


@pytest.mark.parametrize(("route", "body", "field"), ELSEWHERE)
def test_other_protocols_name_their_own_field(address, route, body, field):
    question = {"input": "x"} if route == "responses" else {"messages": [{"role": "user", "content": "x"}]}
    body = {"model": "m", "max_tokens": 9, "max_output_tokens": 16, **question, **body}
    body.pop("max_tokens" if route == "responses" else "max_output_tokens")
    body["model"] = httpx.get(f"{address}/v1/models").json()["data"][0]["id"]
    answer = httpx.post(f"{address}/v1/{route}", json=body, timeout=60)
    assert answer.status_code == 400, answer.text
    assert f"{field} cannot be used: at /properties/x/not: the keyword not" in answer.json()["error"]["message"]


def test_tools_that_are_not_strict_are_followed_as_far_as_can_be(client):
    loose = {"type": "function", "function": {"name": "loose", "parameters": WRONG}}
    call = ask(client, "x", tools=[loose], tool_choice="required", temperature=1.5).choices[0].message.tool_calls[0]
    assert call.function.name == "loose"
    assert isinstance(json.loads(call.function.arguments), dict)


def test_hostile_patterns_hold_up_nobody(client):
    """Streams go on while others send what is expensive to refuse."""
    words = "|".join(f"word{i * 7919}" for i in range(8000))

    def hostile(number: int) -> None:
        with contextlib.suppress(openai.BadRequestError):
            ask(client, max_tokens=30, extra_body={"guided_regex": f"({words}|{number})(.*a){{30}}"})

    gaps_s: list[float] = []
    begin_s = time.monotonic()
    with ThreadPoolExecutor(4) as pool:
        sent = [pool.submit(hostile, number) for number in range(8)]
        stream = ask(client, "Tell me about Quire.", stream=True, max_tokens=600, extra_body={"min_tokens": 600})
        last_s = None
        for chunk in stream:
            now_s = time.monotonic()
            if last_s is not None and chunk.choices and chunk.choices[0].delta.content:
                gaps_s.append(now_s - last_s)
            last_s = now_s
        for each in sent:
            each.result()
    whole_s = time.monotonic() - begin_s
    assert len(gaps_s) > 20
    assert max(gaps_s) < max(1.0, whole_s / 4)  # on a busy machine all of it is slower


def test_metrics(client, address):
    for _ in range(2):
        ask(client, max_tokens=20, extra_body={"guided_regex": "metrics[0-9]"})
    text = httpx.get(f"{address}/metrics").text
    values = {
        name: float(re.search(rf"^quire:{name}\{{.*\}} (\S+)$", text, re.M).group(1))
        for name in ("grammar_cache_queries_total", "grammar_cache_hits_total", "grammar_compile_seconds_count")
    }
    assert values["grammar_cache_hits_total"] >= 1
    assert values["grammar_cache_queries_total"] > values["grammar_cache_hits_total"]
    assert values["grammar_compile_seconds_count"] >= 1
