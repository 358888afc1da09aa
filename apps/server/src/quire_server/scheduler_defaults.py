"""What a server sets in the scheduler where nobody has said it: how far its callers may slow each other down."""

from __future__ import annotations

import dataclasses
from typing import Any

from quire import QuireConfig
from quire_server.callers import APIKeys

__all__ = ["with_scheduler_defaults"]

_MAX_SLOWDOWN = 1.7
_MAX_INTER_TOKEN_LATENCY_S = 0.15


def with_scheduler_defaults(keys: APIKeys, config: QuireConfig) -> QuireConfig:
    """The settings, with a bound on the time between tokens, and with one for tenants if there are several."""
    defaults: dict[str, Any] = {}
    if config.scheduler.max_inter_token_latency is None:
        defaults["max_inter_token_latency"] = _MAX_INTER_TOKEN_LATENCY_S
    if keys.num_keys > 1 and config.scheduler.max_tenant_slowdown is None:
        defaults["max_tenant_slowdown"] = _MAX_SLOWDOWN
    return dataclasses.replace(config, scheduler=dataclasses.replace(config.scheduler, **defaults))
