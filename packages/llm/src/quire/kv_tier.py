"""The tiers of an engine: what may be combined with them, whose blocks they hold, and how they join the two sides.

Free of torch until `start_digest`, which reads the checkpoint's list of weight files.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from quire.config import QuireConfig
from quire.media import MediaFront
from quire.parallel.data_parallel import engine_ranks
from quire.parallel.rank_tiers import TierRank, merge_by, shared_digest
from quire.plan import MemoryPlan
from quire_engine import EngineInfo
from quire_interfaces import (
    BlockMemory,
    ConfigError,
    KVCachePlan,
    KVTransferJob,
    KVTransferWorker,
    RequestConnector,
)
from quire_interfaces.platforms import platform_of
from quire_kv_transfer import (
    MAX_DEVICE_STORE_BYTES,
    MAX_STORE_BYTES,
    BlockTier,
    ConnectedWorker,
    ConnectorContext,
    DiskEncoderCache,
    DiskTier,
    HostMemoryTier,
    KVTransferConfig,
    PullConnector,
    RemoteTier,
    TierStack,
    check_connector,
    group_block_bytes,
    layout_facts,
    model_fingerprint,
    open_connectors,
    parse_address,
    prepare_folder,
    weights_digest,
)
from quire_models import __version__ as models_version
from quire_models.compilation import compilation_backend
from quire_models.config import ModelConfig
from quire_models.hub import resolve_model

if TYPE_CHECKING:
    from quire.parallel.rank_groups import RankGroups
    from quire.parallel.rank_tiers import RanksExecutor
    from quire_models import Network

__all__ = [
    "ENCODER_CACHE",
    "EngineTiers",
    "check_tier",
    "connect_media",
    "needs_digest",
    "open_encoder_cache",
    "open_tiers",
    "start_digest",
    "tier_setting",
    "towers_fingerprint",
]

GIB = 1 << 30

ENCODER_CACHE = "encoder_cache"
"""In `EngineInfo.extra`: where the encoder outputs on disk are (`DiskEncoderCache.address`)."""


def check_tier(config: QuireConfig) -> None:
    """Refuse settings that cannot work, before anything is loaded.

    Raises:
        ConfigError: a combination that makes no sense, or a folder that cannot be written to.
    """
    if config.kv_transfer != KVTransferConfig():
        _check_transfer(config)


def _check_transfer(config: QuireConfig) -> None:
    """Refuse settings of tiers and connectors that cannot work. Raises as `check_tier`."""
    settings = config.kv_transfer
    if settings.kv_disk_path is None and settings.kv_disk_size is not None:
        raise ConfigError(
            f"kv_disk_size is {settings.kv_disk_size}, but there is no kv_disk_path to bound; set it, or leave the "
            "size out",
            field="kv_disk_size",
        )
    name = tier_setting(config)
    if name is not None:
        _check_asked_tier(config, name)


def _check_asked_tier(config: QuireConfig, name: str) -> None:
    """Refuse a tier that cannot work. Raises as `check_tier`.

    Args:
        name: The setting that asks for it.
    """
    settings = config.kv_transfer
    if not config.kv_cache.enable_prefix_caching:
        raise ConfigError(
            f"{name} keeps cached prefixes, and enable_prefix_caching is off; switch it on, or leave {name} out",
            field=name,
        )
    if settings.kv_disk_path is not None:
        prepare_folder(settings.kv_disk_path)
    if settings.kv_tier is not None:
        parse_address(settings.kv_tier)
    check_connector(settings.connector)


def tier_setting(config: QuireConfig) -> str | None:
    """Name of the setting that asks for a tier, the first of several; None where none does."""
    return None if config.kv_transfer == KVTransferConfig() else config.kv_transfer.asked_tier


def needs_digest(config: QuireConfig, groups: RankGroups | None = None) -> bool:
    """Whether blocks of this engine may be read by another, or after it; of several ranks, only the first one digests.

    Args:
        groups: Of several ranks, those of this one.
    """
    if groups is not None and groups.mesh.rank > 0:
        return False
    return tier_setting(config) not in (None, "kv_offloading_size") or config.kv_transfer.kv_tier is not None


def start_digest(config: QuireConfig, folder: Path) -> Future[str]:
    """Begin to digest the checkpoint, beside the loading of its weights. Quick when the tier's folder remembers it.

    The future raises what reading raised.
    """
    from quire_models.checkpoint_files import open_checkpoint

    path = config.kv_transfer.kv_disk_path
    root = None if path is None else prepare_folder(path)
    files = [folder / "config.json"]
    if config.model.load_format != "dummy":
        files += open_checkpoint(folder, pickled=config.model.load_format == "pt").files
    if config.model.mmproj is not None and not config.model.language_model_only:
        files += open_checkpoint(resolve_model(config.model.mmproj, modelscope=config.model.use_modelscope)).files
    return _in_thread(lambda: weights_digest(files, root))


@dataclass(frozen=True, slots=True)
class EngineTiers:
    """What is behind the KV cache of one engine."""

    stack: TierStack | None
    """What is found by content; None where there is only a connector."""
    disk: DiskTier | None
    """The folder of `kv_disk_path`."""
    memory: HostMemoryTier | None
    """The host memory of `kv_offloading_size`."""
    connector: RequestConnector | None = None
    """What fetches and sends blocks of single requests."""
    encoder_cache: DiskEncoderCache | None = None
    """Embeddings of media in the folder."""

    def connect_ranks(self, executor: RanksExecutor) -> None:
        """Let the executor of several ranks make one report of theirs, and let them hold what this rank holds."""
        executor.merge_transfers = merge_by(self.stack)
        if isinstance(self.connector, PullConnector):
            self.connector.on_hold = partial(executor.call, "hold_blocks")

    def hold_blocks(self, name: str, job: KVTransferJob) -> None:
        """On another rank than the first: let others read this rank's parts of blocks."""
        assert isinstance(self.connector, PullConnector)
        self.connector.hold(name, job)

    @property
    def on_computed(self) -> Callable[[int, Sequence[bytes]], None] | None:
        """What wants to hear of computed blocks."""
        return None if self.stack is None else self.stack.connector.offer

    def make_worker(self, memory: BlockMemory) -> KVTransferWorker:
        """The runner's half."""
        worker = None if self.stack is None else self.stack.make_worker(memory)
        if self.connector is not None:
            return ConnectedWorker(self.connector.make_worker(memory), worker)
        assert worker is not None, "there is neither a tier nor a connector"
        return worker


