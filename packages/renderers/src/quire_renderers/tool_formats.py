"""How models write tool calls: one entry per format, data only.

Sources: the models' published cards and chat templates, named by the entry's `models`. The shapes are those of
format_families.py; a format that has none of them (Harmony) is spelled out.
"""

from __future__ import annotations

from quire_renderers.channel_tool_formats import CHANNEL_TOOL_FORMATS
from quire_renderers.format_families import json_calls, named_calls, python_calls, tagged_calls
from quire_renderers.format_states import Expect, Go, Sink, Until
from quire_renderers.json_tool_formats import JSON_TOOL_FORMATS
from quire_renderers.literal_relay import GEMMA
from quire_renderers.tagged_tool_formats import TAGGED_TOOL_FORMATS, TaggedCalls
from quire_renderers.tool_format import ToolFormat

__all__ = ["TOOL_FORMATS", "ToolFormat"]

_DEEPSEEK_OPEN = {"<｜tool▁calls▁begin｜>": "section", "<｜tool▁call▁begin｜>": "kind"}
_DEEPSEEK_AFTER: dict[str, Go | str] = {
    "<｜tool▁call▁end｜>": Go("after", commits=True),
    "<｜tool▁call▁begin｜>": "kind",
    "<｜tool▁calls▁end｜>": Go("content", commits=True),
}
_DEEPSEEK_SECTION = Expect({"<｜tool▁call▁begin｜>": "kind", "<｜tool▁calls▁end｜>": Go("content", commits=True)})
_KIMI_AFTER: dict[str, Go | str] = {
    "<|tool_call_end|>": Go("after", commits=True),
    "<|tool_call_begin|>": "name",
    "<|tool_calls_section_end|>": Go("content", commits=True),
}
_GLM_AFTER: dict[str, Go | str] = {"<tool_call>": "name", "</tool_call>": Go("after", commits=True)}
_MISTRAL_AFTER: dict[str, Go | str] = {"[TOOL_CALLS]": "head"}
_PYTHONIC_AFTER: dict[str, Go | str] = {"<|python_start|>": "opened", "<|python_end|>": Go("after", commits=True)}
_LLAMA_END = ("<|eom_id|>", "<|eot_id|>")


def _of(*formats: ToolFormat) -> dict[str, ToolFormat]:
    return {each.name: each for each in formats}


