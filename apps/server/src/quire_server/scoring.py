"""POST /score and /rerank: how well documents answer a query, in the shapes of vLLM, Jina, Cohere and TEI.

A model that reads query and document together (a cross-encoder, a generative reranker) scores pairs. One that embeds
each text compares the vectors by their cosine; one that embeds each token, by MaxSim (Khattab & Zaharia, "ColBERT",
2020, section 3.2). Scores are answered as they are computed; only TEI's are turned into numbers from 0 to 1.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from quire_interfaces import PooledOutput, PoolingTask, QuireError
from quire_server.body import read_model
from quire_server.cohere_protocol import CohereMeta
from quire_server.context import ServerContext, in_thread_when
from quire_server.pooling_answers import (
    FailedDocument,
    RankedDocument,
    RerankAnswer,
    Score,
    ScoreList,
    TEIRank,
)
from quire_server.pooling_protocol import PoolingInput, RerankRequest, ScoreRequest, pairs_of
from quire_server.pooling_run import Pooled, PoolingJob, item_error, output_of, pool_items, task_of, usage_of
from quire_server.request_ids import answer_id
from quire_server.responses import json_response
from quire_server.vector_encoding import dot_product, float_vector

__all__ = ["cosine", "rerank", "score"]

Scored = float | QuireError
"""The score of one document, or why there is none."""


async def score(context: ServerContext, request: Request) -> Response:
    """POST /score and /v1/score: a number for each pair of texts."""
    body = await read_model(context, request, ScoreRequest)
    context = context.for_pooling(body.model)
    model = context.resolve_model(body.model)
    scores, outputs = await _scores(context, request, body, *body.sides())
    data = [
        Score(index=index, error=item_error(each)) if isinstance(each, QuireError) else Score(index=index, score=each)
        for index, each in enumerate(scores)
    ]
    name = answer_id(request, "score-", body.request_id)
    created = int(time.time())
    return json_response(ScoreList(id=name, created=created, model=model, data=data, usage=usage_of(outputs)))


async def rerank(context: ServerContext, request: Request) -> Response:
    """POST /rerank, /v1/rerank and /v2/rerank: documents by how well they answer a query, the best first."""
    body = await read_model(context, request, RerankRequest)
    context = context.for_pooling(body.model)
    model = context.resolve_model(body.model)
    queries, documents = body.sides()
    num_results = body.num_results(len(documents))
    scores, outputs = await _scores(context, request, body, queries, documents)
    ranked = [(each, index) for index, each in enumerate(scores) if not isinstance(each, QuireError)]
    ranked.sort(key=lambda pair: (-pair[0], pair[1]))
    del ranked[num_results:]
    if body.is_tei:
        texts = body.texts if body.return_text and body.texts is not None else None
        return json_response(
            [TEIRank(index=index, score=each, text=UNSET if texts is None else texts[index]) for each, index in ranked]
        )
    failed = [
        FailedDocument(index=index, error=error)
        for index, each in enumerate(scores)
        if isinstance(each, QuireError) and not isinstance(error := item_error(each), msgspec.UnsetType)
    ]
    usage = usage_of(outputs)
    version = "1" if request.url.path.endswith("/v1/rerank") else "2"
    answer = RerankAnswer(
        id=answer_id(request, "rerank-", body.request_id),
        model=model,
        results=[
            RankedDocument(
                index=index,
                relevance_score=each,
                document=_document(documents[index]) if body.return_documents else UNSET,
            )
            for each, index in ranked
        ],
        usage=usage,
        meta=CohereMeta.of(version, usage.prompt_tokens, search_units=1),
        errors=failed or UNSET,
    )
    return json_response(answer)


def _document(document: PoolingInput) -> dict[str, Any]:
    """As it stands in the answer, in vLLM's words."""
    if document.messages is None:
        return {"text": document.prompt, "multi_modal": None}
    return {"text": None, "multi_modal": document.messages[0]["content"]}


