"""POST /v1/embeddings, /classify and /pooling, in OpenAI's and vLLM's shapes."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire_interfaces import PooledOutput, PoolingTask, RequestError
from quire_server.context import ServerContext, in_thread_when
from quire_server.late_chunks import late_chunks, named_prompts
from quire_server.plugin_pooling import plugin_pooling
from quire_server.pooling_answers import Classification, EmbeddingObject, PooledObject
from quire_server.pooling_call import PoolingCall, read_call
from quire_server.pooling_protocol import ClassificationRequest, EmbeddingRequest, PoolingRequest, VectorFields
from quire_server.pooling_run import Pooled, item_error, output_of, usage_of
from quire_server.vector_encoding import base64_vector, encoded_vector, float_matrix, float_vector

__all__ = ["as_lists", "classify", "embeddings", "pooling"]

MAX_HEADER_BYTES = 60_000
"""Clients refuse headers of 64 KiB."""


async def embeddings(context: ServerContext, request: Request) -> Response:
    """POST /v1/embeddings: texts, token ids or conversations to one vector each."""
    call = await read_call(context, request, EmbeddingRequest)
    job = named_prompts(call, call.job(call.task("embed")))
    if call.body.late_chunking:
        outputs = await late_chunks(call, job)
    else:
        outputs = await call.run(call.body.inputs(), job)
    if call.body.encoding_format in ("bytes", "bytes_only"):
        return await _bytes_answer(call, "embd-", outputs)

    def items() -> Iterator[EmbeddingObject]:
        for index, each in enumerate(outputs):
            yield EmbeddingObject(index=index, embedding=_numbers(each, call.body), error=item_error(each))

    return await call.list_answer("embd-", outputs, items)


async def classify(context: ServerContext, request: Request) -> Response:
    """POST /classify: the probabilities of classes of each text, with the most likely one's name."""
    call = await read_call(context, request, ClassificationRequest)
    outputs = await call.run(call.body.inputs(), call.job(call.task("classify")))
    labels = call.context.pooler.labels

    def items() -> Iterator[Classification]:
        return (_classification(index, each, labels) for index, each in enumerate(outputs))

    return await call.list_answer("classify-", outputs, items)


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
    call = await read_call(context, request, PoolingRequest)
    if call.body.task == "plugin" or call.body.data is not None:
        return await plugin_pooling(call)
    outputs = await call.run(call.body.inputs(), named_prompts(call, call.job(_requested_task(call))))
    if call.body.encoding_format in ("bytes", "bytes_only"):
        return await _bytes_answer(call, "pool-", outputs)

    def items() -> Iterator[PooledObject]:
        for index, each in enumerate(outputs):
            yield PooledObject(index=index, data=_numbers(each, call.body), error=item_error(each))

    return await call.list_answer("pool-", outputs, items)


def _requested_task(call: PoolingCall[PoolingRequest]) -> PoolingTask:
    """The task that is named, or the model's first.

    Raises:
        HTTPError: 404, the model pools nothing.
        RequestError: the model has other tasks.
    """
    served: Sequence[PoolingTask] = call.context.llm.engine.info.pooling_tasks
    task = call.body.task
    if not served:
        return call.task(task or "embed")
    if task is None:
        return served[0]
    if task not in served:
        raise RequestError(
            f"Unsupported task: {task!r}; this model's tasks are {', '.join(served)}",
            param="task",
            code="unsupported",
        )
    return task


def _numbers(pooled: Pooled, body: VectorFields) -> Any:
    """The numbers of an item as the body wants them; None where it failed."""
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


async def _bytes_answer(
    call: PoolingCall[EmbeddingRequest] | PoolingCall[PoolingRequest], prefix: str, outputs: Sequence[Pooled]
) -> Response:
    """All vectors one behind the other; with encoding_format "bytes", a header says where each one lies."""
    body = call.body

    def answer() -> Response:
        parts, items, start = [], [], 0
        form = {"embed_dtype": body.embed_dtype, "endianness": body.endianness}
        for index, each in enumerate(outputs):
            output = output_of(each)
            assert output is not None
            parts.append(encoded_vector(output.data, body.embed_dtype, body.endianness))
            end = start + len(parts[-1])
            items.append({"index": index, **form, "start": start, "end": end, "shape": list(output.shape)})
            start = end
        headers = {}
        if body.encoding_format == "bytes":
            headers["metadata"] = json.dumps(
                {
                    "id": name,
                    "created": int(time.time()),
                    "model": call.model,
                    "data": items,
                    "usage": msgspec.to_builtins(usage_of(outputs)),
                }
            )
            if len(headers["metadata"]) > MAX_HEADER_BYTES:
                raise RequestError(
                    f"{len(outputs)} items are more than the header `metadata` has room for; take encoding_format "
                    "'bytes_only', or send fewer",
                    param="encoding_format",
                )
        return Response(b"".join(parts), media_type="application/octet-stream", headers=headers)

    name = call.answer_id(prefix)
    return await in_thread_when(body.is_large, answer)
