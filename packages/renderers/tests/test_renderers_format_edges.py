"""Outputs at the edges of the formats: calls written in two ways at once, malformed ones before others, odd keys."""

from __future__ import annotations

import json

import pytest

from quire_renderers import ChatFormat, fold_events
from quire_renderers.reasoning_formats import REASONING_FORMATS
from quire_renderers.tool_schemas import ToolSchemas

M = "]<]minimax[>["
CALL = {
    "cohere_command4": '<|START_ACTION|>[{"tool_name": "now", "parameters": {}}]<|END_ACTION|>',
    "kimi_k3": '<|open|>tools<|sep|><|open|>call tool="now" index="1"<|sep|><|close|>call<|sep|><|close|>tools<|sep|>',
    "hermes": '<tool_call>{"name": "now", "arguments": {}}</tool_call>',
}


def tool(name="f", **schema):
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", **schema}}}


def read(output, tool_parser, *tools, reasoning="none", stopped=False, **arguments):
    """The message of an output, whole and by characters."""
    form = ChatFormat(tool_parser=tool_parser, reasoning_parser=reasoning)
    messages = []
    for pieces in ([output], list(output)):
        parser = form.parser(tools or (tool(), tool("now")), **arguments)
        events = [event for piece in pieces for event in parser.feed(piece)]
        messages.append(fold_events([*events, *parser.finish(stopped=stopped)]))
    assert messages[0] == messages[1]
    return messages[0]


def calls(message):
    return [(call.name, json.loads(call.arguments), call.complete) for call in message.calls]


K3_BEGIN = '<|open|>tools<|sep|><|open|>call tool="f" index="1"<|sep|>'
K3_JSON = '<|open|>json type="object"<|sep|>{"a": 1}<|close|>json<|sep|>'
K3_TAGGED = '<|open|>argument key="b" type="number"<|sep|>2<|close|>argument<|sep|>'


def test_kimi_k3_arguments_are_written_in_one_way():
    end = "<|close|>call<|sep|><|close|>tools<|sep|>"
    message = read(K3_BEGIN + K3_JSON + K3_TAGGED + end, "kimi_k3")
    assert (calls(message), message.text[: len(K3_TAGGED)]) == ([("f", {"a": 1}, True)], K3_TAGGED)
    # The end tag of a value before what cannot follow it is a part of the value.
    message = read(K3_BEGIN + K3_TAGGED + K3_JSON + end, "kimi_k3")
    assert [(name, list(arguments)) for name, arguments, _ in calls(message)] == [("f", ["b"])]
    assert K3_JSON in message.calls[0].arguments.replace("\\", "")


@pytest.mark.parametrize("reasoning", ["none", "hy_v3"])
@pytest.mark.parametrize("ending", ["", ":opensource"])
def test_hy_v3_reads_calls_behind_a_malformed_one(ending, reasoning):
    output = (
        "<tool_calls><tool_call>two words<tool_sep></tool_call><tool_call>now<tool_sep></tool_call></tool_calls>"
    ).replace(">", f"{ending}>")
    assert calls(read(output, "hy_v3", reasoning=reasoning)) == [("now", {}, True)]


A_SCHEMA = {"type": "object", "properties": {"zip": {"type": "string"}}}


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#/$defs/A"},
        {"anyOf": [{"$ref": "#/$defs/A"}, {"type": "null"}]},
        {"oneOf": [{"type": "null"}, A_SCHEMA]},
        {"allOf": [{"$ref": "#/$defs/A"}, {"properties": {"zip": {"minLength": 5}}}]},
        {"additionalProperties": {"type": "integer"}, "allOf": [A_SCHEMA]},
        {"$ref": "#/$defs/Loop"},
    ],
)
def test_minimax_m3_follows_schemas_to_nested_properties(schema):
    loop = {"anyOf": [{"$ref": "#/$defs/Loop"}, {"$ref": "#/$defs/A"}]}
    f = tool(properties={"address": schema}, **{"$defs": {"A": A_SCHEMA, "Loop": loop}})
    output = f'{M}<tool_call>{M}<invoke name="f">{M}<address>{M}<zip>10115{M}</zip>{M}</address>{M}</invoke>'
    assert calls(read(output, "minimax_m3", f)) == [("f", {"address": {"zip": "10115"}}, True)]


def test_minimax_m3_follows_references_to_the_items_of_lists():
    f = tool(properties={"codes": {"$ref": "#/$defs/L"}}, **{"$defs": {"L": {"items": {"type": "string"}}}})
    output = f'{M}<tool_call>{M}<invoke name="f">{M}<codes>{M}<item>1{M}</item>{M}<item>2{M}</item>{M}</codes>'
    assert calls(read(f"{output}{M}</invoke>", "minimax_m3", f)) == [("f", {"codes": ["1", "2"]}, True)]


def test_types_of_parts_are_kept_for_their_schema_alone():
    tools = ToolSchemas([tool(properties={})])
    for kind in ("string", "integer", "array") * 3:  # each new object may take the place of the last
        assert tools.types_of("f", {"type": kind}) == {kind}
    schema = {"anyOf": [A_SCHEMA, {"properties": {"zip": {"type": "integer"}}}]}
    assert tools.types_of("f", tools.child("f", schema, "zip")) == {"string", "integer"}
    assert tools.types_of("f", schema) is tools.types_of("f", schema)


@pytest.mark.parametrize("kind", [["array", "null"], ["object", "null"], "array", "object"])
def test_minimax_m3_an_empty_element_of_a_nullable_list_or_object(kind):
    f = tool(properties={"x": {"type": kind}})
    message = read(f'{M}<tool_call>{M}<invoke name="f">{M}<x>{M}</x>{M}</invoke>', "minimax_m3", f)
    assert calls(message) == [("f", {"x": [] if "array" in kind else {}}, True)]


