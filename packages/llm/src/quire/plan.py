"""The memory plan: what an engine will take, byte by byte, before anything is loaded. Free of torch,
except where an accelerator is asked how much memory it has.

`quire plan` prints it and start-up allocates by it, so that the two cannot disagree. Knows config.json and settings;
opens no weight file.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from quire.adapters import takes_adapters
from quire.available_memory import available_memory_bytes
from quire.block_weights import kept_blocks
from quire.checkpoint_notes import checkpoint_notes
from quire.compilation import chosen_compilation
from quire.config import KV_CACHE_ALIASES, LONGEST_THAT_FITS, QuireConfig
from quire.draft_plan import DraftPlan, plan_draft, require_place
from quire.memory_advice import format_bytes, ledger_lines, ways_to_fit
from quire.parallel.tensor_parallel import check_parallel, model_of_rank
from quire.routed_experts_config import check_routed_experts
from quire_interfaces import (
    FP8_DS_MLA,
    ConfigError,
    CrossAttentionSpec,
    KVCachePlan,
    KVCacheSpec,
    LatentAttentionSpec,
    MambaSpec,
    NotEnoughMemoryError,
)
from quire_interfaces.platforms import platform_of
from quire_kv_cache import max_concurrency, plan_kv_cache, state_block_size
from quire_kv_transfer import MAX_DEVICE_STORE_BYTES, MAX_STORE_BYTES
from quire_lora import adapter_bytes
from quire_models.config import ModelConfig
from quire_models.config_fields import DTYPE_BYTES
from quire_models.ledger import linear_shapes, weight_ledger
from quire_models.named_formats import check_load_format, resolved_linear_method
from quire_runner.config import RunnerConfig
from quire_runner.memory import activation_bytes, graph_bytes, row_bytes
from quire_spec_decode import NETWORK_METHODS, SpecDecodeConfig

__all__ = ["MemoryPlan", "advice", "available_memory_bytes", "format_bytes", "make_plan", "resolved_dtype"]

MAX_DEFAULT_ENCODER_CACHE = 16_384
"""Most embeddings of media that are kept where nobody says how many."""

_ROWS_OF_TOWERS = ("weights: towers", "embeddings of media", "copies on their way to disk")
"""Rows of the ledger that an engine without a language model has."""

_DTYPE_ALIASES = {"float": "float32", "half": "float16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """The ledger and what it buys."""

    dtype: str
    """Of weights and activations."""
    kv_cache_dtype: str
    """What keys and values are kept in: a name of `quire_interfaces.KV_CACHE_DTYPES`."""
    linear_method: str
    max_model_len: int
    max_encoder_len: int
    """Most tokens that the network's encoder reads for one request; 0 for a network without one."""
    encoder_cache_size: int
    """Most embeddings of media that are kept; 0 for a network that takes none."""
    ledger_bytes: dict[str, int]
    """What -> bytes, in the order of a start-up; "KV cache" is the last."""
    kv_plan: KVCachePlan
    block_size: int
    max_concurrency: float
    """Requests of max_model_len tokens that fit at the same time."""
    free_bytes: int
    """Memory that was free when the plan was made."""
    notes: tuple[str, ...]
    """What was chosen and why."""
    speculative: SpecDecodeConfig
    """How drafts are made: as asked, in chains where the model cannot have trees."""
    draft: DraftPlan | None = None
    """The network that drafts, if one does."""
    budget_bytes: int
    """Memory that the plan may take: all that is free where the KV cache has a size of its own, else a share of it."""
    shortage: str = ""
    """Why it does not fit, in one sentence; empty where it does. The KV cache is then as asked, or has room for one
    request."""
    shortage_field: str = ""
    """The setting that the sentence is about."""

    @property
    def fits(self) -> bool:
        return not self.shortage

    @property
    def total_bytes(self) -> int:
        return sum(self.ledger_bytes.values())

    @property
    def num_kv_tokens(self) -> int:
        """Tokens the KV cache holds (one group's worth; the null block is not counted)."""
        return (self.kv_plan.num_blocks - 1) * self.block_size


