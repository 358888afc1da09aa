"""The one place where the parts are put together: settings in, a scheduler and an executor out.

Importing this module loads no torch; `build_parts` does, so that only the process that computes pays for it. Read it to
see what an engine is made of; `examples/assemble_your_own.py` does the same by hand.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.adapters import offered_adapters
from quire.blueprint import Blueprint, DeviceSide, Report
from quire.compilation import chosen_compilation
from quire.config import ModelSettings, QuireConfig
from quire.engine_report import engine_info, with_pooling
from quire.kernel_builds import use_kernels
from quire.kv_tier import check_tier
from quire.kv_transfers import make_transfers
from quire.live_config import Reconfigure
from quire.mm_encoder_only import build_encoder_parts, check_mm_encoder_only
from quire.parallel.collective_rpc import RankCalls
from quire.parallel.data_parallel import engine_ranks
from quire.parallel.pipeline_parallel import num_steps_in_flight, with_table_at_end
from quire.parallel.rank_groups import RankGroups
from quire.parallel.tensor_parallel import config_of_ranks, mesh_of, on_device_of_rank
from quire.parallel.tensor_parallel_ranks import RankPayload, RankWorker, start_other_ranks
from quire.plan import MemoryPlan, make_plan
from quire.pooling.parts import build_pooling_parts
from quire.pooling.poolers import (
    PoolingChoice,
    choose_pooling,
    converted_overrides,
    longest_embedded_text,
    network_overrides,
    read_pooler_spec,
)
from quire.prompt_embeds import check_prompt_embeds
from quire.routed_experts import ExpertsScheduler
from quire.weight_sleep import DeviceRebuild, KeptParts, StartDevice, device_fields
from quire.worker import build_device_side, load_networks
from quire_engine import EngineParts, KVEventPublisher
from quire_interfaces import (
    AdmissionRule,
    ConfigError,
    GrammarBackend,
    LogitsProcessor,
    RequestError,
    Tokenizer,
)
from quire_kv_cache import KVCacheManager
from quire_models.config import ModelConfig
from quire_models.hub import resolve_model
from quire_pooling import PoolerSpec
from quire_pooling.checkpoint import network_folder
from quire_renderers import ChatRenderer, load_tokenizer
from quire_scheduler import (
    AdapterGate,
    EncoderRule,
    MediaRule,
    PipelineRule,
    Scheduler,
    SchedulerConfig,
    SharedPromptRule,
)
from quire_structured_output import GrammarCompiler, GrammarGate, Vocabulary, make_backend, resolve_backend

if TYPE_CHECKING:
    from quire_distributed import Collectives
    from quire_models import Network

__all__ = ["FACTORY", "build_grammar_gate", "build_parts", "build_rank_worker", "build_renderer", "engine_factory",
           "media_folder", "model_folder", "read_model_config"]  # fmt: skip

FACTORY = "quire.assemble:engine_factory"
"""What the engine process calls."""


def model_folder(config: QuireConfig) -> Path:
    """Folder of the configured model: as it is, downloaded from the hub, or the embedded demo model's.

    Raises:
        CheckpointError: there is no such model; the message says what to do.
        ConfigError: it is to come from ModelScope, whose package is not installed.
    """
    if config.model.model is None:
        from quire_demo_model import checkpoint_path

        return Path(checkpoint_path())
    return _asked_folder(config.model, config.model.model)


def _asked_folder(settings: ModelSettings, model: str) -> Path:
    """The folder of a model that the settings name. Raises as `model_folder`."""
    return resolve_model(
        model,
        settings.revision,
        modelscope=settings.use_modelscope,
        pickled=settings.load_format == "pt",
        with_code=settings.trust_remote_code,
        mistral=settings.load_format == "mistral",
    )


def read_model_config(config: QuireConfig, folder: Path) -> ModelConfig:
    """What the configured model's config.json says, with the fields that the settings replace.

    Raises:
        CheckpointError: the model is not understood.
        ConfigError: a replaced field that the network does not read, embeddings as prompts of a network that takes
            none, or a form of weights for towers that are not built.
    """
    read = partial(ModelConfig.from_path, network_folder(folder), trust_remote_code=config.model.trust_remote_code)
    model = read(overrides=network_overrides(config, folder))
    if (overrides := converted_overrides(config, folder, model)) is not None:
        model = read(overrides=overrides)
    if config.model.language_model_only:
        model = dataclasses.replace(model, media=None)
    elif config.model.mmproj is not None:
        model = model.with_towers(media_folder(config, folder))
    if config.model.mm_encoder_quantization is not None:
        model = model.with_tower_weights(config.model.mm_encoder_quantization)
    if config.media.enable_prompt_embeds:
        check_prompt_embeds(model)
    return model if config.parallel.pipeline_parallel_size == 1 else with_table_at_end(config, model)


def _tokenizer(config: QuireConfig, folder: Path) -> Tokenizer:
    """The tokenizer of a model in this folder. CheckpointError: there is none that is read."""
    return load_tokenizer(tokenizer_folder(config, folder), trust_remote_code=config.model.trust_remote_code)


def media_folder(config: QuireConfig, folder: Path) -> Path:
    """Folder of the towers, the processor, the tokenizer and the chat template: the model's, or `mmproj`.

    Raises:
        CheckpointError: there are no such towers.
    """
    if config.model.mmproj is None or config.model.language_model_only:
        return folder
    return resolve_model(config.model.mmproj, modelscope=config.model.use_modelscope)


def tokenizer_folder(config: QuireConfig, folder: Path) -> Path:
    """Folder of the tokenizer: as asked, or the network's."""
    return Path(config.model.tokenizer) if config.model.tokenizer else network_folder(folder)


