"""POST /collective_rpc, /start_profile and /stop_profile: calls that all ranks of all engines answer between two
steps."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from quire_server.body import read_model
from quire_server.context import ServerContext
from quire_server.errors import HTTPError
from quire_server.protocol import LenientBody

__all__ = ["CollectiveRPCRequest", "collective_rpc", "start_profile", "stop_profile"]


class CollectiveRPCRequest(LenientBody):
    """Body of POST /collective_rpc."""

    method: str
    args: list[Any] = Field(default_factory=list)
    kwargs: dict[str, Any] = Field(default_factory=dict)
    timeout: Annotated[float, Field(gt=0, le=86400)] | None = None
    """Seconds that the answers may take; those of the engines, --call-timeout-s, hold as well."""


async def collective_rpc(context: ServerContext, request: Request) -> Response:
    """Have every rank of every engine do a call, one of a fixed list (an unknown `method` names them): `results` has
    what each returned, by engine and rank."""
    body = await read_model(context, request, CollectiveRPCRequest)
    try:
        async with asyncio.timeout(body.timeout):
            results = await _on_all_ranks(context, body.method, body.args, body.kwargs)
    except TimeoutError:
        raise HTTPError(504, f"not all ranks answered {body.method!r} in {body.timeout:g} s", code="timeout") from None
    return JSONResponse({"results": results})


async def start_profile(context: ServerContext, request: Request) -> Response:
    """Begin to record what all ranks compute, as --profiler-config says; `?prefix=` begins the names of the files."""
    prefix = request.query_params.get("prefix")
    await _on_all_ranks(context, "start_profile", [] if prefix is None else [prefix])
    return Response()


async def stop_profile(context: ServerContext, request: Request) -> Response:
    """End the recording, and write the traces: `files` has their paths, each on the host of its rank."""
    files = await _on_all_ranks(context, "stop_profile")
    return JSONResponse({"files": [path for paths in files for path in paths]})


async def _on_all_ranks(
    context: ServerContext, method: str, arguments: Sequence[Any] = (), named: Mapping[str, Any] | None = None
) -> list[Any]:
    """What the ranks of all engines return, one behind the other."""
    answers = await context.llm.client.collective_rpc(method, arguments, named or {})
    return [result for ranks in answers for result in ranks]
