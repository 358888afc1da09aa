"""How models write tool calls: one entry per format, data only.

Sources: the models' published cards and chat templates, named by the entry's `models`. The shapes are those of
format_families.py; a format that has none of them (Harmony) is spelled out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from quire_renderers.format_families import States, json_calls, named_calls, python_calls, tagged_calls
from quire_renderers.format_states import Expect, Go, Literal, Role, Sink, Until
from quire_renderers.literal_relay import GEMMA

__all__ = ["ALIASES", "TOOL_FORMATS", "ToolFormat"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """One way of writing tool calls."""

    name: str
    models: str
    """Who writes so."""
    content: Mapping[str, Go | str]
    """Markers that begin calls inside the answer's text."""
    states: Callable[[], States]
    """Makes the states behind them; `begin`, if there is one, is where an answer begins. Made for the format that is
    used, not for all of them."""
    recover: str = "after"
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of `FormatTable`."""
    prefix: str
    """The beginning of a call up to its arguments, with NAME for the tool: what a forced call starts with."""
    suffix: str = ""
    """What stands behind the arguments, for formats whose arguments are one JSON object."""
    trigger: str = ""
    """The text that tells a grammar that a call begins; empty where the arguments are no JSON."""
    call_id: str = "call"
    """How ids are made: "call" (call_ and random), "alnum9" (nine letters or digits), "functions" (the model's)."""
    fingerprints: tuple[tuple[str, ...], ...] = ()
    """Texts that a chat template has all of, for one of the tuples."""
    thinks: bool = False
    """Whether the states also say how thinking is marked."""


def _tagged(
    name: str,
    models: str,
    outer: tuple[str, str],
    inner: str,
    parameter: str,
    value_end: str,
    call_end: str,
    fingerprints: tuple[tuple[str, ...], ...],
    *,
    key_exits: Mapping[str, Go | str],
    section: tuple[str, str] | None = None,
    strips_newline: bool = False,
    name_end: str = '">',
    bare_inner: bool = False,
    untyped: str = "text",
) -> ToolFormat:
    """A format of the shape `OUTER INNER name NAME_END <parameter ...>...`."""
    openers: dict[str, Go | str] = {outer[0]: "open"}
    if bare_inner:
        openers[inner] = "name"
    if section is not None:
        openers[section[0]] = "section"
    closers: dict[str, Go | str] = {outer[1]: Go("again", commits=True)}
    if section is not None:
        closers[section[1]] = Go("content", commits=True)
    after = {**openers, **closers}
    if not bare_inner:
        after[inner] = "name"  # several calls inside of one outer pair

    ways = _TaggedWays(outer[0], inner, name_end, section, openers, after)
    return ToolFormat(
        name=name,
        models=models,
        content=openers,
        states=partial(_tagged_states, ways, parameter, key_exits, value_end, call_end),
        options={"strips_newline": strips_newline, "untyped_values": untyped},
        prefix=f"{section[0] if section else ''}{outer[0]}\n{inner}NAME{name_end}\n",
        fingerprints=fingerprints,
    )


@dataclass(frozen=True, slots=True)
class _TaggedWays:
    """Where a tagged format's markers lead."""

    outer: str
    inner: str
    name_end: str
    section: tuple[str, str] | None
    openers: Mapping[str, Go | str]
    after: Mapping[str, Go | str]


def _tagged_states(
    ways: _TaggedWays, parameter: str, key_exits: Mapping[str, Go | str], value_end: str, call_end: str
) -> States:
    """The states behind a tagged format's markers."""
    made = tagged_calls(
        {ways.inner: "name"},
        call=ways.inner,
        name_exits={ways.name_end: "parameters"},
        parameter=parameter,
        key_exits=key_exits,
        value_end=value_end,
        call_end=call_end,
        after=ways.after,
    )
    ends: dict[str, Go | str] = {}
    if ways.section is not None:
        ends = {ways.section[1]: Go("content", commits=True)}
        made["section"] = Expect({ways.outer: "open", **ends})
    made["again"] = Until(Sink.CONTENT, {**ways.openers, **ends})
    return made


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


def _harmony() -> States:
    """OpenAI's Harmony response format: messages with a channel and perhaps a recipient, in any order."""
    between: dict[str, Go | str] = {
        "<|end|>": Go("between", commits=True),
        "<|call|>": Go("between", commits=True),
        "<|return|>": Go("between", commits=True),
        "<|start|>assistant": Go("header", commits=True),
        "<|channel|>": Go("channel", commits=True),
    }
    recipient: dict[str, Go | str] = {"to=": "to"}
    words = ("json", "code", "text", "commentary", "<|constrain|>")
    of_call: dict[str, Go | str] = {"<|message|>": "arguments", "<|channel|>": "of_call"}
    of_code: dict[str, Go | str] = {"<|message|>": "script", "<|channel|>": "of_code"}
    behind_name = ("<|channel|>", "<|constrain|>", " ")
    code_ends = ("<|call|>", "<|end|>", "<|return|>")
    return {
        "start": Expect(
            {"<|start|>assistant": "header", "<|channel|>": "channel", "<|message|>": Go("content", commits=True),
             **recipient},
            otherwise="content",
        ),
        "between": Expect(
            {"<|start|>assistant": Go("header", commits=True), "<|channel|>": Go("channel", commits=True)},
            otherwise="content",
        ),
        "header": Expect({"<|channel|>": "channel", "<|message|>": Go("content", commits=True), **recipient}),
        "channel": Expect({"analysis": "analysis", "final": "final", "commentary": "commentary"}),
        "analysis": Expect(
            {"<|message|>": Go("thinking", commits=True), **recipient} | dict.fromkeys(words, "analysis")
        ),
        "thinking": Until(Sink.REASONING, {**between, "<|start|>assistant": "header", "<|channel|>": "channel"}),
        "final": Expect({"<|message|>": Go("content", commits=True)} | dict.fromkeys(words, "final")),
        "commentary": Expect(
            {"<|message|>": Go("content", commits=True), **recipient} | dict.fromkeys(words, "commentary")
        ),
        # What the built-in python is given is code, mostly.
        "to": Expect(
            {f"python{behind}": Go("python", keeps_marker=True) for behind in ("<|message|>", *behind_name)},
            otherwise="recipient",
        ),
        "python": Until(Sink.NAME, {"<|message|>": "script"} | dict.fromkeys(behind_name, "of_code")),
        "of_code": Expect(of_code | dict.fromkeys((*words, "analysis"), "of_code")),
        "script": Expect({"{": Go("arguments", keeps_marker=True)}, otherwise="code"),
        "code": Until(Sink.VALUE_TEXT, {end: Go("between", ends_call=True) for end in code_ends}, key="code"),
        "recipient": Until(Sink.NAME, {"<|message|>": "arguments"} | dict.fromkeys(behind_name, "of_call")),
        "of_call": Expect(of_call | dict.fromkeys((*words, "analysis"), "of_call")),
        "arguments": Literal(Role.ARGUMENTS, "after", ends_call=True),
        "content": Until(Sink.CONTENT, between),
        "after": Until(Sink.CONTENT, between),
    }  # fmt: skip


def _of(*formats: ToolFormat) -> dict[str, ToolFormat]:
    return {each.name: each for each in formats}


# In the order in which a template is compared with them: the telling fingerprints first.
TOOL_FORMATS = _of(
    ToolFormat(
        name="gpt_oss",
        models="gpt-oss (Harmony)",
        content={},
        states=_harmony,
        options={
            "name_pattern": r"(?:functions\.)?(?P<name>[\w.:/\-]{1,256}?)",
            "start_thinking": "thinking",
            "recover_thinking": "thinking",
        },
        prefix="<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>",
        suffix="<|call|>",
        thinks=True,
        fingerprints=(("<|channel|>", "<|message|>"),),
    ),
    _tagged(
        "deepseek_v32",
        "DeepSeek-V3.2",
        ("<｜DSML｜function_calls>", "</｜DSML｜function_calls>"),
        '<｜DSML｜invoke name="',
        '<｜DSML｜parameter name="',
        "</｜DSML｜parameter>",
        "</｜DSML｜invoke>",
        (("｜DSML｜",),),
        key_exits={'" string="true">': "value_text", '" string="false">': "value_json", '">': "value"},
    ),
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
    _tagged(
        "minimax_m2",
        "MiniMax-M2",
        ("<minimax:tool_call>", "</minimax:tool_call>"),
        '<invoke name="',
        '<parameter name="',
        "</parameter>",
        "</invoke>",
        (("<minimax:tool_call>",),),
        key_exits={'">': "value"},
        untyped="json",
    ),
    _tagged(
        "seed_oss",
        "Seed-OSS",
        ("<seed:tool_call>", "</seed:tool_call>"),
        "<function=",
        "<parameter=",
        "</parameter>",
        "</function>",
        (("<seed:tool_call>",),),
        key_exits={">": "value"},
        strips_newline=True,
        name_end=">",
    ),
    _tagged(
        "step3",
        "Step3",
        ("<｜tool_call_begin｜>function<｜tool_sep｜>", "<｜tool_call_end｜>"),
        '<steptml:invoke name="',
        '<steptml:parameter name="',
        "</steptml:parameter>",
        "</steptml:invoke>",
        (("steptml",),),
        key_exits={'">': "value"},
        section=("<｜tool_calls_begin｜>", "<｜tool_calls_end｜>"),
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
    _tagged(
        "qwen3_coder",
        "Qwen3-Coder, Qwen3.5, Nemotron 3",
        ("<tool_call>", "</tool_call>"),
        "<function=",
        "<parameter=",
        "</parameter>",
        "</function>",
        (("<function=", "<parameter="),),
        key_exits={">": "value"},
        strips_newline=True,
        name_end=">",
        bare_inner=True,
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

ALIASES = {
    "openai": "gpt_oss",
    "openai_gptoss": "gpt_oss",
    "qwen": "hermes",
    "qwen25": "hermes",
    "qwen3": "hermes",
    "qwen3_xml": "qwen3_coder",
    "nemotron_v3": "qwen3_coder",
    "glm47": "glm45",
    "glm4_moe": "glm45",
    "minimax": "minimax_m2",
    "phi4_mini_json": "phi4_mini",
    "llama3": "llama3_json",
    "llama4_json": "llama3_json",
    "granite-20b-fc": "granite",
    "llama4": "llama4_pythonic",
    "hunyuan_a13b": "jamba",
}
"""Other names under which a format is known."""
