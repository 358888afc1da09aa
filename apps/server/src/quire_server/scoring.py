"""POST /score and /rerank: how well documents answer a query, in the shapes of vLLM, Jina, Cohere and TEI.

A model that reads query and document together (a cross-encoder, a generative reranker) scores pairs. One that embeds
each text compares the vectors by their cosine; one that embeds each token, by MaxSim (Khattab & Zaharia, "ColBERT",
2020, section 3.2). Scores are answered as they are computed; only TEI's are turned into numbers from 0 to 1.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from quire_interfaces import PooledOutput, PoolingTask, QuireError
from quire_server.cohere_protocol import CohereMeta
from quire_server.context import ServerContext, in_thread_when
from quire_server.pooling_answers import FailedDocument, RankedDocument, RerankAnswer, Score, TEIRank
from quire_server.pooling_call import PoolingCall, read_call
from quire_server.pooling_protocol import PoolingInput, RerankRequest, ScoreRequest, pairs_of
from quire_server.pooling_run import Pooled, item_error, output_of, usage_of
from quire_server.responses import json_response
from quire_server.vector_encoding import dot_product, float_vector

__all__ = ["cosine", "max_sim", "rerank", "score"]

Scored = float | QuireError
"""The score of one document, or why there is none."""


async def score(context: ServerContext, request: Request) -> Response:
    """POST /score and /v1/score: a number for each pair of texts."""
    call = await read_call(context, request, ScoreRequest)
    scores, outputs = await _scores(call, *call.body.sides())

    def items() -> Iterator[Score]:
        for index, each in enumerate(scores):
            if isinstance(each, QuireError):
                yield Score(index=index, error=item_error(each))
            else:
                yield Score(index=index, score=each)

    return await call.list_answer("score-", outputs, items)


async def rerank(context: ServerContext, request: Request) -> Response:
    """POST /rerank, /v1/rerank and /v2/rerank: documents by how well they answer a query, the best first."""
    call = await read_call(context, request, RerankRequest)
    body = call.body
    queries, documents = body.sides()
    num_results = body.num_results(len(documents))
    scores, outputs = await _scores(call, queries, documents)
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
        id=call.answer_id("rerank-"),
        model=call.model,
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
    call: PoolingCall[ScoreRequest] | PoolingCall[RerankRequest],
    queries: Sequence[PoolingInput],
    documents: Sequence[PoolingInput],
) -> tuple[list[Scored], list[Pooled]]:
    """The score of each document for its query, and what was computed for it.

    Raises:
        HTTPError: 404, the model can neither score pairs nor embed texts.
        QuireError: as `pool_items` does.
    """
    body, context = call.body, call.context
    pairs_of(queries, documents)  # before anything runs
    task = call.task("score", "embed", "token_embed")
    job = call.job(task)
    queries, documents = await in_thread_when(
        body.is_large,
        lambda: (_cut(context, queries, body.max_tokens_per_query), _cut(context, documents, body.max_tokens_per_doc)),
    )
    if task == "score":
        outputs = await call.run(list(pairs_of(queries, documents)), job)
        return [each if isinstance(each, QuireError) else _number(each.pooled) for each in outputs], outputs
    if task == "embed":
        outputs = await call.run([*queries, *documents], job)
    else:
        outputs = []
        for texts, role in ((queries, "query"), (documents, "document")):
            job.prompt_options["prompt_name"] = role
            outputs += await call.run(texts, job)
    num_queries = len(queries)

    def compared() -> list[Scored]:
        return [
            _compared(task, outputs[index if num_queries > 1 else 0], document)
            for index, document in enumerate(outputs[num_queries:])
        ]

    return await in_thread_when(body.is_large or task == "token_embed", compared), outputs


def _number(output: PooledOutput | None) -> float:
    assert output is not None
    return float_vector(output.data)[0]


def _cut(context: ServerContext, texts: Sequence[PoolingInput], num_tokens: int | None) -> Sequence[PoolingInput]:
    """The texts, those of more than `num_tokens` tokens cut at their end; None or 0 for as they are."""
    if not num_tokens:
        return texts
    renderer, prompts = context.llm.renderer, context.llm.pooling_prompts
    assert prompts is not None
    cut = []
    for each in texts:
        text = each.prompt
        if isinstance(text, str) and len(text) > num_tokens:  # a token has at least one character
            text = prompts.head(text, num_tokens + 1)
            prompt = renderer.render_prompt(text, add_special_tokens=False)
            if len(prompt.token_ids) > num_tokens:
                offsets = renderer.token_offsets(prompt, add_special_tokens=False)
                ids = prompt.token_ids[:num_tokens]
                text = renderer.tokenizer.decode(ids) if offsets is None else text[: offsets[num_tokens - 1][1]]
        cut.append(dataclasses.replace(each, prompt=text))
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
