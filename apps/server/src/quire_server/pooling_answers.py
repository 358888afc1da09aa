"""Answers of the pooling routes in OpenAI's and vLLM's shapes, as msgspec structs. Knows no engine.

With `errors: "per_item"`, an item that failed stands in its place with `error` and without a result.
"""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from quire_server.cohere_protocol import CohereMeta
from quire_server.responses import PromptTokensDetails

__all__ = [
    "Classification",
    "EmbeddingObject",
    "PluginAnswer",
    "PooledObject",
    "PoolingAnswer",
    "PoolingUsage",
    "RankedDocument",
    "RerankAnswer",
    "Score",
    "TEIInfo",
    "TEIRank",
]


class ItemError(msgspec.Struct):
    """Why an item has no result, in the words of a request's error."""

    message: str
    type: str
    param: str | None
    code: str | None


class PoolingUsage(msgspec.Struct):
    """Tokens that were read. Nothing is generated."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int
    prompt_tokens_details: PromptTokensDetails

    @classmethod
    def of(cls, num_tokens: int, num_cached_tokens: int) -> PoolingUsage:
        """Of `num_tokens` prompt tokens, of which the prefix cache had some."""
        return cls(num_tokens, num_tokens, 0, PromptTokensDetails(max(0, num_cached_tokens)))


Item = TypeVar("Item")


class PoolingAnswer(msgspec.Struct, Generic[Item], kw_only=True):
    """Answer of POST /v1/embeddings, /classify, /score and /pooling: an object per item of the request, in order."""

    id: str
    object: str = "list"
    created: int
    model: str
    data: list[Item]
    usage: PoolingUsage


class EmbeddingObject(msgspec.Struct, kw_only=True):
    """One embedding, as numbers or as base64; null where the item failed."""

    index: int
    object: str = "embedding"
    embedding: list[float] | str | None = None
    error: ItemError | UnsetType = UNSET


class Classification(msgspec.Struct, kw_only=True):
    """The most likely class of one text, and the probabilities of all."""

    index: int
    label: str | None = None
    probs: list[float] = msgspec.field(default_factory=list)
    num_classes: int = 0
    error: ItemError | UnsetType = UNSET


class PooledObject(msgspec.Struct, kw_only=True):
    """What was pooled of one text: numbers, rows of numbers (one per token), or either in base64."""

    index: int
    object: str = "pooling"
    data: list[float | list[float]] | str | None = None
    error: ItemError | UnsetType = UNSET


class PluginAnswer(msgspec.Struct, kw_only=True):
    """Answer of POST /pooling by an IO-processor plug-in."""

    request_id: str
    created_at: int
    data: Any


class Score(msgspec.Struct, kw_only=True):
    """How well a document answers its query."""

    index: int
    object: str = "score"
    score: float | None = None
    error: ItemError | UnsetType = UNSET


class RankedDocument(msgspec.Struct, kw_only=True):
    """A document with its place in the request, best first."""

    index: int
    relevance_score: float
    document: dict[str, Any] | UnsetType = UNSET


class FailedDocument(msgspec.Struct, kw_only=True):
    """A document that could not be scored."""

    index: int
    error: ItemError


class RerankAnswer(msgspec.Struct, kw_only=True):
    """Answer of the rerank routes; `meta` is Cohere's, `usage` vLLM's and Jina's."""

    id: str
    object: str = "list"
    model: str
    results: list[RankedDocument]
    usage: PoolingUsage
    meta: CohereMeta
    errors: list[FailedDocument] | UnsetType = UNSET


class TEIRank(msgspec.Struct, kw_only=True):
    """A text with its place in the request, best first."""

    index: int
    score: float
    text: str | UnsetType = UNSET


class TEIInfo(msgspec.Struct, kw_only=True):
    """Answer of GET /info."""

    model_id: str
    model_sha: str | None = None
    model_dtype: str
    model_type: dict[str, dict[str, Any]]
    max_concurrent_requests: int
    max_input_length: int
    max_batch_tokens: int
    max_batch_requests: int
    max_client_batch_size: int
    auto_truncate: bool = False
    tokenization_workers: int
    version: str
    sha: str | None = None
    docker_label: str | None = None
