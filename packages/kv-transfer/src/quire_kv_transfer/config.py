"""The settings of KV tiers. Knows no folder and no model: what the disk has room for is looked at when a tier opens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from quire_interfaces import Settings, at_least, one_of, setting
from quire_kv_transfer.connector_config import ConnectorConfig

__all__ = ["KVTransferConfig"]


def _connector(value: Any) -> str | None:
    if not isinstance(value, dict):
        return "be a JSON object"
    ConnectorConfig.of(value)  # which says better what is wrong
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class KVTransferConfig(Settings):
    """Where blocks of the prefix cache are kept beside memory.

    Raises:
        ConfigError: a value is not possible.
    """

    kv_disk_path: str | None = setting(
        None,
        help="Folder in which computed prefixes are kept, over restarts too; several engines may share it. It holds "
        "what prompts were made into, so keep it as private as the prompts. Empty keeps them in memory only.",
    )
    kv_disk_size: int | None = setting(
        None,
        help="Most bytes that the files in kv_disk_path take together; the least recently used go first. Empty takes "
        "half of the space that is free there at the start.",
        unit="bytes",
        check=at_least(1),
    )
    kv_offloading_size: float | None = setting(
        None,
        help="Host memory for blocks that the KV cache has no room for, above the disk where there is one. Empty takes "
        "none.",
        unit="GiB",
        check=at_least(0),
    )
    kv_offloading_backend: str = setting(
        "native", help="What offloads to host memory: native is Quire's own.", check=one_of("native")
    )
    kv_tier: str | None = setting(
        None,
        help="Block store that engines share (quire kv-serve): unix:/path or tcp://host:port. Prefixes that another "
        "engine computed are read from it; when it is away they are computed.",
    )
    kv_tier_api_key: str | None = setting(
        None, help="Key of the tenant at the block store, where it asks for one.", secret=True, nonempty=True
    )
    kv_load_failure_policy: str = setting(
        "recompute",
        help="A block that a tier has, and that does not arrive whole: recompute computes it, fail fails the requests "
        "that wait for it.",
        check=one_of("recompute", "fail"),
    )
    kv_transfer_config: dict[str, Any] | None = setting(  # noqa: RUF009  (the default is None)
        None,
        help="Give keys and values to other engines and take theirs: a JSON object in vLLM's form, e.g. "
        '{"kv_connector": "NixlConnector", "kv_role": "kv_both"}. Requests say by kv_transfer_params which.',
        check=_connector,
    )

    @property
    def connector(self) -> ConnectorConfig:
        """What `kv_transfer_config` says."""
        return ConnectorConfig.of(self.kv_transfer_config or {})

    @property
    def asked_tier(self) -> str | None:
        """Name of the setting that asks for a tier or a connector, the first of several; None where none does."""
        asked = {
            "kv_disk_path": self.kv_disk_path is not None,
            "kv_offloading_size": bool(self.kv_offloading_size),
            "kv_tier": self.kv_tier is not None,
            "kv_transfer_config": self.connector.kv_connector is not None,
        }
        return next((name for name, is_asked in asked.items() if is_asked), None)

    @property
    def fails_on_loss(self) -> bool:
        """Whether a request fails when blocks for it do not arrive."""
        return (self.connector.kv_load_failure_policy or self.kv_load_failure_policy) == "fail"
