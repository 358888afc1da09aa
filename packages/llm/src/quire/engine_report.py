"""What an engine says of itself once it is put together: sizes, and what serves each part and why.

Importing this module loads no torch.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from quire.alignment import alignment_heads
from quire.compilation import chosen_compilation
from quire.config import QuireConfig
from quire.kv_tier import EngineTiers
from quire.plan import MemoryPlan, format_bytes
from quire.pooling.poolers import PoolingChoice, cached_pooling_tasks, pooling_tasks
from quire_engine import EngineInfo
from quire_interfaces import FP8_DS_MLA, Modality
from quire_interfaces.platforms import platform_of
from quire_models.config import ModelConfig
from quire_models.media_spec import MediaSpec
from quire_models.stages import StageSpec
from quire_pooling import PoolerSpec
from quire_spec_decode import SpecDecodeConfig
from quire_structured_output import resolve_backend

if TYPE_CHECKING:
    import torch

    from quire_lora import AdapterSlots
    from quire_models import Network
    from quire_runner import ModelRunner
    from quire_runner.graphs import DecodeGraphs

__all__ = ["engine_info", "tower_format", "with_pooling"]


def engine_info(
    config: QuireConfig,
    folder: Path,
    model: ModelConfig,
    plan: MemoryPlan,
    network: Network,
    runner: ModelRunner,
    tiers: EngineTiers | None,
    timings_s: dict[str, float],
    offered: dict[str, str],
) -> EngineInfo:
    """What an engine says of itself: its sizes, and what was chosen for it and why.

    Args:
        config: Settings, as planned.
        folder: The model's.
        model: Its configuration.
        plan: Its memory.
        network: As it was loaded.
        runner: Runs its steps.
        tiers: What keeps prefixes behind the KV cache; None without any.
        timings_s: Stage of the start -> seconds.
        offered: Name -> folder of adapters that are there from the start.
    """
    merges_adapters = (
        config.lora.lora_merge_after > 0 and network.adapters is not None and network.adapters.has_plain_weights
    )
    return EngineInfo(
        model=config.model.model or "quire-demo",
        max_model_len=plan.max_model_len,
        vocab_size=model.vocab_size,
        max_encoder_len=plan.max_encoder_len,
        modalities=_modalities(config, model),
        decoder_start_token_ids=model.decoder_start_token_ids,
        num_blocks=plan.kv_plan.num_blocks - 1,
        block_size=plan.block_size,
        max_num_seqs=config.scheduler.max_num_seqs,
        dtype=plan.dtype,
        kv_cache_dtype=plan.kv_cache_dtype,
        device=config.runner.device,
        memory_bytes=dict(plan.ledger_bytes),
        choices=_choices(config, model, plan, network, runner, tiers, offered, merges_adapters),
        timings_s=timings_s,
        batch_invariant=network.batch_invariant,
        adapters=offered,
        default_mm_adapters=config.lora.default_adapters(),
        takes_adapters=network.adapters is not None,
        merges_adapters=merges_adapters,
        structured_output_backend=resolve_backend(config.structured_output.backend),
        max_grammar_bytes=config.structured_output.max_bytes,
        aligns_words=bool(model.num_mel_bins and alignment_heads(config, folder)),
        needs_audio=model.media is not None and model.media.is_added,
        returns_routed_experts=config.model.enable_return_routed_experts,
        extra={"folder": str(folder), "max_concurrency": plan.max_concurrency, "notes": list(plan.notes)},
    )


def with_pooling(info: EngineInfo, choice: PoolingChoice, spec: PoolerSpec) -> EngineInfo:
    """What an engine that pools says of itself.

    Args:
        info: What it says of the rest.
        choice: What it is for.
        spec: Its pooler.
    """
    tasks, longest = pooling_tasks(spec), spec.max_embed_len or 0
    pooling = {
        "runner": f"{choice.runner}: {choice.reason}",
        "pooling": "; ".join(filter(None, (" and ".join(spec.methods), ", ".join(tasks)))),
    }
    return dataclasses.replace(
        info,
        runner=choice.runner,
        pooling_tasks=tasks,
        cached_pooling_tasks=cached_pooling_tasks(spec),
        embedding_size=spec.embedding_size if "embed" in spec.tasks else 0,
        max_embed_len=longest if spec.embeds_in_chunks else min(longest, info.max_model_len),
        choices={**pooling, **info.choices},
        extra={**info.extra, "notes": [*info.extra["notes"], *spec.notes]},
    )


def tower_format(media: MediaSpec, dtype: str) -> str:
    """Whose towers a network has, and how their weights are kept.

    Args:
        dtype: What they run in.
    """
    if media.tower is None:
        return f"Transformers', {dtype}"
    return f"Quire's, {dtype if media.linear_method == 'plain' else f'{media.linear_method}, {dtype}'}"


def _modalities(config: QuireConfig, model: ModelConfig) -> tuple[str, ...]:
    """What prompts may hold beside tokens."""
    towers = () if model.media is None else tuple(map(str, model.media.modalities))
    if model.encoder_takes_audio:
        towers = (str(Modality.AUDIO),)
    return (*towers, str(Modality.EMBEDS)) if config.media.enable_prompt_embeds else towers


def _choices(
    config: QuireConfig,
    model: ModelConfig,
    plan: MemoryPlan,
    network: Network,
    runner: ModelRunner,
    tiers: EngineTiers | None,
    offered: dict[str, str],
    merges_adapters: bool,
) -> dict[str, str]:
    """Part -> what serves it, and why."""
    graphs = f"none: {runner.graph_refusal}" if runner.graphs is None else _graphs(config, runner.graphs, network)
    choices = {
        "attention": network.attention_backend.name,
        "matrices": _matrices(config.runner.device, network.dtype),
        "layers": "all in one call" if network.in_one_call else "op by op",
        **_ranks(config, network),
        "threads": _threads(runner.cores),
        "torch": _torch_build(config.runner.device),
        "determinism": "a request's tokens depend on nothing else" if network.batch_invariant else "not promised",
        "weights": f"{_weight_format(plan, model, network)}, {plan.dtype}",
        "KV cache": _cache_format(plan.kv_cache_dtype, network),
        "scheduling": "asynchronous, one step ahead" if config.engine.depth(config.runner.device) else "synchronous",
        "graphs": graphs,
        "structured output": resolve_backend(config.structured_output.backend),
        "speculation": "none" if config.speculative.method == "none" else _speculation(config.speculative),
        "prefix caching": config.kv_cache.prefix_caching_hash_algo if config.kv_cache.enable_prefix_caching else "off",
    }
    if sys.dont_write_bytecode:  # as images of Python often have it
        choices["modules"] = "compiled at each start, about half of its time, as PYTHONDONTWRITEBYTECODE asks"
    if config.runner.device != "cpu":
        choices["device"] = platform_of(config.runner.device).description(config.runner.device)
    if configurations := _configurations(config.runner.device):
        choices["kernel configurations"] = configurations
    if not model.is_native:
        choices["network"] = _fallback_network(config, model)
    if config.model.trust_remote_code:
        choices["remote code"] = "trusted (trust_remote_code)"
    if model.media_refusal:
        choices["media"] = f"none: {model.media_refusal}"
    elif network.towers is not None and model.media is not None:
        choices["media"] = f"{', '.join(model.media.modalities)}; towers: {tower_format(model.media, plan.dtype)}"
    if network.expert_methods:
        choices["experts"] = network.expert_methods
    if network.adapters is not None:
        choices["adapters"] = _adapters(config, network.adapters, offered, merges_adapters)
    if config.engine.kv_events.is_published:
        choices["KV events"] = f"published at {config.engine.kv_events.endpoint}"
    if config.kv_transfer.kv_tier is not None:
        choices["prefixes of other engines"] = f"block store at {config.kv_transfer.kv_tier}"
    return choices if tiers is None else choices | _tiers(tiers)


def _fallback_network(config: QuireConfig, model: ModelConfig) -> str:
    """That the network is Transformers' own, and how it is compiled."""
    compilation = chosen_compilation(config, model)
    compiled = f"; compiled by torch.compile ({compilation}): the first steps wait for it" if compilation else ""
    whose = "code of the checkpoint" if model.network.brings_code else "Transformers'"
    return f"{whose}, with Quire's attention{compiled}"