def build_renderer(
    config: QuireConfig,
    folder: Path,
    model: ModelConfig,
    chat_template: str | None = None,
    *,
    placeholders: Mapping[str, str] | None = None,
) -> ChatRenderer:
    """Tokenizer and chat template of a model folder.

    Args:
        config: Settings.
        folder: The model's.
        model: Its configuration.
        chat_template: Replaces the checkpoint's own.
        placeholders: Token that stands for an item in a prompt, by modality; None for text only.

    Raises:
        CheckpointError: there is no usable tokenizer.
        ConfigError: `chat_template` does not compile. A model's own may: it serves completions all the same.
    """
    tokenizer = _tokenizer(config, folder)
    renderer = ChatRenderer(
        tokenizer, chat_template, config.renderer, vocab_size=model.vocab_size, placeholders=placeholders
    )
    if chat_template is not None:
        _check_templates(renderer)
    return renderer


def _check_templates(renderer: ChatRenderer) -> None:
    """ConfigError: a template does not compile."""
    try:
        renderer.check_templates()
    except RequestError as error:
        raise ConfigError(str(error), field="chat_template") from error


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
        known = tokenizer or _tokenizer(config, folder)
        eos_token_ids = dict.fromkeys((*model.eos_token_ids, *known.eos_token_ids))
        vocabulary = Vocabulary.from_tokenizer(known, vocab_size=model.vocab_size, eos_token_ids=eos_token_ids)
        return make_backend(name, vocabulary)

    compiler = GrammarCompiler(config.structured_output, make, tries_apart=apart)
    compiler.warm_up()
    return GrammarGate(compiler)


def _no_chunks_of_texts(model: ModelConfig) -> ConfigError:
    return ConfigError(
        f"enable_chunked_processing is of encoders, and {model.architecture} reads prompts of up to its context "
        "anyway; leave it out",
        field="pooler_config",
    )


