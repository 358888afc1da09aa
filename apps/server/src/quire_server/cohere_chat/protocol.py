"""Body of Cohere's chat, and what it is as the body of a chat completion. Knows no engine.

Source of the shapes: Cohere's public API reference of version 2, and the types of its Python client.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from quire_interfaces import RequestError, wrong_value
from quire_server.protocol import LenientBody
from quire_server.request_fields import Int, Messages, Objects, Tools

__all__ = ["FIELD_NAMES", "CohereChatRequest"]

_ROLES = ("system", "user", "assistant", "tool")


FIELD_NAMES = {
    "top_k": "k",
    "top_p": "p",
    "stop": "stop_sequences",
    "prompt": "messages",
    "max_completion_tokens": "max_tokens",
    "thinking_token_budget": "thinking.token_budget",
}
"""Fields of chat completions -> Cohere's."""


class CohereThinking(BaseModel):
    """How the model may think."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["enabled", "disabled"]
    token_budget: Annotated[int, Field(ge=1, lt=2**63)] | None = None


class CohereChatRequest(LenientBody):
    """Body of POST /v2/chat."""

    model: str
    messages: Messages = Field(min_length=1)
    stream: bool = False
    tools: Tools | None = None
    strict_tools: bool = False
    tool_choice: Literal["REQUIRED", "NONE"] | None = None
    documents: Annotated[list[str | dict[str, Any]], Field(max_length=4096)] | None = None
    citation_options: dict[str, Any] | None = None
    """Answers have no citations, whatever stands here."""
    response_format: dict[str, Any] | None = None
    safety_mode: Literal["CONTEXTUAL", "STRICT", "OFF", "NONE"] | None = None
    """A variable of the chat template."""
    max_tokens: Int | None = None
    stop_sequences: Annotated[list[str], Field(max_length=64)] | None = None
    temperature: float | None = None
    seed: Int | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    k: Int | None = None
    """As `top_k`; 0 for all tokens."""
    p: float | None = None
    """As `top_p`."""
    logprobs: bool = False
    thinking: CohereThinking | None = None
    priority: Int | None = None

    def chat_fields(self) -> dict[str, Any]:
        """Fields of the chat completion that this asks for.

        Raises:
            RequestError: naming the message or field at fault.
        """
        template: dict[str, Any] = {}
        if self.safety_mode is not None:
            template["safety_mode"] = self.safety_mode
        if self.thinking is not None:
            template["enable_thinking"] = template["thinking"] = self.thinking.type == "enabled"
        values = {
            "model": self.model,
            "messages": [_message(message, f"messages[{place}]") for place, message in enumerate(self.messages)],
            "tools": self._tools(),
            "tool_choice": None if self.tool_choice is None else self.tool_choice.lower(),
            "documents": self._documents(),
            "response_format": self._response_format(),
            "chat_template_kwargs": template or None,
            "thinking_token_budget": None if self.thinking is None else self.thinking.token_budget,
            "max_tokens": self.max_tokens,
            "stop": self.stop_sequences,
            "temperature": self.temperature,
            "seed": self.seed,
            "frequency_penalty": self.frequency_penalty,
            "presence_penalty": self.presence_penalty,
            "top_k": self.k,
            "top_p": self.p,
            "logprobs": self.logprobs or None,
            "priority": self.priority,
            "stream": self.stream,
        }
        return {name: value for name, value in values.items() if value is not None}

    def _tools(self) -> list[dict[str, Any]] | None:
        if not self.tools or not self.strict_tools:
            return self.tools or None
        return [
            {**tool, "function": {**tool["function"], "strict": True}}
            if isinstance(tool.get("function"), dict)
            else tool
            for tool in self.tools
        ]

    def _documents(self) -> Objects | None:
        """Documents as templates read them: an object each, with its id."""
        documents = []
        for place, document in enumerate(self.documents or ()):
            if isinstance(document, str):
                documents.append({"id": str(place), "text": document})
                continue
            data = document.get("data")
            if isinstance(data, str):
                data = {"text": data}
            if not isinstance(data, dict):
                raise wrong_value(f"documents[{place}].data", data, "be an object or a text")
            documents.append({"id": str(document.get("id", place)), **data})
        return documents or None

    def _response_format(self) -> dict[str, Any] | None:
        form = self.response_format
        if form is None or form.get("type") == "text":
            return None
        if form.get("type") != "json_object":
            raise wrong_value("response_format.type", form.get("type"), "be text or json_object")
        schema = form.get("json_schema", form.get("schema"))
        if schema is None:
            return {"type": "json_object"}
        return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}


def _message(message: dict[str, Any], at: str) -> dict[str, Any]:
    """A message in the chat API's form.

    Raises:
        RequestError: naming what is wrong.
    """
    role = message.get("role")
    if role not in _ROLES:
        raise wrong_value(f"{at}.role", role, f"be one of {', '.join(_ROLES)}")
    content = message.get("content")
    if role == "tool":
        return {"role": role, "tool_call_id": message.get("tool_call_id"), "content": _tool_text(content, at)}
    if role != "assistant":
        return {"role": role, "content": content}
    text, thinking = _answer_text(content, at)
    chat: dict[str, Any] = {"role": role, "content": text}
    plan = message.get("tool_plan")
    if reasoning := thinking or (plan if isinstance(plan, str) else ""):
        chat["reasoning"] = chat["reasoning_content"] = reasoning
    if message.get("tool_calls"):
        chat["tool_calls"] = message["tool_calls"]
    return chat


def _answer_text(content: Any, at: str) -> tuple[str | None, str]:
    """Text and thinking of an answer of before."""
    if content is None or isinstance(content, str):
        return content, ""
    parts: dict[str, list[str]] = {"text": [], "thinking": []}
    for place, part in enumerate(_parts(content, at)):
        kind = part.get("type", "text")
        if kind not in parts or not isinstance(part.get(kind), str):
            raise RequestError(
                f"{at}.content[{place}] must be an object of type text or thinking with its text",
                param=f"{at}.content",
            )
        parts[kind].append(part[kind])
    return "".join(parts["text"]) or None, "".join(parts["thinking"])


def _tool_text(content: Any, at: str) -> str:
    """What a tool answered: texts as they are, documents as JSON, one on each line."""
    if isinstance(content, str):
        return content
    texts = []
    for place, part in enumerate(_parts(content, at)):
        if part.get("type", "text") == "text" and isinstance(part.get("text"), str):
            texts.append(part["text"])
        elif part.get("type") == "document" and isinstance(part.get("document"), dict):
            data = part["document"].get("data", part["document"])
            texts.append(data if isinstance(data, str) else json.dumps(data, ensure_ascii=False))
        else:
            raise RequestError(
                f"{at}.content[{place}] must be an object of type text or document", param=f"{at}.content"
            )
    return "\n".join(texts)


def _parts(content: Any, at: str) -> list[dict[str, Any]]:
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        raise RequestError(f"{at}.content must be a text or a list of objects", param=f"{at}.content")
    return content
