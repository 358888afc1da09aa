"""POST /scale_elastic_ep and /is_scaling_elastic_ep, in vLLM's forms: more engines or fewer while the server runs; POST
/restart_engines: new engine processes, one after the other."""

from __future__ import annotations

import reprlib

from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from quire_engine import EngineClient, EnginePool, HubClient
from quire_interfaces import RequestError
from quire_server.body import read_model
from quire_server.context import ServerContext

__all__ = ["ScaleRequest", "is_scaling", "pool_of", "restart_engines", "scale"]

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
    client = context.llm.client
    if isinstance(client, HubClient):
        await client.call("resize", size=body.new_data_parallel_size, drain_s=body.drain_timeout)
    else:
        await pool_of(client).resize(body.new_data_parallel_size, body.drain_timeout)
    return JSONResponse({"message": f"Scaled to {body.new_data_parallel_size} data parallel engines"})


async def is_scaling(context: ServerContext, request: Request) -> Response:
    """Whether engines are being added, ended or restarted."""
    client = context.llm.client
    is_resizing = await client.call("is_resizing") if isinstance(client, HubClient) else pool_of(client).is_resizing
    return JSONResponse({"is_scaling_elastic_ep": is_resizing})


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
    client = context.llm.client
    if isinstance(client, HubClient):
        num_engines = await client.call("restart", drain_s=drain_s)
    else:
        await pool_of(client).restart(drain_s)
        num_engines = len(pool_of(client).engines)
    return JSONResponse({"message": f"Restarted {num_engines} data parallel engines"})


def pool_of(client: EngineClient) -> EnginePool:
    """The engines of a server that may have more or fewer. Raises RequestError where it has one for good."""
    if not isinstance(client, EnginePool):
        raise RequestError(
            "this server has one engine for good: start it with --data-parallel-size 2 or more, or with "
            "--enable-elastic-ep",
            code="unsupported",
        )
    return client
