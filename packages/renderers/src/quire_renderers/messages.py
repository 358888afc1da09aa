"""OpenAI message dictionaries made ready for templates: checked, copied, plain.

Knows the shapes of the chat completions API; knows no template and no tokenizer.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from quire_interfaces import RequestError
from quire_renderers.literal_relay import replace_lone_surrogates
from quire_renderers.media_parts import modality_of

__all__ = ["joined_text", "left_out", "newest_of_user", "plain_value", "prepare_messages", "prepare_tools", "softened"]

_MAX_DEPTH = 64
_TEXT_PARTS = ("text", "input_text", "output_text", "refusal")


def left_out(kind: str, modalities: Collection[str] = ()) -> str:
    """The line that stands where a conversation holds what the model does not read, so that the model knows of it.

    Args:
        kind: "image", "file", ... as a client names it.
        modalities: What it reads beside text.
    """
    return f"[{kind} left out: this model reads {', '.join(('text', *modalities))} only]"


def joined_text(texts: Sequence[str], lines: Collection[int]) -> str:
    """Texts one after the other, with those at the given places on lines of their own."""
    result = ""
    for place, text in enumerate(texts):
        if result and not result.endswith("\n") and (place in lines or place - 1 in lines):
            result += "\n"
        result += text
    return result


def prepare_messages(messages: Sequence[dict[str, Any]], modalities: Collection[str] = ()) -> list[dict[str, Any]]:
    """Copy messages into the form templates expect.

    Keys that are None and empty lists of tool calls are left out, lists of text parts become one string, tool-call
    arguments given as a JSON string become the object they describe (and stay the string when they do not parse), and
    `reasoning` is `reasoning_content`, as templates call it. A content with media that the model takes stays a list, of
    `{"type": "text", "text": ...}` and `{"type": "image"}` (or "video", "audio"). Parts of other kinds (files, media of
    a model that reads text only) become lines that name them; only where the user's message that is to be answered
    holds nothing else, or the model takes media, are they refused.

    Args:
        messages: As a client sent them.
        modalities: What the model takes beside text.

    Raises:
        RequestError: naming the message.
    """
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise RequestError(f"messages must be a list, got {type(messages).__name__}", param="messages")
    if not messages:
        raise RequestError("messages must hold at least one message, got none", param="messages")
    roles = [message.get("role") if isinstance(message, Mapping) else None for message in messages]
    newest = newest_of_user(roles)
    return [
        _prepare_message(message, f"messages[{index}]", modalities, needs_text=index == newest)
        for index, message in enumerate(messages)
    ]


def newest_of_user(roles: Sequence[Any]) -> int:
    """Place of the user's message that is to be answered; -1 where an answer follows it already."""
    last = next((index for index in range(len(roles) - 1, -1, -1) if roles[index] in ("user", "assistant")), -1)
    return last if last >= 0 and roles[last] == "user" else -1


