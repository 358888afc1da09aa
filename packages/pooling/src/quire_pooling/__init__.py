"""Hidden states to embeddings, classes and scores.

Importing this package and `quire_pooling.spec` loads no torch; the names that need it are loaded when they are first
used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from quire_pooling.checkpoint import read_pooler
from quire_pooling.spec import (
    NO_HEAD,
    Activation,
    ActivationSpec,
    DenseSpec,
    DualEncoderSpec,
    LateInteractionSpec,
    LayerNormSpec,
    NormalizeSpec,
    PoolerSpec,
    PoolingHeadSpec,
    PoolingMethod,
    TokenTaskSpec,
)

if TYPE_CHECKING:
    from quire_pooling.pooler import Pooler, PoolingState
    from quire_pooling.weights import load_pooler_weights

__version__ = "0.1.0"

__all__ = [
    "NO_HEAD",
    "Activation",
    "ActivationSpec",
    "DenseSpec",
    "DualEncoderSpec",
    "LateInteractionSpec",
    "LayerNormSpec",
    "NormalizeSpec",
    "Pooler",
    "PoolerSpec",
    "PoolingHeadSpec",
    "PoolingMethod",
    "PoolingState",
    "TokenTaskSpec",
    "load_pooler_weights",
    "read_pooler",
]

_LAZY = {
    "Pooler": "quire_pooling.pooler",
    "PoolingState": "quire_pooling.pooler",
    "load_pooler_weights": "quire_pooling.weights",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)
