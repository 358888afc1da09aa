"""The scheduler of an engine with tiers or a connector: the rules that let requests wait for blocks on their way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from quire.config import QuireConfig
from quire.kv_tier import ENCODER_CACHE, EngineTiers
from quire.transfer_params import KV_CONNECTOR
from quire_engine import EngineInfo
from quire_interfaces import AdmissionRule, RequestFailure, TieredBlockAllocator
from quire_kv_transfer import ConnectorConfig, DiskEncoderCache
from quire_scheduler import ConnectedScheduler, KVTransfers, RequestTransfers, Scheduler

__all__ = ["Transfers", "make_transfers"]


@dataclass(slots=True)
class Transfers:
    """The scheduler's side of what is behind the KV cache."""

    rules: list[AdmissionRule] = field(default_factory=list)
    take_failures: Callable[[], list[tuple[str, RequestFailure]]] | None = None
    """Requests that losses failed since the last call."""
    requests: RequestTransfers | None = None
    connector: ConnectorConfig = field(default_factory=ConnectorConfig)
    encoder_cache: DiskEncoderCache | None = None

    def tell(self, info: EngineInfo) -> None:
        """Add what the engine says of its connector, and of encoder outputs on disk."""
        if self.encoder_cache is not None:
            info.extra[ENCODER_CACHE] = self.encoder_cache.address
            info.choices["encoder outputs"] = "kept on disk, beside the prefixes"
        if self.connector.kv_connector is not None:
            said = f"{self.connector.kv_connector} as {self.connector.kv_role}"
            info.choices["keys and values of other engines"] = said
        if self.requests is not None:
            info.extra[KV_CONNECTOR] = self.connector.kv_connector

    def make_scheduler(self, *args: Any, **options: Any) -> Scheduler:
        """A `Scheduler`, from its arguments, that knows the connector where there is one."""
        if self.requests is None:
            return Scheduler(*args, **options)
        return ConnectedScheduler(*args, transfers=self.requests, **options)


def make_transfers(
    config: QuireConfig, tiers: EngineTiers, allocator: TieredBlockAllocator, block_size: int
) -> Transfers:
    """The rules for what there is, tiers before the connector: what they have need not be fetched.

    Args:
        config: Says what a loss does.
        tiers: What is there.
        allocator: The scheduler's.
        block_size: Tokens of a block.
    """
    transfers = Transfers(connector=config.kv_transfer.connector, encoder_cache=tiers.encoder_cache)
    fails_on_loss = config.kv_transfer.fails_on_loss
    each: list[KVTransfers | RequestTransfers] = []
    if tiers.stack is not None:
        each.append(KVTransfers(allocator, tiers.stack.connector, fails_on_loss=fails_on_loss))
    if tiers.connector is not None:
        transfers.requests = RequestTransfers(allocator, tiers.connector, block_size, fails_on_loss=fails_on_loss)
        each.append(transfers.requests)
    transfers.rules.extend(each)
    transfers.take_failures = lambda: [failure for rule in each for failure in rule.take_failures()]
    return transfers
