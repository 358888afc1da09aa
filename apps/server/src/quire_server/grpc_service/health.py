"""gRPC's own health service (grpc.health.v1), which Kubernetes and load balancers ask. Needs no key."""

from __future__ import annotations

import asyncio
from typing import Any

from grpc_health.v1 import health_pb2, health_pb2_grpc

from quire_interfaces import QuireError
from quire_server.context import ServerContext
from quire_server.errors import HTTPError
from quire_server.grpc_service.calls import RPC, EndlessCalls, answering
from quire_server.readiness import check_ready

__all__ = ["ENGINE_SERVICE", "HealthService"]

ENGINE_SERVICE = "vllm.grpc.engine.VllmEngine"
LOOK_S = 0.5
"""How often a watcher's status is looked at."""


class HealthService(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # the library has no types
    """The status of the whole server ("") and of its engine service, which are the same: SERVING while GET /ready says
    200.

    Args:
        context: Of the server.
        endless: Knows who watches.
    """

    def __init__(self, context: ServerContext, endless: EndlessCalls) -> None:
        self._context, self._endless = context, endless

    def _status(self, name: str) -> Any:
        if name not in ("", ENGINE_SERVICE):
            return health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
        try:
            check_ready(self._context)
        except QuireError:
            return health_pb2.HealthCheckResponse.NOT_SERVING
        return health_pb2.HealthCheckResponse.SERVING

    @answering
    async def Check(self, request: Any, rpc: RPC) -> Any:  # noqa: N802  # names of the protocol
        """The status now; NOT_FOUND for other services."""
        status = self._status(request.service)
        if status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN:
            raise HTTPError(404, f"there is no service {request.service!r} here", code="not_found")
        return health_pb2.HealthCheckResponse(status=status)

    @answering
    async def List(self, request: Any, rpc: RPC) -> Any:  # noqa: N802
        """The status of each service."""
        statuses = {name: health_pb2.HealthCheckResponse(status=self._status(name)) for name in ("", ENGINE_SERVICE)}
        return health_pb2.HealthListResponse(statuses=statuses)

    @answering
    async def Watch(self, request: Any, rpc: RPC) -> None:  # noqa: N802
        """The status now, and whenever it changes."""
        told = None
        with self._endless.running():
            while True:
                status = self._status(request.service)
                if status != told:
                    await rpc.write(health_pb2.HealthCheckResponse(status=status))
                    told = status
                await asyncio.sleep(LOOK_S)
