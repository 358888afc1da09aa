"""`quire serve --models-dir FOLDER`: from settings to a router that listens."""

from __future__ import annotations

import asyncio
import logging
import shutil
import socket
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quire import QuireConfig
from quire.setting_fields import Origin
from quire_interfaces import ConfigError
from quire_server.callers import read_api_keys
from quire_server.config import ServerConfig
from quire_server.exit_status import ExitStatus
from quire_server.http_server import http_server_of
from quire_server.listening import address_of, bind, check_tls, listen
from quire_server.log_settings import begin_logging
from quire_server.model_router.app import RouterApp, layered
from quire_server.model_router.pool import ModelPool
from quire_server.model_router.process import ROUTER_SETTINGS
from quire_server.stopping import Stopping, stopping_on_signals

__all__ = ["serve_models"]

_logger = logging.getLogger(__name__)


def serve_models(config: QuireConfig, server: ServerConfig, origins: Mapping[str, Origin]) -> ExitStatus:
    """Serve the models of a folder until SIGTERM or Ctrl-C. Returns the exit status.

    Args:
        config: Settings of engines.
        server: Settings of the router.
        origins: Setting -> its value, and where that came from: what was set is set for each model's server.

    Raises:
        QuireError: the port is taken, or a setting is wrong.
    """
    begin_logging(server)
    folder = Path(server.models_dir or "").expanduser()
    if config.model.model is not None:
        raise ConfigError("models_dir serves the models of a folder; leave MODEL out", field="models_dir")
    if server.served_model_name is not None:
        raise ConfigError("models of models_dir are called as their folders; leave it out", field="served_model_name")
    if server.grpc_port is not None or server.grpc_uds is not None:
        raise ConfigError("gRPC serves one model; leave models_dir out", field="models_dir")
    if not folder.is_dir():
        raise ConfigError(f"there is no folder {str(folder)!r}", field="models_dir")
    check_tls(server)
    read_api_keys(server)
    work_folder = Path(tempfile.mkdtemp(prefix="quire-models-"))  # for this user alone
    settings = {
        name: _plain(origin.value)
        for name, origin in origins.items()
        if origin.source != "default" and name not in ROUTER_SETTINGS
    }
    try:
        with stopping_on_signals() as stopping, bind(server) as listening:
            if server.uds is not None:
                stopping.before_end(Path(server.uds).unlink)
            stop_s = config.engine.shutdown_timeout_s
            return asyncio.run(_serve(folder, settings, work_folder, server, listening, stopping, stop_s))
    finally:
        shutil.rmtree(work_folder, ignore_errors=True)


def _plain(value: Any) -> Any:
    """A value as YAML has it."""
    if isinstance(value, (tuple, list)):
        return [_plain(each) for each in value]
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


async def _serve(
    folder: Path,
    settings: Mapping[str, Any],
    work_folder: Path,
    server: ServerConfig,
    listening: socket.socket,
    stopping: Stopping,
    stop_s: float,
) -> ExitStatus:
    start_s = time.monotonic()
    keys = read_api_keys(server)
    pool = ModelPool(
        folder, settings, work_folder, most=server.models_max, ttl_s=server.models_ttl_s, stop_timeout_s=stop_s
    )
    stopping.before_end(pool.kill)
    app = RouterApp(pool, server, keys)
    http = http_server_of(layered(app, server, keys), server, stop_s)
    idle = asyncio.ensure_future(pool.unload_idle())
    try:
        listen(listening, server)
        stopped = asyncio.ensure_future(stopping.drains().wait())
        running = asyncio.ensure_future(http.serve(sockets=[listening]))
        while not (http.started or running.done()):
            await asyncio.sleep(0.005)
        address, names = address_of(listening, server), ", ".join(pool.models) or "none yet"
        if server.banner and server.log_format == "text":
            lines = {"OpenAI API": f"{address}/v1", "models": f"{names} (of {folder}, loaded when asked for)"}
            print("\n".join(["Quire", *(f"  {name + ':':<19}{value}" for name, value in lines.items())]), flush=True)
        else:
            _logger.info("ready: models of %s at %s, after %.1f s", folder, address, time.monotonic() - start_s)
        await asyncio.wait((running, stopped), return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        app.is_leaving = True
        http.should_exit = True
        await running
        return ExitStatus.OK
    finally:
        idle.cancel()
        await asyncio.gather(idle, return_exceptions=True)
        await pool.close()
