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
from quire.checkpoint_notes import checkpoint_notes
from quire.compilation import chosen_compilation
from quire.config import KV_CACHE_ALIASES, LONGEST_THAT_FITS, QuireConfig
from quire.draft_plan import DraftPlan, plan_draft, require_place
from quire.memory_advice import format_bytes, ledger_lines, ways_to_fit
from quire_interfaces import ConfigError, CrossAttentionSpec, KVCachePlan, LatentAttentionSpec, MambaSpec
from quire_kv_cache import max_concurrency, plan_kv_cache, state_block_size
from quire_kv_transfer import MAX_STORE_BYTES
from quire_lora import adapter_bytes
from quire_models.config import DTYPE_BYTES, ModelConfig
from quire_models.ledger import linear_shapes, weight_ledger
from quire_models.named_formats import check_load_format, resolved_linear_method
from quire_models.recurrent_config import RecurrentConfig
from quire_runner.memory import activation_bytes, graph_bytes, row_bytes
from quire_spec_decode import NETWORK_METHODS, SpecDecodeConfig

__all__ = ["MemoryPlan", "advice", "available_memory_bytes", "format_bytes", "make_plan", "resolved_dtype"]

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


def resolved_dtype(asked: str, checkpoint: str) -> str:
    """The dtype to run in: as asked, or the checkpoint's for "auto"."""
    return checkpoint if asked == "auto" else _DTYPE_ALIASES.get(asked, asked)


