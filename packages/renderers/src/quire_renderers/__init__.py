"""Messages to tokens and tokens to messages: chat templates, tokenizers, detokenizing, tool calls and reasoning."""

from quire_renderers.bounded_prompts import BoundedPrompts
from quire_renderers.chat_format import ChatFormat, detect_reasoning_format, detect_tool_format
from quire_renderers.chat_renderer import ChatRenderer
from quire_renderers.chat_template import checked_template_kwargs
from quire_renderers.config import RendererConfig
from quire_renderers.detokenizer import IncrementalDetokenizer
from quire_renderers.fill_in_middle import FillInMiddle
from quire_renderers.literal_relay import replace_lone_surrogates
from quire_renderers.media_parts import modality_of
from quire_renderers.messages import joined_text, left_out, newest_of_user
from quire_renderers.output_events import (
    CallArguments,
    CallEnd,
    CallStart,
    ContentDelta,
    MessageBuilder,
    OutputEvent,
    ParsedCall,
    ParsedMessage,
    ReasoningDelta,
    fold_events,
    merge_events,
)
from quire_renderers.output_parser import OutputParser
from quire_renderers.segment_cache import SegmentCacheStats
from quire_renderers.thinking_spans import ThinkingSpan
from quire_renderers.tokenizer_loading import load_tokenizer

__version__ = "0.2.0"

__all__ = [
    "BoundedPrompts",
    "CallArguments",
    "CallEnd",
    "CallStart",
    "ChatFormat",
    "ChatRenderer",
    "ContentDelta",
    "FillInMiddle",
    "IncrementalDetokenizer",
    "MessageBuilder",
    "OutputEvent",
    "OutputParser",
    "ParsedCall",
    "ParsedMessage",
    "ReasoningDelta",
    "RendererConfig",
    "SegmentCacheStats",
    "ThinkingSpan",
    "checked_template_kwargs",
    "detect_reasoning_format",
    "detect_tool_format",
    "fold_events",
    "joined_text",
    "left_out",
    "load_tokenizer",
    "merge_events",
    "modality_of",
    "newest_of_user",
    "replace_lone_surrogates",
]
