"""Formats of tool calls with a tag per parameter: what makes one, and those that are not in tool_formats.py itself.

Sources: the models' published cards and chat templates, named by the entry's `models`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from quire_renderers.format_families import States, json_calls, tagged_calls, with_prefix
from quire_renderers.format_states import Expect, Go, Literal, Role, Sink, Until
from quire_renderers.tag_tree_relay import TagTree
from quire_renderers.tool_format import ToolFormat

__all__ = ["TAGGED_TOOL_FORMATS", "TaggedCalls"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TaggedCalls:
    """The states of `OUTER INNER name NAME_END <parameter ...>...`."""

    outer: tuple[str, str]
    """What stands before and behind calls."""
    inner: str
    """What stands before a name."""
    parameter: str
    """What begins a parameter."""
    key_exits: Mapping[str, Go | str]
    """As in `tagged_calls`."""
    value_end: str
    call_end: str
    section: tuple[str, str] | None = None
    """What stands before and behind all of that."""
    name_end: str = '">'
    bare_inner: bool = False
    """Whether a name may begin without what stands before calls."""

    def __call__(self) -> States:
        """The states behind the openers."""
        openers: dict[str, Go | str] = {self.outer[0]: "open"}
        if self.bare_inner:
            openers[self.inner] = "name"
        ends: dict[str, Go | str] = {}
        if self.section is not None:
            openers[self.section[0]] = "section"
            ends = {self.section[1]: Go("content", commits=True)}
        after = {**openers, self.outer[1]: Go("again", commits=True), **ends}
        after[self.inner] = "name"  # several calls inside of one outer pair
        made = tagged_calls(
            {self.inner: "name"},
            call=self.inner,
            name_exits={self.name_end: "parameters"},
            parameter=self.parameter,
            key_exits=self.key_exits,
            value_end=self.value_end,
            call_end=self.call_end,
            after=after,
        )
        if self.section is not None:
            made["section"] = Expect({self.outer[0]: "open", **ends})
        made["again"] = Until(Sink.CONTENT, {**openers, **ends})
        return made


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyedCalls:
    """The states of `CALL name [NAME_END] KEY key /KEY VALUE value /VALUE ... /CALL`, each pair before and behind."""

    call: tuple[str, str]
    key: tuple[str, str]
    value: tuple[str | None, str]
    """None before it where the end of the key does."""
    section: tuple[str, str] | None = None
    """What stands before and behind all calls."""
    name_end: str | None = None
    """What stands behind the name, where that is a marker of its own."""

    def __call__(self) -> States:
        """The states behind the openers."""
        call, key, section = self.call, self.key, self.section
        after: dict[str, Go | str] = {call[0]: "name", call[1]: Go("after", commits=True)}
        ends: dict[str, Go | str] = {}
        if section is not None:
            ends = {section[1]: Go("content", commits=True)}
            after |= {section[0]: "section", **ends}
        name_exits: dict[str, Go | str] = {key[0]: "key", call[1]: Go("after", ends_call=True)}
        if self.name_end is not None:
            name_exits[self.name_end] = "parameters"
        made = tagged_calls(
            {},
            call=call[0],
            name_exits=name_exits,
            parameter=key[0],
            key_exits={key[1]: "between" if self.value[0] is not None else "value"},
            key_to_value=self.value[0],
            value_end=self.value[1],
            call_end=call[1],
            after=after,
        )
        if section is not None:
            made["section"] = Expect({call[0]: "name", **ends})
        return made


@dataclass(frozen=True, slots=True)
class OrJson:
    """The states of a format whose calls may also be JSON objects."""

    states: Callable[[], States]
    before: str
    """The state in which one or the other comes; that of the name stands behind one of its own, "either"."""

    def __call__(self) -> States:
        """The states behind the openers."""
        made = dict(self.states())
        objects: dict[str, Go | str] = {char: Go("json/call", keeps_marker=True) for char in "{["}
        way = made[self.before]
        if isinstance(way, Expect):
            made[self.before] = replace(way, exits={**way.exits, **objects})
        else:
            made["either"] = Expect(objects, otherwise=self.before)
            for name in ("section", "after"):
                state = made.get(name)
                if isinstance(state, (Expect, Until)):
                    exits = {marker: "either" if go == self.before else go for marker, go in state.exits.items()}
                    made[name] = replace(state, exits=exits)
        return made | with_prefix(json_calls(()), "json/", kept=("content", "after"))


_DSML_KEY_EXITS = {'" string="true">': "value_text", '" string="false">': "value_json", '">': "value"}
_ARG_KEY, _ARG_VALUE = ("<arg_key>", "</arg_key>"), ("<arg_value>", "</arg_value>")


def _with_ending(pair: tuple[str, str], ending: str) -> tuple[str, str]:
    """Tags with an ending of their names."""
    return pair[0][:-1] + ending + ">", pair[1][:-1] + ending + ">"


def _hunyuan(ending: str) -> States:
    calls = KeyedCalls(
        call=_with_ending(("<tool_call>", "</tool_call>"), ending),
        key=_with_ending(_ARG_KEY, ending),
        value=_with_ending(_ARG_VALUE, ending),
        section=_with_ending(("<tool_calls>", "</tool_calls>"), ending),
        name_end=f"<tool_sep{ending}>",
    )
    return calls()


def _hy_v3() -> States:
    """Both endings; behind a malformed call, either may come."""
    states = _hunyuan("") | with_prefix(_hunyuan(":opensource"), "opensource/", kept=("content",))
    exits: dict[str, Go | str] = {}
    for name in ("after", "opensource/after"):
        state = states[name]
        assert isinstance(state, Until)
        exits |= state.exits
    return states | {"recover": Until(Sink.CONTENT, exits)}


def _k2_states() -> States:
    """Between a key and its value a type may stand."""
    calls = KeyedCalls(
        call=("<ifm|tool_call>", "</ifm|tool_call>"),
        key=("<ifm|arg_key>", "</ifm|arg_key>"),
        value=("<ifm|arg_value>", "</ifm|arg_value>"),
        section=("<ifm|tool_calls>", "</ifm|tool_calls>"),
    )
    types = ("number", "integer", "boolean", "object", "array", "null")
    typed = {f"<ifm|arg_type>{kind}</ifm|arg_type>": "between_json" for kind in types}
    before_value: dict[str, Go | str] = {"<ifm|arg_value>": "value"}
    return calls() | {
        "between": Expect({**before_value, "<ifm|arg_type>string</ifm|arg_type>": "between_text", **typed}),
        "between_text": Expect({"<ifm|arg_value>": "value_text"}),
        "between_json": Expect({"<ifm|arg_value>": "value_json"}),
    }


_MINICPM_AFTER: dict[str, Go | str] = {'<function name="': "name"}


def _minicpm5() -> States:
    """Values may begin with CDATA sections. White space around these is none of the value's, all other is."""
    made = tagged_calls(
        {},
        call='<function name="',
        name_exits={'">': "parameters"},
        parameter='<param name="',
        key_exits={'">': Go("begin_value", keeps_marker=True)},
        value_end="</param>",
        call_end="</function>",
        after=_MINICPM_AFTER,
    )
    value = made["value"]
    assert isinstance(value, Until)
    spaces = ("", " ", "\n", "\r\n")
    sections: dict[str, Go | str] = {f'">{space}<![CDATA[': "cdata" for space in spaces}
    ends = {f"{space}</param>": value.exits["</param>"] for space in spaces}
    return made | {
        "begin_value": Expect({'">': "value", **sections}),
        "cdata": Until(Sink.VALUE, {"]]>": Go("behind_cdata", continues=True)}),
        "behind_cdata": Until(Sink.VALUE, {**value.exits, **ends, "<![CDATA[": Go("cdata", continues=True)}),
    }