def resolved_cache_dtype(asked: str, dtype: str, model: ModelConfig) -> str:
    """What keys and values are kept in: as asked, or for "auto" what the checkpoint has scales for, or the dtype to run
    in."""
    if asked != "auto":
        return KV_CACHE_ALIASES.get(asked, asked)
    specs = model.kv_cache_specs(16, dtype).values()
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
        ConfigError: it cannot fit (the message has the ledger and what to change), or `compilation_config` cannot be
            had.
    """
    free = available_memory_bytes(config.runner.device) if free_bytes is None else free_bytes
    plan = _plan(config, model, free, folder)
    if must_fit and not plan.fits:
        ways = advice(config, model, plan, folder)
        ledger = "\n".join(ledger_lines(plan.ledger_bytes))
        raise ConfigError(f"{plan.shortage}\n{ledger}\n{ways}", field=plan.shortage_field)
    return plan


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
    if not model.generates:
        raise ConfigError(
            f"{model.architecture} is an encoder: it reads texts and has no generation, so that there is nothing to "
            "serve; for its hidden states see `quire_models.load_model` and `read` (docs/encoders.md)",
            field="model",
        )
    chosen_compilation(config, model)  # what it does not go with is refused here
    if config.model.max_model_len == LONGEST_THAT_FITS:
        return _longest_plan(config, model, free, folder)
    dtype = resolved_dtype(config.model.dtype, model.dtype)
    method = resolved_linear_method(config.model.quantization, model)
    check_load_format(config.model.load_format, model)
    max_model_len, notes = _max_model_len(config, model)
    if model.rope.kind == "longrope":
        notes.append(_rotation_note(model, max_model_len))
    model = _with_encoder_len(config, model, max_model_len, notes)
    config = _with_chains(config, model, notes)
    if dtype == "float16" and config.runner.device.startswith("cpu"):
        notes.append(
            "float16 is widened to float32 where it is multiplied; --dtype bfloat16 is several times faster at prompts "
            "on processors that multiply it as it is (AMX), with 3 bits of precision less"
        )
    scheduler = config.scheduler
    runner = dataclasses.replace(
        config.runner, dtype=dtype, max_model_len=max_model_len,
        max_num_batched_tokens=scheduler.max_num_batched_tokens, max_num_seqs=scheduler.max_num_seqs,
        num_speculative_tokens=config.speculative.most_draft_tokens,
    )  # fmt: skip
    cache_dtype = resolved_cache_dtype(config.model.kv_cache_dtype, dtype, model)
    block_size = state_block_size(lambda size: model.kv_cache_specs(size, cache_dtype), config.kv_cache.block_size)
    if block_size != config.kv_cache.block_size:
        notes.append(f"blocks of {block_size} tokens: each holds a state of the model's recurrent layers")
    specs = model.kv_cache_specs(block_size, cache_dtype)
    draft = plan_draft(config, model, folder, dtype)
    draft_block_bytes = 0
    if draft is not None:
        if draft.keeps_tokens:
            require_place(specs)
        draft_block_bytes = draft.block_bytes(block_size)
    one_block = plan_kv_cache(specs, num_blocks=1 + len(specs))
    ledger = {f"weights: {part}": size for part, size in weight_ledger(model, dtype, method).items()}
    if draft is not None:
        ledger["weights: draft"] = draft.weight_bytes
    ledger["activations"] = activation_bytes(model, runner, kv_cache_dtype=cache_dtype)
    if isinstance(model, RecurrentConfig) and runner.num_speculative_tokens:
        num_verified = min(runner.max_num_seqs * (1 + runner.num_speculative_tokens), runner.max_num_batched_tokens)
        ledger["drafts of recurrent layers"] = num_verified * model.state_inputs * DTYPE_BYTES[dtype]
    block_sizes, encoder_blocks = _table_widths(one_block)
    ledger["rows"] = row_bytes(runner, block_sizes=block_sizes, encoder_blocks=encoder_blocks)
    if config.runner.device.startswith("cuda") and runner.graph_sizes:
        ledger["graphs"] = graph_bytes(
            model, runner, dtype_bytes=DTYPE_BYTES[dtype], num_layers=model.num_layers,
            block_sizes=block_sizes, feature_width=0 if draft is None else draft.feature_width,
            takes_adapters=takes_adapters(config),
        )  # fmt: skip
    if takes_adapters(config):
        ledger["adapters"] = adapter_bytes(linear_shapes(model), config.lora, DTYPE_BYTES[dtype])
        if config.lora.lora_merge_after and method == "plain":
            numbers = sum(outputs * inputs for outputs, inputs in linear_shapes(model))
            ledger["weights without the adapter in them"] = numbers * DTYPE_BYTES[dtype]
    if config.kv_transfer.kv_disk_path is not None:
        ledger["copies on their way to disk"] = MAX_STORE_BYTES
    before_kv = sum(ledger.values())
    step_tokens = min(scheduler.max_num_batched_tokens, max_model_len)
    # Blocks of one request of the full length: what a cache of a known size holds, the other way round.
    concurrency = max_concurrency(one_block, max_model_len, max_step_tokens=step_tokens)
    per_request = round((one_block.num_blocks - 1) / concurrency)
    block_bytes = sum(one_block.tensor_block_bytes) + draft_block_bytes
    num_blocks, why = _num_blocks(config, free, before_kv, per_request, block_bytes)
    notes.append(why)
    if folder is not None:
        notes += checkpoint_notes(config.model, folder)
    has_own_size = config.model.num_gpu_blocks_override is not None or config.model.kv_cache_memory_bytes is not None
    budget = free if has_own_size else int(free * config.model.gpu_memory_utilization)
    shortage, shortage_field = "", ""
    if num_blocks - 1 < per_request:
        # What the encoder reads shrinks with the context only where nothing else bounds it.
        reading = 0 if model.has_positions_without_end and model.max_encoder_len >= max_model_len else encoder_blocks
        there = max(num_blocks - 1, 0)
        shortage, shortage_field = _too_few(there, max_model_len, per_request, block_bytes, reading, model)
        if before_kv > budget:
            shortage = (
                f"weights and activations take {format_bytes(before_kv)}, and {format_bytes(budget)} of memory may be "
                f"used on {config.runner.device} ({format_bytes(free)} are free); {shortage}"
            )
        if not has_own_size:
            num_blocks = 1 + per_request  # what it takes, for the ledger
    elif before_kv + num_blocks * block_bytes > budget:
        shortage = (
            f"this takes {format_bytes(before_kv + num_blocks * block_bytes)}, and {format_bytes(budget)} of memory "
            f"are free on {config.runner.device}:"
        )
        shortage_field = (
            "num_gpu_blocks_override" if config.model.num_gpu_blocks_override is not None else "kv_cache_memory_bytes"
        )
    plan = plan_kv_cache(specs, num_blocks=max(num_blocks, 1 + len(one_block.groups)))
    if draft is not None:
        ledger["KV cache: draft"] = plan.num_blocks * draft_block_bytes
    ledger["KV cache"] = plan.total_bytes
    return MemoryPlan(
        dtype=dtype,
        kv_cache_dtype=cache_dtype,
        linear_method=method,
        max_model_len=max_model_len,
        max_encoder_len=model.max_encoder_len,
        ledger_bytes=ledger,
        kv_plan=plan,
        block_size=block_size,
        max_concurrency=max_concurrency(plan, max_model_len),
        free_bytes=free,
        notes=tuple(notes),
        speculative=config.speculative,
        draft=draft,
        budget_bytes=budget,
        shortage=shortage,
        shortage_field=shortage_field,
    )


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
    if config.speculative.eagle_topk == 1 or not any(isinstance(spec, MambaSpec) for spec in specs):
        return config
    notes.append("drafts in chains, not in trees: the model's recurrent layers read tokens in a line")
    chains = dataclasses.replace(config.speculative, eagle_topk=1, num_draft_tokens=None)
    return dataclasses.replace(config, speculative=chains)


def _with_encoder_len(config: QuireConfig, model: ModelConfig, max_model_len: int, notes: list[str]) -> ModelConfig:
    """The model with the bound of what its encoder reads at once: its own (as long as the context, where nothing else
    ends its positions), but no more than a step computes."""
    if not model.max_encoder_len:
        return model
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
    return dataclasses.replace(model, max_encoder_len=longest)


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
