"""The one place where the parts are put together: settings in, a scheduler and an executor out.

Importing this module loads no torch; `build_parts` does, so that only the process that computes pays for it. Read it to
see what an engine is made of; `examples/assemble_your_own.py` does the same by hand.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from quire.adapters import offered_adapters, open_adapters, takes_adapters
from quire.compilation import chosen_compilation
from quire.config import QuireConfig
from quire.draft_plan import DraftPlan
from quire.kv_tier import check_tier, open_tier, start_digest
from quire.logprob_bound import resolved_max_logprobs
from quire.plan import MemoryPlan, format_bytes, make_plan
from quire_engine import EngineInfo, EngineParts
from quire_interfaces import (
    AdmissionRule,
    ConfigError,
    GrammarBackend,
    LogitsProcessor,
    RequestError,
    SchedulerStats,
    Tokenizer,
)
from quire_kv_cache import KVCacheManager
from quire_kv_transfer import DiskTier
from quire_models.config import ModelConfig
from quire_models.hub import resolve_model
from quire_renderers import ChatRenderer, load_tokenizer
from quire_scheduler import AdapterGate, EncoderRule, KVTransfers, Scheduler, SharedPromptRule
from quire_spec_decode import HEAD_METHODS, DraftController, make_drafter
from quire_structured_output import GrammarCompiler, GrammarGate, Vocabulary, make_backend, resolve_backend

if TYPE_CHECKING:
    import torch

    from quire_models import Network
    from quire_models.transformers_backend.model import TransformersLM
    from quire_runner import ModelRunner

__all__ = ["FACTORY", "build_grammar_gate", "build_parts", "build_renderer", "engine_factory", "model_folder",
           "read_model_config", "use_kernel_tables"]  # fmt: skip

_logger = logging.getLogger(__name__)

FACTORY = "quire.assemble:engine_factory"
"""What the engine process calls."""

Report = Callable[[str, float], None]
"""Called with (stage, fraction of the stage that is done)."""


def model_folder(config: QuireConfig) -> Path:
    """Folder of the configured model: as it is, downloaded from the hub, or the embedded demo model's.

    Raises:
        CheckpointError: there is no such model; the message says what to do.
        ConfigError: it is to come from ModelScope, whose package is not installed.
    """
    if config.model.model is None:
        from quire_demo_model import checkpoint_path

        return Path(checkpoint_path())
    return resolve_model(
        config.model.model,
        config.model.revision,
        modelscope=config.model.use_modelscope,
        pickled=config.model.load_format == "pt",
    )


def read_model_config(config: QuireConfig, folder: Path) -> ModelConfig:
    """What the configured model's config.json says, with the fields that the settings replace.

    Raises:
        CheckpointError: the model is not understood.
        ConfigError: a replaced field that the network does not read.
    """
    return ModelConfig.from_path(folder, overrides=config.model.hf_overrides)


def build_renderer(
    config: QuireConfig, folder: Path, model: ModelConfig, chat_template: str | None = None
) -> ChatRenderer:
    """Tokenizer and chat template of a model folder.

    Raises:
        CheckpointError: there is no usable tokenizer.
        ConfigError: `chat_template` does not compile. A model's own may: it serves completions all the same.
    """
    tokenizer = load_tokenizer(Path(config.model.tokenizer) if config.model.tokenizer else folder)
    renderer = ChatRenderer(tokenizer, chat_template, config.renderer, vocab_size=model.vocab_size)
    if chat_template is not None:
        try:
            renderer.check_templates()
        except RequestError as error:
            raise ConfigError(str(error), field="chat_template") from error
    return renderer


def build_grammar_gate(
    config: QuireConfig, folder: Path, model: ModelConfig, tokenizer: Tokenizer | None = None, *, apart: bool = False
) -> GrammarGate:
    """What compiles constraints on outputs, and lets requests wait for it. Reads the vocabulary beside the engine's
    loop; a model without tokenizer or end token refuses such requests.

    Args:
        config: Settings.
        folder: The model's.
        model: Its configuration.
        tokenizer: The model's, if it is there already.
        apart: Whether constraints come from strangers: each is tried in a process of its own first.

    Raises:
        ConfigError: the configured backend's library is not installed.
    """
    name = resolve_backend(config.structured_output.backend)

    def make() -> GrammarBackend:
        known = tokenizer or load_tokenizer(Path(config.model.tokenizer) if config.model.tokenizer else folder)
        eos_token_ids = dict.fromkeys((*model.eos_token_ids, *known.eos_token_ids))
        vocabulary = Vocabulary.from_tokenizer(known, vocab_size=model.vocab_size, eos_token_ids=eos_token_ids)
        return make_backend(name, vocabulary)

    compiler = GrammarCompiler(config.structured_output, make, tries_apart=apart)
    compiler.warm_up()
    return GrammarGate(compiler)


def build_parts(
    config: QuireConfig,
    *,
    report: Report | None = None,
    logits_processors: Mapping[str, LogitsProcessor] | None = None,
    on_logits: Any = None,
    tokenizer: Tokenizer | None = None,
    serves_strangers: bool = False,
) -> EngineParts:
    """Plan memory, load the weights, and join scheduler and runner.

    Args:
        config: Settings.
        report: Sees the progress.
        logits_processors: Name -> processor that requests may ask for.
        on_logits: Sees the logits of every step (`quire_runner.LogitsTap`).
        tokenizer: The model's, if it is there already; for constraints on outputs.
        serves_strangers: Whether requests come from other programs: their constraints are tried in a process apart.

    Raises:
        ConfigError: settings that cannot work together, or too little memory.
        CheckpointError: a model that is missing or not understood.
    """
    start = time.perf_counter()
    report = report or (lambda stage, fraction: None)
    check_tier(config)
    folder = model_folder(config)
    model = read_model_config(config, folder)
    plan = make_plan(config, model, folder=folder)
    config = dataclasses.replace(config, speculative=plan.speculative)
    model = model.within(plan.max_model_len)
    compilation = chosen_compilation(config, model)
    offered = offered_adapters(config)
    report("importing torch", 0.0)
    from quire_lora import AdapterRuntime
    from quire_models import load_model
    from quire_models.compilation import compile_network
    from quire_runner import ModelRunner, RunnerExecutor
    from quire_sampling import SamplingConfig

    _use_kernels(config)
    imported = time.perf_counter()
    digest = start_digest(config, folder) if config.kv_transfer.kv_disk_path else None
    network = load_model(
        model,
        folder,
        dtype=plan.dtype,
        device=config.runner.device,
        linear_method=plan.linear_method,
        attention_backend=config.model.attention_backend,
        kv_cache_dtype=plan.kv_cache_dtype,
        block_size=plan.block_size,
        load_format=config.model.load_format,
        max_loras=config.lora.max_loras if takes_adapters(config) else 0,
        max_lora_rank=config.lora.max_lora_rank,
        disabled_linear_kernels=config.model.disabled_linear_kernels,
        progress=lambda done, total: report("loading weights", done / max(1, total)),
    )
    if compilation is not None:
        report(f"compiling by {compilation}", 0.0)
        compile_network(cast("TransformersLM", network), compilation)
    draft_network = None if plan.draft is None else _load_draft(config, plan.draft, plan.max_model_len)
    loaded = time.perf_counter()
    speculative = config.speculative
    drafter = make_drafter(speculative)
    num_drafts = speculative.most_draft_tokens
    scheduler_config = dataclasses.replace(
        config.scheduler,
        max_model_len=plan.max_model_len,
        num_speculative_tokens=num_drafts,
        num_lookahead_tokens=speculative.most_slots_ahead,
    )
    runner_config = dataclasses.replace(
        config.runner,
        dtype=plan.dtype,
        max_model_len=plan.max_model_len,
        max_num_seqs=scheduler_config.max_num_seqs,
        max_num_batched_tokens=scheduler_config.max_num_batched_tokens,
        num_speculative_tokens=num_drafts,
        draft_depth=speculative.num_speculative_tokens if num_drafts else 0,
        draft_topk=speculative.eagle_topk,
    )
    store = open_adapters(config, network, offered)
    adapter_device, add_stats = None, list[Callable[[SchedulerStats], None]]()
    if store is not None and network.adapters is not None:
        adapter_device = AdapterRuntime(network.adapters, store, merge_after=config.lora.lora_merge_after)
        add_stats.append(adapter_device.add_stats)
    adapters = AdapterGate(store, config.lora.max_loras if store is not None else 0)
    gate = build_grammar_gate(config, folder, model, tokenizer, apart=serves_strangers)
    tier = None if digest is None else open_tier(config, plan, digest, network)
    runner = ModelRunner.for_model(
        network,
        plan.kv_plan,
        runner_config,
        drafter=drafter,
        draft_network=draft_network,
        draft_controller=_make_controller(config),
        logits_processors=logits_processors,
        sampling_config=SamplingConfig(max_logprobs=resolved_max_logprobs(config.model.max_logprobs, model.vocab_size)),
        grammars=gate.compiler,
        on_logits=on_logits,
        make_transfer_worker=None if tier is None else tier.make_worker,
        adapters=adapter_device,
    )
    on_computed = None if tier is None else tier.connector.offer
    cache_config = dataclasses.replace(config.kv_cache, block_size=plan.block_size)
    allocator = KVCacheManager(plan.kv_plan, cache_config, on_computed=on_computed)
    rules: list[AdmissionRule] = [gate, adapters]
    if cache_config.enable_prefix_caching:
        rules.append(SharedPromptRule())
    if tier is not None:
        rules.append(KVTransfers(allocator, tier.connector))
    rules.append(EncoderRule(plan.max_encoder_len, scheduler_config.max_num_batched_tokens))
    timings = {"import": imported - start, "weights": loaded - imported, "cache": time.perf_counter() - loaded}
    if config.runner.device.startswith("cuda"):
        add_stats.append(_watch_kernels(runner))
    executor = RunnerExecutor(
        runner,
        threaded=config.engine.depth(config.runner.device) > 0,
        reads_apart=not config.runner.device.startswith("cpu"),
    )
    executor.prepare(runner.learn_draft_costs)
    return EngineParts(
        scheduler=Scheduler(scheduler_config, allocator, rules=rules),
        executor=executor,
        info=_info(config, folder, model, plan, network, runner, tier, timings, offered),
        gates=(gate, adapters),
        adapters=store,
        # A tier still copies blocks that were computed; an accelerator's memory cannot be taken from under its graphs.
        release_kv_cache=runner.release_kv_cache if tier is None and config.runner.device.startswith("cpu") else None,
        check_integrity=allocator.check_integrity,
        add_stats=tuple(add_stats),
    )


def use_kernel_tables(config: QuireConfig) -> None:
    """Let every package that tunes kernels look into the configured folder first."""
    if config.runner.kernel_tables is not None:
        from quire_ops import kernel_builders

        for builder in kernel_builders():
            builder.use_tables(Path(config.runner.kernel_tables))


def _use_kernels(config: QuireConfig) -> None:
    """The same of packages that compile kernels."""
    use_kernel_tables(config)
    if config.runner.kernel_cache is not None:
        from quire_ops import kernel_builders

        for builder in kernel_builders():
            builder.use(Path(config.runner.kernel_cache))


def _watch_kernels(runner: ModelRunner) -> Callable[[SchedulerStats], None]:
    """Have everything compiled that steps need, then count what is compiled nevertheless."""
    from quire_ops import kernel_builders

    try:
        runner.warm_up()
    except Exception:
        _logger.exception("the rehearsal of steps failed; kernels are compiled when they are first needed")
    builders = kernel_builders()
    for builder in builders:
        builder.count_compilations()

    def add_stats(stats: SchedulerStats) -> None:
        for builder in builders:
            stats.jit_compilations_total |= builder.count_compilations()

    return add_stats


def _make_controller(config: QuireConfig) -> DraftController | None:
    if config.speculative.method == "none" or not config.speculative.adaptive:
        return None
    return DraftController(
        config.speculative.num_speculative_tokens, catches_up=config.speculative.method not in HEAD_METHODS
    )


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
    )


def _info(
    config: QuireConfig,
    folder: Path,
    model: ModelConfig,
    plan: MemoryPlan,
    network: Network,
    runner: ModelRunner,
    tier: DiskTier | None,
    timings: dict[str, float],
    offered: dict[str, str],
) -> EngineInfo:
    choices = {
        "attention": network.attention_backend.name,
        "matrices": _matrices(config.runner.device, network.dtype),
        "layers": "all in one call" if network.in_one_call else "op by op",
        "threads": _threads(runner.cores),
        "determinism": "a request's tokens depend on nothing else" if network.batch_invariant else "not promised",
        "weights": f"{_weight_format(plan, model, network)}, {plan.dtype}",
        "KV cache": _cache_format(plan.kv_cache_dtype, network),
        "scheduling": "asynchronous, one step ahead" if config.engine.depth(config.runner.device) else "synchronous",
        "graphs": _graphs(config, runner, network),
        "structured output": resolve_backend(config.structured_output.backend),
        "speculation": _speculation(config),
        "prefix caching": config.kv_cache.prefix_caching_hash_algo if config.kv_cache.enable_prefix_caching else "off",
    }
    if configurations := _configurations(config.runner.device):
        choices["kernel configurations"] = configurations
    if not model.is_native:
        choices["network"] = "Transformers', with Quire's attention"
        compilation = chosen_compilation(config, model)
        if compilation is not None:
            choices["network"] += f"; compiled by torch.compile ({compilation}): the first steps wait for it"
    merges_adapters = (
        config.lora.lora_merge_after > 0 and network.adapters is not None and network.adapters.has_plain_weights
    )
    if network.expert_methods:
        choices["experts"] = network.expert_methods
    if network.adapters is not None:
        slots = network.adapters
        choices["adapters"] = (
            f"{', '.join(offered) or 'none yet'}; {slots.num_slots} at once, ranks up to {slots.max_rank}"
        )
        if merges_adapters:
            choices["adapters"] += f"; in the weights after {config.lora.lora_merge_after} steps alone"
        elif config.lora.lora_merge_after:
            choices["adapters"] += "; on top of the weights, which are quantized, whatever --lora-merge-after says"
    if tier is not None:
        choices["prefixes on disk"] = (
            f"{tier.root}, {format_bytes(tier.used_bytes)} of at most {format_bytes(tier.size_bytes)}"
        )
    return EngineInfo(
        model=config.model.model or "quire-demo",
        max_model_len=plan.max_model_len,
        vocab_size=model.vocab_size,
        max_encoder_len=plan.max_encoder_len,
        decoder_start_token_ids=model.decoder_start_token_ids,
        num_blocks=plan.kv_plan.num_blocks - 1,
        block_size=plan.block_size,
        max_num_seqs=config.scheduler.max_num_seqs,
        dtype=plan.dtype,
        kv_cache_dtype=plan.kv_cache_dtype,
        device=config.runner.device,
        memory_bytes=dict(plan.ledger_bytes),
        choices=choices,
        timings_s=timings,
        batch_invariant=network.batch_invariant,
        adapters=offered,
        takes_adapters=network.adapters is not None,
        merges_adapters=merges_adapters,
        structured_output_backend=resolve_backend(config.structured_output.backend),
        max_grammar_bytes=config.structured_output.max_bytes,
        extra={"folder": str(folder), "max_concurrency": plan.max_concurrency, "notes": list(plan.notes)},
    )


def _matrices(device: str, dtype: torch.dtype) -> str:
    """What multiplies matrices; where it is torch, why nothing faster does."""
    from quire_ops import OpRequest, op_table, ops

    device = device.partition(":")[0]
    choice = op_table().report(ops.linear, OpRequest(device=device, dtype=dtype))
    if choice.backend != "torch":
        return choice.backend
    reasons = [f"{name}: {reason}" for name, reason in choice.refused.items() if name != "reference"]
    return f"torch ({'; '.join(reasons)})" if reasons else "torch"


def _configurations(device: str) -> str:
    """Where those of the GPU's kernels come from; nothing without a GPU."""
    from quire_ops import kernel_builders

    if not device.startswith("cuda"):
        return ""
    return "; ".join(found for builder in kernel_builders() if (found := builder.configurations()) is not None)


