"""Conversations in the order of roles that a chat template takes.

Many templates take less than clients send: the system message first and once, user and assistant in turn, one call per
message, no tools. Which of it a template refuses, or leaves out in silence, is found once by rendering small
conversations; later conversations are rearranged before they are rendered, and a template that takes them as they are
gets them so. Texts keep their order, so that a longer conversation begins with the tokens of the shorter one.

Knows prepared messages (messages.py); knows neither jinja2 nor tokens.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

__all__ = ["TemplateRoles", "narrowed"]

Messages = list[dict[str, Any]]

_SYSTEM = ("system", "developer")
_TURNS = ("user", "assistant")


class TemplateRoles:
    """What one template takes.

    Args:
        render: A small conversation as text, with the tools that are offered; None where the template refuses
            or fails.
    """

    def __init__(self, render: Callable[[Messages, Messages | None], str | None]) -> None:
        self._render = render

    def adapted(self, messages: Messages) -> Messages:
        """The messages as the template takes them; the same list where it takes them as they are."""
        if _is_plain(messages):
            return messages
        return _apply(self.needed, messages)

    @functools.cached_property
    def needed(self) -> tuple[_Step, ...]:
        """The rearrangements without which the template refuses a conversation, or leaves some of it out."""
        needed: list[_Step] = []
        for place, step in enumerate(_STEPS):
            if any(self._helps(step, probe, needed, _STEPS[place + 1 :]) for probe in step.probes):
                needed.append(step)
        return tuple(needed)

    @property
    def frame(self) -> str:
        """What the template writes for a conversation of a few words."""
        messages = [_SYSTEM_1, _USER_1, _ANSWER_1, _USER_2]
        return self._render(messages, None) or self._render(narrowed(messages), None) or ""

    def _helps(self, step: _Step, probe: Messages, before: Sequence[_Step], later: Sequence[_Step]) -> bool:
        """Whether the probe wants this step: alone, or together with later ones that do not do without it."""
        messages = _apply(before, probe)
        if self._takes(messages, probe):
            return False
        if self._takes(step.apply(messages), probe):
            return True
        changed = _apply(later, step.apply(messages))
        return self._takes(changed, probe) and not self._takes(_apply(later, messages), probe)

    def _takes(self, messages: Messages, probe: Messages) -> bool:
        """Whether all words of the probe are written."""
        has_tools = any(message["role"] == "tool" for message in probe)
        text = self._render(messages, _PROBE_TOOLS if has_tools else None)
        return text is not None and all(word in text for word in _words(probe))


def narrowed(messages: Messages) -> Messages:
    """The messages in the form that the narrowest templates take."""
    return _apply(_STEPS, messages)


def _apply(steps: Sequence[_Step], messages: Messages) -> Messages:
    for step in steps:
        messages = step.apply(messages)
    return messages


class _Step(NamedTuple):
    """One rearrangement; messages that need none come back unchanged."""

    apply: Callable[[Messages], Messages]
    probes: tuple[Messages, ...]
    """Conversations of which a template that needs the step refuses one or leaves a word out."""


def _is_plain(messages: Messages) -> bool:
    """Whether every template takes this order: user and assistant in turn."""
    return all(
        message["role"] == _TURNS[place % 2] and "tool_calls" not in message for place, message in enumerate(messages)
    )


def _system_alone_as_user(messages: Messages) -> Messages:
    if any(message["role"] not in _SYSTEM for message in messages):
        return messages
    *before, last = messages
    return [*before, {**last, "role": "user"}]


def _one_call_each(messages: Messages) -> Messages:
    """Each call in a message of its own, with its result behind it."""
    result: Messages = []
    place = 0
    while place < len(messages):
        message = messages[place]
        place += 1
        calls = message.get("tool_calls", ())
        if len(calls) < 2:
            result.append(message)
            continue
        answers: Messages = []
        while place < len(messages) and messages[place]["role"] == "tool":
            answers.append(messages[place])
            place += 1
        for index, call in enumerate(calls):
            head = message if index == 0 else {"role": message["role"], "content": ""}
            result.append({**head, "tool_calls": [call]})
            own = [each for each in answers if each.get("tool_call_id") == call.get("id")] or answers[:1]
            result += own[:1]
            answers = [each for each in answers if all(each is not taken for taken in own[:1])]
        result += answers
    return result


def _short_call_ids(messages: Messages) -> Messages:
    """Nine letters and digits, which Mistral's templates insist on."""
    return [
        {
            **message,
            **({"tool_call_id": _short_id(message["tool_call_id"])} if "tool_call_id" in message else {}),
            **(
                {"tool_calls": [{**call, "id": _short_id(call["id"])} if "id" in call else call for call in calls]}
                if (calls := message.get("tool_calls"))
                else {}
            ),
        }
        for message in messages
    ]


