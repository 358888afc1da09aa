"""Settings that change while a server runs: which there are, what they are now, and what they were before.

One `LiveSettings` belongs to the process that has the engines; API processes ask it and hear of changes. Knows no HTTP.
"""

from __future__ import annotations

import asyncio
import dataclasses
import difflib
import logging
import reprlib
import time
import typing
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire import QuireConfig
from quire.config import ModelSettings
from quire.generation_config import generation_defaults
from quire.live_config import LIVE_ENGINE_SETTINGS, changed_scheduler_config
from quire.setting_fields import config_fields
from quire_engine import EngineConfig
from quire_interfaces import ConfigError, QuireError, RequestError
from quire_server.callers import KeyLimits
from quire_server.config import ServerConfig

__all__ = ["LIVE_NAMES", "NOTICE", "LiveSettings", "engine_values", "key_limits_of", "taken", "with_server_values"]

_audit = logging.getLogger("quire.audit")
_audit.setLevel(logging.INFO)  # also where --log-level leaves such lines out

NOTICE = "apply_config"
"""What API processes are told of changed settings."""

SERVER_NAMES = (
    "log_level",
    "max_prompts_per_request",
    "max_body_bytes",
    "body_timeout_s",
    "default_chat_template_kwargs",
    "trust_request_chat_template",
    "enable_auto_tool_choice",
    "enable_force_include_usage",
    "enable_per_request_metrics",
    "return_tokens_as_token_ids",
)
"""Fields of `ServerConfig` that routes read anew for each request."""
DEFAULTS = "override_generation_config"
IN_FLIGHT = "max_requests_in_flight"
KEY_LIMITS = "api_key_limits"
"""Name of a key -> its limits; no setting of the command line, where the key file has them."""

LIVE_NAMES = (*LIVE_ENGINE_SETTINGS, IN_FLIGHT, DEFAULTS, *SERVER_NAMES, KEY_LIMITS)
MAX_HISTORY = 32

Apply = Callable[[Mapping[str, Any]], Awaitable[None]]
"""(name -> value of all settings that are to be others than at the start); when it raises, nothing has changed."""


@dataclass(frozen=True, slots=True)
class _Change:
    """One change, and what there was before it."""

    revision: int
    time_s: float
    changed_by: str
    changes: dict[str, Any]
    before: dict[str, Any]
    """Values that were others than at the start, before."""


class LiveSettings:
    """What was changed since the start. All calls from one event loop.

    Args:
        config: Settings of the engines, as at the start.
        server: Those of the HTTP side.
        key_limits: Name of each API key -> its limits, as at the start.
        apply: Puts values into effect, everywhere or nowhere.
        may_limit_keys: Whether one process counts what keys use.
    """

    def __init__(
        self,
        config: QuireConfig,
        server: ServerConfig,
        key_limits: Mapping[str, KeyLimits],
        apply: Apply,
        *,
        may_limit_keys: bool = True,
    ) -> None:
        self._config, self._server, self._apply = config, server, apply
        self._key_limits, self._may_limit_keys = dict(key_limits), may_limit_keys
        self._lock = asyncio.Lock()
        self._revision = 0
        self._history: list[_Change] = []
        self.values: dict[str, Any] = {}
        """Name -> value of all settings that are others than at the start."""

    def shown(self) -> dict[str, Any]:
        """The settings, and the last changes."""
        starts = self._start_values()
        return {
            "object": "config",
            "revision": self._revision,
            "settings": {
                name: {
                    "value": self.values.get(name, starts[name]),
                    "value_at_start": starts[name],
                    "is_changed": name in self.values,
                }
                for name in LIVE_NAMES
            },
            "history": [
                {
                    "revision": each.revision,
                    "time": int(each.time_s),
                    "changed_by": each.changed_by,
                    "changes": each.changes,
                }
                for each in reversed(self._history)
            ],
        }

    async def patch(self, changes: Mapping[str, Any], changed_by: str, *, dry_run: bool = False) -> dict[str, Any]:
        """Change settings, all of them or none.

        Args:
            changes: Name -> new value; None for that of the start.
            changed_by: Who asks, for the log.
            dry_run: Check them, and change nothing.

        Raises:
            RequestError: a setting that there is not or that needs a restart, or a value that is not possible.
        """
        async with self._lock:
            try:
                values = self._checked(changes)
                if not dry_run:
                    await self._change(values, changed_by, "changed")
            except QuireError as error:
                _audit.warning("settings not changed by %s: %s: %s", changed_by, dict(changes), error)
                raise
            return self.shown()

    async def roll_back(self, changed_by: str) -> dict[str, Any]:
        """Undo the last change that was not undone.

        Raises:
            RequestError: there is none.
        """
        async with self._lock:
            if not self._history:
                raise RequestError("no change is left to be undone", code="nothing_to_undo")
            last = self._history[-1]
            before = dict(last.before)
            await self._change(before, changed_by, f"rolled back (revision {last.revision})")
            del self._history[self._history.index(last) :]  # the change, and its undoing
            return self.shown()

    async def _change(self, values: dict[str, Any], changed_by: str, how: str) -> None:
        starts, before = self._start_values(), self.values
        changes = {
            name: values.get(name, starts[name])
            for name in LIVE_NAMES
            if values.get(name, starts[name]) != before.get(name, starts[name])
        }
        if not changes:
            return
        await self._apply(values)
        self.values = values
        self._revision += 1
        self._history.append(_Change(self._revision, time.time(), changed_by, changes, before))
        del self._history[:-MAX_HISTORY]
        text = "; ".join(f"{name} {before.get(name, starts[name])!r} -> {value!r}" for name, value in changes.items())
        _audit.info("settings %s by %s, revision %d: %s", how, changed_by, self._revision, text or "nothing")

    def _start_values(self) -> dict[str, Any]:
        config, server = self._config, self._server
        return {
            **{name: getattr(config.scheduler, name) for name in LIVE_ENGINE_SETTINGS},
            IN_FLIGHT: config.engine.max_requests_in_flight,
            DEFAULTS: config.model.override_generation_config,
            **{name: getattr(server, name) for name in SERVER_NAMES},
            KEY_LIMITS: {
                name: {field: value for field, value in dataclasses.asdict(limits).items() if value}
                for name, limits in self._key_limits.items()
            },
        }

    def _checked(self, changes: Mapping[str, Any]) -> dict[str, Any]:
        """All values that are to be others than at the start. Raises RequestError."""
        for name, value in changes.items():
            if name not in LIVE_NAMES:
                raise _no_such_setting(name, self._config)
            if value is not None:
                _check_type(name, value)
        starts = self._start_values()
        values = {**self.values, **changes}
        values = {name: value for name, value in values.items() if value is not None and value != starts[name]}
        try:
            changed_scheduler_config(self._config.scheduler, values)
            with_server_values(self._server, values)
            dataclasses.replace(self._config.engine, **taken(values, (IN_FLIGHT,)))
            if DEFAULTS in values:
                model = dataclasses.replace(
                    self._config.model, generation_config="vllm", override_generation_config=values[DEFAULTS]
                )
                generation_defaults(model, Path())
        except ConfigError as error:
            raise RequestError(str(error), param=error.field) from None
        if KEY_LIMITS in values:
            self._check_key_limits(values[KEY_LIMITS])
        return values

    def _check_key_limits(self, limits: Any) -> None:
        if not self._may_limit_keys:
            raise RequestError(
                "limits of keys are counted by one API process: start the server with --api-server-count 1",
                param=KEY_LIMITS,
            )
        key_limits_of(limits, self._key_limits)


