"""Formats of tool calls whose arguments are one value, in JSON or a dialect near it, beside those of tool_formats.py.

Sources: the models' published cards and chat templates, named by the entry's `models`.
"""

from __future__ import annotations

from quire_renderers.format_families import States, json_calls, named_calls, python_calls, with_prefix
from quire_renderers.format_states import Expect, Go, Literal, Role, Sink, Until
from quire_renderers.literal_relay import GEMMA4
from quire_renderers.tool_format import ToolFormat

__all__ = ["JSON_TOOL_FORMATS"]

_APERTUS_END: dict[str, Go | str] = {"<|tools_suffix|>": Go("after", commits=True)}
_PLAMO_AFTER: dict[str, Go | str] = {
    "<|plamo:end_tool_arguments:plamo|>": Go("after", commits=True),
    "<|plamo:end_tool_request:plamo|>": Go("after", commits=True),
    "<|plamo:begin_tool_request:plamo|>": "request",
    "<|plamo:end_tool_requests:plamo|>": Go("content", commits=True),
}


def _apertus() -> States:
    """A list of objects with one key each, the name of the tool; more keys are more calls."""
    return {
        "call": Expect({"[": "item"}),
        "item": Expect({"{": "open", ",": "item", "]": Go("after", commits=True)}),
        "open": Expect({'"': "name"}),
        "name": Until(Sink.NAME, {'"': "colon"}),
        "colon": Expect({":": "arguments"}),
        "arguments": Literal(Role.ARGUMENTS, "close"),
        "close": Expect({"}": Go("item", ends_call=True), ",": Go("again", ends_call=True)}, is_whole=True),
        "again": Expect({'"': "name", "}": "item"}),
        "after": Until(Sink.CONTENT, {"<|tools_prefix|>": "call", **_APERTUS_END}),
    }


def _lfm2() -> States:
    """Python's syntax in brackets, or JSON where the system message asked for it."""
    end: dict[str, Go | str] = {"<|tool_call_end|>": Go("after", commits=True)}
    states = python_calls(None, {"]": Go("after", commits=True), **end}, {"<|tool_call_start|>": "either", **end})
    return states | {
        "either": Expect({"[": "first", "{": Go("json/call", keeps_marker=True)}, otherwise="call"),
        "first": Expect({"{": Go("json/first_item", keeps_marker=True)}, otherwise="call"),
        **with_prefix(json_calls(()), "json/", kept=("content", "after")),
    }


# In the order in which a template is compared with them.
JSON_TOOL_FORMATS = (
    ToolFormat(
        name="cohere_command4",
        models="Command R7B, Command A, Command A Plus",
        content={"<|START_ACTION|>": "call"},
        states=lambda: json_calls(
            ("<|START_ACTION|>",),
            ("<|END_ACTION|>",),
            name_keys=("tool_name", "name"),
            argument_keys=("parameters", "arguments"),
        ),
        prefix='<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "NAME", "parameters": ',
        suffix="}\n]<|END_ACTION|>",
        trigger="<|START_ACTION|>",
        fingerprints=(("<|START_ACTION|>",),),
    ),
    ToolFormat(
        name="apertus",
        models="Apertus",
        content={"<|tools_prefix|>": "call"},
        states=_apertus,
        prefix='<|tools_prefix|>[{"NAME": ',
        suffix="}]<|tools_suffix|>",
        trigger="<|tools_prefix|>",
        fingerprints=(("<|tools_prefix|>",),),
    ),
    ToolFormat(
        name="gigachat3",
        models="GigaChat 3",
        content={"<|function_call|>": "call", "function call<|role_sep|>": "call"},
        states=lambda: json_calls(("<|function_call|>", "function call<|role_sep|>")),
        prefix='<|function_call|>{"name": "NAME", "arguments": ',
        suffix="}",
        trigger="<|function_call|>",
        fingerprints=(("<|function_call|>",), ("function call", "<|role_sep|>")),
    ),
    ToolFormat(
        name="gemma4",
        models="Gemma 4",
        content={"<|tool_call>": "head"},
        states=lambda: {
            "head": Expect({"call:": "name"}),
            **named_calls(
                {"{": Go("arguments", keeps_marker=True)},
                {"<|tool_call>": "head", "<tool_call|>": Go("after", commits=True)},
                dialect=GEMMA4,
            ),
        },
        prefix="<|tool_call>call:NAME",
        fingerprints=(("<|tool_call>",),),
    ),
    ToolFormat(
        name="lfm2",
        models="LFM2, LFM2.5",
        content={"<|tool_call_start|>": "either"},
        states=_lfm2,
        prefix="<|tool_call_start|>[NAME(",
        fingerprints=(("<|tool_call_start|>",), ("<|tool_list_start|>",)),
    ),
    ToolFormat(
        name="plamo3",
        models="PLaMo 3",
        content={
            "<|plamo:begin_tool_requests:plamo|>": "section",
            "<|plamo:begin_tool_request:plamo|>": "request",
        },
        states=lambda: {
            "section": Expect({marker: _PLAMO_AFTER[marker] for marker in list(_PLAMO_AFTER)[2:]}),
            "request": Expect({"<|plamo:begin_tool_name:plamo|>": "name"}),
            **named_calls({"<|plamo:end_tool_name:plamo|>": "opened"}, _PLAMO_AFTER),
            "opened": Expect({"<|plamo:begin_tool_arguments:plamo|>": "kind"}),
            "kind": Expect(
                {"<|plamo:constrain|>": "kind", "json": "kind", "<|plamo:msg|>": "kind"}, otherwise="arguments"
            ),
        },
        prefix="<|plamo:begin_tool_requests:plamo|><|plamo:begin_tool_request:plamo|><|plamo:begin_tool_name:plamo|>NAME"
        "<|plamo:end_tool_name:plamo|><|plamo:begin_tool_arguments:plamo|><|plamo:constrain|>json<|plamo:msg|>",
        suffix="<|plamo:end_tool_arguments:plamo|><|plamo:end_tool_request:plamo|><|plamo:end_tool_requests:plamo|>",
        trigger="<|plamo:begin_tool_requests:plamo|>",
        fingerprints=(("<|plamo:begin_tool_request",), ("<|plamo:begin_", "tool_requests")),
    ),
    ToolFormat(
        name="granite_20b_fc",
        models="Granite 20B function calling",
        content={"<function_call>": "call"},
        states=lambda: json_calls(("<function_call>",)),
        prefix='<function_call> {"name": "NAME", "arguments": ',
        suffix="}",
        trigger="<function_call>",
        fingerprints=(("<function_call>",),),
    ),
    ToolFormat(
        name="minimax_m1",
        models="MiniMax-M1",
        content={"<tool_calls>": "call"},
        states=lambda: json_calls(("<tool_calls>",), ("</tool_calls>",), in_a_row=True),
        prefix='<tool_calls>\n{"name": "NAME", "arguments": ',
        suffix="}\n</tool_calls>",
        recover="rest",
        trigger="<tool_calls>",
        fingerprints=(("<beginning_of_sentence>", "<tool_calls>"),),
    ),
)