def resolved_dtype(asked: str, checkpoint: str, device: str = "cpu") -> str:
    """The dtype to run in: as asked, or for "auto" the checkpoint's where the device has it.

    Raises:
        ConfigError: The device does not have what is asked for.
    """
    dtypes, dtype = platform_of(device).dtypes, checkpoint if asked == "auto" else _DTYPE_ALIASES.get(asked, asked)
    if dtype in dtypes:
        return dtype
    if asked == "auto":
        return dtypes[0]
    raise ConfigError(f"device {device} computes in {', '.join(dtypes)}, not in {dtype}", field="dtype")


def resolved_cache_dtype(asked: str, dtype: str, model: ModelConfig) -> str:
    """What keys and values are kept in: as asked, or for "auto" what the checkpoint has scales for, or the dtype to run
    in. "fp8" of latents is their published layout."""
    if asked not in ("auto", "fp8"):
        return KV_CACHE_ALIASES.get(asked, asked)
    specs = model.kv_cache_specs(16, dtype).values()
    if asked == "fp8":
        keeps_latents = any(isinstance(spec, LatentAttentionSpec) and spec.rank for spec in specs)
        return FP8_DS_MLA if keeps_latents else KV_CACHE_ALIASES[asked]
    takes_scales = model.is_native and not any(isinstance(spec, LatentAttentionSpec) for spec in specs)
    return (model.stored_cache_dtype if takes_scales else None) or dtype


def make_plan(
    config: QuireConfig,
    model: ModelConfig,
    *,
    free_bytes: int | None = None,
    folder: Path | None = None,
    must_fit: bool = True,
) -> MemoryPlan:
    """Plan memory for a model.

    Args:
        config: Settings.
        model: The network, from config.json.
        free_bytes: Memory that may be planned with; None reads what is free now.
        folder: Of the model: its vocabulary is compared with a draft model's, and what its files set without effect is
            noted.
        must_fit: Whether a plan that does not fit is an error; otherwise it says so itself.

    Raises:
        CheckpointError: what is to draft for it is missing, or not understood.
        NotEnoughMemoryError: it cannot fit; the message has the ledger and what to change.
        ConfigError: `compilation_config` cannot be had.
    """
    parallel, hosts = config.parallel, config.hosts
    sizes = parallel.num_ranks, parallel.decode_context_parallel_size, hosts.nnodes
    if max(sizes) > 1 or hosts.node_rank or parallel.enable_expert_parallel or parallel.enable_eplb:
        check_parallel(config, model)
    if config.model.enable_return_routed_experts:
        check_routed_experts(config, model)
    if config.runner.extract_hidden_states:
        from quire.hidden_states_config import check_extraction

        check_extraction(config, model)
    if parallel.num_ranks > 1:
        from quire.parallel.rank_devices import memory_of_rank

        free_bytes = memory_of_rank(config, free_bytes)
    free = available_memory_bytes(config.runner.device) if free_bytes is None else free_bytes
    plan = _plan(config, model, free, folder)
    if must_fit and not plan.fits:
        ways = advice(config, model, plan, folder)
        ledger = "\n".join(ledger_lines(plan.ledger_bytes))
        raise NotEnoughMemoryError(f"{plan.shortage}\n{ledger}\n{ways}", field=plan.shortage_field)
    return plan


def _check_drafted(config: QuireConfig, model: ModelConfig) -> None:
    """ConfigError: the network cannot go back to the state of a token that was accepted."""
    if not model.is_native and any(mixer.states for mixer in model.network.mixers):
        raise ConfigError(
            f"speculative method {config.speculative.method!r} does not go with {model.architecture}: Transformers "
            "runs its recurrent layers, and keeps no state of the tokens before the last; leave it out",
            field="speculative_method",
        )


