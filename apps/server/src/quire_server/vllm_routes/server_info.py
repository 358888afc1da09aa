"""GET /server_info: settings and versions of a running server; GET /kv_event_sources: where its KV events come from."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import platform
import reprlib
import socket
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from quire import QuireConfig, __version__
from quire_engine.kv_event_publisher import rank_endpoint
from quire_interfaces import RequestError
from quire_server.config import ServerConfig
from quire_server.context import ServerContext

__all__ = ["kv_event_sources", "server_info", "settings_shown"]

_PACKAGES = ("torch", "triton", "transformers", "tokenizers", "safetensors", "numpy", "msgspec", "pyzmq", "fastapi")


async def server_info(context: ServerContext, request: Request) -> Response:
    """Settings, environment and versions, in vLLM's shape; `?config_format=json` gives settings by section. Keys are
    never shown."""
    config_format = request.query_params.get("config_format", "text")
    if config_format not in ("text", "json"):
        raise RequestError(
            f"config_format must be text or json, got {reprlib.repr(config_format)}", param="config_format"
        )
    settings: Any = settings_shown(context.llm.config, context.config)
    if config_format == "text":
        lines = (
            f"{section}.{name}={value!r}" for section, values in settings.items() for name, value in values.items()
        )
        settings = ", ".join(lines)
    info = context.llm.engine.info
    return JSONResponse(
        {
            "vllm_config": settings,
            "vllm_env": _environment(),
            "system_env": _system(),
            "engine": {
                "model": info.model,
                "dtype": info.dtype,
                "device": info.device,
                "kv_cache_dtype": info.kv_cache_dtype,
                "max_model_len": info.max_model_len,
                "num_blocks": info.num_blocks,
                "block_size": info.block_size,
                "memory_bytes": info.memory_bytes,
                "choices": info.choices,
            },
        }
    )


def settings_shown(config: QuireConfig, server: ServerConfig) -> dict[str, dict[str, Any]]:
    """Section -> name -> value, without secrets."""
    shown = config.to_dict()
    shown["server"] = {
        spec.name: "(not shown)" if spec.metadata.get("secret") and getattr(server, spec.name) else value
        for spec in dataclasses.fields(server)
        for value in [getattr(server, spec.name)]
    }
    return shown


def _environment() -> dict[str, str]:
    """Variables that begin with QUIRE_, but for those with keys."""
    return {
        name: "(not shown)" if "KEY" in name or "TOKEN" in name else value
        for name, value in sorted(os.environ.items())
        if name.startswith("QUIRE_")
    }


def _system() -> dict[str, Any]:
    versions: dict[str, str | None] = {}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    return {
        "quire_version": __version__,
        "python_version": platform.python_version(),
        "platform": platform.platform(),
        "machine": platform.machine(),
        "host": socket.gethostname(),
        "num_cpus": os.cpu_count(),
        "package_versions": versions,
    }


async def kv_event_sources(context: ServerContext, request: Request) -> Response:
    """Where each engine publishes its KV cache events (--kv-events-config), in vLLM's shape; none without them."""
    events = context.llm.config.engine.kv_events
    sources = []
    if events.is_published:
        for rank in sorted(await context.llm.client.engine_ranks()):
            replay = events.replay_endpoint
            sources.append(
                {
                    "data_parallel_rank": rank,
                    "endpoint": rank_endpoint(events.endpoint, rank),
                    "replay_endpoint": None if replay is None else rank_endpoint(replay, rank),
                    "topic": events.topic,
                }
            )
    return JSONResponse({"sources": sources})