def _graphs(config: QuireConfig, runner: ModelRunner, network: Network) -> str:
    """Whether decode steps are captured, of how many tokens, and whether with adapters."""
    if runner.graphs is None:
        return f"none: {runner.graph_refusal}"
    sizes = dataclasses.replace(config.runner, max_num_seqs=config.scheduler.max_num_seqs).graph_sizes
    refusal = None if network.adapters is None else network.adapters.capture_refusal
    without = "" if refusal is None else f"; with adapters none: {refusal}"
    sizes_of = f"decode steps of up to {max(sizes)} tokens, {len(sizes)} sizes"
    return f"{sizes_of}, each captured after it was first needed{without}"


def _threads(cores: tuple[int, ...]) -> str:
    import torch

    where = f"bound to cores {','.join(map(str, cores))}" if cores else "not bound to cores"
    return f"{torch.get_num_threads()}, {where}"


def _speculation(config: QuireConfig) -> str:
    settings = config.speculative
    if settings.method == "none":
        return "none"
    by = f" by {settings.model}" if settings.model else ""
    limit = f"at most {settings.num_speculative_tokens} tokens{', as much as pays' if settings.adaptive else ''}"
    tree = f", in trees of {settings.most_draft_tokens}" if settings.eagle_topk > 1 else ""
    return f"{settings.method}{by}, {limit}{tree}"


def _cache_format(dtype: str, network: Network) -> str:
    """What keys and values are kept in, and where their scales come from."""
    if dtype in ("int8", "int4"):
        return f"{dtype}, a scale for each token and head"
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


def engine_factory(data: dict[str, Any], report: Report) -> EngineParts:
    """`build_parts` from plain data, for the engine process (`QuireConfig.to_dict`)."""
    return build_parts(QuireConfig.from_dict(data), report=report, serves_strangers=True)