def advice(config: QuireConfig, model: ModelConfig, plan: MemoryPlan, folder: Path | None) -> str:
    """What would make a plan fit that does not, for people."""

    def fits(changed: QuireConfig) -> bool:
        return _plan(changed, model, plan.free_bytes, folder).fits

    is_plain = plan.linear_method == "plain" and model.quantization is None
    ways = ways_to_fit(config, fits, max_model_len=plan.max_model_len, is_plain=is_plain)
    if ways:
        return "each of these alone makes it fit: " + "; ".join(ways)
    return "no single flag makes it fit here: it takes several of those above, more memory, or a smaller model"


def _plan(config: QuireConfig, model: ModelConfig, free: int, folder: Path | None) -> MemoryPlan:
    """The plan, whether or not it fits. Raises as `make_plan`."""
    if model.is_encoder:
        raise ConfigError(
            f"{model.architecture} is an encoder, which has no KV cache to plan: see `quire.encoder_plan`",
            field="model",
        )
    chosen_compilation(config, model)  # what it does not go with is refused here
    if config.model.max_model_len == LONGEST_THAT_FITS:
        return _longest_plan(config, model, free, folder)
    resolved = _resolve(config, model, folder)
    if config.model.mm_encoder_only:
        return _without_language_model(resolved, _ledger_before_kv(resolved), free)
    return _with_kv_cache(resolved, _ledger_before_kv(resolved), free)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Resolved:
    """Settings with nothing left open but the size of the KV cache."""

    config: QuireConfig
    """Drafts in chains where the model cannot have trees."""
    model: ModelConfig
    """Its encoder reads no more than a step computes."""
    dtype: str
    linear_method: str
    cache_dtype: str
    max_model_len: int
    runner: RunnerConfig
    specs: dict[str, KVCacheSpec]
    """Name of a layer -> what it keeps of each block."""
    block_size: int
    draft: DraftPlan | None
    draft_block_bytes: int
    """Bytes that the drafting network keeps for a block."""
    notes: tuple[str, ...]
    """What was chosen and why."""
    file_notes: tuple[str, ...]
    """What the model's files set without effect."""

    @property
    def encoder_cache_size(self) -> int:
        """Most embeddings of media and of callers that are kept; 0 where neither are taken."""
        if self.model.media is None and not self.config.media.enable_prompt_embeds:
            return 0
        step_tokens = self.config.scheduler.max_num_batched_tokens
        return self.config.scheduler.encoder_cache_size or max(
            step_tokens, min(self.max_model_len, MAX_DEFAULT_ENCODER_CACHE)
        )

    @property
    def one_block(self) -> KVCachePlan:
        """The smallest KV cache there can be."""
        return plan_kv_cache(self.specs, num_blocks=1 + len(self.specs))


def _resolve(config: QuireConfig, model: ModelConfig, folder: Path | None) -> _Resolved:
    """Choose lengths, dtypes, block size and drafter. Raises as `make_plan`."""
    dtype = resolved_dtype(config.model.dtype, model.dtype, config.runner.device)
    method = resolved_linear_method(config.model.quantization, model)
    check_load_format(config.model.load_format, model)
    max_model_len, notes = _max_model_len(config, model)
    notes.extend(model.network.notes)
    if model.rope.kind == "longrope":
        notes.append(_rotation_note(model, max_model_len))
    if model.max_encoder_len:
        model = _with_encoder_len(config, model, max_model_len, notes)
    if config.speculative.eagle_topk > 1:
        config = _with_chains(config, model, notes)
    is_host = platform_of(config.runner.device).is_host
    if dtype == "float16" and is_host:
        notes.append(
            "float16 is widened to float32 where it is multiplied; --dtype bfloat16 is several times faster at prompts "
            "on processors that multiply it as it is (AMX), with 3 bits of precision less"
        )
    runner = dataclasses.replace(
        config.runner,
        dtype=dtype,
        max_model_len=max_model_len,
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        max_num_seqs=config.scheduler.max_num_seqs,
        num_speculative_tokens=config.speculative.most_draft_tokens,
    )
    cache_dtype = resolved_cache_dtype(config.model.kv_cache_dtype, dtype, model)
    block_size = state_block_size(lambda size: model.kv_cache_specs(size, cache_dtype), config.kv_cache.block_size)
    if block_size != config.kv_cache.block_size:
        notes.append(f"blocks of {block_size} tokens: each holds a state of the model's recurrent layers")
    num_ranks = config.parallel.tensor_parallel_size
    specs = model_of_rank(model, 0, config.parallel).kv_cache_specs(block_size, cache_dtype)
    if num_ranks > 1:
        has = "all of them have the memory of this machine" if is_host else "each has a device of its own"
        notes.append(f"bytes are those of one of {num_ranks} ranks; {has}")
    drafts = config.speculative.method in NETWORK_METHODS
    draft = plan_draft(config, model, folder, dtype) if drafts else None
    draft_block_bytes = 0
    if draft is not None:
        if draft.keeps_tokens:
            require_place(specs)
        draft_block_bytes = draft.block_bytes(block_size)
    return _Resolved(
        config=config,
        model=model,
        dtype=dtype,
        linear_method=method,
        cache_dtype=cache_dtype,
        max_model_len=max_model_len,
        runner=runner,
        specs=specs,
        block_size=block_size,
        draft=draft,
        draft_block_bytes=draft_block_bytes,
        notes=tuple(notes),
        file_notes=() if folder is None else tuple(checkpoint_notes(config.model, folder)),
    )


