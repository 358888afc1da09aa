"""Formats in which messages have channels or kinds: they say how thinking, text and calls are marked, all three.

Sources: the models' published cards and chat templates, named by the entry's `models`.
"""

from __future__ import annotations

from quire_renderers.format_families import CallKeys, States, call_object, tagged_calls
from quire_renderers.format_states import Expect, Go, Literal, Role, Sink, Until
from quire_renderers.tool_format import ToolFormat

__all__ = ["CHANNEL_TOOL_FORMATS"]


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


def _inkling() -> States:
    """Messages with a kind of content each; a call's name may stand before its content, in it, or in both."""
    kinds: dict[str, Go | str] = {
        "<|content_thinking|>": Go("thinking", commits=True),
        "<|content_text|>": Go("content", commits=True),
        "<|content_invoke_tool_json|>": "bare",
    }
    of_assistant = {f"assistant{marker}": go for marker, go in kinds.items() if isinstance(go, Go)}
    ends: dict[str, Go | str] = {
        "<|end_message|>": Go("between", commits=True),
        "<|content_model_end_sampling|>": Go("between", commits=True),
    }
    text: dict[str, Go | str] = {**ends, "<|message_model|>": "header", "<|content_invoke_tool_json|>": "bare"}
    states: States = {
        "start": Expect({"<|message_model|>": "header", **kinds}, otherwise="content"),
        "between": Expect({"<|message_model|>": "header", **ends, **kinds}, otherwise="content"),
        "header": Expect(kinds | of_assistant, otherwise="header_name"),
        "header_name": Until(Sink.NAME, {"<|content_invoke_tool_json|>": "named"}),
        "bare": Expect({"{": "bare_key"}),
        "named": Expect({"{": "named_key"}),
        "thinking": Until(
            Sink.REASONING, {**ends, "<|message_model|>": "header", "<|content_invoke_tool_json|>": "bare"}
        ),
        "content": Until(Sink.CONTENT, text),
        "after": Until(Sink.CONTENT, text),
    }
    arguments = ("args", "arguments")
    states |= call_object("bare_", "after", CallKeys(arguments=arguments))
    return states | call_object("named_", "after", CallKeys(arguments=arguments, names_again=True))


def _muse() -> States:
    """Messages to somebody: to itself is thinking, to the user is text, to a tool holds calls with tags."""
    receivers: dict[str, Go | str] = {
        "to=self<|message|>": Go("thinking", commits=True),
        "to=user<|message|>": Go("content", commits=True),
        "to=": "receiver",
        "<|message|>": Go("content", commits=True),
    }
    ends: dict[str, Go | str] = {"<|eom|>": Go("between", commits=True), "<|eot|>": Go("between", commits=True)}
    outer: dict[str, Go | str] = {
        "<atem:function_calls>": "open",
        "</atem:function_calls>": Go("after", commits=True),
        **ends,
        '<atem:invoke name="': "name",
        "<|start|>": "header",
    }
    made = tagged_calls(
        {'<atem:invoke name="': "name"},
        call='<atem:invoke name="',
        name_exits={'">': "parameters"},
        parameter='<atem:parameter name="',
        key_exits={'">': "value"},
        value_end="</atem:parameter>",
        call_end="</atem:invoke>",
        after=outer,
    )
    return made | {
        "start": Expect({"<|start|>": "header", **receivers}, otherwise="content"),
        "between": Expect({"<|start|>": Go("header", commits=True), **ends, **receivers}, otherwise="content"),
        "header": Expect({"assistant": "header", **receivers}),
        "receiver": Until(Sink.KEY, {"<|message|>": "block"}),
        "block": Expect({"<atem:function_calls>": "open", '<atem:invoke name="': "name"}),
        "thinking": Until(Sink.REASONING, {**ends, "<atem:function_calls>": "open", "<|start|>": "header"}),
        "content": Until(Sink.CONTENT, outer),
    }


# In the order in which a template is compared with them.
CHANNEL_TOOL_FORMATS = (
    ToolFormat(
        name="muse",
        models="Muse Glimmer",
        content={},
        states=_muse,
        options={"start_thinking": "thinking", "recover_thinking": "thinking", "untyped_values": "json"},
        prefix='to=functions<|message|><atem:function_calls>\n<atem:invoke name="NAME">\n',
        thinks=True,
        fingerprints=(("<atem:function_calls>",), ("<|start|>", "<|eom|>", "to=self")),
    ),
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
    ToolFormat(
        name="inkling",
        models="Inkling",
        content={},
        states=_inkling,
        options={"start_thinking": "thinking", "recover_thinking": "thinking"},
        prefix='<|message_model|>NAME<|content_invoke_tool_json|>{"name": "NAME", "args": ',
        suffix="}<|end_message|>",
        thinks=True,
        fingerprints=(("<|content_invoke_tool_json|>",), ("<|message_model|>",)),
    ),
)
