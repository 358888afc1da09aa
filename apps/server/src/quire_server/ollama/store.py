"""POST /api/pull, /api/push, /api/create, /api/copy, /api/blobs/... and DELETE /api/delete: Ollama's store of models.

Models are folders and names of the Hugging Face hub here, which the operator chooses. Pulling downloads from the hub
where --allow-pull says so; all else is refused, with what to do instead.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator
from typing import NoReturn

from starlette.requests import Request
from starlette.responses import Response

from quire_interfaces import CheckpointError, RequestError
from quire_models.hub import resolve_model
from quire_server.body import read_model
from quire_server.context import ServerContext
from quire_server.errors import HTTPError
from quire_server.ollama.answers import line, lines
from quire_server.ollama.names import LATEST, own_name
from quire_server.ollama.protocol import OllamaPullRequest, OllamaStoreRequest
from quire_server.responses import json_response

__all__ = ["copy", "create", "delete", "has_blob", "hub_name", "pull", "push", "write_blob"]

PROGRESS_INTERVAL_S = 1.0
"""How often a stream says that the download goes on."""
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(:[\w.-]+)?")


async def pull(context: ServerContext, request: Request) -> Response:
    """POST /api/pull: download a model of the hub into its cache. One that is served is there already."""
    body = await read_model(context, request, OllamaPullRequest, any_content_type=True)
    name = body.named
    if own_name(context, name) in {*context.model_names, *context.adapters, context.pooling_model}:
        events = _no_download()
    else:
        events = _downloading(hub_name(context, name))
    if body.stream:
        return await lines(events)
    async for _ in events:
        pass
    return json_response({"status": "success"})


def hub_name(context: ServerContext, name: str) -> str:
    """The name on the hub of a model that is to be pulled.

    Raises:
        HTTPError: 403, this server downloads nothing, or nothing for this caller.
        RequestError: it is no name of the hub.
    """
    if not context.config.allow_pull:
        raise HTTPError(
            403,
            f"this server downloads no models, and {name!r} is none of its own; start it with --allow-pull, or run "
            "`quire serve NAME` with a name of the Hugging Face hub",
            code="not_allowed",
        )
    if context.api_keys.has_admins and not context.caller.is_admin:
        raise HTTPError(403, "/api/pull wants the key of an administrator (--admin-api-key)", code="not_an_admin")
    for prefix in ("hf.co/", "huggingface.co/"):
        name = name.removeprefix(prefix)
    name = name.removesuffix(LATEST)
    if not _HUB_NAME.fullmatch(name):
        raise RequestError(
            f"{name!r} is no name of the Hugging Face hub (owner/name, or owner/name:Q4_K_M for a GGUF file); names of "
            "Ollama's library are not known here",
            param="model",
        )
    return name


async def _no_download() -> AsyncGenerator[bytes, None]:
    yield line({"status": "success"})


async def _downloading(name: str) -> AsyncGenerator[bytes, None]:
    work = asyncio.ensure_future(asyncio.to_thread(_download, name))
    try:
        done, _ = await asyncio.wait((work,), timeout=PROGRESS_INTERVAL_S)  # what fails at once has a status of its own
        if done:
            work.result()
        yield line({"status": "pulling manifest"})
        while not done:
            yield line({"status": f"pulling {name}"})
            done, _ = await asyncio.wait((work,), timeout=PROGRESS_INTERVAL_S)
        work.result()
        yield line({"status": "success"})
    finally:
        work.cancel()  # the thread goes on: what is downloaded is kept for the next try


def _download(name: str) -> None:
    """Raises HTTPError (404) where the hub does not give it."""
    try:
        resolve_model(name)
    except CheckpointError as error:
        raise HTTPError(404, str(error), code="model_not_found") from None


async def push(context: ServerContext, request: Request) -> Response:
    """POST /api/push: refused."""
    await read_model(context, request, OllamaStoreRequest, any_content_type=True)
    _refuse("this server uploads no models; use `hf upload` of the package huggingface_hub")


async def create(context: ServerContext, request: Request) -> Response:
    """POST /api/create: refused."""
    await read_model(context, request, OllamaStoreRequest, any_content_type=True)
    _refuse(
        "this server makes no models of Modelfiles: for FROM serve the model itself, for SYSTEM send a system message, "
        "for PARAMETER send options or write generation_config.json, for TEMPLATE start with --chat-template, for "
        "ADAPTER with --lora-modules; `quire quantize` makes smaller ones"
    )


async def copy(context: ServerContext, request: Request) -> Response:
    """POST /api/copy: refused, or 404 for a model that is not there."""
    body = await read_model(context, request, OllamaStoreRequest, any_content_type=True)
    context.resolve_model(own_name(context, body.source or body.named))
    _refuse("this server gives its model no further names while it runs; start it with --served-model-name NAME NAME")


async def delete(context: ServerContext, request: Request) -> Response:
    """DELETE /api/delete: refused, or 404 for a model that is not there."""
    body = await read_model(context, request, OllamaStoreRequest, any_content_type=True)
    context.resolve_model(own_name(context, body.named))
    _refuse("this server deletes no models; remove the folder, or use `hf cache delete` for those of the hub")


async def has_blob(context: ServerContext, request: Request) -> Response:
    """HEAD /api/blobs/...: there is none."""
    raise HTTPError(404, "this server keeps no blobs", code="not_found")


async def write_blob(context: ServerContext, request: Request) -> Response:
    """POST /api/blobs/...: refused, unread."""
    _refuse("this server keeps no blobs: put the files of a model into a folder, and serve that")


def _refuse(message: str) -> NoReturn:
    raise RequestError(message, param=None, code="unsupported")
