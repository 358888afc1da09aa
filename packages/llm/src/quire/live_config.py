"""Settings of an engine that change while it runs. Loads no torch."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from typing import Any

from quire_interfaces import ConfigError
from quire_scheduler import Scheduler, SchedulerConfig

__all__ = ["LIVE_ENGINE_SETTINGS", "Reconfigure", "changed_scheduler_config"]

LIVE_ENGINE_SETTINGS = (
    "max_num_seqs",
    "max_num_batched_tokens",
    "long_prefill_token_threshold",
    "max_queued_requests",
    "max_running_per_tenant",
)
"""Bounds of the scheduler."""


def changed_scheduler_config(start: SchedulerConfig, values: Mapping[str, Any]) -> SchedulerConfig:
    """The scheduler's settings with some of `LIVE_ENGINE_SETTINGS`.

    Args:
        start: Those of the start.
        values: Name -> value; other names are passed over.

    Raises:
        ConfigError: a value is not possible, or needs memory that was not taken at the start.
    """
    config = dataclasses.replace(start, **{name: values[name] for name in LIVE_ENGINE_SETTINGS if name in values})
    for name in ("max_num_seqs", "max_num_batched_tokens"):
        value, most = getattr(config, name), getattr(start, name)
        if value > most:
            raise ConfigError(
                f"{name} must be at most {most}, for which memory was taken at the start, got {value}", field=name
            )
    if bool(config.max_running_per_tenant) != bool(start.max_running_per_tenant):
        raise ConfigError(
            "max_running_per_tenant can be changed where it was set at the start, and not to 0",
            field="max_running_per_tenant",
        )
    return config


class Reconfigure:
    """Changes the settings of an engine, between two steps.

    Args:
        scheduler: The engine's.
        has_fixed_steps: Whether rules beside it count on the tokens of a step, as those of media and encoders do.
    """

    def __init__(self, scheduler: Scheduler, *, has_fixed_steps: bool = False) -> None:
        self._scheduler, self._start, self._has_fixed_steps = scheduler, scheduler.config, has_fixed_steps

    def __call__(self, values: Mapping[str, Any]) -> None:
        """Take other values than those of the start, by name.

        Raises:
            ConfigError: a value is not possible; nothing has changed.
        """
        config = changed_scheduler_config(self._start, values)
        if self._has_fixed_steps and config.max_num_batched_tokens != self._start.max_num_batched_tokens:
            raise ConfigError(
                "max_num_batched_tokens of an engine with an encoder or media is that of the start",
                field="max_num_batched_tokens",
            )
        self._scheduler.reconfigure(config)
        if (level := values.get("log_level")) is not None:
            logging.getLogger().setLevel(str(level).upper())
