"""Settings of a connector, in the JSON form of vLLM's `--kv-transfer-config`."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from quire_interfaces import ConfigError

__all__ = ["ConnectorConfig", "ConnectorContext"]

ROLES = ("kv_producer", "kv_consumer", "kv_both")
POLICIES = ("recompute", "fail")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectorConfig:
    """What of an engine's keys and values other engines get, and by what.

    Raises:
        ConfigError: a value is not possible.
    """

    kv_connector: str | None = None
    """Name of the connector; None for none."""
    kv_role: str = "kv_both"
    """kv_producer lets others read blocks, kv_consumer reads those of others, kv_both does both."""
    engine_id: str | None = None
    """What the engine is called by others; None for a random name."""
    kv_connector_extra_config: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the connector itself."""
    kv_connector_module_path: str | None = None
    """Python module that has the connector as an attribute of its name; None for one of Quire's, or an entry point."""
    kv_load_failure_policy: str | None = None
    """"recompute" or "fail"; None for `--kv-load-failure-policy`."""
    kv_ip: str = "127.0.0.1"
    """Address at which other engines reach this one."""
    kv_port: int = 0
    """Port there, of the engine with the data parallel rank 0; the next ranks have the next ports. 0 takes a free one,
    which requests carry to other engines."""
    kv_buffer_device: str = "cpu"
    """Where keys and values are read from and written to: "cpu"."""

    def __post_init__(self) -> None:
        for name, value, choices in (
            ("kv_role", self.kv_role, ROLES),
            ("kv_load_failure_policy", self.kv_load_failure_policy, (None, *POLICIES)),
            ("kv_buffer_device", self.kv_buffer_device, ("cpu",)),
        ):
            if value not in choices:
                raise _error(f"{name} must be {' or '.join(str(each) for each in choices if each)}, got {value!r}")
        for name in ("kv_connector", "engine_id", "kv_connector_module_path"):
            if not isinstance(getattr(self, name), str | None):
                raise _error(f"{name} must be text, got {getattr(self, name)!r}")
        if not isinstance(self.kv_connector_extra_config, Mapping):
            raise _error(f"kv_connector_extra_config must be an object, got {self.kv_connector_extra_config!r}")
        if not isinstance(self.kv_ip, str) or not self.kv_ip:
            raise _error(f"kv_ip must be an address, got {self.kv_ip!r}")
        if type(self.kv_port) is not int or not 0 <= self.kv_port < 1 << 16:
            raise _error(f"kv_port must be a port from 0 to 65535, got {self.kv_port!r}")

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> ConnectorConfig:
        """Configuration from the members of the JSON object. Members that speak of vLLM's own buffers and ranks are
        passed over.

        Raises:
            ConfigError: an unknown member (with the nearest known one), or a value that is not possible.
        """
        names = [spec.name for spec in fields(cls)]
        values = {name: value for name, value in values.items() if name not in _PASSED_OVER}
        if unknown := sorted(set(values).difference(names)):
            nearest = difflib.get_close_matches(unknown[0], names, n=1)
            hint = f"did you mean {nearest[0]!r}?" if nearest else f"there are {', '.join(names)}"
            raise _error(f"it has no member {unknown[0]!r}; {hint}")
        return cls(**{name: value for name, value in values.items() if value is not None})

    def extra(self, name: str, default: Any) -> Any:
        """A number or switch of `kv_connector_extra_config`, of the type of its default.

        Raises:
            ConfigError: it has another type, or is less than 0.
        """
        value = self.kv_connector_extra_config.get(name, default)
        if isinstance(default, bool):
            fits = isinstance(value, bool)
        else:
            fits = isinstance(value, int | float) and not isinstance(value, bool) and value >= 0
        if not fits:
            kind = "true or false" if isinstance(default, bool) else "a number of at least 0"
            raise _error(f"kv_connector_extra_config.{name} must be {kind}, got {value!r}")
        return value

    def check_extra(self, known: Mapping[str, Any] | set[str]) -> None:
        """Raises ConfigError when `kv_connector_extra_config` has a member that the connector does not know."""
        for name in self.kv_connector_extra_config:
            if name not in known:
                nearest = difflib.get_close_matches(name, list(known), n=1)
                hint = f"did you mean {nearest[0]!r}?" if nearest else f"there are {', '.join(sorted(known))}"
                raise _error(f"{self.kv_connector} has no kv_connector_extra_config.{name}; {hint}")


_PASSED_OVER = {"kv_buffer_size", "kv_rank", "kv_parallel_size", "enable_permute_local_kv"}


def _error(what: str) -> ConfigError:
    return ConfigError(f"kv_transfer_config: {what}", field="kv_transfer_config")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectorContext:
    """What a connector is made from."""

    config: ConnectorConfig
    fingerprint: bytes
    """32 bytes that depend on everything that keys and values depend on beside tokens, adapters, media and salts:
    blocks of another fingerprint are not to be served."""
    block_bytes: tuple[int, ...]
    """Bytes of a block, per KV cache group."""
    block_size: int
    """Tokens of a block."""
    num_blocks: int
    """Blocks of the KV cache, the null block included."""
    data_parallel_rank: int = 0
    """Rank of the engine among those of one address."""
    rank: int = 0
    """Of the ranks that share the model, the one whose parts of blocks this is about."""
    num_ranks: int = 1
    gather: Callable[[int], list[int]] = lambda number: [number]
    """A number of each rank, in their order; all ranks call it, or none."""