def _ledger_before_kv(resolved: _Resolved) -> dict[str, int]:
    """What -> bytes, of all but the KV cache."""
    config, model, runner, draft = resolved.config, resolved.model, resolved.runner, resolved.draft
    dtype_bytes, takes = DTYPE_BYTES[resolved.dtype], takes_adapters(config)
    num_ranks, stages = config.parallel.tensor_parallel_size, config.parallel.pipeline_parallel_size
    weights = weight_ledger(
        model_of_rank(model, 0, config.parallel), resolved.dtype, resolved.linear_method, num_ranks=num_ranks,
        in_blocks=frozenset() if model.quantization is None else kept_blocks(config),
    )  # fmt: skip
    ledger = {f"weights: {part}": size for part, size in weights.items() if size or model.generates}
    if draft is not None:
        ledger["weights: draft"] = draft.weight_bytes
    ledger["activations"] = stages * activation_bytes(
        model, runner, kv_cache_dtype=resolved.cache_dtype,
        input_numbers=model.max_encoder_len * model.network.sound_width, score_copies=model.network.score_copies,
    )  # fmt: skip
    if (input_bytes := model.network.state_input_bytes(dtype_bytes)) and runner.num_speculative_tokens:
        _check_drafted(config, model)
        num_verified = min(runner.max_num_seqs * (1 + runner.num_speculative_tokens), runner.max_num_batched_tokens)
        ledger["drafts of recurrent layers"] = num_verified * input_bytes
    block_sizes, encoder_blocks = _table_widths(resolved.one_block)
    has_graphs = platform_of(config.runner.device).has_graphs and bool(runner.graph_sizes)
    edited_vocab = model.vocab_size if has_graphs else 0
    ledger["rows"] = stages * row_bytes(
        runner, block_sizes=block_sizes, encoder_blocks=encoder_blocks, edited_vocab=edited_vocab
    )
    if has_graphs:
        ledger["graphs"] = graph_bytes(
            model,
            runner,
            dtype_bytes=dtype_bytes,
            num_layers=model.num_layers,
            block_sizes=block_sizes,
            feature_width=0 if draft is None else draft.feature_width,
            takes_adapters=takes,
        )
    if takes:
        ledger["adapters"] = adapter_bytes(linear_shapes(model), config.lora, dtype_bytes)
        if config.lora.lora_merge_after and resolved.linear_method == "plain" and model.quantization is None:
            numbers = sum(outputs * inputs for outputs, inputs in linear_shapes(model))
            ledger["weights without the adapter in them"] = numbers * dtype_bytes
    if resolved.encoder_cache_size:
        # The kept ones, and as many that a tower is just making.
        width = model.hidden_size if model.media is None else model.media.width
        ledger["embeddings of media"] = 2 * resolved.encoder_cache_size * width * dtype_bytes
    if not platform_of(config.runner.device).is_host:
        if config.kv_transfer.asked_tier is not None:
            ledger["copies on their way to tiers"] = MAX_DEVICE_STORE_BYTES
        return ledger
    if config.kv_transfer.kv_disk_path is not None:
        ledger["copies on their way to disk"] = MAX_STORE_BYTES
    if config.kv_transfer.kv_offloading_size:
        ledger["blocks in host memory"] = round(config.kv_transfer.kv_offloading_size * (1 << 30)) // num_ranks
    return ledger


