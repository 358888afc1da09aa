"""Tool calls: several functions are offered, one (or none) fits, and its arguments are in the request."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from corpus.exchange import Exchange, Message, ask
from corpus.tool_catalog import KINDS, Kind, Parameter
from corpus.words import LANGUAGES, Source, held_out

Tool = dict[str, Any]
Call = dict[str, Any]

VALUES: dict[str, Callable[[Source], str | int]] = {
    "city": Source.city,
    "email": Source.email,
    "phrase": lambda s: s.phrase() if s.rng.random() < 0.8 else s.word(),
    "integer": lambda s: s.integer(1, 9999),
    "time": Source.time,
    "date": Source.date,
    "currency": lambda s: s.rng.choice("EUR USD GBP JPY CHF SEK NOK PLN CAD AUD INR BRL".split()),
    "language": lambda s: s.rng.choice(LANGUAGES),
    "name": Source.name,
    "code": Source.code,
    "symbol": lambda s: "".join(s.rng.choice("ABCDEFGHIKLMNOPRSTUVXY") for _ in range(s.rng.randint(3, 4))),
    "room": lambda s: s.rng.choice("kitchen bedroom bathroom office garage hall cellar".split()),
    "word": Source.word,
}

_VERBS = (
    "open close start stop create delete update list show lock unlock clean move check print save load sort".split()
)
_NO_TOOL = "None of my tools can do that."
_POLITE = ("", "", "", "", "", "", "Hi, ", "Hello! ", "Please help: ", "One more thing: ", "Hey, ", "OK. ")


def _tool_name(source: Source, verb: str, noun: str) -> str | None:
    """A function name in one of the usual spellings, or ``None`` when it is on the other side of the split.

    Many names have a part that means nothing, and a few mean nothing at all: the model must copy the name from the
    offer, not make up a likely one.
    """
    rng = source.rng
    style = rng.random()
    if style < 0.66:
        name = f"{verb}_{noun}"
    elif style < 0.82:
        name = verb + "".join(part.capitalize() for part in noun.split("_"))
    elif style < 0.94:
        name = noun
    else:
        name = f"{source.made_up()}_{source.made_up()}"
    if rng.random() < 0.3:
        name = f"{source.made_up()}_{name}" if rng.random() < 0.6 else f"{name}_{source.made_up()}"
    return name if held_out("tool", name) == source.held else None


def _schema(
    source: Source, name: str, description: str, fields: list[tuple[str, Parameter]], required: list[str]
) -> Tool:
    """The function schema in the chat API's form; what is optional in the API varies."""
    rng = source.rng
    described = rng.random() < 0.5
    properties: dict[str, Any] = {}
    for field, parameter in fields:
        spec: dict[str, Any] = {"type": "integer" if parameter.value == "integer" else "string"}
        if described:
            spec["description"] = parameter.description
        if parameter.choices:
            spec["enum"] = list(parameter.choices)
        properties[field] = spec
    parameters: dict[str, Any] = {"type": "object", "properties": properties}
    if rng.random() < 0.85:
        parameters["required"] = required
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def _catalog_tool(source: Source, kind: Kind) -> tuple[Tool, list[tuple[str, Parameter]]]:
    rng = source.rng
    name = None
    while name is None:
        name = _tool_name(source, rng.choice(kind.verbs), rng.choice(kind.nouns))
    fields: list[tuple[str, Parameter]] = []
    for parameter in kind.parameters:
        free = [option for option in parameter.names if option not in dict(fields)]
        fields.append((rng.choice(free), parameter))
    required = [field for field, _ in fields]
    tool = _schema(source, name, rng.choice(kind.descriptions), fields, required[:-1] if kind.optional else required)
    return tool, fields


def _catalog_request(source: Source, kind: Kind, tool: Tool, fields: list[tuple[str, Parameter]]) -> tuple[str, Call]:
    rng = source.rng
    short = bool(kind.optional) and rng.random() < 0.6
    values = [_value(source, parameter) for _, parameter in fields]
    request = rng.choice(kind.optional if short else kind.requests).format(*values)
    used = list(zip(fields, values, strict=True))[: len(fields) - short]
    return request, {"name": tool["function"]["name"], "arguments": {field: value for (field, _), value in used}}


def _value(source: Source, parameter: Parameter) -> str | int:
    return source.rng.choice(parameter.choices) if parameter.choices else VALUES[parameter.value](source)


