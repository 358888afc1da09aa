"""Images, videos and sounds of prompts: fetched, bounded, prepared by processes of their own, kept in shared memory.

Knows media, processors of checkpoints and placeholders in a prompt's text; knows no engine and no network, and imports
no torch (a preparing process may, where a processor needs it).
"""

from __future__ import annotations

from quire_multimodal.config import MediaConfig
from quire_multimodal.errors import MediaError
from quire_multimodal.fetch import fetch, is_public
from quire_multimodal.positions import PositionScheme, place_media
from quire_multimodal.preparer import MediaPreparer, MediaStats
from quire_multimodal.sources import MediaSource
from quire_multimodal.spans import expand_placeholders, find_spans
from quire_multimodal.store import MediaStore, StoredItem, read_features

__version__ = "0.1.0"

__all__ = [
    "MediaConfig",
    "MediaError",
    "MediaPreparer",
    "MediaSource",
    "MediaStats",
    "MediaStore",
    "PositionScheme",
    "StoredItem",
    "expand_placeholders",
    "fetch",
    "find_spans",
    "is_public",
    "place_media",
    "read_features",
]