def _with_kv_cache(resolved: _Resolved, ledger: dict[str, int], free: int) -> MemoryPlan:
    """The plan with a KV cache of the size that is asked for, or of what is left of `free` bytes; where that is too
    little, of what one request needs, and why it does not fit."""
    config, draft = resolved.config, resolved.draft
    before_kv, one_block = sum(ledger.values()), resolved.one_block
    step_tokens = min(config.scheduler.max_num_batched_tokens, resolved.max_model_len)
    # Blocks of one request of the full length: what a cache of a known size holds, the other way round.
    concurrency = max_concurrency(one_block, resolved.max_model_len, max_step_tokens=step_tokens)
    per_request = round((one_block.num_blocks - 1) / concurrency)
    block_bytes = sum(one_block.tensor_block_bytes) + resolved.draft_block_bytes
    num_blocks, why = _num_blocks(config, free, before_kv, per_request, block_bytes)
    budget = free if _has_own_size(config) else int(free * config.model.gpu_memory_utilization)
    shortage, shortage_field = "", ""
    if num_blocks - 1 < per_request or before_kv + num_blocks * block_bytes > budget:
        shortage, shortage_field = _shortage(resolved, free, budget, before_kv, per_request, block_bytes, num_blocks)
    if num_blocks - 1 < per_request and not _has_own_size(config):
        num_blocks = 1 + per_request  # what it takes, for the ledger
    plan = plan_kv_cache(resolved.specs, num_blocks=max(num_blocks, 1 + len(one_block.groups)))
    if draft is not None:
        ledger["KV cache: draft"] = plan.num_blocks * resolved.draft_block_bytes
    ledger["KV cache"] = plan.total_bytes
    return MemoryPlan(
        dtype=resolved.dtype,
        kv_cache_dtype=resolved.cache_dtype,
        linear_method=resolved.linear_method,
        max_model_len=resolved.max_model_len,
        max_encoder_len=resolved.model.max_encoder_len,
        encoder_cache_size=resolved.encoder_cache_size,
        ledger_bytes=ledger,
        kv_plan=plan,
        block_size=resolved.block_size,
        max_concurrency=max_concurrency(plan, resolved.max_model_len),
        free_bytes=free,
        notes=(*resolved.notes, why, *resolved.file_notes),
        speculative=config.speculative,
        draft=draft,
        budget_bytes=budget,
        shortage=shortage,
        shortage_field=shortage_field,
    )


def _without_language_model(resolved: _Resolved, ledger: dict[str, int], free: int) -> MemoryPlan:
    """The plan of towers alone: of the ledger, what they take, and no KV cache."""
    config = resolved.config
    ledger = {what: size for what, size in ledger.items() if what in _ROWS_OF_TOWERS}
    needed, budget = sum(ledger.values()), int(free * config.model.gpu_memory_utilization)
    shortage = f"the towers take {format_bytes(needed)}, and {format_bytes(budget)} of memory may be used"
    return MemoryPlan(
        dtype=resolved.dtype,
        kv_cache_dtype=resolved.cache_dtype,
        linear_method=resolved.linear_method,
        max_model_len=resolved.max_model_len,
        max_encoder_len=0,
        encoder_cache_size=resolved.encoder_cache_size,
        ledger_bytes=ledger,
        kv_plan=KVCachePlan(groups=(), num_blocks=1, tensor_block_bytes=()),
        block_size=resolved.block_size,
        max_concurrency=config.scheduler.max_num_seqs,
        free_bytes=free,
        notes=("towers alone, without language model and KV cache", *resolved.file_notes),
        speculative=config.speculative,
        budget_bytes=budget,
        shortage=shortage if needed > budget else "",
        shortage_field="encoder_cache_size" if needed > budget else "",
    )