def _short_id(call_id: Any) -> Any:
    if not isinstance(call_id, str) or (len(call_id) == 9 and call_id.isascii() and call_id.isalnum()):
        return call_id
    return hashlib.sha256(call_id.encode("utf-8", "surrogatepass")).hexdigest()[:9]


def _arguments_as_text(messages: Messages) -> Messages:
    """Arguments as JSON text, for templates that join them to other texts."""
    return [
        {**message, "tool_calls": list(map(_with_text, message["tool_calls"]))}
        if message.get("tool_calls")
        else message
        for message in messages
    ]


def _with_text(call: Any) -> Any:
    if not isinstance(call, dict):
        return call
    if isinstance(call.get("function"), dict):
        return {**call, "function": _with_text(call["function"])}
    if isinstance(call.get("arguments"), dict):
        return {**call, "arguments": json.dumps(call["arguments"], ensure_ascii=False)}
    return call


def _tools_as_text(messages: Messages) -> Messages:
    """Calls as text of the assistant, their results as text of the user."""
    result: Messages = []
    for message in messages:
        if message["role"] == "tool":
            result.append({"role": "user", "content": message.get("content", "")})
        elif message.get("tool_calls"):
            others = {key: value for key, value in message.items() if key != "tool_calls"}
            calls = "\n".join(map(_call_text, message["tool_calls"]))
            result.append({**others, "content": _joined_texts(message.get("content"), calls)})
        else:
            result.append(message)
    return result


def _call_text(call: Any) -> str:
    function = call.get("function", call) if isinstance(call, dict) else {}
    named = {"name": function.get("name"), "arguments": function.get("arguments", {})}
    return json.dumps(named, ensure_ascii=False)


def _leading_systems_joined(messages: Messages) -> Messages:
    count = _num_leading_systems(messages)
    if count < 2:
        return messages
    first = {**messages[0], "content": _joined_texts(*(each.get("content") for each in messages[:count]))}
    return [first, *messages[count:]]


def _later_systems_as_user(messages: Messages) -> Messages:
    """They stay where they are: at the head of the prompt, each new one would make the prefix cache miss."""
    count = _num_leading_systems(messages)
    return messages[:count] + [
        {**each, "role": "user"} if each["role"] in _SYSTEM else each for each in messages[count:]
    ]


def _systems_as_user(messages: Messages) -> Messages:
    return [{**each, "role": "user"} if each["role"] in _SYSTEM else each for each in messages]


def _num_leading_systems(messages: Messages) -> int:
    return next((i for i, each in enumerate(messages) if each["role"] not in _SYSTEM), len(messages))


def _assistant_behind_tools(messages: Messages) -> Messages:
    """An empty answer between a tool's result and the user, for templates that count the turns of both."""
    result: Messages = []
    for message in messages:
        if message["role"] == "user" and result and result[-1]["role"] == "tool":
            result.append({"role": "assistant", "content": ""})
        result.append(message)
    return result


def _user_first(messages: Messages) -> Messages:
    count = _num_leading_systems(messages)
    if count == len(messages) or messages[count]["role"] != "assistant":
        return messages
    return [*messages[:count], {"role": "user", "content": ""}, *messages[count:]]


def _turns_joined(role: str, messages: Messages, *, with_calls: bool = False) -> Messages:
    """Messages of one role in a row are one, those with calls only if asked for: their text may not be shown."""
    result: Messages = []
    for message in messages:
        pair = [*result[-1:], message]
        is_row = len(pair) == 2 and all(each["role"] == role for each in pair)
        if is_row and (with_calls or not any("tool_calls" in each for each in pair)):
            result[-1] = _joined(result[-1], message)
        else:
            result.append(message)
    return result