def _adapters(config: QuireConfig, slots: AdapterSlots, offered: dict[str, str], merges: bool) -> str:
    """Which adapters there are, how many at once, and whether one that is alone moves into the weights."""
    text = f"{', '.join(offered) or 'none yet'}; {slots.num_slots} at once, ranks up to {slots.max_rank}"
    if merges:
        return f"{text}; in the weights after {config.lora.lora_merge_after} steps alone"
    if config.lora.lora_merge_after:
        return f"{text}; on top of the weights, which are quantized, whatever --lora-merge-after says"
    return text


def _tiers(tiers: EngineTiers) -> dict[str, str]:
    """Where prefixes are kept beside the device."""
    choices = {}
    if tiers.memory is not None:
        choices["prefixes in host memory"] = f"at most {format_bytes(tiers.memory.size_bytes)}"
    if (disk := tiers.disk) is not None:
        used, size = format_bytes(disk.used_bytes), format_bytes(disk.size_bytes)
        choices["prefixes on disk"] = f"{disk.root}, {used} of at most {size}"
    return choices


def _matrices(device: str, dtype: torch.dtype) -> str:
    """What multiplies matrices; where it is torch, why nothing faster does."""
    from quire_ops import OpRequest, op_table, ops

    device = platform_of(device).device_type
    choice = op_table().report(ops.linear, OpRequest(device=device, dtype=dtype))
    if choice.backend != "torch":
        return choice.backend
    reasons = [f"{name}: {reason}" for name, reason in choice.refused.items() if name != "reference"]
    return f"torch ({'; '.join(reasons)})" if reasons else "torch"


