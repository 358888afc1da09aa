"""The few shapes in which models write tool calls, as tables of states with the markers left open.

`json_calls`: an object with a name and arguments. `named_calls`: the name as text, then the arguments as one object.
`tagged_calls`: the name, then a tag per parameter. `python_calls`: function calls in Python's syntax. Each returns the
states behind the openers; `tool_formats.py`, `json_tool_formats.py`, `tagged_tool_formats.py` and
`channel_tool_formats.py` say which format has which markers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from quire_renderers.format_states import Expect, Go, Literal, Role, Sink, State, Tag, Until, ValueTags
from quire_renderers.literal_relay import JSON, PYTHON, LiteralDialect

__all__ = [
    "CallKeys",
    "States",
    "call_object",
    "json_calls",
    "named_calls",
    "python_calls",
    "tagged_calls",
    "with_prefix",
]

States = dict[str, State]


def json_calls(
    openers: Iterable[str],
    closers: Iterable[str] = (),
    *,
    separators: Iterable[str] = (),
    bare: bool = False,
    in_a_row: bool = False,
    name_keys: Iterable[str] = ("name",),
    argument_keys: Iterable[str] = ("arguments", "parameters"),
) -> States:
    """`OPENER {"name": ..., "arguments": {...}} CLOSER`, or a list of such objects.

    Args:
        openers: What stands before an object or a list of them.
        closers: What stands behind.
        separators: What stands between objects outside of a list.
        bare: Whether objects and lists may also begin an output without an opener.
        in_a_row: Whether objects may follow one another with nothing but white space between them.
        name_keys: Keys of the tool's name.
        argument_keys: Keys of the arguments.
    """
    keys = CallKeys(tuple(name_keys), tuple(argument_keys))
    closing: dict[str, Go | str] = {closer: Go("content", commits=True) for closer in closers}
    opening: dict[str, Go | str] = dict.fromkeys(openers, "call")
    again: dict[str, Go | str] = dict.fromkeys(separators, "call")
    if bare or in_a_row:
        again["{"] = Go("call", keeps_marker=True)
    states: States = {
        "call": Expect({"{": "key", "[": "first_item"}),
        "first_item": Expect({"{": "item_key"}),
        "item": Expect({"{": "item_key", ",": "item", "]": Go("after", commits=True)}),
        "after": Expect({**closing, **again}, otherwise="rest") if again else Until(Sink.CONTENT, closing | opening),
        "rest": Until(Sink.CONTENT, closing | opening),
    }
    if bare:
        states["begin"] = Expect(
            {"{": Go("call", keeps_marker=True), "[": Go("call", keeps_marker=True)} | opening, otherwise="content"
        )
    for prefix, then in (("", "after"), ("item_", "item")):
        states |= call_object(prefix, then, keys)
    return states


@dataclass(frozen=True, slots=True)
class CallKeys:
    """What the keys of a call object are called."""

    name: tuple[str, ...] = ("name",)
    arguments: tuple[str, ...] = ("arguments", "parameters")
    ignored: tuple[str, ...] = ("type", "index", "tool_call_id")
    names_again: bool = False
    """Whether the name was already read, and stands in the object once more."""


def call_object(prefix: str, then: str, keys: CallKeys) -> States:
    """The inside of one call object, in which the function may be an object of its own."""
    ends = {"}": Go(then, ends_call=True)}
    inner = {"}": f"{prefix}function_end"}
    states: States = {f"{prefix}function_end": Expect({"}": Go(then, ends_call=True), ",": f"{prefix}key"})}
    states[f"{prefix}function"] = Expect({":": f"{prefix}function_value"})
    states[f"{prefix}function_value"] = Expect({"{": f"{prefix}inner_key", '"': f"{prefix}name_text"})
    for place, leaving in ((prefix, ends), (f"{prefix}inner_", inner)):
        key, arguments = f"{place}key", f"{place}arguments"
        exits: dict[str, Go | str] = {
            **{f'"{name}"': f"{place}name" for name in keys.name},
            **{f'"{name}"': arguments for name in keys.arguments},
            '"id"': f"{place}id",
            ",": key,
            **leaving,
        }
        exits |= {f'"{ignored}"': f"{place}ignored" for ignored in keys.ignored}
        if place == prefix:
            exits['"function"'] = f"{prefix}function"
        states |= {
            key: Expect(exits),
            f"{place}name": Expect({":": f"{place}name_value"}),
            f"{place}name_value": Expect({'"': f"{place}name_text"}),
            f"{place}name_text": Until(Sink.NAME_AGAIN if keys.names_again else Sink.NAME, {'"': key}),
            f"{place}id": Expect({":": f"{place}id_value"}),
            f"{place}id_value": Expect({'"': f"{place}id_text"}, otherwise=f"{place}ignored_value"),
            f"{place}id_text": Until(Sink.ID, {'"': key}),
            f"{place}ignored": Expect({":": f"{place}ignored_value"}),
            f"{place}ignored_value": Literal(Role.IGNORED, key),
            arguments: Expect({":": f"{place}arguments_value"}),
            f"{place}arguments_value": Literal(Role.ARGUMENTS, key),
        }
    return states


def named_calls(
    to_arguments: Mapping[str, Go | str],
    after: Mapping[str, Go | str],
    *,
    dialect: LiteralDialect = JSON,
    fence: str | None = None,
) -> States:
    """`NAME MARKER {arguments}`: goes in at `name` and comes out at `after`.

    Args:
        to_arguments: Markers behind the name.
        after: Markers that may stand behind the call.
        dialect: Of the arguments.
        fence: What may stand right behind the arguments.
    """
    behind = "after" if fence is None else "fence"
    states: States = {
        "name": Until(Sink.NAME, to_arguments),
        "arguments": Literal(Role.ARGUMENTS, behind, dialect, ends_call=True),
        "after": Until(Sink.CONTENT, after),
    }
    if fence is not None:
        states["fence"] = Expect({fence: "after"}, otherwise="after")
    return states


def tagged_calls(
    openers: Mapping[str, Go | str],
    *,
    call: str,
    name_exits: Mapping[str, Go | str],
    parameter: str,
    key_exits: Mapping[str, Go | str],
    value_end: str,
    call_end: str,
    after: Mapping[str, Go | str],
    key_to_value: str | None = None,
) -> States:
    """`NAME <parameter KEY> value </parameter> ... END`: goes in at `name` and comes out at `after`.

    Any of the end tags may be missing where the next structure stands.

    Args:
        openers: Behind the outer opener: what leads to a name.
        call: What stands before a name.
        name_exits: Markers behind the name.
        parameter: What begins a parameter.
        key_exits: Markers behind the key, and which state reads the value: "value", "value_text" or "value_json".
        value_end: What ends a value.
        call_end: What ends the call.
        after: Markers that may stand behind the call.
        key_to_value: What stands between the end of the key and the value, when that is a marker of its own.
    """
    outer = {marker: go if isinstance(go, Go) else Go(go) for marker, go in after.items()}
    # Whatever may stand behind the call ends it, too.
    ends: dict[str, Go | str] = {marker: replace(go, ends_call=True) for marker, go in outer.items()}
    ends[call_end] = Go("after", ends_call=True)
    kinds = {marker: Tag.CLOSER if go.commits else Tag.OPENER for marker, go in outer.items()}
    kinds |= {value_end: Tag.END, parameter: Tag.PARAMETER, call: Tag.CALL, call_end: Tag.CALL_END}
    key_ends = [*key_exits, *((key_to_value,) if key_to_value is not None else ())]
    tags = ValueTags(kinds, key_ends, [*name_exits, *((call_end,) if call_end not in name_exits else ())])
    value = {value_end: Go("parameters", commits=True), parameter: "key", **ends}
    states: States = {
        "open": Expect(openers),
        "name": Until(Sink.NAME, {parameter: "key", call_end: ends[call_end], **name_exits}),
        "parameters": Expect({parameter: "key", **ends}, is_whole=True),
        "key": Until(Sink.KEY, key_exits),
        "value": Until(Sink.VALUE, value, tags=tags),
        "value_text": Until(Sink.VALUE_TEXT, value, tags=tags),
        "value_json": Until(Sink.VALUE_JSON, value, tags=tags),
        "after": Until(Sink.CONTENT, after),
    }
    if key_to_value is not None:
        states["key"] = Until(Sink.KEY, {**key_exits, key_to_value: "value"})
        states["between"] = Expect({key_to_value: "value"})
    return states


def python_calls(
    begin: Mapping[str, Go | str] | None,
    end: Mapping[str, Go | str],
    after: Mapping[str, Go | str],
    *,
    otherwise: str | None = "content",
) -> States:
    """`name(key=value, ...)`, one behind the other: goes in at `call` and comes out at `after`.

    Args:
        begin: What may begin a list of calls at the beginning of an output, None for nothing.
        end: What ends the calls.
        after: Markers that may stand behind.
        otherwise: The state when an output does not begin so.
    """
    states: States = {
        "call": Expect(end, otherwise="name"),
        "name": Until(Sink.NAME, {"(": "parameters"}),
        "parameters": Expect({")": Go("next", ends_call=True), ",": "parameters"}, otherwise="key"),
        "key": Until(Sink.IDENTIFIER, {"=": "value"}),
        "value": Literal(Role.PARAMETER, "parameters", PYTHON),
        "next": Expect({",": "call", **end}, otherwise="call"),
        "after": Until(Sink.CONTENT, after),
    }
    if begin is not None:
        states["begin"] = Expect(begin, otherwise=otherwise)
    return states


def with_prefix(states: Mapping[str, State], prefix: str, *, kept: Iterable[str]) -> States:
    """The states with a prefix before their names, for two ways of writing calls in one table.

    Args:
        states: Of one way.
        prefix: What comes before each name.
        kept: States of the other way that are gone to as they are.
    """
    shared = frozenset(kept)

    def renamed(go: Go | str) -> Go:
        whole = Go(go) if isinstance(go, str) else go
        return whole if whole.state in shared else replace(whole, state=prefix + whole.state)

    made: States = {}
    for name, state in states.items():
        if name in shared:
            continue
        if isinstance(state, Literal):
            copy: State = replace(state, then=renamed(state.then).state)
        elif isinstance(state, Expect):
            otherwise = renamed(state.otherwise).state if state.otherwise is not None else None
            copy = replace(
                state, exits={marker: renamed(go) for marker, go in state.exits.items()}, otherwise=otherwise
            )
        else:
            copy = replace(state, exits={marker: renamed(go) for marker, go in state.exits.items()})
        made[prefix + name] = copy
    return made
