"""The OpenAI API inside Ray Serve, an engine of its own in each replica; run in this folder:

    serve run ray_serve:build model=/models/demo replicas=2

Arguments other than `replicas` are settings of `quire serve` by name, of the engine or of the server. Needs Ray
(`pip install 'quire[ray]' 'ray[serve]'`) where the replicas run, and Quire.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, MutableMapping
from typing import Any

from ray import serve
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

Message = MutableMapping[str, Any]


class Quire:
    """A replica: one server, whose address is Ray's.

    Args:
        settings: By name.
    """

    async def __init__(self, settings: dict[str, Any]) -> None:
        from quire import AsyncLLM
        from quire.config import QuireConfig, build_sections
        from quire_observability import EngineMetrics
        from quire_server.app import make_app
        from quire_server.config import ServerConfig
        from quire_server.context import ServerContext

        sections, _ = build_sections({**QuireConfig.sections(), "server": ServerConfig}, [("Ray Serve", settings)])
        server = sections.pop("server")
        metrics = EngineMetrics(prefix=server.metrics_prefix)
        self.llm = AsyncLLM(QuireConfig(**sections), listener_of=metrics.of_engine)
        info = await self.llm.ready()
        names = server.served_model_name or (info.model,)
        metrics.set_labels(model_name=names[0], engine="0")
        self.app = make_app(ServerContext(llm=self.llm, config=server, metrics=metrics, model_names=names))

    def check_health(self) -> None:
        """Raises when the engine is gone for good; Ray then starts another replica."""
        self.llm.client.check_health()

    async def __call__(self, request: Request) -> Response:
        """Answer one call, as it is made: what streams is streamed."""
        messages: asyncio.Queue[Message | None] = asyncio.Queue()

        async def run() -> None:
            try:
                await self.app(request.scope, request.receive, messages.put)
            finally:
                await messages.put(None)

        task = asyncio.ensure_future(run())
        start = await messages.get()
        if start is None:
            await task  # raises what went wrong
            raise RuntimeError("the app gave no answer")

        async def body() -> AsyncIterator[bytes]:
            try:
                while (message := await messages.get()) is not None:
                    if part := message.get("body"):
                        yield part
            finally:
                task.cancel()  # whoever asked may be gone

        response = StreamingResponse(body(), status_code=start["status"])
        response.raw_headers = list(start["headers"])
        return response


def build(arguments: dict[str, Any]) -> serve.Application:
    """The application, for `serve run` and for configuration files of Ray Serve."""
    settings = {name: value for name, value in arguments.items() if name != "replicas"}
    deployment = serve.deployment(Quire).options(
        num_replicas=int(arguments.get("replicas", 1)),
        health_check_period_s=5,
        graceful_shutdown_timeout_s=60,
        max_ongoing_requests=4096,
        ray_actor_options={"num_cpus": int(settings.get("num_threads", 1))},
    )
    return deployment.bind(settings)
