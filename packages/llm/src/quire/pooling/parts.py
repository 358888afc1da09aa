"""An engine that reads whole texts, or sounds, with an encoder and pools them: a scheduler, no KV cache, and a
`PoolingRunner`.

Importing this module loads no torch.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, cast

from quire.config import QuireConfig
from quire.encoder_plan import EncoderPlan, plan_encoder
from quire.engine_report import with_pooling
from quire.live_config import Reconfigure
from quire.parallel.collective_rpc import CollectiveRPC
from quire.pooling.poolers import PoolingChoice, choose_pooling, longest_embedded_text, read_pooler_spec
from quire_engine import EngineInfo, EngineParts
from quire_interfaces import ConfigError, Executor, Modality
from quire_kv_cache import NoKVCache
from quire_models.config import ModelConfig
from quire_pooling import PoolerSpec
from quire_pooling.checkpoint import network_folder
from quire_scheduler import MediaRule, Scheduler

if TYPE_CHECKING:
    from quire_models import Network
    from quire_models.layers.encoder_only import EncoderOnly
    from quire_runner.protocols import HearsSounds

__all__ = ["build_pooling_parts"]

_NUM_STEP_IMAGES = 16
"""Images that are encoded in one step: texts wait for them."""
_NUM_CACHED_IMAGES = 4096
"""Vectors of images that are kept, where the settings do not say: 8 MB of 512 numbers."""


def build_pooling_parts(
    config: QuireConfig, folder: Path, model: ModelConfig, report: Callable[[str, float], None]
) -> EngineParts:
    """Load an encoder and its pooler, and join them with a scheduler.

    Args:
        config: Settings.
        folder: The model's.
        model: Its configuration.
        report: Called with (stage, fraction of the stage that is done).

    Raises:
        ConfigError: settings that an encoder cannot have, or too little memory.
        CheckpointError: a model that is missing or not understood.
    """
    choice = choose_pooling(config, folder, model)
    _check(config, model)
    spec = read_pooler_spec(config, folder, model)
    max_embed_len = longest_embedded_text(config)
    plan = plan_encoder(config, model, max_seq_length=spec.max_seq_length, max_embed_len=max_embed_len)
    start = time.perf_counter()
    report("importing torch", 0.0)

    from quire_models import load_model
    from quire_ops import torch_device
    from quire_pooling import Pooler, load_pooler_weights
    from quire_runner import PoolingRunner, SoundPooler, ThreadedExecutor

    imported = time.perf_counter()
    device = torch_device(config.runner.device)
    network = load_model(
        model,
        network_folder(folder),
        dtype=plan.dtype,
        device=config.runner.device,
        linear_method=plan.linear_method,
        load_format=config.model.load_format,
        disabled_linear_kernels=config.model.disabled_linear_kernels,
        language_model_only=config.model.language_model_only,
        progress=lambda done, total: report("loading weights", done / max(1, total)),
    )
    weights = {**network.head_weights, **load_pooler_weights(spec, folder, network_folder(folder))}
    hears = "transcribe" in spec.tasks
    pooler = SoundPooler(cast("HearsSounds", network)) if hears else Pooler(spec, weights, device)
    timings_s = {"import": imported - start, "weights": time.perf_counter() - imported}
    runner = PoolingRunner(
        cast("EncoderOnly", network),
        pooler,
        dataclasses.replace(config.runner, max_model_len=plan.max_encoder_len),
        () if spec.merged_task else spec.embedding_tasks,
    )
    depth = config.engine.depth(config.runner.device)
    executor: Executor = ThreadedExecutor(runner, reads_apart=device.type != "cpu") if depth else runner
    rule = None if model.media is None else _media_rule(config, plan.num_tokens)
    scheduler = Scheduler(
        dataclasses.replace(
            config.scheduler,
            max_model_len=max(2, plan.max_encoder_len, max_embed_len),
            max_num_batched_tokens=plan.num_tokens,
            enable_chunked_prefill=False,
            long_prefill_token_threshold=0,
        ),
        NoKVCache(),
        rules=[] if rule is None else [rule],
    )
    return EngineParts(
        scheduler=scheduler,
        reconfigure=Reconfigure(scheduler, has_fixed_steps=True),
        executor=executor,
        info=_info(config, folder, model, plan, choice, spec, network, timings_s),
        reset_encoder_cache=None if rule is None else rule.reset_cache,
        collective_rpc=CollectiveRPC(config, executor, runner),
    )


def _modalities(model: ModelConfig) -> tuple[str, ...]:
    return () if model.media is None else tuple(map(str, model.media.modalities))


def _media_rule(config: QuireConfig, num_tokens: int) -> MediaRule:
    """What bounds the images that a step encodes, and the vectors that stay."""
    size = config.scheduler.encoder_cache_size or _NUM_CACHED_IMAGES
    return MediaRule(min(_NUM_STEP_IMAGES, size), size, num_tokens)


def _check(config: QuireConfig, model: ModelConfig) -> None:
    """Raises ConfigError for settings of what an encoder does not have."""
    for name, is_set in (
        ("speculative_method", config.speculative.method != "none"),
        ("kv_disk_path", config.kv_transfer.kv_disk_path is not None),
        ("kv_offloading_size", bool(config.kv_transfer.kv_offloading_size)),
        ("kv_tier", config.kv_transfer.kv_tier is not None),
        ("kv_transfer_config", config.kv_transfer.connector.kv_connector is not None),
        ("enable_lora", config.lora.enable_lora),
    ):
        if is_set:
            raise ConfigError(
                f"{model.architecture} is an encoder: it has no KV cache, no drafts and no adapters; leave {name} out",
                field=name,
            )


def _info(
    config: QuireConfig,
    folder: Path,
    model: ModelConfig,
    plan: EncoderPlan,
    choice: PoolingChoice,
    spec: PoolerSpec,
    network: Network,
    timings_s: dict[str, float],
) -> EngineInfo:
    info = EngineInfo(
        model=config.model.model or "quire-demo",
        max_model_len=plan.max_encoder_len,
        vocab_size=model.vocab_size,
        max_num_seqs=config.scheduler.max_num_seqs,
        dtype=plan.dtype,
        device=config.runner.device,
        batch_invariant=network.batch_invariant,
        max_encoder_len=plan.max_encoder_len if model.encoder_takes_audio else 0,
        modalities=(str(Modality.AUDIO),) if model.encoder_takes_audio else _modalities(model),
        memory_bytes=dict(plan.ledger_bytes),
        choices={
            "weights": f"{plan.linear_method}, {plan.dtype}",
            "KV cache": "none",
        },
        timings_s=timings_s,
        extra={"folder": str(folder), "notes": []},
    )
    return with_pooling(info, choice, spec)
