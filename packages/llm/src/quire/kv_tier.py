"""The tiers of an engine: what may be combined with them, whose blocks they hold, and how they join the two sides.

Free of torch until `start_digest`, which reads the checkpoint's list of weight files.
"""

from __future__ import annotations

import importlib.metadata
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from quire.config import QuireConfig
from quire.data_parallel import engine_ranks
from quire.media import MediaFront
from quire.plan import MemoryPlan
from quire_engine import EngineInfo
from quire_interfaces import BlockMemory, ConfigError, KVTransferWorker, RequestConnector
from quire_kv_transfer import (
    BlockTier,
    ConnectedWorker,
    ConnectorContext,
    DiskEncoderCache,
    DiskTier,
    HostMemoryTier,
    KVTransferConfig,
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
    if config.runner.device.partition(":")[0] != "cpu":
        raise ConfigError(
            f"{name} works with a KV cache in host memory only, and device is {config.runner.device!r}; leave it "
            "out, or run on the CPU",
            field=name,
        )
    if settings.kv_disk_path is not None:
        prepare_folder(settings.kv_disk_path)
    if settings.kv_tier is not None:
        parse_address(settings.kv_tier)
    check_connector(settings.connector)


def tier_setting(config: QuireConfig) -> str | None:
    """Name of the setting that asks for a tier, the first of several; None where none does."""
    return None if config.kv_transfer == KVTransferConfig() else _first_asked(config.kv_transfer)


def _first_asked(settings: KVTransferConfig) -> str | None:
    asked = {
        "kv_disk_path": settings.kv_disk_path is not None,
        "kv_offloading_size": bool(settings.kv_offloading_size),
        "kv_tier": settings.kv_tier is not None,
        "kv_transfer_config": settings.connector.kv_connector is not None,
    }
    return next((name for name, is_asked in asked.items() if is_asked), None)


def needs_digest(config: QuireConfig) -> bool:
    """Whether blocks of this engine may be read by another, or after it."""
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


def open_tiers(config: QuireConfig, plan: MemoryPlan, digest: Future[str] | None, network: Network) -> EngineTiers:
    """Open the tiers for this model, dtype and layout.

    Args:
        config: Settings.
        plan: Dtype, linear method and KV cache.
        digest: From `start_digest`; None where no block outlives the process.
        network: KV of another attention backend differs in its last bits, or in its layout; and keys keep the rotation
            that the network gave them.

    Raises:
        ConfigError: the folder is too small, or cannot be written to.
    """
    settings = config.kv_transfer
    fingerprint = bytes(32) if digest is None else _fingerprint(config, plan, digest.result(), network)
    block_bytes = group_block_bytes(plan.kv_plan)
    tiers: list[BlockTier] = []
    disk = memory = None
    if settings.kv_offloading_size:
        memory = HostMemoryTier(round(settings.kv_offloading_size * GIB))
        tiers.append(memory)
    if settings.kv_disk_path is not None:
        disk = DiskTier(settings.kv_disk_path, fingerprint, block_bytes, size_bytes=settings.kv_disk_size)
        tiers.append(disk.files)
    if settings.kv_tier is not None:
        tiers.append(RemoteTier(settings.kv_tier, fingerprint, api_key=settings.kv_tier_api_key or ""))
    context = ConnectorContext(
        config=settings.connector,
        fingerprint=fingerprint,
        block_bytes=tuple(block_bytes),
        block_size=plan.block_size,
        num_blocks=plan.kv_plan.num_blocks,
        data_parallel_rank=engine_ranks(config.data_parallel).first,
    )
    opened = open_connectors(context)
    tiers.extend(opened.tiers)
    stack = TierStack(tiers, fingerprint, block_bytes, max_wanted=plan.kv_plan.num_blocks) if tiers else None
    return EngineTiers(stack, disk, memory, opened.connector)


def _fingerprint(config: QuireConfig, plan: MemoryPlan, digest: str, network: Network) -> bytes:
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
            "layout": layout_facts(plan.kv_plan),
            "block_hash": config.kv_cache.prefix_caching_hash_algo,
        }
    )


def open_encoder_cache(
    config: QuireConfig, model: ModelConfig, plan: MemoryPlan, digest: Future[str], tier: DiskTier
) -> DiskEncoderCache | None:
    """What towers have made, in the folder of the tier; None for a model without any.

    Args:
        config: Settings.
        model: The network, from config.json.
        plan: Dtype and linear method.
        digest: From `start_digest`.
        tier: Has the folder, and bounds it.
    """
    if model.media is None:
        return None
    fingerprint = towers_fingerprint(model, plan, digest.result())
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