_XTML_AFTER: dict[str, Go | str] = {
    "<|open|>tools<|sep|>": "section",
    '<|open|>call tool="': "name",
    "<|close|>tools<|sep|>": Go("content", commits=True),
}
_XTML_TYPES = ("number", "integer", "boolean", "object", "array", "null")


def _kimi_k3() -> States:
    """Kimi-K3's markup: tags with attributes, a value's type among them."""
    made = tagged_calls(
        {},
        call='<|open|>call tool="',
        name_exits={'"': "attributes"},
        parameter='<|open|>argument key="',
        key_exits={
            '" type="string"<|sep|>': "value_text",
            **{f'" type="{kind}"<|sep|>': "value_json" for kind in _XTML_TYPES},
            '"<|sep|>': "value",
        },
        value_end="<|close|>argument<|sep|>",
        call_end="<|close|>call<|sep|>",
        after=_XTML_AFTER,
    )
    parameters = made["parameters"]
    assert isinstance(parameters, Expect)
    return made | {
        "section": Expect({marker: go for marker, go in _XTML_AFTER.items() if go != "section"}),
        "attributes": Expect({"index=": "index", "<|sep|>": "first"}),
        "index": Literal(Role.IGNORED, "attributes"),
        # All arguments as one object, or a tag for each.
        "first": replace(parameters, exits={**parameters.exits, '<|open|>json type="object"<|sep|>': "object"}),
        "object": Literal(Role.ARGUMENTS, "object_end"),
        "object_end": Expect({"<|close|>json<|sep|>": Go("last", commits=True)}, otherwise="last"),
        "last": replace(parameters, exits={marker: go for marker, go in parameters.exits.items() if go != "key"}),
    }


