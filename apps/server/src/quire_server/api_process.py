"""One of several API processes: HTTP, templates, tokens and text, in front of engines that another process has.

It reads what it is from standard input (`APIProcessSpec`), which stays open as a lifeline: when the process of the
engines dies, it ends, and so does this one.
"""

from __future__ import annotations

import multiprocessing
import socket
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from quire import AsyncLLM, QuireConfig
from quire_engine import EngineInfo, HubClient
from quire_engine.hub_messages import FrontReady, FrontReport
from quire_engine.lifeline import read_spec
from quire_interfaces import QuireError
from quire_observability import EngineMetrics
from quire_server.api_servers import APIProcessSpec
from quire_server.config import ServerConfig
from quire_server.context import ServerContext
from quire_server.exit_status import ExitStatus, exit_status_of
from quire_server.serve import serve_http
from quire_server.stopping import Stopping, stopping_on_signals

__all__ = ["main"]

REPORT_INTERVAL_S = 1.0
"""How often it is told what was prepared, if anything was."""


def main() -> int:
    """Serve until told to stop; the exit status."""
    with stopping_on_signals() as stopping:
        spec = read_spec(APIProcessSpec, partial(_end_with_hub, stopping))
        multiprocessing.current_process().name = f"server {spec.number}"
        config = QuireConfig.from_dict(spec.config)
        values: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in spec.server.items()
        }
        values["disable_log_stats"] = True  # figures are the hub's
        server = ServerConfig(**values)
        metrics = _FrontMetrics(server.metrics_prefix)
        client = metrics.client = HubClient(spec.addresses, config.engine, metrics)
        front = _Front(client, metrics)
        with socket.socket(spec.family, socket.SOCK_STREAM, fileno=spec.listening_fd) as listening:
            try:
                return serve_http(
                    server,
                    stopping,
                    listening,
                    lambda template: AsyncLLM(config, client=client, chat_template=template),
                    metrics,
                    front.announce,
                )
            except QuireError as error:
                print(f"quire: {error}", file=sys.stderr)
                return exit_status_of(error)
            except KeyboardInterrupt:
                return ExitStatus.OK


def _end_with_hub(stopping: Stopping, spec: APIProcessSpec) -> None:
    spec.addresses.remove_folder()
    stopping.end_now(ExitStatus.ENGINE_DEAD)


class _FrontMetrics(EngineMetrics):
    """What this process alone sees is told to who counts for all."""

    client: HubClient

    def __init__(self, prefix: str) -> None:
        super().__init__(prefix)
        self._told: dict[str, list[Any]] = {}

    def on_pooled(self, task: str, num_prompt_tokens: int, latency_s: float) -> None:
        self.client.tell(FrontReport(name="pooled", arguments=[task, num_prompt_tokens, latency_s]))

    def tell_prepared(self) -> None:
        """Tell what was prepared so far, if that has changed."""
        counts = {
            modality: [each.num_queries, each.num_hits, each.num_items, each.num_embeds, each.num_seconds]
            for modality, each in self.prepared_media().items()
        }
        if counts != self._told and any(any(each) for each in counts.values()):
            self._told = counts
            self.client.tell(FrontReport(name="prepared", arguments=[counts]))


class _Front:
    """Joins the routes of this process with the hub."""

    def __init__(self, client: HubClient, metrics: _FrontMetrics) -> None:
        self._client, self._metrics = client, metrics

    def announce(self, context: ServerContext, info: EngineInfo) -> None:
        """This process answers from now on."""
        import asyncio

        loop = asyncio.get_running_loop()
        state = context.state
        self._client.on_status = lambda status: setattr(state, "is_asleep", status.is_asleep)
        state.is_asleep = self._client.is_asleep

        def on_notice(name: str, arguments: Sequence[Any]) -> None:
            handler: Callable[..., None] | None = state.on_notices.get(name)
            if handler is not None:
                handler(*arguments)

        self._client.on_notice = on_notice

        def report() -> None:
            if not self._client.is_dead:
                self._metrics.tell_prepared()
                loop.call_later(REPORT_INTERVAL_S, report)

        report()
        self._client.tell(FrontReady())