def _configurations(device: str) -> str:
    """Where those of the GPU's kernels come from; nothing without a GPU."""
    from quire_ops import kernel_builders

    if platform_of(device).is_host:
        return ""
    return "; ".join(found for builder in kernel_builders() if (found := builder.configurations()) is not None)


def _graphs(config: QuireConfig, graphs: DecodeGraphs, network: Network) -> str:
    """Of how many tokens decode steps are captured, and whether with adapters."""
    sizes = dataclasses.replace(config.runner, max_num_seqs=config.scheduler.max_num_seqs).graph_sizes
    refusal = None if network.adapters is None else network.adapters.capture_refusal
    without = "" if refusal is None else f"; with adapters none: {refusal}"
    sizes_of = f"decode steps of up to {max(sizes)} tokens, {len(sizes)} sizes"
    waits = config.parallel.num_ranks == 1 and config.engine.depth(config.runner.device) > 0
    rest = "while no step waits" if waits else "when steps want them"
    return f"{sizes_of}, {len(graphs.captured)} captured at the start, the rest {rest}{without}"


def _ranks(config: QuireConfig, network: Network) -> dict[str, str]:
    """How ranks share the network; empty for one rank."""
    return {} if config.parallel.num_ranks == 1 else _parts_of_ranks(config, network)


def _parts_of_ranks(config: QuireConfig, network: Network) -> dict[str, str]:
    size, rows = config.parallel.tensor_parallel_size, dict[str, str]()
    where = "processes of this host" if config.hosts.nnodes == 1 else f"on {config.hosts.nnodes} hosts"
    if config.parallel.distributed_executor_backend == "ray":
        where = "placed by Ray"
    if size > 1:
        shared, whole = network.shared_parts
        parts = f"shared: {', '.join(shared)}; whole on each: {', '.join(whole)}"
        rows["ranks"] = f"{size}, {where}; {parts}"
    if isinstance(stage := network.config.network, StageSpec):
        first = f"this process has the first {len(stage.layers)} layers"
        rows["stages"] = f"{stage.num_stages}, {where}; {first}"
    return rows


def _threads(cores: tuple[int, ...]) -> str:
    import torch

    where = f"bound to cores {','.join(map(str, cores))}" if cores else "not bound to cores"
    return f"{torch.get_num_threads()}, {where}"


def _torch_build(device: str) -> str:
    """Its version, and what a build for GPUs costs where there is none."""
    import torch

    if torch.version.cuda is None or not device.startswith("cpu"):
        return str(torch.__version__)  # a class of its own, which no message holds
    return f"{torch.__version__}, for GPUs: its CPU build loads in less than half of the time, and of the memory"


def _speculation(settings: SpecDecodeConfig) -> str:
    by = f" by {settings.model}" if settings.model else ""
    limit = f"at most {settings.num_speculative_tokens} tokens{', as much as pays' if settings.adaptive else ''}"
    tree = f", in trees of {settings.most_draft_tokens}" if settings.eagle_topk > 1 else ""
    return f"{settings.method}{by}, {limit}{tree}"


def _cache_format(dtype: str, network: Network) -> str:
    """What keys and values are kept in, and where their scales come from."""
    if dtype in ("int8", "int4"):
        return f"{dtype}, a scale for each token and head"
    if dtype == FP8_DS_MLA:
        return f"{dtype}, a scale for each 128 numbers of a token's latent"
    if not dtype.startswith("fp8"):
        return dtype
    found = network.num_kv_scales
    if not found:
        return f"{dtype}, all scales 1.0: the checkpoint has none"
    num_layers = len(network.attention_names)
    return f"{dtype}, the checkpoint's scales for {found} of {num_layers} layers, 1.0 for the others"


def _weight_format(plan: MemoryPlan, model: ModelConfig, network: Network) -> str:
    stored, kernels = model.quantization, network.linear_kernels
    if stored is None:
        return f"{plan.linear_method}; by {kernels}" if kernels else plan.linear_method
    forms = stored.name if stored.ggml_types else network.stored_forms or stored.name
    return "; ".join(part for part in (forms, stored.notes, f"by {kernels}" if kernels else "") if part)
