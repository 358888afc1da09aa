"""The device side of one rank: networks with their weights, a runner for them, and what computes beside them.

Knows what a `Blueprint` decided, and nothing of scheduling. Importing this module loads no torch; its functions do.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, cast

from quire.adapters import open_adapters, takes_adapters
from quire.alignment import alignment_pooler
from quire.blueprint import Blueprint, DeviceSide, LoadedNetworks, Report
from quire.config import QuireConfig
from quire.draft_plan import DraftPlan
from quire.kernel_builds import agreement_of, use_kernels, watch_kernels
from quire.kv_tier import needs_digest, open_tiers, start_digest, tier_setting
from quire.logits_processors import named_processors
from quire.logprob_bound import resolved_max_logprobs
from quire.parallel.expert_parallel import expert_parallel_of
from quire.parallel.pipeline_parallel import tap_stage
from quire.parallel.rank_groups import RankGroups
from quire.parallel.tensor_parallel import interleaved
from quire.parallel.tensor_parallel_ranks import OtherRanks
from quire.routed_experts import runner_class
from quire.weight_sleep import KeptParts
from quire_interfaces import Executor, LogitsProcessor, SchedulerStats
from quire_interfaces.platforms import platform_of
from quire_pooling.checkpoint import network_folder
from quire_runner.config import RunnerConfig
from quire_spec_decode import HEAD_METHODS, DraftController, make_drafter
from quire_structured_output import GrammarGate

if TYPE_CHECKING:
    from quire_models import Network
    from quire_models.transformers_backend.model import TransformersLM
    from quire_pooling import Pooler
    from quire_runner import AlignmentPooler

__all__ = ["build_device_side", "load_networks"]


def load_networks(blueprint: Blueprint, report: Report, groups: RankGroups | None) -> LoadedNetworks:
    """Load the weights of a rank; the drafting network is whole on each of the last stage."""
    start = time.perf_counter()
    report("importing torch", 0.0)
    from quire_models import load_model
    from quire_models.compilation import compile_network

    config, plan = blueprint.config, blueprint.plan
    use_kernels(config)
    imported = time.perf_counter()
    digest = start_digest(config, blueprint.folder) if needs_digest(config, groups) else None
    network = load_model(
        interleaved(blueprint.model, config.parallel),
        network_folder(blueprint.folder),
        dtype=plan.dtype,
        device=config.runner.device,
        linear_method=plan.linear_method,
        attention_backend=config.model.attention_backend or platform_of(config.runner.device).attention_backend,
        kv_cache_dtype=plan.kv_cache_dtype,
        block_size=plan.block_size,
        load_format=config.model.load_format,
        max_loras=config.lora.max_loras if takes_adapters(config) else 0,
        max_lora_rank=config.lora.max_lora_rank,
        lora_dtype=config.lora.lora_dtype,
        disabled_linear_kernels=config.model.disabled_linear_kernels,
        towers_folder=blueprint.media_folder,
        progress=lambda done, total: report("loading weights", done / max(1, total)),
        tp_group=groups and groups.tp,
        pp_group=groups and groups.pp,
        expert_parallel=expert_parallel_of(config.parallel, groups.tp) if groups and groups.tp else None,
    )
    if blueprint.compilation is not None:
        report(f"compiling by {blueprint.compilation}", 0.0)
        compile_network(cast("TransformersLM", network), blueprint.compilation)
    draft = plan.draft if groups is None or groups.pp is None else tap_stage(network, groups, plan.draft)
    draft_network = None if draft is None else _load_draft(config, draft, plan.max_model_len)
    loaded = time.perf_counter()
    timings = {"import": imported - start, "weights": loaded - imported}
    return LoadedNetworks(
        target=network, draft=draft_network, digest=digest, groups=groups, timings_s=timings, loaded_at_s=loaded
    )


def build_device_side(
    blueprint: Blueprint,
    networks: LoadedNetworks,
    gate: GrammarGate,
    *,
    logits_processors: Mapping[str, LogitsProcessor] | None = None,
    on_logits: Any = None,
    ranks: OtherRanks | None = None,
    ends_process: bool = False,
    kept: KeptParts | None = None,
) -> DeviceSide:
    """Join the network with its adapters, its drafter, its grammars, its KV cache and the tier behind that.

    Args:
        blueprint: What is to be built.
        networks: With their weights.
        gate: Makes the matchers of constraints on outputs.
        logits_processors: Name -> processor that requests may ask for.
        on_logits: Sees the logits of every step (`quire_runner.LogitsTap`).
        ranks: Those beside rank 0; None on other ranks, and where there is one only.
        ends_process: Whether this process ends once another rank has died.
        kept: Parts of a former build, which outlived a sleep.

    Raises:
        ConfigError: settings that cannot work together, or too little memory.
        CheckpointError: adapters, a pooler or a tier that do not fit the network.
    """
    from quire_lora import AdapterRuntime
    from quire_runner import ThreadedExecutor
    from quire_sampling import SamplingConfig

    config, plan, network = blueprint.config, blueprint.plan, networks.target
    store = open_adapters(config, network, blueprint.offered) if kept is None else kept.joined_store(network)
    adapters, add_stats = None, list[Callable[[SchedulerStats], None]]()
    if store is not None and network.adapters is not None:
        adapters = AdapterRuntime(network.adapters, store, merge_after=config.lora.lora_merge_after)
        add_stats.append(adapters.add_stats)
    kv_plan = plan.kv_plan if ranks is None else ranks.kv_plan
    tiers = None
    if tier_setting(config) is not None:
        tiers = open_tiers(config, blueprint.model, plan, kv_plan, network, networks.digest, networks.groups)
    max_logprobs = resolved_max_logprobs(config.model.max_logprobs, blueprint.model.vocab_size)
    runner = runner_class(config).for_model(
        network,
        kv_plan,
        _runner_config(blueprint),
        drafter=make_drafter(config.speculative),
        draft_network=networks.draft,
        draft_controller=_make_controller(config),
        logits_processors=named_processors(config.model.logits_processors, logits_processors),
        sampling_config=SamplingConfig(max_logprobs=max_logprobs),
        grammars=gate.compiler,
        on_logits=on_logits,
        make_transfer_worker=None if tiers is None else tiers.make_worker,
        encoder_connector=None if tiers is None else tiers.encoder_cache,
        adapters=adapters,
        pooler=_load_pooler(blueprint, network) if blueprint.pooler or blueprint.model.num_mel_bins else None,
    )
    timings = {**networks.timings_s, "cache": time.perf_counter() - networks.loaded_at_s}
    device, is_host = config.runner.device, platform_of(config.runner.device).is_host
    if not is_host:
        agree = agreement_of(networks.groups)
        add_stats.append(watch_kernels(runner, config.runner.cuda_graph_capture_s, agree))
    executor: Executor = runner
    if ranks is not None:
        executor = ranks.executor(runner, store, network, add_stats, tiers, ends_process=ends_process)
    elif config.engine.depth(device) > 0:
        executor = threads = ThreadedExecutor(runner, reads_apart=not is_host)
        threads.prepare(runner.learn_draft_costs)
    else:
        runner.learn_draft_costs()
    return DeviceSide(
        runner=runner,
        executor=executor,
        gate=gate,
        store=store,
        tiers=tiers,
        add_stats=tuple(add_stats),
        balancer=network.expert_balancer,
        timings_s=timings,
    )


def _load_pooler(blueprint: Blueprint, network: Network) -> Pooler | AlignmentPooler | None:
    """The pooler with its weights, or what aligns words; None where the engine only generates."""
    from quire_pooling import Pooler, load_pooler_weights

    spec, folder = blueprint.pooler, blueprint.folder
    if spec is None or not network.config.network.is_last:
        return alignment_pooler(blueprint, network) if blueprint.model.num_mel_bins else None
    stored = load_pooler_weights(spec, folder, network_folder(folder), blueprint.model.language_names)
    return Pooler(spec, {**network.head_weights, **stored}, network.device)


def _runner_config(blueprint: Blueprint) -> RunnerConfig:
    """The runner's settings, with what the plan and the scheduler say."""
    config, speculative, plan = blueprint.config, blueprint.config.speculative, blueprint.plan
    num_drafts = speculative.most_draft_tokens
    return dataclasses.replace(
        config.runner,
        dtype=plan.dtype,
        max_model_len=plan.max_model_len,
        max_num_seqs=config.scheduler.max_num_seqs,
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        num_speculative_tokens=num_drafts,
        draft_depth=speculative.num_speculative_tokens if num_drafts else 0,
        draft_topk=speculative.eagle_topk,
        # Without an LM head there are no decode steps to capture.
        enforce_eager=config.runner.enforce_eager or not blueprint.model.generates,
        rotates_by_axes=blueprint.model.media is not None and blueprint.model.media.has_mrope,
    )


def _make_controller(config: QuireConfig) -> DraftController | None:
    if config.speculative.method == "none" or not config.speculative.adaptive:
        return None
    settings = config.speculative
    return DraftController(settings.num_speculative_tokens, catches_up=settings.method not in HEAD_METHODS)


def _load_draft(config: QuireConfig, draft: DraftPlan, max_model_len: int) -> Network:
    """The network that drafts: on the same device, in the same dtype, with attention of its own choice."""
    from quire_models import load_model

    asked = config.model.load_format
    return load_model(
        draft.config.within(max_model_len),
        draft.folder,
        dtype=draft.dtype,
        device=config.runner.device,
        linear_method=draft.linear_method,
        load_format=asked if asked in ("dummy", "pt") else "auto",  # others say what the target is
        language_model_only=True,  # drafts are of text: where the target has media, a drafter sees placeholders
    )