def build_parts(
    config: QuireConfig,
    *,
    report: Report | None = None,
    logits_processors: Mapping[str, LogitsProcessor] | None = None,
    on_logits: Any = None,
    tokenizer: Tokenizer | None = None,
    serves_strangers: bool = False,
) -> EngineParts:
    """Plan memory, load the weights, and join scheduler and runner: the table of contents of an engine.

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
    folder = model_folder(config)
    model = read_model_config(config, folder)
    if model.is_encoder:
        if config.runner.extract_hidden_states:
            from quire.hidden_states_config import check_extraction  # of use to few starts

            check_extraction(config, model)
        use_kernels(config)
        return build_pooling_parts(config, folder, model, report or (lambda stage, fraction: None))
    choice = choose_pooling(config, folder, model)
    if longest_embedded_text(config):
        raise _no_chunks_of_texts(model)
    if choice.pools and tokenizer is None:
        tokenizer = _tokenizer(config, folder)
    pooler = read_pooler_spec(config, folder, model, tokenizer) if choice.pools else None
    blueprint = _plan_engine(config, folder, model, choice, pooler)
    if config.model.mm_encoder_only:
        return build_encoder_parts(
            config,
            blueprint.folder,
            blueprint.media_folder,
            blueprint.model,
            blueprint.plan,
            report or (lambda stage, fraction: None),
        )
    if logits_processors and blueprint.config.parallel.num_ranks > 1:
        raise ConfigError("logits processors of this program are on one rank only", field="tensor_parallel_size")
    start = partial(
        _start_device_side,
        blueprint,
        report or (lambda stage, fraction: None),
        logits_processors=logits_processors,
        on_logits=on_logits,
        tokenizer=tokenizer,
        serves_strangers=serves_strangers,
    )
    network, device = start()
    return _join(blueprint, network, device, start)


def _start_device_side(
    blueprint: Blueprint,
    report: Report,
    *,
    tokenizer: Tokenizer | None,
    serves_strangers: bool,
    kept: KeptParts | None = None,
    **options: Any,
) -> tuple[Network, DeviceSide]:
    """Load the weights, of all ranks, and what computes with them; `options` of `build_device_side`."""
    ranks = None
    if blueprint.config.parallel.num_ranks > 1:
        ranks = start_other_ranks(blueprint.config, blueprint.folder, blueprint.model, blueprint.plan)
    try:
        networks = load_networks(blueprint, report, None if ranks is None else ranks.groups)
        gate = kept.gate if kept is not None else _grammar_gate(blueprint, tokenizer, apart=serves_strangers)
        device = build_device_side(
            blueprint, networks, gate, ranks=ranks, kept=kept, ends_process=serves_strangers, **options
        )
        return networks.target, device
    except BaseException:
        if ranks is not None:
            ranks.close()
        raise


def _grammar_gate(blueprint: Blueprint, tokenizer: Tokenizer | None, *, apart: bool = False) -> GrammarGate:
    """`build_grammar_gate` of what was decided."""
    return build_grammar_gate(blueprint.config, blueprint.media_folder, blueprint.model, tokenizer, apart=apart)


def build_rank_worker(payload: RankPayload, collectives: Collectives) -> RankWorker:
    """What a rank beside rank 0 runs: its part of the network, and a runner of its own."""
    config, plan = QuireConfig.from_dict(payload.config), payload.plan
    folder = model_folder(config)
    model = read_model_config(config, folder)
    choice = choose_pooling(config, folder, model)
    tokenizer = _tokenizer(config, folder) if choice.pools else None
    blueprint = Blueprint(
        config=config,
        folder=folder,
        media_folder=media_folder(config, folder),
        model=model.within(plan.max_model_len),
        plan=plan,
        compilation=None,
        choice=choice,
        pooler=read_pooler_spec(config, folder, model, tokenizer) if choice.pools else None,
        offered={},
    )
    groups = RankGroups.of(collectives, mesh_of(config.parallel, collectives.rank))
    networks = load_networks(blueprint, lambda stage, fraction: None, groups)
    device = build_device_side(blueprint, networks, _grammar_gate(blueprint, tokenizer))
    calls = RankCalls(config, collectives.rank, device.runner)
    calls.balancer = device.balancer
    return RankWorker(device.runner, device.store, device.tiers, calls, groups)


def _plan_engine(
    config: QuireConfig, folder: Path, model: ModelConfig, choice: PoolingChoice, pooler: PoolerSpec | None
) -> Blueprint:
    """Decide everything that can be known before torch is loaded. Raises as `build_parts`."""
    check_tier(config)
    if config.model.mm_encoder_only:
        check_mm_encoder_only(config, model)
    plan = make_plan(config, model, folder=folder)
    config = dataclasses.replace(config, speculative=plan.speculative)
    if config.parallel.num_ranks > 1:
        config = on_device_of_rank(config_of_ranks(config), 0)
    model = model.within(plan.max_model_len)
    return Blueprint(
        config=config,
        folder=folder,
        media_folder=media_folder(config, folder),
        model=model,
        plan=plan,
        compilation=chosen_compilation(config, model),
        choice=choice,
        pooler=pooler,
        offered=offered_adapters(config),
    )


def _join(blueprint: Blueprint, network: Network, device: DeviceSide, start: StartDevice) -> EngineParts:
    """Join scheduler and KV cache manager, and hand all parts to an engine; `start` builds the device side again."""
    config, plan, tiers = blueprint.config, blueprint.plan, device.tiers
    scheduler_config = _scheduler_config(blueprint)
    kv_events = config.engine.kv_events
    cache_config = dataclasses.replace(
        config.kv_cache,
        block_size=plan.block_size,
        enable_kv_cache_events=config.kv_cache.enable_kv_cache_events or kv_events.enable_kv_cache_events,
    )
    on_computed = None if tiers is None else tiers.on_computed
    allocator = KVCacheManager(plan.kv_plan, cache_config, on_computed=on_computed)
    adapters = AdapterGate(device.store, config.lora.max_loras if device.store is not None else 0)
    rules: list[AdmissionRule] = [device.gate, adapters]
    if cache_config.enable_prefix_caching:
        rules.append(SharedPromptRule())
    transfers = None
    if tiers is not None:
        transfers = make_transfers(config, tiers, allocator, cache_config.block_size)
        rules += transfers.rules
    rules.append(EncoderRule(plan.max_encoder_len, scheduler_config.max_num_batched_tokens))
    media, media_rule = blueprint.model.media, None
    if size := plan.encoder_cache_size:
        step_tokens = scheduler_config.max_num_batched_tokens
        is_bidirectional = media is not None and media.is_bidirectional
        media_rule = MediaRule(size, size, step_tokens, keeps_spans_whole=is_bidirectional)
        rules.append(media_rule)
    if (num_steps := num_steps_in_flight(config)) > 1:
        rules.append(PipelineRule(num_steps))
    make_scheduler = Scheduler if transfers is None else transfers.make_scheduler
    scheduler = make_scheduler(scheduler_config, allocator, rules=rules)
    folder, model, runner, timings = blueprint.folder, blueprint.model, device.runner, device.timings_s
    info = engine_info(config, folder, model, plan, network, runner, tiers, timings, blueprint.offered)
    if blueprint.pooler is not None:
        info = with_pooling(info, blueprint.choice, blueprint.pooler)
    if transfers is not None:
        transfers.tell(info)
    return EngineParts(
        scheduler=ExpertsScheduler(scheduler, blueprint) if config.model.enable_return_routed_experts else scheduler,
        **device_fields(config, device),
        info=info,
        gates=(device.gate, adapters),
        adapters=device.store,
        take_failures=None if transfers is None else transfers.take_failures,
        weight_sleep=None if tiers else DeviceRebuild(blueprint, KeptParts(device.gate, device.store), start),
        reset_encoder_cache=None if media_rule is None else media_rule.reset_cache,
        kv_events=_publisher(config, plan, allocator) if kv_events.is_published else None,
        steps_ahead=num_steps - 1 if config.parallel.num_ranks > 1 else None,
        reconfigure=Reconfigure(scheduler, has_fixed_steps=bool(media_rule or plan.max_encoder_len)),
        check_integrity=allocator.check_integrity,
        kv_cache=allocator,
    )


def _publisher(config: QuireConfig, plan: MemoryPlan, allocator: KVCacheManager) -> KVEventPublisher:
    """What publishes the events of the KV cache, under this engine's rank."""
    rank = engine_ranks(config.data_parallel).first
    return KVEventPublisher(
        config.engine.kv_events, plan.kv_plan.groups, allocator.take_events, data_parallel_rank=rank
    )


def _scheduler_config(blueprint: Blueprint) -> SchedulerConfig:
    """The scheduler's settings, with what the plan says of lengths and drafts."""
    config, speculative = blueprint.config, blueprint.config.speculative
    return dataclasses.replace(
        config.scheduler,
        max_model_len=blueprint.plan.max_model_len,
        num_speculative_tokens=speculative.most_draft_tokens,
        num_lookahead_tokens=speculative.most_slots_ahead,
    )


def engine_factory(data: dict[str, Any], report: Report) -> EngineParts:
    """`build_parts` from plain data, for the engine process (`QuireConfig.to_dict`)."""
    return build_parts(QuireConfig.from_dict(data), report=report, serves_strangers=True)