_MADE_PARAMETERS = (
    Parameter(names=("name", "target", "title", "key", "who"), value="name", description="The name"),
    Parameter(names=("count", "number", "amount", "size", "level"), value="integer", description="The number"),
    Parameter(names=("id", "code", "ref", "tag"), value="code", description="The code"),
    Parameter(names=("text", "label", "note", "comment"), value="phrase", description="The text"),
    Parameter(names=("day", "date", "until"), value="date", description="The date"),
)
_LINKS = {
    "name": ("for {}", "of {}", "named {}"),
    "integer": ("with {}", "at {}", "number {}"),
    "code": ("with code {}", "{}"),
    "phrase": ('with the text "{}"', 'saying "{}"'),
    "date": ("on {}", "for {}"),
}


def _made_up_tool(source: Source, verb: str | None = None, noun: str | None = None) -> tuple[Tool, str, Call]:
    """A tool nobody has heard of, a request that fits it and the call; only copying gets it right."""
    rng = source.rng
    the_verb, the_noun = verb or rng.choice(_VERBS), noun or source.word()
    name = None
    while name is None:
        name = _tool_name(source, the_verb, the_noun)
    chosen = rng.sample(_MADE_PARAMETERS, rng.choice((0, 1, 1, 1, 2)))
    fields = [(rng.choice(p.names) if rng.random() < 0.8 else f"{the_noun}_{rng.choice(p.names)}", p) for p in chosen]
    description = rng.choice(
        (
            f"{the_verb.capitalize()} the {the_noun}",
            f"{the_verb.capitalize()} a {the_noun}",
            f"This function can {the_verb} the {the_noun}",
        )
    )
    tool = _schema(source, name, description, fields, [field for field, _ in fields])
    arguments = {field: _value(source, p) for field, p in fields}
    tail = "".join(" " + rng.choice(_LINKS[p.value]).format(arguments[field]) for field, p in fields)
    lead = rng.choice(
        (
            "{v} the {n}",
            "Please {v} the {n}",
            "Can you {v} the {n}",
            "I want to {v} the {n}",
            "{v} {n}",
            "Could you {v} a {n}",
        )
    )
    request = lead.format(v=the_verb, n=the_noun) + tail
    end = "?" if request.startswith(("Can", "Could")) else rng.choice((".", ""))
    return tool, request[0].upper() + request[1:] + end, {"name": name, "arguments": arguments}


def _offer(source: Source, size: int, kinds: list[Kind]) -> list[Tool]:
    """Tools of other kinds than ``kinds``, half of them made up."""
    rng = source.rng
    others = rng.sample([kind for kind in KINDS if kind not in kinds], size)
    return [_catalog_tool(source, kind)[0] if rng.random() < 0.6 else _made_up_tool(source)[0] for kind in others]


def _num_distractors(source: Source) -> int:
    return source.rng.choice((0, 0, 1, 1, 1, 1, 2, 2, 2, 3, 3, 5))


def call_message(calls: list[Call]) -> Message:
    """The assistant message that makes the calls."""
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": c} for c in calls]}


def tool_call(source: Source) -> Exchange:
    """A request that one offered tool fits; sometimes two values, and then two calls."""
    rng = source.rng
    made_up = rng.random() < 0.4
    kinds: list[Kind] = []
    siblings: list[Tool] = []
    if made_up:
        noun, (verb, other_verb) = source.word(), rng.sample(_VERBS, 2)
        tool, request, call = _made_up_tool(source, verb, noun)
        calls = [call]
        if rng.random() < 0.4:  # the same noun with another verb: the verb decides
            siblings = [_made_up_tool(source, other_verb, noun)[0]]
    else:
        kind = rng.choice(KINDS)
        kinds = [kind]
        tool, fields = _catalog_tool(source, kind)
        request, call = _catalog_request(source, kind, tool, fields)
        calls = [call]
        if rng.random() < 0.12:
            second, call_2 = _catalog_request(source, kind, tool, fields)
            request, calls = f"{request} {rng.choice(('And also: ', 'Then: ', ''))}{second}", [call, call_2]
    request = rng.choice(_POLITE) + request
    offer = [tool, *siblings, *_offer(source, _num_distractors(source), kinds)]
    rng.shuffle(offer)
    names = " and ".join(c["name"] for c in calls)
    messages = [{"role": "user", "content": request}, call_message(calls)]
    return Exchange(task="tool_call", messages=messages, thought=f"The tool {names} fits.", tools=offer)


_RESULT_KEYS = (
    "temperature price status distance count total code result title city name wind humidity date time".split()
)


