"""Hidden states to embeddings, classes and scores. Importing it and `quire_pooling.spec` loads no torch."""

from quire_pooling.spec import (
    NO_HEAD,
    Activation,
    DenseSpec,
    LayerNormSpec,
    PoolerSpec,
    PoolingHeadSpec,
    TokenTaskSpec,
)

__version__ = "0.1.0"

__all__ = [
    "NO_HEAD",
    "Activation",
    "DenseSpec",
    "LayerNormSpec",
    "PoolerSpec",
    "PoolingHeadSpec",
    "TokenTaskSpec",
]
