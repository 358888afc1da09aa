"""The conversation of Anthropic's Messages API as messages of the chat API: what each kind of block says to a model.

Text, documents and search results are read. What a text model cannot read (images, files, kinds that are yet to come)
becomes a line that names it, so that no conversation ends with an image that a tool has read. What only the server can
read that wrote it (hidden thoughts, tools that it ran) is passed over. Knows no engine.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from quire.media import media_part
from quire_interfaces import RequestError, wrong_value
from quire_renderers import left_out, newest_of_user
from quire_server.content_parts import Content, content_of, joined_contents

__all__ = ["chat_messages", "found_tools"]

_BILLING = "x-anthropic-billing-header:"
"""Begins a block that Claude Code puts before its system prompt; another one in each request."""
_READ = ("text", "document", "search_result", "tool_reference")
_SUMMARY = "What was said before, in short:\n\n"


def chat_messages(
    system: Any,
    messages: Sequence[dict[str, Any]],
    tools: Mapping[str, dict[str, Any]],
    modalities: Collection[str] = (),
) -> list[dict[str, Any]]:
    """A conversation in the chat API's form.

    Args:
        system: Text, or text blocks; may be empty.
        messages: As they were sent. Those before the last `compaction` block give way to its summary.
        tools: Of the request, by name: a `tool_reference` describes its tool.
        modalities: What the model takes beside text; then images of messages and of results are parts of the contents.

    Raises:
        RequestError: naming the block at fault.
    """
    result: list[dict[str, Any]] = []
    text = _system_text(system)
    if text:
        result.append({"role": "system", "content": text})
    first, start = _last_compaction(messages)
    if first >= 0:
        summary = messages[first]["content"][start]["content"]
        result.append({"role": "user", "content": _SUMMARY + summary})
    newest = newest_of_user([each.get("role") for each in messages])
    for index in range(max(first, 0), len(messages)):
        skipped = start + 1 if index == first else 0
        message = _with_definitions(messages[index], tools)
        where = f"messages[{index}]"
        for each in _chat_messages(message, where, skipped, modalities, needs_text=index == newest):
            _append(result, each)
    return result


def found_tools(messages: Sequence[dict[str, Any]]) -> tuple[list[str], list[str]]:
    """Names of tools that were found: (by a search of another server, by one of the client's, whose result names them).

    Only what the model still reads counts: what a summary has replaced does not.
    """
    first, start = _last_compaction(messages)
    by_server: list[str] = []
    by_client: list[str] = []
    for index in range(max(first, 0), len(messages)):
        for block in _blocks(messages[index])[start + 1 if index == first else 0 :]:
            content = block.get("content")
            if block.get("type") == "tool_result":
                by_client += _referred(content)
            elif isinstance(content, dict):
                by_server += _referred(content.get("tool_references"))
    return by_server, by_client


def _blocks(holder: dict[str, Any]) -> list[dict[str, Any]]:
    content = holder.get("content")
    return [block if isinstance(block, dict) else {} for block in content] if isinstance(content, list) else []


def _referred(blocks: Any) -> list[str]:
    names = [block.get("tool_name") for block in blocks if _is_reference(block)] if isinstance(blocks, list) else []
    return [name for name in names if isinstance(name, str)]


def _is_reference(block: Any) -> bool:
    return isinstance(block, dict) and block.get("type") == "tool_reference"


def _with_definitions(message: dict[str, Any], tools: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """The message with the tools that its results refer to described in place."""
    if not any(_referred(block.get("content")) for block in _blocks(message)):
        return message

    def described(block: Any) -> Any:
        tool = tools.get(str(block.get("tool_name"))) if _is_reference(block) else None
        return block if tool is None else {"type": "text", "text": _described(tool) + "\n"}

    def replaced(block: Any) -> Any:
        is_result = isinstance(block, dict) and isinstance(block.get("content"), list)
        return {**block, "content": [described(each) for each in block["content"]]} if is_result else block

    return {**message, "content": [replaced(block) for block in message["content"]]}


def _described(tool: dict[str, Any]) -> str:
    fields = {"name": tool["name"], "description": tool.get("description"), "parameters": tool.get("input_schema")}
    return json.dumps({key: value for key, value in fields.items() if value is not None}, ensure_ascii=False)


def _last_compaction(messages: Sequence[dict[str, Any]]) -> tuple[int, int]:
    """Message and place of the last summary; -1 for none. A compaction that failed has no content."""
    for index in range(len(messages) - 1, -1, -1):
        content = messages[index].get("content")
        blocks = content if isinstance(content, list) else []
        for place in range(len(blocks) - 1, -1, -1):
            block = blocks[place]
            is_summary = isinstance(block, dict) and block.get("type") == "compaction"
            if is_summary and isinstance(block.get("content"), str) and block["content"]:
                return index, place
    return -1, -1


def _chat_messages(
    message: dict[str, Any], at: str, skipped: int, modalities: Collection[str], *, needs_text: bool
) -> list[dict[str, Any]]:
    """One message as one or more: tool results are messages of their own in the chat API."""
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        raise wrong_value(f"{at}.role", role, "be user, assistant or system")
    if role == "system" and isinstance(content, str | list):
        content, skipped = _without_billing(content[skipped:]), 0
        if not content:
            return []
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list):
        raise wrong_value(f"{at}.content", content, "be text or a list of blocks")
    texts = _Texts(modalities if role == "user" else ())
    results: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    thoughts: list[str] = []
    for index, block in enumerate(content[skipped:], skipped):
        where = f"{at}.content[{index}]"
        kind = _kind(block, where)
        if kind == "tool_result" and role == "user":
            text = _result_content(block.get("content") or "", f"{where}.content", modalities)
            if not text and block.get("is_error"):
                text = "The tool failed and said nothing."
            results.append({"role": "tool", "tool_call_id": str(block.get("tool_use_id") or ""), "content": text})
        elif kind == "tool_use" and role == "assistant":
            calls.append(_chat_call(block, where))
        elif kind == "thinking" and role == "assistant":
            thoughts.append(str(block.get("thinking") or ""))
        elif role != "assistant" or not _is_passed_over(kind):
            texts.add(block, where)
    if needs_text and not results:
        texts.check()
    return results + _own_message(role, texts.joined(), calls, "".join(thoughts), has_results=bool(results))


class _Texts:
    """The texts of the blocks of one message, with lines for what is not read."""

    def __init__(self, modalities: Collection[str] = ()) -> None:
        self._modalities = modalities
        self._texts: list[str] = []
        self._media: dict[int, dict[str, Any]] = {}
        """Place -> part."""
        self._lines: dict[int, tuple[str, str]] = {}
        """Place -> where the client sent it, and what it is."""

    def add(self, block: Any, where: str) -> None:
        kind = _kind(block, where)
        if kind == "image" and self._modalities:
            self._media[len(self._texts)] = media_part(_chat_image(block, where), where)
            self._texts.append("")
            return
        text = _read_text(block, where) if kind in _READ else None
        if text is None:
            self._lines[len(self._texts)] = where, kind
            text = left_out(_shown_kind(block), self._modalities)
        self._texts.append(text)

    def check(self) -> None:
        """Raises RequestError where there are lines and nothing else."""
        if self._lines and not self._media and len(self._lines) == sum(1 for text in self._texts if text.strip()):
            where, kind = next(iter(self._lines.values()))
            raise RequestError(
                f"{where} is of type {kind!r}, and this model reads text only (no images, PDF or files): send text "
                "with it, or instead of it",
                param=where,
                code="unsupported_content_type",
            )

    def joined(self, *, on_lines: bool = False) -> Content:
        return content_of(self._texts, range(len(self._texts)) if on_lines else list(self._lines), self._media)


def _chat_image(block: dict[str, Any], at: str) -> dict[str, Any]:
    """An image block in the chat API's form."""
    source: dict[str, Any] = block["source"] if isinstance(block.get("source"), dict) else {}
    kind = source.get("type")
    if kind == "url" and isinstance(source.get("url"), str):
        return {"type": "image_url", "image_url": {"url": source["url"]}}
    if kind == "base64" and isinstance(source.get("data"), str):
        url = f"data:{source.get('media_type') or 'image/*'};base64,{source['data']}"
        return {"type": "image_url", "image_url": {"url": url}}
    if kind == "file":
        raise RequestError(
            f"{at}.source names a file, and this server keeps none (--files-dir): send it as base64, or as a url",
            param=f"{at}.source",
            code="unsupported",
        )
    raise wrong_value(f"{at}.source", kind, "have the type base64, with data, or url, with a url")


def _kind(block: Any, at: str) -> str:
    kind = block.get("type") if isinstance(block, dict) else None
    if not isinstance(kind, str):
        raise wrong_value(at, block, "be a block, an object with a type")
    return kind


def _shown_kind(block: dict[str, Any]) -> str:
    """A kind for the model: "PDF" of a document, and its title."""
    kind, source = str(block["type"])[:64], block.get("source")
    if kind == "document":
        is_pdf = isinstance(source, dict) and source.get("media_type") == "application/pdf"
        kind = "PDF document" if is_pdf else kind
    title = next((block[key] for key in ("title", "name", "file_id") if isinstance(block.get(key), str)), "")
    return f"{kind} {title[:200]!r}" if title else kind


def _own_message(
    role: str, text: Content, calls: list[dict[str, Any]], thoughts: str, *, has_results: bool
) -> list[dict[str, Any]]:
    if has_results and not text:
        return []
    message: dict[str, Any] = {"role": role, "content": text}
    if calls:
        message["tool_calls"] = calls
    if thoughts:
        message["reasoning_content"] = thoughts
    return [message]


def _is_passed_over(kind: str) -> bool:
    """Blocks of an earlier answer that only the server that made them can read: hidden thoughts, summaries that failed,
    and tools that it ran by itself."""
    return kind in ("redacted_thinking", "compaction", "server_tool_use", "mcp_tool_use") or kind.endswith(
        "_tool_result"
    )


def _append(messages: list[dict[str, Any]], message: dict[str, Any]) -> None:
    """Adds a message; consecutive ones of the user or of the assistant are one turn."""
    last = messages[-1] if messages else {}
    if message["role"] not in ("user", "assistant") or last.get("role") != message["role"]:
        messages.append(message)
        return
    for key in ("content", "reasoning_content"):
        texts = [each[key] for each in (last, message) if each.get(key)]
        if texts or key in last:
            last[key] = joined_contents(texts, "\n\n")
    if message.get("tool_calls"):
        last["tool_calls"] = [*last.get("tool_calls", ()), *message["tool_calls"]]


def _chat_call(block: dict[str, Any], at: str) -> dict[str, Any]:
    if not isinstance(block.get("name"), str):
        raise wrong_value(f"{at}.name", block.get("name"), "be the name of a tool")
    arguments = block.get("input")
    function = {"name": block["name"], "arguments": {} if arguments is None else arguments}
    return {"id": str(block.get("id") or ""), "type": "function", "function": function}


def _without_billing(content: str | list[Any]) -> str | list[Any]:
    """Text or blocks, without what differs in each request and would keep the prefix cache from finding anything."""
    if isinstance(content, str):
        return content.partition("\n")[2] if content.startswith(_BILLING) else content
    return [block for block in content if not (isinstance(block, dict) and str(block.get("text")).startswith(_BILLING))]


def _system_text(system: str | list[Any]) -> str:
    """The system prompt."""
    if isinstance(system, str):
        return str(_without_billing(system))
    texts = []
    for index, block in enumerate(system):
        at = f"system[{index}]"
        kind = _kind({"type": "text", **block}, at)
        if kind != "text":
            raise RequestError(
                f"{at} is of type {reprlib.repr(kind)}; a system prompt is made of text blocks",
                param=at,
                code="unsupported_content_type",
            )
        texts.append(_plain_text(block, at))
    return "\n\n".join(text for text in texts if not text.startswith(_BILLING))


def _content_text(value: Any, at: str) -> str:
    """Text, or the text of a list of blocks."""
    return str(_read_blocks(_Texts(), value, at).joined())


def _result_content(value: Any, at: str, modalities: Collection[str]) -> Content:
    """What a tool has found: blocks are things of their own, each on its lines."""
    return _read_blocks(_Texts(modalities), value, at).joined(on_lines=True)


def _read_blocks(texts: _Texts, value: Any, at: str) -> _Texts:
    if isinstance(value, str):
        value = [{"type": "text", "text": value}]
    if not isinstance(value, list):
        raise wrong_value(at, value, "be text or a list of blocks")
    for index, block in enumerate(value):
        texts.add({"type": "text", **block} if isinstance(block, dict) else block, f"{at}[{index}]")
    return texts


def _read_text(block: dict[str, Any], at: str) -> str | None:
    """The text of one block; None for a document that is no text. Documents and search results stand under their
    titles, with a blank line behind."""
    kind = block["type"]
    if kind == "text":
        return _plain_text(block, at)
    if kind == "tool_reference":
        return f"{block.get('tool_name')}\n"
    if kind == "document":
        heads, content = ("title", "context"), _document_text(block.get("source"), f"{at}.source")
    else:
        heads, content = ("title", "source"), _content_text(block.get("content") or "", f"{at}.content")
    if content is None:
        return None
    lines = [str(block[head]) for head in heads if block.get(head)]
    return "\n".join([*lines, content]) + "\n\n"


def _plain_text(block: dict[str, Any], at: str) -> str:
    if not isinstance(block.get("text"), str):
        raise wrong_value(f"{at}.text", block.get("text"), "be text")
    return str(block["text"])


def _document_text(source: Any, at: str) -> str | None:
    kind = source.get("type") if isinstance(source, dict) else None
    if kind == "text" and isinstance(source.get("data"), str):
        return str(source["data"])
    return _content_text(source.get("content") or "", f"{at}.content") if kind == "content" else None
