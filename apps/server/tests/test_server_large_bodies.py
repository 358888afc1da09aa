"""Too large constraints are found without parsing bodies, and named."""

from __future__ import annotations

import asyncio
import json

import pytest

from quire_interfaces import RequestError
from quire_server.large_bodies import BodyInspector, find_too_large

SMALL = {"type": "object"}


@pytest.mark.parametrize(
    ("body", "field", "part"),
    [
        (
            {"structured_outputs": {"json": {"properties": {"a": {}, "b": {"enum": [1] * 900}}}}},
            "structured_outputs",
            "structured_outputs.json.properties.b.enum (",
        ),
        ({"structured_outputs": {"regex": "é" * 600}}, "structured_outputs", "structured_outputs.regex (36"),
        ({"guided_choice": ["a", "b" * 1200]}, "guided_choice", "guided_choice[1] (1202 bytes)"),
        ({"text": {"format": {"schema": {"const": "c" * 1200}}}}, "text", "text.format.schema.const (1202"),
        ({"tools": [{"function": {"parameters": {"const": "c" * 5000}}}]}, "tools", "tools[0].function.parameters"),
        ({"tools": [{"function": {"parameters": {"const": "c" * 2000}}}]}, None, None),
        ({"messages": "m" * 5000, "response_format": SMALL}, None, None),
    ],
)
def test_the_field_and_its_largest_part(body, field, part):
    found = find_too_large(json.dumps({"model": "m", **body}).encode(), 1000)
    assert (found and found.field) == field
    assert found is None or found.part.startswith(part)


@pytest.mark.parametrize(
    "data", [b"[" * 5000, b"{" * 5000, b'{"tools":' * 2000, b"\xff" * 2000, b" " * 2000, b"[]" * 999]
)
def test_what_is_no_json_is_left_to_who_parses_it(data):
    assert find_too_large(data, 1000) is None


def test_the_process_apart_says_the_same_again_and_again():
    inspector = BodyInspector(1000)

    async def check(value):
        await inspector.check(json.dumps(value).encode())

    async def run():
        await check({"prompt": "p" * 3000})
        for _ in range(2):
            with pytest.raises(RequestError, match=r"regex \(3002 bytes") as error:
                await check({"structured_outputs": {"regex": "r" * 3000}})
            assert (error.value.param, error.value.code) == ("structured_outputs.regex", "grammar_too_large")
        inspector._process.kill()
        with pytest.raises(RequestError, match="response_format"):
            await check({"response_format": {"type": "t" * 3000}})

    asyncio.run(run())
    process = inspector._process
    process.stdin.close()
    assert process.wait(30) == 0
    process.stdout.close()
