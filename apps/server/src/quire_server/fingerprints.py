"""`system_fingerprint`: what a client compares to know whether the same request may be answered otherwise."""

from __future__ import annotations

import hashlib
import json
from importlib.metadata import version

from quire import QuireConfig
from quire_engine.messages import EngineInfo
from quire_interfaces import ConfigError
from quire_server.config import ServerConfig

__all__ = ["fingerprint_of"]

_SECTIONS = ("model", "lora", "speculative", "structured_output", "renderer", "parallel")
"""Of the settings: those that tokens may depend on, beside what the engine has chosen."""


def fingerprint_of(server: ServerConfig, config: QuireConfig, info: EngineInfo | None) -> str | None:
    """Version, ranks and a hash of model, settings and chosen kernels, as `fingerprint_mode` says.

    Args:
        server: Settings of the server.
        config: Settings of the engine.
        info: What the engine has chosen; None where none runs.

    Raises:
        ConfigError: mode and value do not go together.
    """
    mode, value = server.fingerprint_mode, server.fingerprint_value
    if (mode == "custom") != (value is not None):
        raise ConfigError(
            "fingerprint_value is what fingerprint_mode custom shows: set both, or neither", field="fingerprint_value"
        )
    if mode in ("none", "custom"):
        return value
    settings = config.to_dict()
    told = {name: settings.get(name) for name in _SECTIONS}
    chosen = None if info is None else [info.model, info.dtype, info.device, dict(info.choices)]
    digest = hashlib.sha256(json.dumps([told, chosen], sort_keys=True, default=str).encode()).hexdigest()
    parallel = config.parallel
    ranks = {
        "tp": parallel.tensor_parallel_size,
        "pp": parallel.pipeline_parallel_size,
        "dp": config.data_parallel.data_parallel_size,
    }
    parts = [f"{name}{size}" for name, size in ranks.items() if size > 1 and mode == "full"]
    return "-".join(["quire", version("quire-server"), *parts, digest[:8]])
