"""The engine's own settings: pipeline depth, bounds of queues, deadlines. Knows no model and no scheduler setting."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from quire_engine.kv_events_config import KVEventsConfig
from quire_interfaces import ConfigError, Settings, at_least, one_of, setting
from quire_interfaces.platforms import platform_of

__all__ = ["EngineConfig"]


def _kv_events(value: Any) -> str | None:
    if not isinstance(value, dict):
        return "be a JSON object"
    try:
        KVEventsConfig.of(value)
    except ConfigError as error:
        return f"be right in all its members ({error})"
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig(Settings):
    """How the step loop, its process and its client behave."""

    async_scheduling: bool | None = setting(
        None,
        help="Plan the next step while the device runs this one; stopping is then noticed one step late. Empty: yes on "
        "accelerators, no on the CPU, where planning would take a core from computing.",
        check=one_of(None, True, False),
    )
    seed: int | None = setting(
        None,
        help="Seed of requests that bring none, each by its number, so that the same requests in the same order give "
        "the same tokens; empty: different tokens each time.",
    )
    stream_interval: int = setting(
        1,
        help="Send tokens of a request to the client in groups of this many; the first and the last go at once.",
        unit="tokens",
        check=at_least(1),
    )
    max_requests_in_flight: int = setting(
        4096,
        help="Requests the client hands to the engine at a time (each of n completions counts); more are refused.",
        unit="requests",
        check=at_least(1),
    )
    max_queued_messages: int = setting(
        65536,
        help="Messages that may wait on the way to the engine process, and steps that may wait on the way back.",
        unit="messages",
        check=at_least(16),
    )
    startup_timeout_s: float = setting(
        1800.0, help="The engine must be ready within this time.", unit="seconds", check=at_least(0.1)
    )
    shutdown_timeout_s: float = setting(
        30.0,
        help="On shutdown, requests in flight get this long to finish; then they are aborted.",
        unit="seconds",
        check=at_least(0),
    )
    step_timeout_s: float = setting(
        600.0,
        help="A step that takes longer than this means that the device hangs: the engine's process is ended, and "
        "started again.",
        unit="seconds",
        check=at_least(0.1),
    )
    stall_timeout_s: float = setting(
        300.0,
        help="An engine that has requests but takes no step for this long is reported as stalled, in the log and by "
        "GET /health.",
        unit="seconds",
        check=at_least(0.1),
    )
    call_timeout_s: float = setting(
        60.0,
        help="Control calls (pause, statistics, cache reset) must be answered within this time.",
        unit="seconds",
        check=at_least(0.1),
    )
    max_restarts: int = setting(
        3,
        help="How often within an hour an engine process that died is started again; its requests go on where they "
        "were.",
        unit="restarts",
        check=at_least(0),
    )
    max_failed_steps: int = setting(
        64,
        help="After this many failed steps without one success between them, the device is taken for broken.",
        unit="steps",
        check=at_least(2),
    )
    forward_output: bool = setting(
        True,
        help="Log what the engine's process logs and prints.",
        check=one_of(True, False),
    )

    kv_events_config: dict[str, Any] | None = setting(  # noqa: RUF009  (the default is None)
        None,
        help="Publish over ZMQ which prefix blocks are stored and evicted, for prefix-aware routers: a JSON object in "
        'vLLM\'s form, e.g. {"enable_kv_cache_events": true, "endpoint": "tcp://*:5557", "replay_endpoint": '
        '"tcp://*:5558"}. Events hold the token ids of prompts, and whoever reaches the address reads them.',
        check=_kv_events,
    )

    def depth(self, device: str) -> int:
        """Steps that may be planned ahead of the one that a device runs.

        Args:
            device: As --device names it; empty for something else.
        """
        if self.async_scheduling is None:
            return 0 if device and platform_of(device).is_host else 1
        return int(self.async_scheduling)

    @property
    def kv_events(self) -> KVEventsConfig:
        """What `kv_events_config` says."""
        return KVEventsConfig.of(self.kv_events_config or {})
