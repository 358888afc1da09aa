"""Routes that read texts and generate nothing: path, handler, body, answer. A server whose model has not the task of a
route answers 404, saying how one has."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response

from quire_server.cohere import cohere_embed
from quire_server.cohere_protocol import CohereEmbeddings, CohereEmbedRequest
from quire_server.context import ServerContext
from quire_server.embeddings import classify, embeddings, pooling
from quire_server.openapi import BYTES, LISTS, Bodies, Media, json_of
from quire_server.pooling_answers import (
    Classification,
    EmbeddingObject,
    PooledObject,
    PoolingAnswer,
    RerankAnswer,
    Score,
)
from quire_server.pooling_protocol import (
    ClassificationRequest,
    EmbeddingRequest,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
)
from quire_server.scoring import rerank, score
from quire_server.tei import embed, embed_all, embed_sparse, predict, root, similarity
from quire_server.tei_protocol import (
    TEIEmbedAllRequest,
    TEIEmbedRequest,
    TEIPredictRequest,
    TEIPromptRequest,
    TEISimilarityRequest,
)

__all__ = ["POOLING_ROUTES"]

Handler = Callable[[ServerContext, Request], Awaitable[Response]]

_CLASSES, _SCORES = json_of(PoolingAnswer[Classification]), json_of(PoolingAnswer[Score])

POOLING_ROUTES: tuple[tuple[str, Handler, Bodies, Media], ...] = (
    ("/v1/embeddings", embeddings, EmbeddingRequest, {**json_of(PoolingAnswer[EmbeddingObject]), **BYTES}),
    ("/v1/embed", cohere_embed, CohereEmbedRequest, json_of(CohereEmbeddings)),
    ("/v2/embed", cohere_embed, CohereEmbedRequest, json_of(CohereEmbeddings)),
    ("/score", score, ScoreRequest, _SCORES),
    ("/v1/score", score, ScoreRequest, _SCORES),
    ("/rerank", rerank, RerankRequest, json_of(RerankAnswer)),
    ("/v1/rerank", rerank, RerankRequest, json_of(RerankAnswer)),
    ("/v2/rerank", rerank, RerankRequest, json_of(RerankAnswer)),
    ("/classify", classify, ClassificationRequest, _CLASSES),
    ("/v1/classify", classify, ClassificationRequest, _CLASSES),
    ("/pooling", pooling, PoolingRequest, {**json_of(PoolingAnswer[PooledObject]), **BYTES}),
    ("/embed", embed, TEIEmbedRequest, LISTS),
    ("/embed_all", embed_all, TEIEmbedAllRequest, LISTS),
    ("/embed_sparse", embed_sparse, TEIPromptRequest, LISTS),
    ("/predict", predict, TEIPredictRequest, LISTS),
    ("/similarity", similarity, TEISimilarityRequest, LISTS),
    ("/", root, (TEIEmbedRequest, TEIPredictRequest, RerankRequest), LISTS),
)
