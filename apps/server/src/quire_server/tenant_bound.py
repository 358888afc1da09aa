"""How far the callers of a server may slow each other down, where nobody has said it."""

from __future__ import annotations

import dataclasses

from quire import QuireConfig
from quire_server.callers import APIKeys

__all__ = ["with_tenant_defaults"]

_MAX_SLOWDOWN = 1.7


def with_tenant_defaults(keys: APIKeys, config: QuireConfig) -> QuireConfig:
    """The settings, with a bound for tenants if there are several and none is set."""
    if keys.num_keys < 2 or config.scheduler.max_tenant_slowdown is not None:
        return config
    scheduler = dataclasses.replace(config.scheduler, max_tenant_slowdown=_MAX_SLOWDOWN)
    return dataclasses.replace(config, scheduler=scheduler)
