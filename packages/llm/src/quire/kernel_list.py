"""Which kernels a model launches on a GPU that need not be here, found by running its steps on tensors without memory:
to compile them, and to tune them.

Nothing is listed by hand: the network is built as ever, on fake tensors of device "cuda", and the runner warms up.
What a quantized checkpoint's kernels owe to its numbers, not to its config.json, is tried both ways.
Imports torch.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from quire.assemble import model_folder, read_model_config
from quire.config import QuireConfig
from quire.kernel_builds import use_kernel_tables
from quire.plan import make_plan
from quire_interfaces import ConfigError
from quire_kv_cache import plan_kv_cache
from quire_ops import KernelBuilder, kernel_builders
from quire_quantization.experts import EACH_EXPERT
from quire_quantization.numbers import in_every_case

__all__ = ["compile_kernels", "list_problems", "record_kernels", "tune_kernels"]

ENOUGH_BYTES = 1 << 60
NUM_BLOCKS = 1 << 16
"""Of the KV cache that is not there. Where kernels depend on it (`KernelBuilder.has_short_pointers`), few and many."""
FEW_BLOCKS = 16  # more than a KV cache has groups
SHORT_BYTES = 1 << 31
"""From here on memory is large to those."""


def compile_kernels(
    config: QuireConfig, target: str, folder: Path, *, gpu: str | None = None, num_processes: int | None = None
) -> dict[str, int]:
    """Compile what a model launches into a folder for --kernel-cache.

    Args:
        config: The model, and how it will be served: dtypes, lengths, sizes.
        target: Kind of GPU, e.g. "sm_90".
        folder: New, or one that this has made; what it has already is not compiled again.
        gpu: Name of the GPU, e.g. "h200", where its table of configurations decides what is launched.

    Returns:
        "kernels" that are needed and "compiled" of them.

    Raises:
        ConfigError: there is no such target, or no package that compiles for it.
    """
    builder = _builder(target)
    use_kernel_tables(config)
    kernels = record_kernels(config, builder, target, gpu)
    processes = num_processes or os.cpu_count() or 1
    compiled = builder.build(kernels, target, folder, num_processes=processes)
    return {"kernels": len(kernels), "compiled": compiled}


def record_kernels(config: QuireConfig, builder: KernelBuilder, target: str, gpu: str | None = None) -> list[Any]:
    """What the model launches on this target, each kernel once, as the builder records it. How much memory the GPU will
    have is unknown: what depends on that is listed for a small KV cache and a large one."""
    with builder.recording(target, gpu) as kernels:
        for num_blocks in (FEW_BLOCKS, None) if builder.has_short_pointers else (NUM_BLOCKS,):
            _warm_up(config, num_blocks)
    return kernels


def list_problems(config: QuireConfig, target: str) -> list[tuple[Any, int]]:
    """The problems that the model's kernels can be tuned for, and how many configurations would be tried for each.

    Raises:
        ConfigError: there is no such target, or no package that compiles for it.
    """
    builder = _builder(target)
    with builder.noting(target) as problems:
        _warm_up(config)
    return [(problem, builder.candidates(problem, target)) for problem in problems]


def tune_kernels(
    config: QuireConfig, folder: Path, *, context: int, num_processes: int | None = None
) -> Iterator[tuple[str, int]]:
    """Find the fastest configurations of the model's kernels on the GPU of this machine.

    Args:
        config: The model, and how it will be served.
        folder: Of tables, for --kernel-tables; made if it is not there.
        context: Tokens of the sequences that are decoded.

    Yields:
        A line about each problem, and how many there are.

    Raises:
        ConfigError: there is no GPU here.
    """
    builder = next((each for each in kernel_builders() if each.configurations() is not None), None)
    if builder is None:
        raise ConfigError(
            "kernels are timed on a GPU, and there is none here that has any (quire ops --device cuda says why); "
            "--list TARGET says what would be tried on one",
            field="device",
        )
    use_kernel_tables(config)
    with builder.noting() as problems:
        _warm_up(config)
    processes = num_processes or os.cpu_count() or 1
    for line in builder.tune(problems, folder, num_processes=processes, context=context):
        yield line, len(problems)


def _warm_up(config: QuireConfig, num_blocks: int | None = NUM_BLOCKS) -> None:
    """Run the model's steps on tensors without memory; once for each way in which its numbers may fall out.

    Args:
        num_blocks: Of the KV cache; None for so many that every layer has more than 2 GiB of it.
    """
    in_every_case(partial(_warm_up_once, config, num_blocks))


def _warm_up_once(config: QuireConfig, num_blocks: int | None) -> None:
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from quire_models import load_model
    from quire_runner import ModelRunner

    runner_settings = dataclasses.replace(config.runner, device="cuda", enforce_eager=False)
    config = dataclasses.replace(config, runner=runner_settings)
    folder = model_folder(config)
    model = read_model_config(config, folder)
    plan = make_plan(config, model, folder=folder, free_bytes=ENOUGH_BYTES)
    model = model.within(plan.max_model_len)
    with torch.inference_mode(), FakeTensorMode(allow_non_fake_inputs=True):
        network = load_model(
            model,
            folder,
            dtype=plan.dtype,
            device="cuda",
            linear_method=plan.linear_method,
            disabled_linear_kernels=config.model.disabled_linear_kernels,
            attention_backend=config.model.attention_backend,
            kv_cache_dtype=plan.kv_cache_dtype,
            block_size=plan.block_size,
            load_format="dummy",
        )
        if readers := network.host_lengths:
            raise ConfigError(f"the kernels of this model cannot be listed: lengths are read by {', '.join(readers)}")
        if EACH_EXPERT in network.expert_methods:
            raise ConfigError(
                "the kernels of this model cannot be listed: which experts a step runs one by one, and for how many "
                f"tokens, its numbers say; its experts are run by {network.expert_methods}",
                field="model",
            )
        specs = model.kv_cache_specs(plan.block_size, plan.kv_cache_dtype)
        scheduler = config.scheduler
        settings = dataclasses.replace(
            config.runner, dtype=plan.dtype, max_model_len=plan.max_model_len, max_num_seqs=scheduler.max_num_seqs,
            max_num_batched_tokens=scheduler.max_num_batched_tokens,
        )  # fmt: skip
        if num_blocks is None:
            num_blocks = 1 + SHORT_BYTES // min(plan_kv_cache(specs, num_blocks=FEW_BLOCKS).tensor_block_bytes)
        cache = plan_kv_cache(specs, num_blocks=num_blocks)
        runner = ModelRunner.for_model(network, cache, settings, capture=_nothing_is_captured)
        runner.warm_up()


def _builder(target: str) -> KernelBuilder:
    builders = kernel_builders()
    for builder in builders:
        if target in builder.targets:
            return builder
    choices = ", ".join(name for builder in builders for name in builder.targets)
    raise ConfigError(
        f"nothing here compiles kernels for {target!r}; "
        + (f"choose one of {choices}" if choices else "install quire-kernels-cuda with Triton"),
        field="target",
    )


def _nothing_is_captured(step: Any) -> Any:
    raise NotImplementedError("steps only warm up")
