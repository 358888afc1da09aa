"""Settings of the publisher of KV cache events, in the JSON form of vLLM's `--kv-events-config`."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from quire_interfaces import ConfigError, Settings, at_least, one_of, setting

__all__ = ["KVEventsConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class KVEventsConfig(Settings):
    """Whether, where and how KV cache events are published.

    Raises:
        ConfigError: a value is not possible.
    """

    enable_kv_cache_events: bool = setting(
        False, help="Record which blocks become findable and which stop being so.", check=one_of(True, False)
    )
    publisher: str | None = setting(
        None,
        help="zmq publishes the events, null records them only; empty is zmq where events are enabled.",
        check=one_of("zmq", "null"),
    )
    endpoint: str = setting(
        "tcp://*:5557",
        help="ZMQ address of the PUB socket: bound where it is a wildcard, a loopback address, ipc or inproc, else "
        "connected to.",
    )
    replay_endpoint: str | None = setting(
        None, help="ZMQ address at which a ROUTER socket replays batches that a subscriber missed."
    )
    buffer_steps: int = setting(10_000, help="Batches kept for replay.", unit="batches", check=at_least(1))
    hwm: int = setting(
        100_000,
        help="Batches that wait for one slow subscriber; beyond it, that subscriber misses some.",
        unit="batches",
        check=at_least(1),
    )
    max_queue_size: int = setting(
        100_000,
        help="Batches that wait for the publishing thread; beyond it, some are lost, which their numbers show.",
        unit="batches",
        check=at_least(1),
    )
    topic: str = setting("", help="Topic of the messages, their first frame.")

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> KVEventsConfig:
        """Configuration from the members of the JSON object.

        Raises:
            ConfigError: an unknown member (with the nearest known one), or a value that is not possible.
        """
        names = [spec.name for spec in fields(cls)]
        if unknown := sorted(set(values).difference(names)):
            raise _unknown_member(unknown[0], names)
        return cls(**values)

    @property
    def is_published(self) -> bool:
        """Whether events leave the engine."""
        return self.enable_kv_cache_events and self.publisher != "null"


def _unknown_member(name: str, names: list[str]) -> ConfigError:
    """What is said of a member that there is not, where there are `names`."""
    nearest = difflib.get_close_matches(name, names, n=1)
    hint = f"did you mean {nearest[0]!r}?" if nearest else f"there are {', '.join(names)}"
    return ConfigError(f"kv_events_config has no member {name!r}; {hint}", field="kv_events_config")
