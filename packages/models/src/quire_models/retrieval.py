"""Networks that see documents and give a vector for each of their tokens (ColPali, arXiv 2407.01449): a network with
towers, and a layer in place of its LM head. Free of torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from quire_interfaces import CheckpointError, Fields
from quire_models.composite import INHERITED
from quire_models.pooling_decoder import as_pooling_decoder
from quire_models.pooling_heads import dense
from quire_models.spec import NetworkSpec
from quire_pooling.spec import LateInteractionSpec, PoolerSpec, PoolingHeadSpec

__all__ = ["COLBERT", "RETRIEVERS", "RetrieverConfig", "as_retriever", "retriever_config"]

RETRIEVERS = frozenset({"ColPaliForRetrieval", "ColQwen2ForRetrieval"})
"""Architectures of this kind."""

COLBERT = "HF_ColBERT"
"""Architecture of encoders that ColBERT's own code (arXiv 2004.12832) writes: a body of its `model_type`, and a layer
`linear` behind it."""
_COLBERT_BODIES = {"bert": "BertModel", "modernbert": "ModernBertModel", "xlm-roberta": "XLMRobertaModel"}
_UNSERVED = (
    "ColModernVBertForRetrieval", "ColPali", "ColQwen2", "ColQwen2_5", "ColQwen3", "LlamaNemotronVLModel",
    "OpsColQwen3Model", "Qwen3VLNemotronEmbedModel", "llama_NemoRetrieverColEmbed",
)  # fmt: skip
"""Architectures of this kind that are not run: an encoder that sees, or classes with code of their own."""


class RetrieverConfig(NamedTuple):
    """What config.json of such a network says."""

    values: dict[str, Any]
    """Its network with towers, as that one's own config.json would say it, but for the architecture."""
    embedding_dim: int
    """Numbers of a token's vector."""


def retriever_config(values: Mapping[str, Any], source: str) -> RetrieverConfig | None:
    """The parts of a config.json; None for other networks.

    Args:
        values: The file.
        source: Where it comes from, for messages.

    Raises:
        CheckpointError: It is of such a network that is not run.
    """
    names = values.get("architectures")
    if not isinstance(names, list) or RETRIEVERS.union(_UNSERVED, (COLBERT,)).isdisjoint(map(str, names)):
        return None
    return _retriever(values, names, source)


def _retriever(values: Mapping[str, Any], names: list[Any], source: str) -> RetrieverConfig:
    """The parts of a config.json of the architectures `names`. Raises as `retriever_config`."""
    if unserved := sorted(set(_UNSERVED).intersection(map(str, names))):
        raise CheckpointError(
            f"{source}: {unserved[0]} is not supported: of networks with a vector for each token of an image there "
            f"are {', '.join(sorted(RETRIEVERS))}, in Transformers' format"
        )
    if COLBERT in names:
        body = _COLBERT_BODIES.get(model_type := str(values.get("model_type")))
        if body is None:
            known = ", ".join(_COLBERT_BODIES)
            raise CheckpointError(
                f"{source}: {COLBERT} of model_type {model_type!r} is not supported; there are {known}"
            )
        return RetrieverConfig({**values, "architectures": [body]}, _colbert_dim(Fields(values, source)))
    inner = Fields(values, source).get("vlm_config") or {}
    shared = {name: values[name] for name in INHERITED if values.get(name) is not None}
    embedding_dim = Fields(values, source).integer("embedding_dim", default=128, minimum=1)
    return RetrieverConfig({**shared, **inner, "architectures": names}, embedding_dim)


def as_retriever(network: NetworkSpec, config: Fields, embedding_dim: int) -> NetworkSpec:
    """A decoder whose LM head is replaced by the layer `embedding_proj_layer`, or an encoder with the layer `linear`.

    Args:
        config: The language model's part of config.json.
    """
    size = network.hidden_size
    if network.is_encoder:
        head = PoolingHeadSpec(steps=(dense("linear", size, _colbert_dim(config), bias=False),))
        pooler = PoolerSpec(
            hidden_size=size, head=head, tasks=frozenset({"token_embed"}), similarity="maxsim",
            late_interaction=LateInteractionSpec(),
        )  # fmt: skip
        return replace(network, pooler=pooler)
    pooler = PoolerSpec(
        hidden_size=size,
        head=PoolingHeadSpec(steps=(dense("embedding_proj_layer", size, embedding_dim),)),
        tasks=frozenset({"token_embed"}),
        similarity="maxsim",
        late_interaction=LateInteractionSpec(),
    )
    return replace(as_pooling_decoder(network, config, "none"), pooler=pooler)


def _colbert_dim(config: Fields) -> int:
    """Numbers of a token's vector: `dim`, which ColBERT writes into artifact.metadata beside config.json."""
    return config.integer("dim", default=128, minimum=1)
