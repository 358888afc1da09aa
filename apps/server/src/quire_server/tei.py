"""The routes of text-embeddings-inference (TEI): /embed, /embed_all, /embed_sparse, /predict, /similarity, /info.

TEI's /rerank is the one of `scoring`, for bodies with `texts`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from quire import __version__
from quire_interfaces import PooledOutput, PoolingTask
from quire_server.config import MAX_PROMPTS
from quire_server.context import ServerContext, in_thread_when
from quire_server.embeddings import as_lists
from quire_server.errors import HTTPError
from quire_server.pooling_answers import TEIInfo
from quire_server.pooling_call import PoolingCall, read_call
from quire_server.pooling_run import Pooled, output_of
from quire_server.responses import json_response
from quire_server.scoring import cosine, rerank
from quire_server.tei_protocol import (
    TEIEmbedAllRequest,
    TEIEmbedRequest,
    TEIPredictRequest,
    TEIPromptRequest,
    TEISimilarityRequest,
)
from quire_server.vector_encoding import float_vector

__all__ = ["embed", "embed_all", "embed_sparse", "info", "predict", "root", "similarity", "sparse_weights"]


async def embed(context: ServerContext, request: Request) -> Response:
    """POST /embed: a vector per text, in a list of lists."""
    call = await read_call(context, request, TEIEmbedRequest)
    return await _lists(call, "embed")


async def embed_all(context: ServerContext, request: Request) -> Response:
    """POST /embed_all: a vector per token of each text, as the model gives it."""
    call = await read_call(context, request, TEIEmbedAllRequest)
    return await _lists(call, "token_embed")


async def _lists(call: PoolingCall[TEIEmbedRequest] | PoolingCall[TEIEmbedAllRequest], task: PoolingTask) -> Response:
    outputs = await call.run(call.body.prompts(), call.job(call.task(task)))
    return await in_thread_when(
        call.body.is_large or task == "token_embed",
        lambda: json_response([as_lists(output) for each in outputs if (output := output_of(each)) is not None]),
    )


async def embed_sparse(context: ServerContext, request: Request) -> Response:
    """POST /embed_sparse: per text the tokens of the vocabulary that stand for it, with their weights."""
    call = await read_call(context, request, TEIPromptRequest)
    outputs = await call.run(call.body.prompts(), call.job(_sparse_task(call.context)))
    return await in_thread_when(True, lambda: json_response([_sparse(call.context, each) for each in outputs]))


def _sparse_task(context: ServerContext) -> PoolingTask:
    """The task whose output is sparse: embeddings over the vocabulary (SPLADE), or a weight per token (BGE-M3).

    Raises:
        HTTPError: 404, the model has neither.
    """
    info = context.llm.engine.info
    if "embed" in info.pooling_tasks and info.embedding_size == info.vocab_size:
        return "embed"
    if "token_classify" in info.pooling_tasks and "embed" in info.pooling_tasks:
        return "token_classify"
    raise HTTPError(
        404,
        f"this route needs a model that makes sparse embeddings (SPLADE, BGE-M3), and {info.model} does not; its "
        f"pooling tasks are {', '.join(info.pooling_tasks) or 'none'}",
        code="unsupported_task",
    )


def _sparse(context: ServerContext, pooled: Pooled) -> list[dict[str, Any]]:
    output = output_of(pooled)
    assert output is not None
    assert not isinstance(pooled, Exception)
    special = context.llm.renderer.tokenizer.encode("", add_special_tokens=True)
    return sparse_weights(output, pooled.prompt_token_ids, special)


def sparse_weights(output: PooledOutput, token_ids: Sequence[int], special_ids: Sequence[int]) -> list[dict[str, Any]]:
    """Tokens of the vocabulary and their weights; of a token that a text has several times, its largest.

    Args:
        output: A weight of each token of the vocabulary [vocab_size], or of each token of the text [tokens, 1].
        token_ids: Of the text.
        special_ids: Those that the tokenizer adds, which may have no weights.
    """
    weights = float_vector(output.data)
    if len(output.shape) == 1:
        return [{"index": index, "value": weight} for index, weight in enumerate(weights) if weight]
    if len(token_ids) != len(weights):  # without the special tokens
        token_ids = [token_id for token_id in token_ids if token_id not in set(special_ids)]
    largest: dict[int, float] = {}
    for token_id, weight in zip(token_ids, weights, strict=True):
        if weight > largest.get(token_id, 0.0):
            largest[token_id] = weight
    return [{"index": token_id, "value": weight} for token_id, weight in sorted(largest.items())]


async def predict(context: ServerContext, request: Request) -> Response:
    """POST /predict: the classes of each text or pair of texts, the most likely one first."""
    call = await read_call(context, request, TEIPredictRequest)
    outputs = await call.run(call.body.prompts(), call.job(call.task("classify", "score")))
    predictions = [_prediction(each, call.context.pooler.labels) for each in outputs]
    return json_response(predictions if call.body.is_batch else predictions[0])


def _prediction(pooled: Pooled, labels: Sequence[str]) -> list[dict[str, Any]]:
    output = output_of(pooled)
    assert output is not None
    scores = float_vector(output.data)
    ranked = sorted(range(len(scores)), key=lambda index: -scores[index])
    names = dict(enumerate(labels))
    return [{"score": scores[index], "label": names.get(index, f"LABEL_{index}")} for index in ranked]


async def similarity(context: ServerContext, request: Request) -> Response:
    """POST /similarity: the cosine of a sentence's vector with those of others."""
    call = await read_call(context, request, TEISimilarityRequest)
    outputs = await call.run(call.body.prompts(), call.job(call.task("embed")))
    source, *others = [output_of(each) for each in outputs]
    return json_response([cosine(source, each) for each in others if source is not None and each is not None])


async def root(context: ServerContext, request: Request) -> Response:
    """POST /: the route of TEI that suits the model, as Hugging Face's clients call it."""
    tasks = context.for_pooling(None).llm.engine.info.pooling_tasks
    if "embed" in tasks or not tasks:
        return await embed(context, request)
    return await (predict if "classify" in tasks else rerank)(context, request)


async def info(context: ServerContext, request: Request) -> Response:
    """GET /info: what is served, in TEI's words."""
    context = context.for_pooling(None)
    served = context.llm.engine.info
    if not served.pooling_tasks:
        raise HTTPError(404, f"{served.model} generates text and pools nothing", code="unsupported_task")
    labels = {str(index): label for index, label in enumerate(context.pooler.labels)}
    classes = {"id2label": labels, "label2id": {label: int(index) for index, label in labels.items()}}
    if "embed" in served.pooling_tasks or "token_embed" in served.pooling_tasks:
        kind: dict[str, dict[str, Any]] = {"embedding": {"pooling": "_".join(context.pooler.methods).lower()}}
    elif "score" in served.pooling_tasks:
        kind = {"reranker": classes}
    else:
        kind = {"classifier": classes}
    return json_response(
        TEIInfo(
            model_id=served.model,
            model_dtype=served.dtype,
            model_type=kind,
            max_concurrent_requests=context.config.limit_concurrency,
            max_input_length=served.max_model_len,
            max_batch_tokens=context.llm.config.scheduler.max_num_batched_tokens,
            max_batch_requests=served.max_num_seqs,
            max_client_batch_size=MAX_PROMPTS,
            tokenization_workers=1,
            version=__version__,
        )
    )
