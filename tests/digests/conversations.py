"""Requests to the server whose answers must stay what they are: every chat protocol, JSON and streams, and errors."""

from __future__ import annotations

from typing import Any

__all__ = ["CONVERSATIONS"]

_ASK: list[dict[str, Any]] = [{"role": "user", "content": "What is 17 + 25?"}]
_TURNS = [*_ASK, {"role": "assistant", "content": "42"}, {"role": "user", "content": "Spell the word basket."}]
_TOOL = {
    "name": "get_weather",
    "description": "The weather of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
_SCHEMA = {"type": "object", "properties": {"answer": {"type": "integer"}}, "required": ["answer"]}
_SHAPED = {"dry_multiplier": 0.8, "xtc_probability": 0.5, "top_n_sigma": 2.0, "dynatemp_range": 0.3, "min_p": 0.02}
_COMPLETION, _CHAT, _RESPONSES, _MESSAGES = (
    "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages",
)  # fmt: skip

CONVERSATIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "completion": (_COMPLETION, {"prompt": "The word", "max_tokens": 12, "temperature": 0}),
    "completions": (_COMPLETION, {"prompt": ["One", "Two"], "n": 2, "seed": 3, "max_tokens": 6, "logprobs": 2}),
    "completion, echo": (_COMPLETION, {"prompt": "Hello", "max_tokens": 0, "echo": True, "logprobs": 1}),
    "completion, stream": (
        _COMPLETION,
        {"prompt": "The", "max_tokens": 8, "seed": 1, "stream": True, "stream_options": {"include_usage": True}},
    ),
    "completion, penalties": (
        _COMPLETION,
        {"prompt": "a b a b", "max_tokens": 10, "temperature": 0, "repetition_penalty": 1.4, "frequency_penalty": 0.5},
    ),
    "completion, samplers": (
        _COMPLETION,
        {"prompt": "Once", "max_tokens": 12, "seed": 7, "temperature": 1.1, **_SHAPED},
    ),
    "completion, mirostat": (_COMPLETION, {"prompt": "Once", "max_tokens": 12, "seed": 7, "mirostat": 2}),
    "completion, beams": (_COMPLETION, {"prompt": "Once", "max_tokens": 6, "n": 3, "use_beam_search": True}),
    "completion, pattern": (
        _COMPLETION,
        {"prompt": "Digits:", "max_tokens": 12, "temperature": 0, "structured_outputs": {"regex": "[0-9]{3}-[0-9]{2}"}},
    ),
    "chat": (_CHAT, {"messages": _ASK, "max_tokens": 16, "temperature": 0}),
    "chat, turns": (
        _CHAT,
        {"messages": _TURNS, "max_tokens": 16, "temperature": 0, "logprobs": True, "top_logprobs": 2},
    ),
    "chat, stream": (_CHAT, {"messages": _TURNS, "max_tokens": 16, "temperature": 0, "stream": True}),
    "chat, answers": (_CHAT, {"messages": _ASK, "max_tokens": 8, "n": 3, "seed": 5, "temperature": 0.9, "top_p": 0.9}),
    "chat, tool": (
        _CHAT,
        {
            "messages": [{"role": "user", "content": "What is the weather in Paris?"}],
            "tools": [{"type": "function", "function": _TOOL}],
            "tool_choice": "auto",
            "max_tokens": 48,
            "temperature": 0,
        },
    ),
    "chat, tool, stream": (
        _CHAT,
        {
            "messages": [{"role": "user", "content": "What is the weather in Paris?"}],
            "tools": [{"type": "function", "function": _TOOL}],
            "tool_choice": "auto",
            "max_tokens": 48,
            "temperature": 0,
            "stream": True,
        },
    ),
    "chat, schema": (
        _CHAT,
        {
            "messages": _ASK,
            "max_tokens": 32,
            "temperature": 0,
            "response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": _SCHEMA}},
        },
    ),
    "response": (_RESPONSES, {"input": "What is 17 + 25?", "max_output_tokens": 24, "temperature": 0, "store": False}),
    "response, stream": (
        _RESPONSES,
        {"input": "Who are you?", "max_output_tokens": 24, "temperature": 0, "stream": True, "store": False},
    ),
    "response, tool": (
        _RESPONSES,
        {
            "input": "What is the weather in Paris?",
            "tools": [{"type": "function", **_TOOL}],
            "tool_choice": "auto",
            "max_output_tokens": 48,
            "temperature": 0,
            "store": False,
        },
    ),
    "message": (_MESSAGES, {"messages": _ASK, "max_tokens": 24, "temperature": 0, "system": "Be brief."}),
    "message, stream": (_MESSAGES, {"messages": _TURNS, "max_tokens": 24, "temperature": 0, "stream": True}),
    "message, tool": (
        _MESSAGES,
        {
            "messages": [{"role": "user", "content": "What is the weather in Paris?"}],
            "tools": [{"name": _TOOL["name"], "input_schema": _TOOL["parameters"]}],
            "tool_choice": {"type": "auto"},
            "max_tokens": 48,
            "temperature": 0,
        },
    ),
    "tokens counted": ("/v1/messages/count_tokens", {"messages": _TURNS}),
    "rendered": ("/v1/chat/completions/render", {"messages": _TURNS}),
    "tokenized": ("/tokenize", {"prompt": "Hello, world"}),
    "error, field": (_COMPLETION, {"prompt": "x", "temperature": -1}),
    "error, type": (_CHAT, {"messages": _ASK, "max_tokens": "many"}),
    "error, model": (_CHAT, {"model": "nobody", "messages": _ASK}),
    "error, combination": (_COMPLETION, {"prompt": "x", "use_beam_search": True, "presence_penalty": 1.0}),
    "error, message": (_MESSAGES, {"messages": [], "max_tokens": 4}),
}
"""Name -> path and body of a POST request."""
