"""How `quire plan` shows a memory plan."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Sequence
from typing import Any

from quire.assemble import model_folder, read_model_config
from quire.config import QuireConfig
from quire.encoder_plan import EncoderPlan, plan_encoder
from quire.memory_advice import flags_of, format_bytes
from quire.named_gpus import named_gpu_bytes
from quire.parallel.data_parallel import engine_ranks
from quire.parallel.rank_config import rank_config
from quire.plan import MemoryPlan, advice, make_plan
from quire.pooling.poolers import choose_pooling, longest_embedded_text, pooling_tasks, read_pooler_spec
from quire.stage_notes import stage_notes
from quire_models.config import ModelConfig
from quire_pooling import PoolerSpec

__all__ = ["print_plan"]


def print_plan(config: QuireConfig, *, as_json: bool) -> int:
    """Print the ledger, what it buys, and whether it fits, here or on a GPU that is not here (`quire.named_gpus`); 1
    where it does not."""
    start = time.perf_counter()
    folder = model_folder(config)
    model = read_model_config(config, folder)
    free_bytes = named_gpu_bytes(config.runner.device)
    if free_bytes is not None:
        config = dataclasses.replace(config, runner=dataclasses.replace(config.runner, device="cuda"))
    ranks = engine_ranks(config.data_parallel)
    engines = [rank_config(config, rank) for rank in range(ranks.first, ranks.first + ranks.size)]
    config = engines[0]
    choice = choose_pooling(config, folder, model)
    if model.is_encoder:
        pooler = read_pooler_spec(config, folder, model)
        plan_of_reading = plan_encoder(
            config,
            model,
            max_seq_length=pooler.max_seq_length,
            max_embed_len=longest_embedded_text(config),
            free_bytes=free_bytes,
        )
        return _print_encoder_plan(config, model, pooler, plan_of_reading, start, as_json=as_json)
    plan = make_plan(config, model, folder=folder, free_bytes=free_bytes, must_fit=False)
    ways = "" if plan.fits else advice(config, model, plan, folder)
    if as_json:
        figures = {
            "model": str(config.model.model or folder.name),
            "architecture": model.architecture,
            "runner": choice.runner,
            "dtype": plan.dtype,
            "kv_cache_dtype": plan.kv_cache_dtype,
            "linear_method": plan.linear_method,
            "max_model_len": plan.max_model_len,
            "ledger_bytes": plan.ledger_bytes,
            "total_bytes": plan.total_bytes,
            "free_bytes": plan.free_bytes,
            "budget_bytes": plan.budget_bytes,
            "fits": plan.fits,
            "shortage": plan.shortage,
            "advice": ways,
            "num_blocks": plan.kv_plan.num_blocks,
            "block_size": plan.block_size,
            "num_kv_tokens": plan.num_kv_tokens,
            "max_concurrency": plan.max_concurrency,
            "notes": (*plan.notes, *_notes_of_stages(config, model, plan)),
            "engines": [_engine_figures(rank, each) for rank, each in enumerate(engines, ranks.first)],
        }
        print(json.dumps(figures, indent=2))
        return int(not plan.fits)
    print(f"{config.model.model or 'the demo model'}: {model.architecture}, {plan.dtype}, weights {plan.linear_method}")
    if choice.pools:
        beside = "" if choice.runner == "pooling" else ", and pools"
        print(f"runner: {choice.runner}{beside} ({choice.reason})")
    _print_ledger(plan)
    _print_engines(ranks.first, engines, plan.total_bytes)
    if plan.kv_plan.groups:
        print(
            f"The KV cache holds {plan.num_kv_tokens} tokens in {plan.kv_plan.num_blocks} blocks of "
            f"{plan.block_size}, as {plan.kv_cache_dtype}:"
        )
        print(f"  {plan.max_concurrency:.1f} requests of {plan.max_model_len} tokens at the same time")
    for note in (*plan.notes, *_notes_of_stages(config, model, plan)):
        print(f"  note: {note}")
    print(f"planned in {time.perf_counter() - start:.2f} s; nothing was loaded")
    _print_verdict(config, plan, ways)
    return int(not plan.fits)


def _notes_of_stages(config: QuireConfig, model: ModelConfig, plan: MemoryPlan) -> list[str]:
    """What each pipeline stage has; empty for one."""
    return stage_notes(config, model, plan) if config.parallel.pipeline_parallel_size > 1 else []


def _engine_figures(rank: int, config: QuireConfig) -> dict[str, Any]:
    """What one of the engines gets of the host."""
    runner = config.runner
    return {
        "data_parallel_rank": rank,
        "device": runner.device,
        "num_threads": runner.num_threads,
        "cpu_affinity": runner.cpu_affinity,
    }


def _print_engines(first_rank: int, engines: Sequence[QuireConfig], total_bytes: int) -> None:
    """What each of several engines gets of the host; nothing is said of one."""
    if len(engines) == 1:
        return
    together = format_bytes(len(engines) * total_bytes)
    print(f"for each of {len(engines)} engines, {together} together:")
    for rank, config in enumerate(engines, first_rank):
        runner = config.runner
        cores = "" if runner.cpu_affinity in ("auto", "none") else f", cores {runner.cpu_affinity}"
        threads = "" if runner.num_threads is None else f", {runner.num_threads} threads"
        print(f"  rank {rank}: {runner.device}{threads}{cores}")


def _print_verdict(config: QuireConfig, plan: MemoryPlan, ways: str) -> None:
    where = f"on {config.runner.device}"
    may = f"the {format_bytes(plan.budget_bytes)} that it may take {where}"
    if plan.fits:
        print(f"FITS: {format_bytes(plan.total_bytes)} of {may}")
        return
    missing = plan.total_bytes - plan.budget_bytes
    by = f" by {format_bytes(missing)}" if missing > 0 else ""
    print(f"DOES NOT FIT{by}: {plan.shortage.rstrip(':')}")
    print(f"  {ways}")


def _print_ledger(plan: MemoryPlan | EncoderPlan) -> None:
    has_flags = isinstance(plan, MemoryPlan) and not plan.fits
    for what, size in plan.ledger_bytes.items():
        flags = f"   {flags_of(what)}" if has_flags and size else ""
        print(f"  {what:<24}{format_bytes(size):>12}{flags}")
    print(f"  {'together':<24}{format_bytes(plan.total_bytes):>12}   of {format_bytes(plan.free_bytes)} free")


def _print_encoder_plan(
    config: QuireConfig, model: ModelConfig, pooler: PoolerSpec, plan: EncoderPlan, start: float, *, as_json: bool
) -> int:
    tasks = pooling_tasks(pooler)
    if as_json:
        figures: dict[str, Any] = {"model": str(config.model.model), "architecture": model.architecture}
        figures |= {"runner": "pooling", "pooling_tasks": tasks}
        figures |= dataclasses.asdict(plan) | {"total_bytes": plan.total_bytes}
        print(json.dumps(figures, indent=2))
        return 0
    print(f"{config.model.model}: {model.architecture}, {plan.dtype}, weights {plan.linear_method}")
    _print_ledger(plan)
    print(f"runner: pooling ({', '.join(tasks)}); an encoder, which has no KV cache")
    what = "sounds" if model.encoder_takes_audio else "texts"
    print(f"It reads {what} of up to {plan.max_encoder_len} tokens, {plan.num_tokens} tokens of them in one pass")
    for note in pooler.notes:
        print(f"  note: {note}")
    print(f"planned in {time.perf_counter() - start:.2f} s; nothing was loaded")
    print(f"FITS: {format_bytes(plan.total_bytes)} of the {format_bytes(plan.free_bytes)} that are free")
    return 0