def engine_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Those that engines and their clients are told."""
    return taken(values, (*LIVE_ENGINE_SETTINGS, IN_FLIGHT, "log_level"))


def with_server_values(server: ServerConfig, values: Mapping[str, Any]) -> ServerConfig:
    """The settings with those of the HTTP side among the values. Raises ConfigError."""
    return dataclasses.replace(server, **taken(values, SERVER_NAMES))


def key_limits_of(limits: Mapping[str, Any], known: Mapping[str, KeyLimits]) -> dict[str, KeyLimits]:
    """The limits of all keys, where some have others.

    Args:
        limits: Name -> field of `KeyLimits` -> value, of those.
        known: Those of the start.

    Raises:
        RequestError: there is no such key or limit.
    """
    fields = [field.name for field in dataclasses.fields(KeyLimits)]
    changed = dict(known)
    for name, values in limits.items():
        if name not in known:
            raise RequestError(f"there is no API key of the name {name!r}", param=KEY_LIMITS)
        for field, value in values.items():
            if field not in fields:
                raise RequestError(f"{name!r} may have {', '.join(fields)}, not {field!r}", param=KEY_LIMITS)
            if not 0 <= value < 2**53:
                raise RequestError(f"{field} of {name!r} must be a number of at least 0", param=KEY_LIMITS)
        changed[name] = KeyLimits(**values)
    return changed


def taken(values: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    return {name: values[name] for name in names if name in values}


def _check_type(name: str, value: Any) -> None:
    """Raises RequestError where a value is no value of a setting's type."""
    kind = _TYPES[name]
    is_right = isinstance(value, (int, float) if kind is float else kind) and (kind is bool) == isinstance(value, bool)
    if not is_right:
        raise RequestError(f"{name} must be {_WORDS[kind]}, got {reprlib.repr(value)}", param=name)
    if name == KEY_LIMITS:
        for key, limits in value.items():
            if not isinstance(limits, dict) or not all(type(each) is int for each in limits.values()):
                raise RequestError(f"{name} of {key!r} must be an object of whole numbers", param=name)


def _no_such_setting(name: str, config: QuireConfig) -> RequestError:
    known = config_fields({**config.sections(), "server": ServerConfig})
    if name in known:
        return RequestError(
            f"{name} needs a restart; what changes while the server runs is {', '.join(LIVE_NAMES)}",
            param=name,
            code="needs_restart",
        )
    nearest = difflib.get_close_matches(name, LIVE_NAMES, n=1)
    hint = f"did you mean {nearest[0]!r}?" if nearest else "GET /v1/admin/config lists what may change"
    return RequestError(f"there is no setting {name!r}; {hint}", param=name, code="unknown_setting")


def _types() -> dict[str, type[Any]]:
    """Name of a setting -> its type; objects are dictionaries."""
    scheduler = QuireConfig.sections()["scheduler"]
    owners: tuple[tuple[type[Any], Sequence[str]], ...] = (
        (scheduler, LIVE_ENGINE_SETTINGS), (EngineConfig, (IN_FLIGHT,)), (ModelSettings, (DEFAULTS,)),
        (ServerConfig, SERVER_NAMES),
    )  # fmt: skip
    types: dict[str, type[Any]] = {KEY_LIMITS: dict}
    for owner, names in owners:
        hints = typing.get_type_hints(owner)
        types |= {name: hints[name] if hints[name] in _WORDS else dict for name in names}
    return types


_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", dict: "an object"}
_TYPES = _types()