# In the order in which a template is compared with them: the telling fingerprints first.
TOOL_FORMATS = _of(
    *CHANNEL_TOOL_FORMATS,
    *TAGGED_TOOL_FORMATS,
    *JSON_TOOL_FORMATS,
    ToolFormat(
        name="kimi_k2",
        models="Kimi-K2, Kimi-K2.5",
        content={"<|tool_calls_section_begin|>": "section", "<|tool_call_begin|>": "name"},
        states=lambda: {
            **named_calls({"<|tool_call_argument_begin|>": "arguments"}, _KIMI_AFTER),
            "section": Expect(
                {"<|tool_call_begin|>": "name", "<|tool_calls_section_end|>": Go("content", commits=True)}
            ),
        },
        options={"name_pattern": r"(?:functions\.)?(?P<name>[\w.\-]{1,256}?)(?P<id>:\d+)?"},
        prefix="<|tool_calls_section_begin|><|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>",
        suffix="<|tool_call_end|><|tool_calls_section_end|>",
        trigger="<|tool_calls_section_begin|>",
        call_id="functions",
        fingerprints=(("<|tool_calls_section_begin|>",),),
    ),
    ToolFormat(
        name="minimax_m2",
        models="MiniMax-M2",
        content={"<minimax:tool_call>": "open"},
        states=TaggedCalls(
            outer=("<minimax:tool_call>", "</minimax:tool_call>"),
            inner='<invoke name="',
            parameter='<parameter name="',
            value_end="</parameter>",
            call_end="</invoke>",
            key_exits={'">': "value"},
        ),
        options={"untyped_values": "json"},
        prefix='<minimax:tool_call>\n<invoke name="NAME">\n',
        fingerprints=(("<minimax:tool_call>",),),
    ),
    ToolFormat(
        name="seed_oss",
        models="Seed-OSS",
        content={"<seed:tool_call>": "open"},
        states=TaggedCalls(
            outer=("<seed:tool_call>", "</seed:tool_call>"),
            inner="<function=",
            parameter="<parameter=",
            value_end="</parameter>",
            call_end="</function>",
            key_exits={">": "value"},
            name_end=">",
        ),
        options={"strips_newline": True},
        prefix="<seed:tool_call>\n<function=NAME>\n",
        fingerprints=(("<seed:tool_call>",),),
    ),
    ToolFormat(
        name="step3",
        models="Step3",
        content={"<｜tool_call_begin｜>function<｜tool_sep｜>": "open", "<｜tool_calls_begin｜>": "section"},
        states=TaggedCalls(
            outer=("<｜tool_call_begin｜>function<｜tool_sep｜>", "<｜tool_call_end｜>"),
            inner='<steptml:invoke name="',
            parameter='<steptml:parameter name="',
            value_end="</steptml:parameter>",
            call_end="</steptml:invoke>",
            key_exits={'">': "value"},
            section=("<｜tool_calls_begin｜>", "<｜tool_calls_end｜>"),
        ),
        prefix='<｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜>\n<steptml:invoke name="NAME">\n',
        fingerprints=(("steptml",),),
    ),
    ToolFormat(
        name="functiongemma",
        models="FunctionGemma",
        content={"<start_function_call>": "head"},
        states=lambda: {
            "head": Expect({"call:": "name"}),
            **named_calls(
                {"{": Go("arguments", keeps_marker=True)},
                {"<start_function_call>": "head", "<end_function_call>": Go("after", commits=True)},
                dialect=GEMMA,
            ),
        },
        prefix="<start_function_call>call:NAME",
        fingerprints=(("<start_function_call>",), ("<start_function_declaration>",)),
    ),
    ToolFormat(
        name="glm45",
        models="GLM-4.5, GLM-4.6, GLM-4.7",
        content={"<tool_call>": "name"},
        states=lambda: tagged_calls(
            {},
            call="<tool_call>",
            name_exits={
                "<arg_key>": Go("key"),
                "</tool_call>": Go("after", ends_call=True),
            },
            parameter="<arg_key>",
            key_exits={"</arg_key>": "between"},
            key_to_value="<arg_value>",
            value_end="</arg_value>",
            call_end="</tool_call>",
            after=_GLM_AFTER,
        ),
        options={"untyped_values": "json"},
        prefix="<tool_call>NAME\n",
        fingerprints=(("<arg_key>",),),
    ),
    ToolFormat(
        name="qwen3_coder",
        models="Qwen3-Coder, Qwen3.5, Nemotron 3",
        content={"<tool_call>": "open", "<function=": "name"},
        states=TaggedCalls(
            outer=("<tool_call>", "</tool_call>"),
            inner="<function=",
            parameter="<parameter=",
            value_end="</parameter>",
            call_end="</function>",
            key_exits={">": "value"},
            name_end=">",
            bare_inner=True,
        ),
        options={"strips_newline": True},
        prefix="<tool_call>\n<function=NAME>\n",
        fingerprints=(("<function=", "<parameter="),),
    ),
    ToolFormat(
        name="deepseek_v3",
        models="DeepSeek-V3, DeepSeek-R1-0528",
        content=_DEEPSEEK_OPEN,
        states=lambda: {
            "section": _DEEPSEEK_SECTION,
            "kind": Expect({"function<｜tool▁sep｜>": "name"}),
            **named_calls({"```json": "arguments"}, _DEEPSEEK_AFTER, fence="```"),
        },
        prefix="<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\n",
        suffix="\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        trigger="<｜tool▁calls▁begin｜>",
        fingerprints=(("<｜tool▁calls▁begin｜>", "```json"), ("<｜tool▁call▁begin｜>", "```json")),
    ),
    ToolFormat(
        name="deepseek_v31",
        models="DeepSeek-V3.1",
        content=_DEEPSEEK_OPEN,
        states=lambda: {
            "section": _DEEPSEEK_SECTION,
            "kind": Expect({}, otherwise="name"),
            **named_calls({"<｜tool▁sep｜>": "arguments"}, _DEEPSEEK_AFTER),
        },
        prefix="<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>NAME<｜tool▁sep｜>",
        suffix="<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        trigger="<｜tool▁calls▁begin｜>",
        fingerprints=(("<｜tool▁calls▁begin｜>",), ("<｜tool▁call▁begin｜>",)),
    ),
    ToolFormat(
        name="internlm",
        models="InternLM2.5, InternLM3",
        content={"<|action_start|>": "kind"},
        states=lambda: {
            "kind": Expect({"<|plugin|>": "call"}),
            **json_calls((), ("<|action_end|>",)),
            "after": Until(Sink.CONTENT, {"<|action_start|>": "kind", "<|action_end|>": Go("content", commits=True)}),
        },
        prefix='<|action_start|><|plugin|>\n{"name": "NAME", "parameters": ',
        suffix="}<|action_end|>",
        trigger="<|action_start|>",
        fingerprints=(("<|action_start|>",), ("<|plugin|>",)),
    ),
    ToolFormat(
        name="granite",
        models="Granite 3",
        content={"<|tool_call|>": "call", "<tool_call>": "call"},
        states=lambda: json_calls(("<|tool_call|>", "<tool_call>"), ("<|/tool_call|>", "</tool_call>")),
        prefix='<|tool_call|>[{"name": "NAME", "arguments": ',
        suffix="}]",
        trigger="<|tool_call|>",
        fingerprints=(("<|tool_call|>", "<|start_of_role|>"),),
    ),
    ToolFormat(
        name="phi4_mini",
        models="Phi-4-mini",
        content={"functools": "call", "<|tool_call|>": "call"},
        states=lambda: json_calls(("functools", "<|tool_call|>"), ("<|/tool_call|>",)),
        options={"known_names_only": True},
        prefix='functools[{"name": "NAME", "arguments": ',
        suffix="}]",
        trigger="functools[",
        fingerprints=(("<|tool|>", "<|/tool|>"), ("functools",)),
    ),
    ToolFormat(
        name="olmo3",
        models="OLMo 3",
        content={"<function_calls>": "call"},
        states=lambda: python_calls(
            None,
            {"</function_calls>": Go("after", commits=True)},
            {"<function_calls>": "call", "</function_calls>": Go("after", commits=True)},
        ),
        prefix="<function_calls>\nNAME(",
        fingerprints=(("<function_calls>",),),
    ),
    ToolFormat(
        name="jamba",
        models="Jamba 1.5, 1.6, 1.7",
        content={"<tool_calls>": "call"},
        states=lambda: json_calls(("<tool_calls>",), ("</tool_calls>",)),
        prefix='<tool_calls>[\n    {"name": "NAME", "arguments": ',
        suffix="}\n]</tool_calls>",
        trigger="<tool_calls>",
        fingerprints=(("<tool_calls>",),),
    ),
    ToolFormat(
        name="mistral",
        models="Mistral, Mixtral, Magistral, Devstral",
        content={"[TOOL_CALLS]": "head"},
        states=lambda: {
            **json_calls(("[TOOL_CALLS]",)),
            **named_calls(
                {"{": Go("arguments", keeps_marker=True), "[ARGS]": "arguments", "[CALL_ID]": "call_id"}, _MISTRAL_AFTER
            ),
            "call_id": Until(Sink.ID, {"[ARGS]": "arguments", "{": Go("arguments", keeps_marker=True)}),
            "head": Expect({"[": Go("call", keeps_marker=True), "{": Go("call", keeps_marker=True)}, otherwise="name"),
        },
        prefix='[TOOL_CALLS][{"name": "NAME", "arguments": ',
        suffix="}]",
        trigger="[TOOL_CALLS]",
        call_id="alnum9",
        fingerprints=(("[TOOL_CALLS]",),),
    ),
    ToolFormat(
        name="llama4_pythonic",
        models="Llama 4",
        content={"<|python_start|>": "opened"},
        states=lambda: {
            **python_calls(
                {"[": "name", "<|python_start|>": "opened"}, {"]": Go("closed", commits=True)}, _PYTHONIC_AFTER
            ),
            "opened": Expect({"[": "name"}, otherwise="name"),
            "closed": Expect({"<|python_end|>": Go("after", commits=True)}, otherwise="after"),
        },
        options={"known_names_only": True},
        prefix="[NAME(",
        fingerprints=(("<|python_start|>",), ("<|header_start|>", "<|header_end|>")),
    ),
    ToolFormat(
        name="llama3_json",
        models="Llama 3.1, 3.2, 3.3",
        content={"<|python_tag|>": "call"},
        states=lambda: json_calls(("<|python_tag|>",), _LLAMA_END, separators=(";", ","), bare=True),
        recover="rest",
        options={"known_names_only": True},
        prefix='{"name": "NAME", "parameters": ',
        suffix="}",
        trigger='{"name": "',
        fingerprints=(("<|python_tag|>",), ("<|start_header_id|>", '"parameters"'), ("<|start_header_id|>", "tool")),
    ),
    ToolFormat(
        name="hermes",
        models="Hermes, Qwen2.5, Qwen3, SmolLM3, Granite 4, the demo model",
        content={"<tool_call>": "call"},
        states=lambda: json_calls(("<tool_call>",), ("</tool_call>",)),
        prefix='<tool_call>\n{"name": "NAME", "arguments": ',
        suffix="}\n</tool_call>",
        trigger="<tool_call>",
        fingerprints=(("<tool_call>",),),
    ),
    ToolFormat(
        name="xlam",
        models="xLAM",
        content={"<tool_call>": "call", "[TOOL_CALLS]": "call", "```json": "call"},
        states=lambda: {
            **json_calls(("<tool_call>", "[TOOL_CALLS]", "```json"), ("</tool_call>",), bare=True),
            "after": Expect(
                {"```": Go("rest", commits=True), "</tool_call>": Go("rest", commits=True), ",": "call", ";": "call"},
                otherwise="rest",
            ),
        },
        recover="rest",
        options={"known_names_only": True},
        prefix='[{"name": "NAME", "arguments": ',
        suffix="}]",
        trigger='[{"name": "',
        fingerprints=(('"tool_calls"', "xLAM"), ("You are a helpful assistant developed by Salesforce",)),
    ),
    ToolFormat(
        name="pythonic",
        models="Llama 3.2 (pythonic), ToolACE",
        content={},
        states=lambda: python_calls({"[": "name"}, {"]": Go("after", commits=True)}, {}),
        options={"known_names_only": True},
        prefix="[NAME(",
        fingerprints=(("[func_name1(params_name1=params_value1",),),
    ),
)
"""Name -> format."""
