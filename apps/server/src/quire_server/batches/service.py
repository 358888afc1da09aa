"""OpenAI's batches: the routes of /v1/batches, and what runs behind them.

Source of the shapes: OpenAI's public API reference.
"""

from __future__ import annotations

import re
import reprlib
import secrets
import time
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from quire_interfaces import RequestError
from quire_server.batches.batch_run import BatchLimits
from quire_server.batches.batch_runner import BatchRunner
from quire_server.batches.batch_store import StoredBatch
from quire_server.batches.line_answers import BATCH_ENDPOINTS, Handler
from quire_server.batches.load import InteractiveLoad, LineSlots
from quire_server.batches.metrics import BatchMetrics
from quire_server.body import read_model
from quire_server.context import ServerContext
from quire_server.errors import HTTPError
from quire_server.files.file_store import new_file_id
from quire_server.files.service import FilesService, page_limit, page_of
from quire_server.files.upload import MAX_EXPIRY_S, MIN_EXPIRY_S
from quire_server.protocol import Body
from quire_server.request_fields import Metadata

__all__ = ["BatchRequest", "BatchesService"]

MAX_LISTED = 100
"""Batches in one answer."""
MAX_UNFINISHED = 200
"""Batches of one owner that are not done."""
MAX_WINDOW_S = 30 * 86400

_WINDOW = re.compile(r"([1-9][0-9]{0,5})([smhd])")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


class OutputExpiry(Body):
    """When results are forgotten."""

    anchor: Literal["created_at"] = "created_at"
    seconds: int = Field(ge=MIN_EXPIRY_S, le=MAX_EXPIRY_S)


class BatchRequest(Body):
    """Body of POST /v1/batches."""

    input_file_id: str
    endpoint: str
    completion_window: str = "24h"
    metadata: Metadata | None = None
    output_expires_after: OutputExpiry | None = None


class BatchesService:
    """The routes.

    Args:
        context: Of the server.
        files: Where inputs and results are.
        handlers: Path -> handler, of the routes that lines may name.
    """

    def __init__(self, context: ServerContext, files: FilesService, handlers: Mapping[str, Handler]) -> None:
        self.load = InteractiveLoad()
        """Of requests that lines make way for."""
        self._files = files
        self._runner: BatchRunner | None = None
        if files.keeps_files:
            config = context.config
            slots = LineSlots(self.load, config.batch_max_concurrency, config.batch_busy_concurrency)
            limits = BatchLimits(max_lines=config.batch_max_requests, max_line_bytes=config.max_body_bytes)
            self._runner = BatchRunner(context, handlers, files.access, slots, limits)
            context.state.background.append(self._runner.run)
            context.metrics.registry.register(BatchMetrics(config.metrics_prefix, self._runner))

    async def create(self, context: ServerContext, request: Request) -> Response:
        """POST /v1/batches."""
        body = await read_model(context, request, BatchRequest)
        if body.endpoint not in BATCH_ENDPOINTS:
            raise RequestError(
                f"endpoint must be one of {', '.join(BATCH_ENDPOINTS)}, got {reprlib.repr(body.endpoint)}",
                param="endpoint",
            )
        window_s = _window_s(body.completion_window)
        owner = context.caller.owner
        file = await self._files.file(context, body.input_file_id)
        if file.purpose != "batch":
            raise RequestError(
                f"the file {file.id!r} is for {file.purpose!r}: upload it with the purpose 'batch'",
                param="input_file_id",
            )
        batch = _new_batch(owner, body, window_s)
        count = await self._files.access.ask(lambda kept: kept.batches.num_unfinished(owner))
        if count >= MAX_UNFINISHED:
            raise HTTPError(
                429, f"{count} batches of yours are not done: wait for one, or cancel one", code="too_many_batches"
            )
        await self._files.access.ask(lambda kept: kept.batches.add(batch))
        self._wake()
        return JSONResponse(batch.object)

    async def retrieve(self, context: ServerContext, request: Request) -> Response:
        """GET /v1/batches/ID."""
        return JSONResponse((await self._known(context, request.path_params["id"])).object)

    async def list_batches(self, context: ServerContext, request: Request) -> Response:
        """GET /v1/batches: the newest first; `limit` and `after` of the query choose."""
        limit = page_limit(request.query_params, default=20, most=MAX_LISTED)
        after, owner = request.query_params.get("after"), context.caller.owner
        found = await self._files.access.ask(
            lambda kept: kept.batches.listed(owner=owner, after=after, limit=limit + 1)
        )
        if found is None:
            raise RequestError(f"there is no batch {(after or '')[:100]!r} in this list", param="after")
        return JSONResponse(page_of([batch.object for batch in found], limit))

    async def cancel(self, context: ServerContext, request: Request) -> Response:
        """POST /v1/batches/ID/cancel: lines that run are ended, those that are done are kept; 409 for a batch that is
        done."""
        known = await self._known(context, request.path_params["id"])
        is_late = False

        def change(batch: dict[str, Any]) -> None:
            nonlocal is_late
            is_late = batch["status"] not in ("validating", "in_progress", "cancelling")
            if batch["status"] in ("validating", "in_progress"):
                batch |= {"status": "cancelling", "cancelling_at": int(time.time())}

        batch = await self._files.access.ask(lambda kept: kept.batches.change(known.id, change))
        if is_late:
            raise HTTPError(
                409,
                f"the batch is {batch['status']} and cannot be cancelled",
                code="batch_not_cancellable",
                param="batch_id",
            )
        self._wake()
        return JSONResponse(batch)

    def _wake(self) -> None:
        if self._runner is not None:
            self._runner.wake()

    async def _known(self, context: ServerContext, name: str) -> StoredBatch:
        owner = context.caller.owner
        batch = await self._files.access.ask(lambda kept: kept.batches.get(name, owner=owner))
        if batch is None:
            raise HTTPError(404, f"there is no batch {name[:100]!r}", code="batch_not_found", param="batch_id")
        return batch


def _window_s(text: str) -> int:
    match = _WINDOW.fullmatch(text)
    seconds = 0 if match is None else int(match[1]) * _SECONDS[match[2]]
    if not 1 <= seconds <= MAX_WINDOW_S:
        raise RequestError(
            f"completion_window must be a time like 24h, 90m or 7d, of at most 30d, got {reprlib.repr(text)}",
            param="completion_window",
        )
    return seconds


def _new_batch(owner: str, body: BatchRequest, window_s: int) -> StoredBatch:
    batch_id, created_s = f"batch_{secrets.token_hex(16)}", int(time.time())
    times = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
    expiry = body.output_expires_after
    return StoredBatch(
        id=batch_id,
        owner=owner,
        input_file=body.input_file_id,
        output_file=new_file_id(),
        error_file=new_file_id(),
        object={
            "id": batch_id,
            "object": "batch",
            "endpoint": body.endpoint,
            "errors": None,
            "input_file_id": body.input_file_id,
            "completion_window": body.completion_window,
            "status": "validating",
            "output_file_id": None,
            "error_file_id": None,
            "created_at": created_s,
            "expires_at": created_s + window_s,
            **{f"{name}_at": None for name in times},
            "request_counts": {"total": 0, "completed": 0, "failed": 0},
            "metadata": body.metadata,
            "output_expires_after": None if expiry is None else {"anchor": expiry.anchor, "seconds": expiry.seconds},
        },
    )
