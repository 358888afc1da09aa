"""Images, videos and sounds of prompts: fetched, bounded, prepared by processes of their own, kept in shared memory.

Knows media, processors of checkpoints and placeholders in a prompt's text; knows no engine and no network, and imports
no torch (a preparing process may, where a processor needs it). Names are loaded on first use (PEP 562), so that whoever
reads settings alone loads neither numpy nor Pillow.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quire_multimodal.config import MediaConfig
    from quire_multimodal.embeds import read_fact, split_prompt_embeds
    from quire_multimodal.errors import MediaError
    from quire_multimodal.fetch import fetch_media, is_public
    from quire_multimodal.positions import PositionScheme, place_media
    from quire_multimodal.preparer import MediaPreparer, MediaStats
    from quire_multimodal.sound_files import SoundFile
    from quire_multimodal.sound_pool import OpenSound, SoundPool
    from quire_multimodal.sources import MediaSource
    from quire_multimodal.spans import expand_placeholders, find_spans
    from quire_multimodal.spectrograms import SpectrogramPreparer, mono_samples
    from quire_multimodal.store import MediaStore, StoredItem, read_features

__version__ = "0.1.0"

__all__ = [
    "MediaConfig",
    "MediaError",
    "MediaPreparer",
    "MediaSource",
    "MediaStats",
    "MediaStore",
    "OpenSound",
    "PositionScheme",
    "SoundFile",
    "SoundPool",
    "SpectrogramPreparer",
    "StoredItem",
    "expand_placeholders",
    "fetch_media",
    "find_spans",
    "is_public",
    "mono_samples",
    "place_media",
    "read_fact",
    "read_features",
    "split_prompt_embeds",
]

_MODULE_OF = {
    "MediaConfig": "config",
    "MediaError": "errors",
    "MediaPreparer": "preparer",
    "MediaSource": "sources",
    "MediaStats": "preparer",
    "MediaStore": "store",
    "OpenSound": "sound_pool",
    "PositionScheme": "positions",
    "SoundFile": "sound_files",
    "SoundPool": "sound_pool",
    "SpectrogramPreparer": "spectrograms",
    "StoredItem": "store",
    "expand_placeholders": "spans",
    "fetch_media": "fetch",
    "find_spans": "spans",
    "is_public": "fetch",
    "mono_samples": "spectrograms",
    "place_media": "positions",
    "read_fact": "embeds",
    "read_features": "store",
    "split_prompt_embeds": "embeds",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
