"""POST /scale_elastic_ep and /is_scaling_elastic_ep, in vLLM's forms: more engines or fewer while the server runs; POST
/restart_engines: new engine processes, one after the other."""

from __future__ import annotations

import reprlib

from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from quire_engine import EnginePool
from quire_interfaces import RequestError
from quire_server.body import read_model
from quire_server.context import ServerContext

__all__ = ["ScaleRequest", "is_scaling", "restart_engines", "scale"]

DRAIN_TIMEOUT_S = 120.0


class ScaleRequest(BaseModel):
    """Body of POST /scale_elastic_ep."""

    model_config = ConfigDict(extra="forbid")

    new_data_parallel_size: int = Field(ge=1, le=1024)
    drain_timeout: float = Field(default=DRAIN_TIMEOUT_S, ge=0, le=86400)
    """Seconds that requests of engines that go have to finish there; then they go on in the others."""


async def scale(context: ServerContext, request: Request) -> Response:
    """Add engines of the next ranks, or drain those of the highest ranks and end them. Requests are served meanwhile,
    and none is lost."""
    body = await read_model(context, request, ScaleRequest)
    await _pool_of(context).resize(body.new_data_parallel_size, body.drain_timeout)
    return JSONResponse({"message": f"Scaled to {body.new_data_parallel_size} data parallel engines"})


async def is_scaling(context: ServerContext, request: Request) -> Response:
    """Whether engines are being added, ended or restarted."""
    return JSONResponse({"is_scaling_elastic_ep": _pool_of(context).is_resizing})


async def restart_engines(context: ServerContext, request: Request) -> Response:
    """Start every engine's process anew, one after the other; the others serve meanwhile, and no request is lost.
    `?drain_timeout=` is as for /scale_elastic_ep."""
    text = request.query_params.get("drain_timeout", str(DRAIN_TIMEOUT_S))
    try:
        drain_s = float(text)
    except ValueError:
        drain_s = -1.0
    if not 0 <= drain_s <= 86400:
        raise RequestError(
            f"drain_timeout must be seconds from 0 to 86400, got {reprlib.repr(text)}", param="drain_timeout"
        )
    pool = _pool_of(context)
    await pool.restart(drain_s)
    return JSONResponse({"message": f"Restarted {len(pool.engines)} data parallel engines"})


def _pool_of(context: ServerContext) -> EnginePool:
    client = context.llm.client
    if not isinstance(client, EnginePool):
        raise RequestError(
            "this server has one engine for good: start it with --data-parallel-size 2 or more, or with "
            "--enable-elastic-ep",
            code="unsupported",
        )
    return client