def _joined(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    result = {**first, **second}
    for key in ("content", "reasoning_content"):
        if key in result:
            result[key] = _joined_texts(first.get(key), second.get(key))
    calls = [*first.get("tool_calls", ()), *second.get("tool_calls", ())]
    return {**result, "tool_calls": calls} if calls else result


def _joined_texts(*contents: str | list[Any] | None) -> Any:
    """Contents one after the other, with a blank line between texts; a list of parts where one of them is a list."""
    present = [content for content in contents if content]
    if all(isinstance(content, str) for content in present):
        return "\n\n".join(map(str, present))
    parts: list[Any] = []
    for content in present:
        own = [{"type": "text", "text": content}] if isinstance(content, str) else content
        parts += [{"type": "text", "text": "\n\n"}, *own] if parts else own
    return parts


def _words(messages: Messages) -> list[str]:
    """What a template that takes these probes writes. Calls may be left out, as by templates that know no tools."""
    return [message["content"] for message in messages if message["content"]]


def _say(role: str, word: str = "", **more: Any) -> dict[str, Any]:
    return {"role": role, "content": word, **more}


def _call(call_id: str, name: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": {"quantity": "seven"}}}


_SYSTEM_1, _SYSTEM_2 = _say("system", "quartz"), _say("system", "walnut")
_USER_1, _USER_2 = _say("user", "marble"), _say("user", "copper")
_ANSWER_1, _ANSWER_2 = _say("assistant", "velvet"), _say("assistant", "saffron")
_CALLED = [_USER_1, _say("assistant", tool_calls=[_call("a1b2c3d4e", "harvest")])]
_RESULT = _say("tool", "turnip", tool_call_id="a1b2c3d4e", name="harvest")
_LONG_ID = "call_0123456789abcdef"
_PROBE_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "A tool.",
            "parameters": {"type": "object", "properties": {"quantity": {"type": "string", "description": "A count."}}},
        },
    }
    for name in ("reap", "sow")
]

_STEPS = (
    _Step(_system_alone_as_user, ([_SYSTEM_1],)),
    _Step(
        _one_call_each,
        (
            [
                _USER_1,
                _say("assistant", tool_calls=[_call("a1b2c3d4e", "harvest"), _call("f5g6h7i8j", "thresh")]),
                _RESULT,
                _say("tool", "parsnip", tool_call_id="f5g6h7i8j", name="thresh"),
            ],
        ),
    ),
    _Step(
        _short_call_ids,
        (
            [
                _USER_1,
                _say("assistant", tool_calls=[_call(_LONG_ID, "harvest")]),
                {**_RESULT, "tool_call_id": _LONG_ID},
            ],
        ),
    ),
    _Step(_arguments_as_text, ([*_CALLED, _RESULT],)),
    _Step(_tools_as_text, ([*_CALLED, _RESULT],)),
    _Step(_systems_as_user, ([_SYSTEM_1, _USER_1],)),
    _Step(_leading_systems_joined, ([_SYSTEM_1, _SYSTEM_2, _USER_1],)),
    _Step(
        _later_systems_as_user,
        (
            [_SYSTEM_1, _USER_1, _ANSWER_1, _SYSTEM_2, _USER_2],
            [_SYSTEM_1, _USER_1, _SYSTEM_2],
            [_USER_1, _SYSTEM_2],
        ),
    ),
    _Step(_assistant_behind_tools, ([*_CALLED, _RESULT, _USER_2],)),
    _Step(_user_first, ([_ANSWER_1, _USER_1], [_SYSTEM_1, _ANSWER_1, _USER_1])),
    _Step(functools.partial(_turns_joined, "user"), ([_USER_1, _USER_2],)),
    _Step(functools.partial(_turns_joined, "assistant"), ([_USER_1, _ANSWER_1, _ANSWER_2, _USER_2],)),
    _Step(
        functools.partial(_turns_joined, "assistant", with_calls=True),
        ([_USER_1, _ANSWER_1, _CALLED[1], _RESULT],),
    ),
)
