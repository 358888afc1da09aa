"""An engine of towers alone (`mm_encoder_only`): what it encodes goes to the tier on disk, and other engines find it.

It runs requests as every engine does, with the scheduler's rule for media, and without KV cache and language model.
Importing this module loads no torch.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path

from quire.config import QuireConfig
from quire.engine_report import tower_format
from quire.kv_tier import ENCODER_CACHE, start_digest, towers_fingerprint
from quire.parallel.collective_rpc import CollectiveRPC
from quire.plan import MemoryPlan
from quire_engine import EngineInfo, EngineParts
from quire_interfaces import ConfigError
from quire_kv_cache import NoKVCache
from quire_kv_transfer import DiskEncoderCache
from quire_models.config import ModelConfig
from quire_scheduler import MediaRule, Scheduler

__all__ = ["build_encoder_parts", "check_mm_encoder_only"]


def check_mm_encoder_only(config: QuireConfig, model: ModelConfig) -> None:
    """Refuse settings that a server of towers alone cannot have, before anything is loaded.

    Raises:
        ConfigError: no folder for the embeddings, no towers, or something that needs a language model.
    """
    if config.model.language_model_only:
        raise ConfigError(
            "mm_encoder_only builds no language model, and language_model_only nothing else; leave one of them out",
            field="mm_encoder_only",
        )
    if model.media is None:
        raise ConfigError(
            f"mm_encoder_only builds towers, and {model.architecture} has none that are served; leave it out",
            field="mm_encoder_only",
        )
    if config.kv_transfer.kv_disk_path is None:
        raise ConfigError(
            "mm_encoder_only keeps what it encodes in a folder, where other servers find it; name it by kv_disk_path "
            "(--kv-disk-path)",
            field="kv_disk_path",
        )
    if config.speculative.method != "none":
        raise ConfigError(
            f"mm_encoder_only builds no language model, and speculation by {config.speculative.method} is of its "
            "tokens; leave it out",
            field="speculative_method",
        )


def build_encoder_parts(
    config: QuireConfig,
    folder: Path,
    towers_folder: Path,
    model: ModelConfig,
    plan: MemoryPlan,
    report: Callable[[str, float], None],
) -> EngineParts:
    """Load the towers, and join them with a scheduler and the tier on disk.

    Args:
        config: Settings.
        folder: The model's.
        towers_folder: That of its towers.
        model: Its configuration.
        plan: Its memory, without a language model.
        report: Called with (stage, fraction of the stage that is done).

    Raises:
        ConfigError: a folder that cannot be written to.
        CheckpointError: towers that cannot be read.
    """
    start = time.perf_counter()
    report("importing torch", 0.0)
    import torch

    from quire_models import load_media_towers
    from quire_ops import torch_device
    from quire_runner.encoder_runner import EncoderRunner

    assert model.media is not None
    digest = start_digest(config, folder)
    imported = time.perf_counter()
    report("loading weights", 0.0)
    device = config.runner.device
    if config.runner.num_threads is not None:
        torch.set_num_threads(config.runner.num_threads)
    towers = load_media_towers(
        model, towers_folder, dtype=plan.dtype, device=device, load_format=config.model.load_format
    )
    timings_s = {"import": imported - start, "weights": time.perf_counter() - imported}
    settings = config.kv_transfer
    assert settings.kv_disk_path is not None
    cache = DiskEncoderCache.open(
        settings.kv_disk_path,
        towers_fingerprint(model, plan, digest.result()),
        dtype=plan.dtype,
        width=model.media.width,
        size_bytes=settings.kv_disk_size,
    )
    scheduler_config = dataclasses.replace(config.scheduler, max_model_len=plan.max_model_len)
    size = plan.encoder_cache_size
    rule = MediaRule(size, size, scheduler_config.max_num_batched_tokens)
    executor = EncoderRunner(towers.encode, torch_device(device), cache)
    return EngineParts(
        scheduler=Scheduler(scheduler_config, NoKVCache(), rules=[rule]),
        executor=executor,
        info=_info(config, folder, model, plan, cache, timings_s),
        reset_encoder_cache=rule.reset_cache,
        collective_rpc=CollectiveRPC(config, executor),
    )


def _info(
    config: QuireConfig,
    folder: Path,
    model: ModelConfig,
    plan: MemoryPlan,
    cache: DiskEncoderCache,
    timings_s: dict[str, float],
) -> EngineInfo:
    assert model.media is not None
    return EngineInfo(
        model=config.model.model or "quire-demo",
        max_model_len=plan.max_model_len,
        vocab_size=model.vocab_size,
        modalities=tuple(map(str, model.media.modalities)),
        mm_encoder_only=True,
        max_num_seqs=config.scheduler.max_num_seqs,
        dtype=plan.dtype,
        device=config.runner.device,
        memory_bytes=dict(plan.ledger_bytes),
        choices={
            "network": "towers alone, without a language model",
            "media": f"{', '.join(model.media.modalities)}; towers: {tower_format(model.media, plan.dtype)}",
            "encoder outputs": "kept on disk for others",
        },
        timings_s=timings_s,
        extra={"folder": str(folder), "notes": list(plan.notes), ENCODER_CACHE: cache.address},
    )