def prepare_tools(tools: Sequence[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    """Copy tool definitions; an empty list is no tools.

    Raises:
        RequestError: naming the tool.
    """
    if tools is None:
        return None
    if isinstance(tools, (str, bytes, Mapping)) or not isinstance(tools, Sequence):
        raise RequestError(f"tools must be a list, got {type(tools).__name__}", param="tools")
    for index, tool in enumerate(tools):
        if not isinstance(tool, Mapping):
            raise RequestError(f"tools[{index}] must be an object, got {type(tool).__name__}", param=f"tools[{index}]")
    return [plain_value(tool, f"tools[{index}]") for index, tool in enumerate(tools)] or None


def softened(messages: list[dict[str, Any]]) -> list[dict[str, Any]] | None:
    """The prepared messages in the form that the narrowest templates take; None when they have it already.

    What a model once got wrong must not make its conversation impossible: arguments that are no JSON object are wrapped
    into one, and a model's message without content gets an empty one.
    """
    result = []
    for message in messages:
        calls = [_with_object(call) for call in message.get("tool_calls", ())]
        changed = {"content": "", **message} if message["role"] == "assistant" else dict(message)
        if calls:
            changed["tool_calls"] = calls
        result.append(changed)
    return result if result != messages else None


def _with_object(call: Any) -> Any:
    if not isinstance(call, dict):
        return call
    inner = call.get("function")
    if isinstance(inner, dict):
        return {**call, "function": _with_object(inner)}
    if isinstance(call.get("arguments", {}), dict):
        return call
    return {**call, "arguments": {"arguments": call["arguments"]}}


def plain_value(value: Any, where: str, depth: int = 0) -> Any:
    """A deep copy made of exact JSON types only, so that a template meets no methods but theirs.

    Raises:
        RequestError: something in it is no JSON, or it is nested too deeply.
    """
    if value is None or type(value) in (str, int, float, bool):
        return value
    if depth >= _MAX_DEPTH:
        raise RequestError(f"{where} is nested more than {_MAX_DEPTH} levels deep; flatten it", param=where)
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, Mapping):
        return {str(key): plain_value(item, f"{where}.{key}", depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_value(item, f"{where}[{index}]", depth + 1) for index, item in enumerate(value)]
    raise RequestError(f"{where} must be JSON, got {type(value).__name__}", param=where)


def _prepare_message(message: Any, where: str, modalities: Collection[str], *, needs_text: bool) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RequestError(f"{where} must be an object with a role, got {type(message).__name__}", param=where)
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise RequestError(f"{where}.role must be a non-empty string, got {role!r}", param=f"{where}.role")
    prepared: dict[str, Any] = {}
    for key, value in message.items():
        if value is None:
            continue
        if key == "content":
            prepared[key] = _content(value, f"{where}.content", modalities, needs_text=needs_text)
        elif key == "tool_calls":
            calls = _tool_calls(value, f"{where}.tool_calls")
            if calls:
                prepared[key] = calls
        else:
            prepared[str(key)] = plain_value(value, f"{where}.{key}")
    if isinstance(prepared.get("reasoning"), str):
        prepared.setdefault("reasoning_content", prepared.pop("reasoning"))
    return prepared


def _content(value: Any, where: str, modalities: Collection[str], *, needs_text: bool) -> str | list[dict[str, Any]]:
    if isinstance(value, str):
        return str(value)
    if not isinstance(value, (list, tuple)):
        raise RequestError(f"{where} must be a string or a list of parts, got {type(value).__name__}", param=where)
    texts: list[str] = []
    media: dict[int, str] = {}
    others: dict[int, str] = {}
    for index, part in enumerate(value):
        text = _part_text(part, f"{where}[{index}]")
        if text is None and (modality := modality_of(part["type"])) in modalities:
            media[index] = str(modality)
        elif text is None:
            others[index] = part["type"]
        texts.append(left_out(_kind_name(others[index]), modalities) if index in others else text or "")
    # A model that takes media is not asked about what it was not shown.
    has_texts = any(texts[index].strip() for index in range(len(texts)) if index not in others)
    if needs_text and others and (modalities or not has_texts):
        raise _unread(min(others), others, where, modalities)
    return _parts(texts, media, others) if media else joined_text(texts, others)


def _unread(index: int, kinds: Mapping[int, str], where: str, modalities: Collection[str]) -> RequestError:
    """The error for a message with a part that the model does not read."""
    takes = f"takes text and {', '.join(modalities)} only" if modalities else "takes text only"
    return RequestError(
        f"{where}[{index}] is of type {kinds[index]!r}, and this model {takes}; send parts of type 'text'",
        param=f"{where}[{index}]",
        code="unsupported_content_type",
    )


def _parts(texts: Sequence[str], media: Mapping[int, str], lines: Collection[int]) -> list[dict[str, Any]]:
    """Parts as templates know them; texts between two media are one part."""
    parts: list[dict[str, Any]] = []
    begin = 0
    for place in (*media, len(texts)):
        between = joined_text(texts[begin:place], [line - begin for line in lines if begin <= line < place])
        if between:
            parts.append({"type": "text", "text": between})
        if place in media:
            parts.append({"type": media[place]})
        begin = place + 1
    return parts


def _part_text(part: Any, where: str) -> str | None:
    """The text of one part; None for a part of any kind but text."""
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else None
    if not isinstance(kind, str):
        given = repr(kind) if isinstance(part, Mapping) else type(part).__name__
        raise RequestError(f"{where} must be an object with a type such as 'text', got {given}", param=where)
    if kind not in _TEXT_PARTS:
        return None
    text = part.get("refusal" if kind == "refusal" else "text")
    if not isinstance(text, str):
        raise RequestError(f"{where}.text must be a string, got {type(text).__name__}", param=f"{where}.text")
    return text


def _kind_name(kind: str) -> str:
    """`image_url` and `input_image` are both an image."""
    return kind.removeprefix("input_").removesuffix("_url")[:64]


def _tool_calls(value: Any, where: str) -> list[Any]:
    if not isinstance(value, (list, tuple)):
        raise RequestError(f"{where} must be a list, got {type(value).__name__}", param=where)
    calls = []
    for index, call in enumerate(value):
        at = f"{where}[{index}]"
        if not isinstance(call, Mapping):
            raise RequestError(f"{at} must be an object, got {type(call).__name__}", param=at)
        call = plain_value(call, at)
        holder = call.get("function") if isinstance(call.get("function"), dict) else call
        if isinstance(holder.get("arguments"), str):
            holder["arguments"] = _parsed_arguments(holder["arguments"])
        calls.append(call)
    return calls


MAX_ARGUMENT_PARTS = 20_000
"""Commas, and beginnings of lists and objects, up to which the arguments of a call are parsed: nothing else in this
process runs meanwhile, 5 ms."""


def _parsed_arguments(text: str) -> Any:
    """What a model said may be no JSON: then the template gets the string, and the conversation can go on. So it does
    with numbers that no double holds, and with JSON of very many parts; half of a surrogate pair, which no tokenizer
    takes, becomes U+FFFD."""
    if len(text) > MAX_ARGUMENT_PARTS and sum(map(text.count, ",[{")) > MAX_ARGUMENT_PARTS:
        return text
    try:
        whole = replace_lone_surrogates(text)
        parsed = json.loads(whole, parse_constant=_refuse_constant, parse_float=_finite) if text.strip() else {}
    except (ValueError, RecursionError):
        return text
    return parsed if isinstance(parsed, dict) else text


def _finite(number: str) -> float:
    value = float(number)
    return value if math.isfinite(value) else _refuse_constant(number)


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")