def _has_own_size(config: QuireConfig) -> bool:
    """Whether the settings say how large the KV cache is."""
    return config.model.num_gpu_blocks_override is not None or config.model.kv_cache_memory_bytes is not None


def _shortage(
    resolved: _Resolved,
    free: int,
    budget: int,
    before_kv: int,
    per_request: int,
    block_bytes: int,
    num_blocks: int,
) -> tuple[str, str]:
    """Why a plan does not fit, in one sentence, and the setting that it is about."""
    config, model, device = resolved.config, resolved.model, resolved.config.runner.device
    if num_blocks - 1 >= per_request:
        text = (
            f"this takes {format_bytes(before_kv + num_blocks * block_bytes)}, and {format_bytes(budget)} of memory "
            f"are free on {device}:"
        )
        has_blocks = config.model.num_gpu_blocks_override is not None
        return text, "num_gpu_blocks_override" if has_blocks else "kv_cache_memory_bytes"
    # What the encoder reads shrinks with the context only where nothing else bounds it.
    shrinks = model.has_positions_without_end and model.max_encoder_len >= resolved.max_model_len
    reading = 0 if shrinks else _table_widths(resolved.one_block)[1]
    there = max(num_blocks - 1, 0)
    text, setting = _too_few(there, resolved.max_model_len, per_request, block_bytes, reading, model)
    if before_kv > budget:
        text = (
            f"weights and activations take {format_bytes(before_kv)}, and {format_bytes(budget)} of memory may be "
            f"used on {device} ({format_bytes(free)} are free); {text}"
        )
    return text, setting


def _longest_plan(config: QuireConfig, model: ModelConfig, free: int, folder: Path | None) -> MemoryPlan:
    """The plan with the longest context, up to the model's, of which one request fits; rows, activations and blocks
    grow with it, so that it is sought by halving."""

    def plan_of(length: int) -> MemoryPlan:
        settings = dataclasses.replace(config.model, max_model_len=length)
        return _plan(dataclasses.replace(config, model=settings), model, free, folder)

    def fits(length: int) -> bool:
        return plan_of(length).fits

    longest, unit = model.max_model_len, config.kv_cache.block_size
    if not fits(longest):
        low, high = 0, -(-longest // unit)  # in blocks; high does not fit
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle * unit) else (low, middle)
        longest = max(1, low) * unit  # where not even one block fits, the error says by how much
    plan = plan_of(longest)
    why = "the model's context" if longest == model.max_model_len else "the longest that one request has memory for"
    whole = f"max_model_len {longest}: {why} (auto; the model's context is {model.max_model_len})"
    return dataclasses.replace(plan, notes=(whole, *plan.notes[1:]))


def _max_model_len(config: QuireConfig, model: ModelConfig) -> tuple[int, list[str]]:
    asked = config.model.max_model_len
    if asked is None:
        return model.max_model_len, [f"max_model_len {model.max_model_len}: the model's context"]
    if asked > model.max_model_len and not model.has_positions_without_end:
        raise ConfigError(
            f"max_model_len {asked} is more than the model's context of {model.max_model_len} tokens; "
            "lower it, or give --hf-overrides with rope_scaling, or another max_position_embeddings",
            field="max_model_len",
        )
    return asked, [f"max_model_len {asked}: as asked (the model's context is {model.max_model_len})"]


def _rotation_note(model: ModelConfig, max_model_len: int) -> str:
    original = model.rope.original_max_position_embeddings
    if max_model_len <= original:
        return f"rotation by the short factors: no sequence passes the original context of {original} tokens"
    return (
        f"rotation by the long factors, for short sequences too; where none passes {original} tokens, --max-model-len "
        f"{original} gives the short ones, which are better there"
    )


