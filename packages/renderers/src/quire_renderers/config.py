"""Settings of the chat renderer: limits, the size of its cache, and how outputs are parsed."""

from __future__ import annotations

from dataclasses import dataclass

from quire_interfaces import Settings, at_least, setting
from quire_interfaces.plugins import one_of_or_plugin
from quire_renderers.chat_format import (
    REASONING_PARSERS,
    TOOL_PARSERS,
    reasoning_format_names,
    tool_format_names,
)

__all__ = ["RendererConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RendererConfig(Settings):
    """How much one request may ask of the renderer, and how much memory the renderer may keep."""

    segment_cache_bytes: int = setting(
        32 * 2**20,
        help="Memory for tokenized parts of earlier prompts; 0 tokenizes every prompt whole.",
        unit="bytes",
        check=at_least(0),
    )
    max_prompt_chars: int = setting(
        4_000_000,
        help="Longest prompt text, rendered by a template or given; longer ones are refused unread.",
        unit="characters",
        check=at_least(1),
    )
    template_timeout_s: float = setting(
        5.0,
        help="Longest time one run of a chat template may take.",
        unit="seconds",
        check=at_least(0.001),
    )
    allow_control_tokens_in_content: bool = setting(
        False,
        help="Texts of messages, tools and documents may write the model's control tokens, as through Hugging Face's "
        "templates; otherwise what looks like one there is ordinary text.",
    )
    tool_call_parser: str = setting(
        "auto",
        help="How the model writes tool calls; auto recognises it from the chat template, none parses no calls. "
        "A plug-in's name is one, too.",
        check=one_of_or_plugin(TOOL_PARSERS, tool_format_names()),
    )
    reasoning_parser: str = setting(
        "auto",
        help="How the model marks its thinking; auto recognises it from the chat template, none leaves it in the "
        "text. A plug-in's name is one, too.",
        check=one_of_or_plugin(REASONING_PARSERS, reasoning_format_names()),
    )