async def _scores(
    context: ServerContext,
    request: Request,
    body: ScoreRequest | RerankRequest,
    queries: Sequence[PoolingInput],
    documents: Sequence[PoolingInput],
) -> tuple[list[Scored], list[Pooled]]:
    """The score of each document for its query, and what was computed for it.

    Raises:
        HTTPError: 404, the model can neither score pairs nor embed texts.
        QuireError: as `pool_items` does.
    """
    body.check_supported()
    pairs = list(pairs_of(queries, documents))
    task = task_of(context, "score", "embed", "token_embed")
    job = PoolingJob.of(context, body, task)
    job.chat_template, job.chat_template_kwargs = body.chat_template, body.chat_template_kwargs
    if isinstance(body, RerankRequest) and body.max_tokens_per_doc is not None:
        documents = await in_thread_when(body.is_large, lambda: _cut(context, documents, body.max_tokens_per_doc or 1))
        pairs = list(pairs_of(queries, documents))
    if task == "score":
        outputs = await pool_items(context, request, pairs, job)
        return [each if isinstance(each, QuireError) else _number(each.pooled) for each in outputs], outputs
    if task == "embed":
        outputs = await pool_items(context, request, [(each, None) for each in (*queries, *documents)], job)
    else:
        outputs = []
        for texts, job.prompt_name in ((queries, "query"), (documents, "document")):
            outputs += await pool_items(context, request, [(each, None) for each in texts], job)
    places = zip(range(len(queries)) if len(queries) > 1 else [0] * len(documents), range(len(documents)), strict=True)
    num_queries = len(queries)
    scores = await in_thread_when(
        body.is_large or task == "token_embed",
        lambda: [_compared(task, outputs[query], outputs[num_queries + document]) for query, document in places],
    )
    return scores, outputs


def _number(output: PooledOutput | None) -> float:
    assert output is not None
    return float_vector(output.data)[0]


def _cut(context: ServerContext, documents: Sequence[PoolingInput], num_tokens: int) -> list[PoolingInput]:
    """The documents, texts of more than `num_tokens` tokens cut at their end."""
    renderer = context.llm.renderer
    cut = []
    for document in documents:
        text = document.prompt
        if isinstance(text, str) and len(text) > num_tokens:  # a token has at least one character
            prompt = renderer.render_prompt(text, add_special_tokens=False)
            if len(prompt.token_ids) > num_tokens:
                offsets = renderer.token_offsets(prompt, add_special_tokens=False)
                ids = prompt.token_ids[:num_tokens]
                text = renderer.tokenizer.decode(ids) if offsets is None else text[: offsets[num_tokens - 1][1]]
        cut.append(dataclasses.replace(document, prompt=text))
    return cut


def _compared(task: PoolingTask, query: Pooled, document: Pooled) -> Scored:
    """The similarity of what was made of two texts; the error of the one that failed."""
    for each in (query, document):
        if isinstance(each, QuireError):
            return each
    first, second = output_of(query), output_of(document)
    assert first is not None
    assert second is not None
    return cosine(first, second) if task == "embed" else max_sim(first, second)


def cosine(first: PooledOutput, second: PooledOutput) -> float:
    """The cosine of the angle between two vectors; 0 where one of them is 0."""
    squares = dot_product(first.data, first.data) * dot_product(second.data, second.data)
    return dot_product(first.data, second.data) / math.sqrt(squares) if squares else 0.0


def max_sim(query: PooledOutput, document: PooledOutput) -> float:
    """Sum over the query's tokens of the largest dot product with a token of the document (ColBERT, equation 3).

    Args:
        query: [query tokens, dimensions].
        document: [document tokens, dimensions].
    """
    import numpy

    left, right = (numpy.frombuffer(each.data, dtype="<f4").reshape(each.shape) for each in (query, document))
    return float((left @ right.T).max(axis=1).sum(dtype=numpy.float64)) if right.size else 0.0