def open_tiers(
    config: QuireConfig,
    model: ModelConfig,
    plan: MemoryPlan,
    kv_plan: KVCachePlan,
    network: Network,
    digest_future: Future[str] | None,
    groups: RankGroups | None,
) -> EngineTiers:
    """Open the tiers for this model, dtype and layout; all of several ranks call this.

    Args:
        config: Settings.
        model: The network, from config.json.
        plan: Dtype and linear method.
        kv_plan: The KV cache, of this rank.
        network: KV of another attention backend differs in its last bits, or in its layout; and keys keep the rotation
            that the network gave them.
        digest_future: From `start_digest`; None where no block outlives the process, and on other ranks than the first.
        groups: Of several ranks, those of this one.

    Raises:
        ConfigError: the folder is too small, or cannot be written to.
    """
    settings, rank, digest = config.kv_transfer, None, ""
    if needs_digest(config):
        digest = shared_digest(digest_future, None if groups is None else groups.world)
    fingerprint = _fingerprint(config, plan, kv_plan, digest, network) if digest else bytes(32)
    if groups is not None:
        rank = TierRank(groups.world, config.parallel)
        fingerprint = rank.fingerprint(fingerprint)
    num_ranks = config.parallel.num_ranks
    block_bytes = group_block_bytes(kv_plan)
    tiers: list[BlockTier] = []
    disk = memory = encoder_cache = None
    if settings.kv_offloading_size:
        memory = HostMemoryTier(round(settings.kv_offloading_size * GIB) // num_ranks)
        tiers.append(memory)
    if settings.kv_disk_path is not None:
        disk = DiskTier(settings.kv_disk_path, fingerprint, block_bytes, size_bytes=settings.kv_disk_size)
        tiers.append(disk.files)
        encoder_cache = open_encoder_cache(model, plan, digest, disk)
    if settings.kv_tier is not None:
        tiers.append(RemoteTier(settings.kv_tier, fingerprint, api_key=settings.kv_tier_api_key or ""))
    context = ConnectorContext(
        config=settings.connector,
        fingerprint=fingerprint,
        block_bytes=tuple(block_bytes),
        block_size=plan.block_size,
        num_blocks=kv_plan.num_blocks,
        data_parallel_rank=engine_ranks(config.data_parallel).first,
    )
    if rank is not None:
        context = dataclasses.replace(context, rank=rank.world.rank, num_ranks=num_ranks, gather=rank.gather)
    opened = open_connectors(context)
    tiers.extend(opened.tiers)
    stack = None
    if tiers:
        most = MAX_STORE_BYTES if platform_of(config.runner.device).is_host else MAX_DEVICE_STORE_BYTES
        stack = TierStack(tiers, fingerprint, block_bytes, max_wanted=kv_plan.num_blocks, max_store_bytes=most)
    return EngineTiers(stack, disk, memory, opened.connector, encoder_cache)


def _fingerprint(config: QuireConfig, plan: MemoryPlan, kv_plan: KVCachePlan, digest: str, network: Network) -> bytes:
    """32 bytes that depend on everything that KV depends on beside tokens, adapters, media and salts."""
    compiled = compilation_backend(config.model.compilation_config)
    return model_fingerprint(
        {
            "weights": digest,
            "networks": models_version,
            "dtype": plan.dtype,
            "linear_method": plan.linear_method,
            "attention_backend": network.attention_backend.name,
            "rope": repr(network.config.rope),
            **({"overrides": dict(network.config.overrides)} if network.config.overrides else {}),
            **({"adapters": "in weights"} if config.lora.lora_merge_after else {}),
            **({} if compiled is None else {"compiled": compiled}),
            "layout": layout_facts(kv_plan),
            "block_hash": config.kv_cache.prefix_caching_hash_algo,
        }
    )


def open_encoder_cache(model: ModelConfig, plan: MemoryPlan, digest: str, tier: DiskTier) -> DiskEncoderCache | None:
    """What towers have made, in the folder of the tier; None for a model without any.

    Args:
        model: The network, from config.json.
        plan: Dtype and linear method.
        digest: Of the checkpoint.
        tier: Has the folder, and bounds it.
    """
    if model.media is None:
        return None
    fingerprint = towers_fingerprint(model, plan, digest)
    return tier.make_encoder_cache(fingerprint, dtype=plan.dtype, width=model.media.width)


def towers_fingerprint(model: ModelConfig, plan: MemoryPlan, digest: str) -> bytes:
    """32 bytes that depend on everything that embeddings depend on beside their items.

    Args:
        model: The network, from config.json.
        plan: Dtype and linear method, which towers may have, too.
        digest: Of the checkpoint, from `start_digest`.
    """
    return model_fingerprint(
        {
            "towers of": digest,
            "networks": models_version,
            "transformers": importlib.metadata.version("transformers"),
            "dtype": plan.dtype,
            "linear_method": plan.linear_method,
            "towers' linear_method": "plain" if model.media is None else model.media.linear_method,
            "overrides": dict(model.overrides),
        }
    )


def connect_media(media: MediaFront | None, info: EngineInfo) -> None:
    """Let what prepares media find the encoder outputs that an engine keeps on disk."""
    address = info.extra.get(ENCODER_CACHE)
    if media is not None and address is not None:
        media.preparer.encoder_connector = DiskEncoderCache.at(address)


def _in_thread(work: Callable[[], str]) -> Future[str]:
    future: Future[str] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except Exception as error:
            future.set_exception(error)

    threading.Thread(target=run, name="quire-weights-digest", daemon=True).start()
    return future