def _with_chains(config: QuireConfig, model: ModelConfig, notes: list[str]) -> QuireConfig:
    """The settings, without trees of drafts where layers keep states: each token would need the state of its branch."""
    specs = model.kv_cache_specs(1, "bfloat16").values()
    if not any(isinstance(spec, MambaSpec) for spec in specs):
        return config
    notes.append("drafts in chains, not in trees: the model's recurrent layers read tokens in a line")
    chains = dataclasses.replace(config.speculative, eagle_topk=1, num_draft_tokens=None)
    return dataclasses.replace(config, speculative=chains)


def _with_encoder_len(config: QuireConfig, model: ModelConfig, max_model_len: int, notes: list[str]) -> ModelConfig:
    """The model with the bound of what its encoder reads at once: its own (as long as the context, where nothing else
    ends its positions), but no more than a step computes."""
    if config.speculative.method in NETWORK_METHODS:
        raise ConfigError(
            f"speculative method {config.speculative.method!r} drafts with a network, which would not know what the "
            "encoder of this model has read; use 'ngram' or 'none'",
            field="speculative_method",
        )
    own = max_model_len if model.has_positions_without_end else model.max_encoder_len
    longest = min(own, config.scheduler.max_num_batched_tokens)
    why = "as long as the context" if longest == max_model_len else "the encoder's own length"
    if longest < own:
        why = f"max_num_batched_tokens, since it reads a prompt in one step (the model's own bound is {own})"
    notes.append(f"prompts of up to {longest} tokens, which the encoder reads: {why}")
    return model.with_encoder_len(longest)


def _num_blocks(config: QuireConfig, free: int, before_kv: int, per_request: int, block_bytes: int) -> tuple[int, str]:
    settings = config.model
    if settings.num_gpu_blocks_override is not None:
        return settings.num_gpu_blocks_override, f"KV cache of {settings.num_gpu_blocks_override} blocks: as asked"
    if settings.kv_cache_memory_bytes is not None:
        size = settings.kv_cache_memory_bytes
        return size // block_bytes, f"KV cache of {format_bytes(size)}: as asked"
    share = settings.gpu_memory_utilization
    room = int(free * share) - before_kv
    enough = 1 + per_request * config.scheduler.max_num_seqs
    if room // block_bytes >= enough:
        return enough, f"KV cache of {enough} blocks: enough for max_num_seqs requests of max_model_len tokens"
    return max(room // block_bytes, 0), (
        f"KV cache of {format_bytes(max(room, 0))}: what is left of {share:.0%} of {format_bytes(free)} free memory "
        f"after {format_bytes(before_kv)} for weights and activations"
    )


def _table_widths(plan: KVCachePlan) -> tuple[tuple[int, ...], int]:
    """Block sizes of the groups that hold a request's own tokens, and blocks of what the encoder reads for it."""
    specs = [group.spec for group in plan.groups]
    own = tuple(spec.block_size for spec in specs if not isinstance(spec, CrossAttentionSpec))
    return own, sum(spec.max_blocks(0) for spec in specs if isinstance(spec, CrossAttentionSpec))


def _too_few(
    there: int, max_model_len: int, per_request: int, block_bytes: int, reading: int, model: ModelConfig
) -> tuple[str, str]:
    """Why the blocks that are `there` are too few for one request, and the setting that it is about. `reading`: those
    of a request that are needed however short the context is."""
    left = f"but only {format_bytes(there * block_bytes)} are left for it:"
    if reading and there <= reading:
        text = (
            f"what the encoder reads for one request, up to {model.max_encoder_len} tokens, needs "
            f"{format_bytes(reading * block_bytes)} of KV cache, {left}"
        )
        return text, "max_num_batched_tokens"
    needed = format_bytes(per_request * block_bytes)
    return f"one request of max_model_len={max_model_len} tokens needs {needed} of KV cache, {left}", "max_model_len"
