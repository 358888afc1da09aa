"""Messages to tokens and tokens to text: chat templates, tokenizers, incremental detokenizing."""

from quire_renderers.chat_renderer import ChatRenderer
from quire_renderers.config import RendererConfig
from quire_renderers.detokenizer import IncrementalDetokenizer
from quire_renderers.segment_cache import SegmentCacheStats
from quire_renderers.tokenizer_loading import load_tokenizer

__version__ = "0.1.0"

__all__ = [
    "ChatRenderer",
    "IncrementalDetokenizer",
    "RendererConfig",
    "SegmentCacheStats",
    "load_tokenizer",
]