@pytest.mark.parametrize("wrap", [("", ""), (f"{M}<o>", f"{M}</o>")])
def test_minimax_m3_refuses_a_tag_that_comes_twice(wrap):
    twice = f"{M}<x>1{M}</x>{M}<x>2{M}</x>".join(wrap)
    message = read(f'{M}<tool_call>{M}<invoke name="f">{twice}{M}</invoke>', "minimax_m3")
    assert [call.complete for call in message.calls] == [False]
    assert message.calls[0].arguments.count('"x"') == 1
    assert f"{M}<x>2" in message.text


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("    return 1", "    return 1"),
        (" ", " "),
        ("\n", "\n"),
        ("", ""),
        ("<![CDATA[ a ]]>", " a "),
        ("\n<![CDATA[a]]>\n", "a"),
        ("<![CDATA[]]>", ""),
        ("<![CDATA[a]]]]><![CDATA[>b]]>", "a]]>b"),
        ("<![CDATA[</param>]]><![CDATA[b]]> c", "</param>b c"),
    ],
)
@pytest.mark.parametrize("schema", [{"type": "string"}, {}])
def test_minicpm5_values_keep_their_white_space_and_sections(written, value, schema):
    f = tool(properties={"text": schema})
    begin = f'<function name="f"><param name="text">{written}</param>'
    assert calls(read(begin + "</function>", "minicpm5", f)) == [("f", {"text": value}, True)]
    message = read(begin, "minicpm5", f, stopped=True)
    assert (calls(message), message.text) == ([("f", {"text": value}, True)], "")


def test_minicpm5_a_section_that_is_cut_short():
    f = tool(properties={"text": {"type": "string"}})
    message = read('<function name="f"><param name="text"><![CDATA[a]]><![CDATA[b', "minicpm5", f)
    assert (calls(message), message.text) == ([("f", {"text": "ab"}, False)], "")


@pytest.mark.parametrize(
    ("tool_parser", "reasoning"),
    [
        ("hermes", "hunyuan_a13b"),
        ("hermes", "ernie45"),
        ("cohere_command4", "cohere_command4"),
        ("cohere_command4", "cohere_command3"),
        ("kimi_k3", "kimi_k3"),
    ],
)
def test_the_end_of_an_answer_that_calls_stand_in_is_no_text(tool_parser, reasoning):
    form = REASONING_FORMATS[reasoning]
    answer = f"{form.answer_start[0]}Looking.{CALL[tool_parser]}{form.answer_end[0]}"
    message = read(f"{form.start[0]}hm{form.end[0]}{answer}", tool_parser, reasoning=reasoning)
    assert (message.reasoning, message.text, calls(message)) == ("hm", "Looking.", [("now", {}, True)])
    message = read(f"{form.start[0]}hm{form.end[0]}{form.answer_end[0]}", tool_parser, reasoning=reasoning)
    assert message.text == form.answer_end[0]  # of no answer


@pytest.mark.parametrize("reasoning", ["kimi_k3", "ernie45"])
def test_an_answer_at_the_beginning_is_no_thinking(reasoning):
    form = REASONING_FORMATS[reasoning]
    message = read(f"{form.answer_start[0]}Hi{form.answer_end[0]}", "none", reasoning=reasoning)
    assert (message.text, message.reasoning) == ("Hi", "")


@pytest.mark.parametrize("key", ["größe", "$id", "größe in m", "x" * 256])
@pytest.mark.parametrize(
    ("tool_parser", "output"),
    [
        ("gemma4", '<|tool_call>call:f{KEY:<|"|>x<|"|>,n:1}<tool_call|>'),
        ("functiongemma", "<start_function_call>call:f{KEY:<escape>x<escape>,n:1}<end_function_call>"),
    ],
)
def test_bare_keys_are_of_any_letters(tool_parser, output, key):
    assert calls(read(output.replace("KEY", key), tool_parser)) == [("f", {key: "x", "n": 1}, True)]


@pytest.mark.parametrize("key", ["a{b", "a,b", "a]", 'a"b', "x" * 257])
def test_bare_keys_that_are_none(key):
    message = read(f"<|tool_call>call:f{{{key}:1}}<tool_call|>", "gemma4")
    assert not any(call.complete for call in message.calls)
    assert key in message.text


def test_minimax_m2_append_think_continues_a_message_without_its_beginning():
    arguments = {"tool_parser": "none", "reasoning": "minimax_m2_append_think"}
    assert read("hm</think>Hi", **arguments).text == "<think>hm</think>Hi"
    assert read("m</think>Hi", continued="<think>h", **arguments).text == "m</think>Hi"


def test_inkling_a_message_of_the_assistant():
    text = "<|message_model|>assistant<|content_text|>Hello<|end_message|>"
    message = read(f"<|message_model|>assistant<|content_thinking|>hm<|end_message|>{text}", "inkling")
    assert (message.text, message.reasoning, message.calls) == ("Hello", "hm", [])
    message = read('<|message_model|>assistant_x<|content_invoke_tool_json|>{"args": {}}<|end_message|>', "inkling")
    assert calls(message) == [("assistant_x", {}, True)]


def test_apertus_an_object_with_two_keys_is_two_calls():
    output = '<|tools_prefix|>[{"f": {"a": 1}, "now": {}}, {"f": {}, }]<|tools_suffix|>'
    assert calls(read(output, "apertus")) == [("f", {"a": 1}, True), ("now", {}, True), ("f", {}, True)]
