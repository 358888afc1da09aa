"""The networks: one file per family, which describes them as data.

Importing this package, `quire_models.config` and `quire_models.hub` loads no torch; the names that need it are loaded
when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from quire_models.config import ModelConfig
from quire_models.hub import resolve_model
from quire_models.registry import ARCHITECTURES
from quire_models.rope_config import RopeConfig

if TYPE_CHECKING:
    from quire_models.layers.decoder_lm import DecoderLM
    from quire_models.layers.network import Network
    from quire_models.loading import build_model, load_media_towers, load_model
    from quire_models.weights import load_weights

__version__ = "0.1.0"

__all__ = [
    "ARCHITECTURES",
    "DecoderLM",
    "ModelConfig",
    "Network",
    "RopeConfig",
    "build_model",
    "load_media_towers",
    "load_model",
    "load_weights",
    "resolve_model",
]

_LAZY = {
    "DecoderLM": "quire_models.layers.decoder_lm",
    "Network": "quire_models.layers.network",
    "build_model": "quire_models.loading",
    "load_media_towers": "quire_models.loading",
    "load_model": "quire_models.loading",
    "load_weights": "quire_models.weights",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)
