"""What each pipeline stage has of a model, for people. Importing this module loads no torch."""

from __future__ import annotations

import dataclasses

from quire.block_weights import kept_blocks
from quire.config import QuireConfig
from quire.parallel.tensor_parallel import stage_of_rank
from quire.plan import MemoryPlan, format_bytes
from quire_kv_cache import kv_plan_of_layers
from quire_models.config import ModelConfig
from quire_models.ledger import weight_ledger
from quire_models.stages import StageSpec

__all__ = ["stage_notes"]


def stage_notes(config: QuireConfig, model: ModelConfig, plan: MemoryPlan) -> list[str]:
    """What each pipeline stage has, for people: its layers, and the bytes of its weights and of its KV cache on each
    rank."""
    tp, size = config.parallel.tensor_parallel_size, config.parallel.pipeline_parallel_size
    notes = [f"bytes are those of all {size} stages together; of them, each rank has those of its stage"]
    first = 0
    for number in range(size):
        own = stage_of_rank(model, number * tp, config.parallel)
        layers = range(first, first + len(own.layers))
        first = layers.stop
        here = dataclasses.replace(model, network=own, media=model.media if own.is_first else None)
        ledger = weight_ledger(here, plan.dtype, plan.linear_method, num_ranks=tp, in_blocks=kept_blocks(config))
        if isinstance(own, StageSpec) and not own.has_table:
            ledger["embedding"] = 0
        cache = kv_plan_of_layers(plan.kv_plan, own.cache_names()).total_bytes
        ends = ""
        if own.is_first:
            ends = ", embedding" if model.media is None else ", embedding, towers"
        elif own.is_last:
            ends = ", final norm and LM head" if own.has_lm_head else ", final norm"
            if plan.draft is not None:
                ends += ", what drafts"
                ledger["draft"] = plan.draft.weight_bytes
                cache += plan.ledger_bytes["KV cache: draft"]
        has = f"weights {format_bytes(sum(ledger.values()))}, KV cache {format_bytes(cache)}"
        notes.append(f"stage {number}: layers {layers.start} to {layers.stop - 1}{ends}; {has}")
    return notes