def _result(source: Source) -> tuple[str, str]:
    """What a tool sent back, and what the assistant says about it."""
    rng = source.rng
    draw = rng.random()
    if draw < 0.12:
        error = f"{source.word()} {rng.choice(('not found', 'is not available', 'failed', 'timed out'))}"
        return json.dumps({"error": error}), f"The tool failed: {error}."
    if draw < 0.3:
        text = source.phrase()
        return text, f"The answer is: {text}."
    makers: list[Callable[[], str | int]] = [source.integer, source.word, source.city, source.phrase, source.date]
    result = {key: rng.choice(makers)() for key in rng.sample(_RESULT_KEYS, rng.randint(1, 3))}
    told = ", ".join(f"the {key} is {value}" for key, value in result.items())
    return json.dumps(result), told[0].upper() + told[1:] + "."


_TIME_KEYS = (
    "time date duration start end arrival departure sunrise sunset deadline datetime "
    "local_time start_time end_time current_time"
).split()


def _clock_time(source: Source) -> str:
    """A time of day to the minute, in 24 or 12 hours, sometimes with seconds."""
    rng = source.rng
    while True:
        hour, minute = rng.randint(0, 23), rng.randint(0, 59)
        if held_out("time", f"{hour:02d}:{minute:02d}") == source.held:
            break
    style = rng.random()
    if style < 0.6:
        return f"{hour:02d}:{minute:02d}"
    if style < 0.8:
        return f"{hour:02d}:{minute:02d}:{rng.randint(0, 59):02d}"
    return f"{hour % 12 or 12}:{minute:02d} {'am' if hour < 12 else 'pm'}"


def _duration(source: Source) -> str:
    rng = source.rng
    if rng.random() < 0.4:
        return f"{rng.randint(1, 23)} h {rng.randint(1, 59)} min"
    return f"{rng.randint(2, 90)} {rng.choice(('seconds', 'minutes', 'hours', 'days', 'weeks'))}"


def _moment(source: Source) -> str:
    """A date with a time of day."""
    between, after = source.rng.choice(((" ", ""), ("T", ""), ("T", "Z")))
    return f"{source.date()}{between}{source.time()}:{source.rng.randint(0, 59):02d}{after}"


def _time_result(source: Source) -> tuple[str, str]:
    """What a tool sent back about times, and what the assistant says about it."""
    rng = source.rng
    makers = (_clock_time, _clock_time, _duration, Source.date, _moment)
    if rng.random() < 0.25:
        text = rng.choice(makers)(source)
        return text, f"The answer is: {text}."
    result = {key: rng.choice(makers)(source) for key in rng.sample(_TIME_KEYS, rng.choice((1, 1, 2, 3)))}
    told = ", ".join(f"the {key.replace('_', ' ')} is {value}" for key, value in result.items())
    return json.dumps(result), told[0].upper() + told[1:] + "."


def _answered(source: Source, result: Callable[[Source], tuple[str, str]], task: str) -> Exchange:
    exchange = tool_call(source)
    calls = exchange.messages[-1]["tool_calls"]
    contents, told = zip(*(result(source) for _ in calls), strict=True)
    exchange.messages += [{"role": "tool", "content": content} for content in contents]
    exchange.messages.append({"role": "assistant", "content": " ".join(told)})
    exchange.task = task
    return exchange


def tool_answer(source: Source) -> Exchange:
    """A call, the tool's response, and an answer from it."""
    return _answered(source, _result, "tool_answer")


def tool_time(source: Source) -> Exchange:
    """A call, a response with times of day, durations or dates, and an answer from it."""
    return _answered(source, _time_result, "tool_time")


def tool_request(source: Source) -> str:
    """What somebody asks who needs a tool of the catalog."""
    kind = source.rng.choice(KINDS)
    return _catalog_request(source, kind, *_catalog_tool(source, kind))[0]


def no_tool(source: Source) -> Exchange:
    """A request for a tool that is not among those offered."""
    rng = source.rng
    if rng.random() < 0.6:
        kind = rng.choice(KINDS)
        tool, fields = _catalog_tool(source, kind)
        request, _ = _catalog_request(source, kind, tool, fields)
        offer = _offer(source, rng.randint(1, 3), [kind])
    else:
        _, request, call = _made_up_tool(source)
        offer = _offer(source, rng.randint(1, 3), [])
        offer = [t for t in offer if t["function"]["name"] != call["name"]]
    exchange = ask("no_tool", rng.choice(_POLITE) + request, _NO_TOOL, "No tool fits.")
    exchange.tools = offer
    return exchange


def idle_tools(source: Source) -> list[Tool]:
    """Tools to offer in a conversation that needs none of them."""
    return _offer(source, source.rng.randint(1, 3), [])
