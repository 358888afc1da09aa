"""POST /v1/embeddings, /classify and /pooling, in OpenAI's and vLLM's shapes."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire_interfaces import PooledOutput, PoolingTask, QuireError, RequestError
from quire_server.body import read_model
from quire_server.context import ServerContext, in_thread_when
from quire_server.plugin_pooling import plugin_pooling
from quire_server.pooling_answers import (
    Classification,
    ClassificationList,
    EmbeddingList,
    EmbeddingObject,
    PooledList,
    PooledObject,
)
from quire_server.pooling_protocol import (
    ClassificationRequest,
    EmbeddingRequest,
    PoolingRequest,
    PromptFields,
    VectorFields,
)
from quire_server.pooling_run import Pooled, PoolingJob, item_error, output_of, pool_items, task_of, usage_of
from quire_server.request_ids import answer_id
from quire_server.responses import json_response
from quire_server.vector_encoding import base64_vector, encoded_vector, float_matrix, float_vector

__all__ = ["classify", "embeddings", "pooling"]

MAX_HEADER_BYTES = 60_000
"""Clients refuse headers of 64 KiB."""


async def embeddings(context: ServerContext, request: Request) -> Response:
    """POST /v1/embeddings: texts, token ids or conversations to one vector each."""
    body = await read_model(context, request, EmbeddingRequest)
    context = context.for_pooling(body.model)
    model = context.resolve_model(body.model)
    outputs = await _pooled(context, request, body, task_of(context, "embed"))
    name = answer_id(request, "embd-", body.request_id)

    def answer() -> Response:
        if body.encoding_format in ("bytes", "bytes_only"):
            return _bytes_response(body, outputs, name, model)
        data = [
            EmbeddingObject(index=index, embedding=_numbers(each, body), error=item_error(each))
            for index, each in enumerate(outputs)
        ]
        created = int(time.time())
        return json_response(EmbeddingList(id=name, created=created, model=model, data=data, usage=usage_of(outputs)))

    return await in_thread_when(body.is_large, answer)


async def classify(context: ServerContext, request: Request) -> Response:
    """POST /classify: the probabilities of classes of each text, with the most likely one's name."""
    body = await read_model(context, request, ClassificationRequest)
    context = context.for_pooling(body.model)
    model = context.resolve_model(body.model)
    outputs = await _pooled(context, request, body, task_of(context, "classify"))
    labels = context.pooler.labels
    data = [_classification(index, each, labels) for index, each in enumerate(outputs)]
    name = answer_id(request, "classify-", body.request_id)
    created = int(time.time())
    return json_response(ClassificationList(id=name, created=created, model=model, data=data, usage=usage_of(outputs)))


def _classification(index: int, pooled: Pooled, labels: Sequence[str]) -> Classification:
    output = output_of(pooled)
    if output is None:
        return Classification(index=index, error=item_error(pooled))
    probs = float_vector(output.data)
    best = max(range(len(probs)), key=probs.__getitem__, default=0)
    label = labels[best] if best < len(labels) else None
    return Classification(index=index, label=label, probs=probs, num_classes=len(probs))


async def pooling(context: ServerContext, request: Request) -> Response:
    """POST /pooling: whatever the model pools, by the name of the task; task "plugin" is the IO-processor's."""
    body = await read_model(context, request, PoolingRequest)
    context = context.for_pooling(body.model)
    model = context.resolve_model(body.model)
    if body.task == "plugin" or body.data is not None:
        return await plugin_pooling(context, request, body)
    task = _requested_task(context, body)
    outputs = await _pooled(context, request, body, task)
    name = answer_id(request, "pool-", body.request_id)

    def answer() -> Response:
        if body.encoding_format in ("bytes", "bytes_only"):
            return _bytes_response(body, outputs, name, model)
        data = [
            PooledObject(index=index, data=_numbers(each, body), error=item_error(each))
            for index, each in enumerate(outputs)
        ]
        created = int(time.time())
        return json_response(PooledList(id=name, created=created, model=model, data=data, usage=usage_of(outputs)))

    return await in_thread_when(body.is_large, answer)


def _requested_task(context: ServerContext, body: PoolingRequest) -> PoolingTask:
    """The task that is named, or the model's first.

    Raises:
        HTTPError: 404, the model pools nothing.
        RequestError: the model has other tasks.
    """
    served: Sequence[Any] = context.llm.engine.info.pooling_tasks
    if not served:
        return task_of(context, body.task or "embed")
    if body.task is None:
        first: PoolingTask = served[0]
        return first
    if body.task not in served:
        raise RequestError(
            f"Unsupported task: {body.task!r}; this model's tasks are {', '.join(served)}",
            param="task",
            code="unsupported",
        )
    return body.task


async def _pooled(context: ServerContext, request: Request, body: PromptFields, task: PoolingTask) -> list[Pooled]:
    """What comes of each input. Raises as `pool_items` does."""
    body.check_supported()
    job = PoolingJob.of(context, body, task)
    job.prompt_name, job.add_special_tokens = body.prompt_name, body.add_special_tokens
    job.add_generation_prompt, job.continue_final_message = body.add_generation_prompt, body.continue_final_message
    job.chat_template, job.chat_template_kwargs = body.chat_template, body.chat_template_kwargs
    return await pool_items(context, request, [(each, None) for each in body.inputs()], job)


def _numbers(pooled: Pooled, body: VectorFields) -> Any:
    output = output_of(pooled)
    if output is None:
        return None
    if body.encoding_format == "base64":
        return base64_vector(output.data, body.embed_dtype, body.endianness)
    return as_lists(output)


def as_lists(output: PooledOutput) -> list[float] | list[list[float]]:
    """The numbers of one text, or of each of its tokens."""
    if len(output.shape) == 1:
        return float_vector(output.data)
    return float_matrix(output.data, output.shape[1])


def _bytes_response(body: VectorFields, outputs: Sequence[Pooled], name: str, model: str) -> Response:
    """All vectors one behind the other; with encoding_format "bytes", a header says where each one lies."""
    parts, items, start = [], [], 0
    for index, each in enumerate(outputs):
        assert not isinstance(each, QuireError)
        assert each.pooled is not None
        parts.append(encoded_vector(each.pooled.data, body.embed_dtype, body.endianness))
        end = start + len(parts[-1])
        items.append(
            {
                "index": index,
                "embed_dtype": body.embed_dtype,
                "endianness": body.endianness,
                "start": start,
                "end": end,
                "shape": list(each.pooled.shape),
            }
        )
        start = end
    headers = {}
    if body.encoding_format == "bytes":
        usage = msgspec.to_builtins(usage_of(outputs))
        described = {"id": name, "created": int(time.time()), "model": model, "data": items, "usage": usage}
        headers["metadata"] = json.dumps(described)
        if len(headers["metadata"]) > MAX_HEADER_BYTES:
            raise RequestError(
                f"{len(outputs)} items are more than the header `metadata` has room for; take encoding_format "
                "'bytes_only', or send fewer",
                param="encoding_format",
            )
    return Response(b"".join(parts), media_type="application/octet-stream", headers=headers)
