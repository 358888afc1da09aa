"""POST /invocations, by which Amazon SageMaker asks a model for anything: the route that suits the body answers, as in
vLLM; for bodies in TEI's shapes it is that of TEI's `/`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire_interfaces import RequestError
from quire_server.body import parse_checked, read_body
from quire_server.context import ServerContext
from quire_server.protocol import LenientBody

__all__ = ["make_invocations", "with_body"]

Handler = Callable[[ServerContext, Request], Awaitable[Response]]

ADAPTER_HEADER = "x-amzn-sagemaker-adapter-identifier"
"""Names the adapter, and goes before `model` of the body."""


class InvocationRequest(LenientBody):
    """Fields that tell which route a body is for."""

    model: str | None = None
    messages: Any = None
    prompt: Any = None
    query: Any = None
    queries: Any = None
    text_1: Any = None
    data_1: Any = None
    texts: Any = None
    inputs: Any = None
    input: Any = None
    task: Any = None
    data: Any = None


def make_invocations(handlers: Mapping[str, Handler]) -> Handler:
    """The handler of the route.

    Args:
        handlers: Path -> handler, of the routes that may answer.
    """

    async def invocations(context: ServerContext, request: Request) -> Response:
        """What SageMaker sends: chat completions, completions, embeddings, classes, scores, rankings or other poolings,
        by the fields of the body."""
        data = await read_body(request, context.config)
        body = await parse_checked(context, data, InvocationRequest)
        if adapter := request.headers.get(ADAPTER_HEADER):
            data, body.model = _with_model(data, adapter), adapter
        path = _path(context, body)
        return await handlers[path](context, with_body(request, path, data))

    return invocations


def _path(context: ServerContext, body: InvocationRequest) -> str:
    """The route of a body.

    Raises:
        RequestError: it suits none.
    """
    generates = context.llm.engine.info.runner != "pooling"
    if body.model is None or body.model != context.pooling_model:
        if generates and body.messages is not None:
            return "/v1/chat/completions"
        if body.prompt is not None:
            return "/v1/completions"
    if body.inputs is not None or body.texts is not None:
        return "/"
    if body.query is not None:
        return "/rerank"
    if not body.queries is body.text_1 is body.data_1 is None:
        return "/score"
    if body.data is not None:
        return "/pooling"
    if body.input is not None or body.messages is not None:
        main_task = next(iter(context.for_pooling(body.model).llm.engine.info.pooling_tasks), "embed")
        if body.task not in (None, main_task):
            return "/pooling"
        return {"embed": "/v1/embeddings", "classify": "/classify"}.get(main_task, "/pooling")
    raise RequestError(
        "the body suits no route: give messages, prompt, input, inputs, query, queries or data",
        param="body",
    )


def _with_model(data: bytes, model: str) -> bytes:
    return msgspec.json.encode({**msgspec.json.decode(data), "model": model})


def with_body(request: Request, path: str, data: bytes) -> Request:
    """The request as it would have come to another route, its body inflated.

    Args:
        request: Whose body was read; tells when the client leaves.
        path: Of the other route.
        data: The body.
    """
    has_come = False

    async def receive() -> Any:
        nonlocal has_come
        if has_come:
            return await request.receive()
        has_come = True
        return {"type": "http.request", "body": data, "more_body": False}

    base = request.scope["path"].removesuffix("/invocations")
    headers = [each for each in request.scope["headers"] if each[0] not in (b"content-encoding", b"content-length")]
    return Request({**request.scope, "path": base + path, "headers": headers}, receive)
