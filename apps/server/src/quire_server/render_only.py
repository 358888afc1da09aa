"""`quire launch render`: the server without an engine. It renders and tokenizes, and loads neither weights nor torch.

What generates is another server's: it takes what is rendered here at /inference/v1/generate, and this one makes the
answer of its tokens again (.../derender).
"""

from __future__ import annotations

from typing import Any

from quire import QuireConfig
from quire_engine import EngineInfo
from quire_interfaces import ConfigError
from quire_observability import EngineMetrics
from quire_server.config import ServerConfig
from quire_server.exit_status import ExitStatus
from quire_server.listening import address_of, bind, check_tls
from quire_server.render_client import RENDER_PATHS, render_llm
from quire_server.serve import serve_http
from quire_server.stopping import stopping_on_signals

__all__ = ["launch_render"]


def launch_render(config: QuireConfig, server: ServerConfig) -> ExitStatus:
    """Serve until SIGTERM or Ctrl-C; the exit status.

    Raises:
        QuireError: the port is taken, the model is wrong, or a setting asks for an engine.
    """
    refused = {
        "headless": config.data_parallel.headless,
        "models_dir": server.models_dir is not None,
        "pooling_model": server.pooling_model is not None,
        "files_dir": server.files_dir is not None,
        "grpc_port": server.grpc_port is not None,
        "grpc_uds": server.grpc_uds is not None,
        "api_server_count": (server.api_server_count or 1) > 1,
    }
    for name, is_set in refused.items():
        if is_set:
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(
                f"quire launch render does not go with {flag}: it is one process without engines", field=name
            )
    check_tls(server)
    with stopping_on_signals() as stopping, bind(server) as listening:

        def announce(context: Any, info: EngineInfo) -> None:
            if server.banner:
                address = address_of(listening, server)
                paths = sorted(path for path in RENDER_PATHS if path.endswith(("render", "tokenize")))
                print(f"Quire renders for {info.model} at {address}\n  " + "\n  ".join(paths), flush=True)

        metrics = EngineMetrics(prefix=server.metrics_prefix)
        return serve_http(server, stopping, listening, lambda template: render_llm(config, template), metrics, announce)