_M3 = "]<]minimax[>["
_M3_AFTER: dict[str, Go | str] = {
    f"{_M3}<tool_call>": "open",
    f'{_M3}<invoke name="': "name",
    f"{_M3}</tool_call>": Go("content", commits=True),
}


def _minimax_m3() -> States:
    """Parameters are tags of their own names, and so are the members of objects and lists."""
    return {
        "open": Expect({f'{_M3}<invoke name="': "name", f"{_M3}</tool_call>": Go("content", commits=True)}),
        "name": Until(Sink.NAME, {'">': "arguments"}),
        "arguments": Literal(Role.ARGUMENTS, "end", tree=TagTree(_M3, "invoke", "item")),
        "end": Expect({f"{_M3}</invoke>": Go("after", ends_call=True)}, is_whole=True),
        "after": Until(Sink.CONTENT, _M3_AFTER),
    }


# In the order in which a template is compared with them.
TAGGED_TOOL_FORMATS = (
    ToolFormat(
        name="deepseek_v41",
        models="DeepSeek-V4.1",
        content={"<｜DSML｜ calls>": "open"},
        states=TaggedCalls(
            outer=("<｜DSML｜ calls>", "</｜DSML｜ calls>"),
            inner='<｜DSML｜ invoke name="',
            parameter='<｜DSML｜ parameter name="',
            value_end="</｜DSML｜ parameter>",
            call_end="</｜DSML｜ invoke>",
            key_exits=_DSML_KEY_EXITS,
        ),
        prefix='<｜DSML｜ calls>\n<｜DSML｜ invoke name="NAME">\n',
        fingerprints=(("｜DSML｜ calls",),),
    ),
    ToolFormat(
        name="deepseek_v4",
        models="DeepSeek-V4",
        content={"<｜DSML｜tool_calls>": "open"},
        states=TaggedCalls(
            outer=("<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>"),
            inner='<｜DSML｜invoke name="',
            parameter='<｜DSML｜parameter name="',
            value_end="</｜DSML｜parameter>",
            call_end="</｜DSML｜invoke>",
            key_exits=_DSML_KEY_EXITS,
        ),
        prefix='<｜DSML｜tool_calls>\n<｜DSML｜invoke name="NAME">\n',
        fingerprints=(("｜DSML｜tool_calls",),),
    ),
    ToolFormat(
        name="deepseek_v32",
        models="DeepSeek-V3.2",
        content={"<｜DSML｜function_calls>": "open"},
        states=TaggedCalls(
            outer=("<｜DSML｜function_calls>", "</｜DSML｜function_calls>"),
            inner='<｜DSML｜invoke name="',
            parameter='<｜DSML｜parameter name="',
            value_end="</｜DSML｜parameter>",
            call_end="</｜DSML｜invoke>",
            key_exits=_DSML_KEY_EXITS,
        ),
        prefix='<｜DSML｜function_calls>\n<｜DSML｜invoke name="NAME">\n',
        fingerprints=(("｜DSML｜",),),
    ),
    ToolFormat(
        name="gigachat35",
        models="GigaChat 3.5",
        content={"<｜GCML｜tool_calls>": "open"},
        states=TaggedCalls(
            outer=("<｜GCML｜tool_calls>", "</｜GCML｜tool_calls>"),
            inner='<｜GCML｜invoke name="',
            parameter='<｜GCML｜parameter name="',
            value_end="</｜GCML｜parameter>",
            call_end="</｜GCML｜invoke>",
            key_exits=_DSML_KEY_EXITS,
        ),
        prefix='<｜GCML｜tool_calls>\n<｜GCML｜invoke name="NAME">\n',
        fingerprints=(("｜GCML｜",),),
    ),
    ToolFormat(
        name="dots",
        models="dots",
        content={"<dots_function_call>": "open"},
        states=OrJson(
            TaggedCalls(
                outer=("<dots_function_call>", "</dots_function_call>"),
                inner='<invoke name="',
                parameter='<parameter name="',
                value_end="</parameter>",
                call_end="</invoke>",
                key_exits={'">': "value"},
            ),
            "open",
        ),
        prefix='<dots_function_call>\n<invoke name="NAME">\n',
        fingerprints=(("<dots_function_call>",),),
    ),
    ToolFormat(
        name="longcat",
        models="LongCat-Flash",
        content={"<longcat_tool_call>": "either"},
        states=OrJson(
            KeyedCalls(
                call=("<longcat_tool_call>", "</longcat_tool_call>"),
                key=("<longcat_arg_key>", "</longcat_arg_key>"),
                value=("<longcat_arg_value>", "</longcat_arg_value>"),
            ),
            "name",
        ),
        options={"untyped_values": "json"},
        prefix="<longcat_tool_call>NAME\n",
        fingerprints=(("<longcat_tool_call>",),),
    ),
    ToolFormat(
        name="k2_horizon",
        models="K2 Horizon",
        content={"<ifm|tool_calls>": "section", "<ifm|tool_call>": "either"},
        states=OrJson(_k2_states, "name"),
        options={"untyped_values": "json"},
        prefix="<ifm|tool_calls><ifm|tool_call>NAME\n",
        fingerprints=(("<ifm|tool_call",),),
    ),
    ToolFormat(
        name="iquest_q1",
        models="IQuest-Q1",
        content={"<iquest_tool_call>": "name"},
        states=KeyedCalls(
            call=("<iquest_tool_call>", "</iquest_tool_call>"),
            key=("<arg_key>", "</arg_key>"),
            value=("<arg_value>", "</arg_value>"),
        ),
        options={"untyped_values": "json"},
        prefix="<iquest_tool_call>NAME\n",
        fingerprints=(("<iquest_tool_call>",),),
    ),
    ToolFormat(
        name="solar_open2",
        models="Solar Open 2",
        content={"<|tool_call:start|>": "name"},
        states=KeyedCalls(
            call=("<|tool_call:start|>", "<|tool_call:end|>"),
            key=("<|tool_arg:start|>", "<|tool_arg:value|>"),
            value=(None, "<|tool_arg:end|>"),
        ),
        prefix="<|tool_call:start|>NAME\n",
        fingerprints=(("<|tool_call:start|>",),),
    ),
    ToolFormat(
        name="hy_v3",
        models="Hunyuan 3 (Hy3), with and without the ending of its published tokens",
        content={
            "<tool_calls:opensource>": "opensource/section",
            "<tool_call:opensource>": "opensource/name",
            "<tool_calls>": "section",
            "<tool_call>": "name",
        },
        states=_hy_v3,
        recover="recover",
        options={"untyped_values": "json"},
        prefix="<tool_calls:opensource>\n<tool_call:opensource>NAME<tool_sep:opensource>\n",
        fingerprints=(("<tool_sep",),),
    ),
    ToolFormat(
        name="minimax_m3",
        models="MiniMax-M3",
        content={marker: go for marker, go in _M3_AFTER.items() if isinstance(go, str)},
        states=_minimax_m3,
        prefix=f'{_M3}<tool_call>\n{_M3}<invoke name="NAME">',
        fingerprints=(("]<]minimax[>[",),),
    ),
    ToolFormat(
        name="minicpm5",
        models="MiniCPM5",
        content=_MINICPM_AFTER,
        states=_minicpm5,
        options={"untyped_values": "json"},
        prefix='<function name="NAME">',
        fingerprints=(('<function name="', '<param name="'), ('<function name=\\"', '<param name=\\"')),
    ),
    ToolFormat(
        name="kimi_k3",
        models="Kimi-K3",
        content={marker: go for marker, go in _XTML_AFTER.items() if isinstance(go, str)},
        states=_kimi_k3,
        prefix='<|open|>tools<|sep|><|open|>call tool="NAME" index="1"<|sep|>',
        fingerprints=(("<|open|>tools<|sep|>",), ("<|open|>", "<|sep|>", "tools")),
    ),
)
