"""Finds the fastest configuration of a kernel for a problem, among those that a GPU can run.

Candidates are the configurations near the one that the kernel works out itself. Those that cannot fit are left out by a
count of what they hold in shared memory; the others are compiled, all processors at once, and left out if the compiled
kernel asks for more registers or shared memory than there is, or spills registers to memory. What remains is launched:
a candidate whose result is not that of the default is left out, the others are timed, and the fastest one wins.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import replace
from itertools import product
from math import log2
from multiprocessing import get_context
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quire_kernels_cuda.platform import Platform, choosing, pretending
from quire_kernels_cuda.recording import Build, kernel_of, named, recording
from quire_kernels_cuda.targets import Target
from quire_kernels_cuda.tuned import Entry, LaunchConfig, Problem
from quire_kernels_cuda.tuning_cases import CONTEXT, make_call

__all__ = [
    "Fit",
    "Timing",
    "candidates",
    "compiling_pool",
    "default_config",
    "default_on",
    "device_time_us",
    "fastest",
    "fitting",
    "in_order",
    "is_same",
    "noting",
    "problem_builds",
    "timings",
    "tune",
]

_logger = logging.getLogger(__name__)

MOST_CANDIDATES = 64
REPEATS = 25
FLUSHED_BYTES = 256 << 20
"""Written before each measurement, so that nothing is left in the GPU's caches."""
WORTH = 0.98
"""Share of the default's time that another configuration must not exceed."""

_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 5e-3}
"""Of the largest result."""

_BLOCKS: dict[str, dict[str, tuple[int, ...]]] = {
    "decode_attention": {"BLOCK_N": (16, 32, 64, 128)},
    "prefill_attention": {"BLOCK_M": (32, 64, 128), "BLOCK_N": (16, 32, 64, 128)},
    "matmul": {
        "BM": (1, 16, 32, 64, 128, 256), "BN": (16, 32, 64, 128, 256), "BK": (32, 64, 128, 256),
        "SPLITS": (1, 2, 4, 8, 16),
    },
    "fused_moe": {"BM": (16, 32, 64, 128), "BN": (32, 64, 128)},
    "byte_matmul": {"BM": (64, 128, 256), "BN": (64, 128, 256), "BK": (64, 128)},
}  # fmt: skip
_BLOCKS["skinny_matmul"] = _BLOCKS["matmul"]
_BLOCKS["gated_matmul"] = {name: _BLOCKS["matmul"][name] for name in ("BM", "BN", "BK")}


def noting(problems: list[Problem]) -> Any:
    """Within this context, launches ask no table, and what they would ask is put into the list, each once."""

    def note(problem: Problem, otherwise: LaunchConfig | None) -> LaunchConfig | None:
        if problem not in problems:
            problems.append(problem)
        return otherwise

    return choosing(note)


def in_order(problems: Iterable[Problem]) -> list[Problem]:
    """The problems, those behind that are held against what was found for others: gate and up in one kernel against
    the product of both."""
    return sorted(problems, key=lambda problem: problem.kernel == "gated_matmul")


def default_config(call: Callable[[], Any]) -> LaunchConfig | None:
    """What a call is launched with where no table is asked; None where something else than this kernel serves."""
    found: list[LaunchConfig | None] = []

    def note(_: Problem, otherwise: LaunchConfig | None) -> LaunchConfig | None:
        found.append(otherwise)
        return otherwise

    with choosing(note):
        call()
    return found[0]


def default_on(problem: Problem, platform: Platform, target: Target) -> LaunchConfig | None:
    """What a problem is launched with on a target that need not be here."""
    with pretending(target), recording(str(problem), target.vendor):
        return default_config(make_call(problem, platform, torch.device("meta")))


def _always(config: LaunchConfig | None) -> Callable[..., LaunchConfig | None]:
    return lambda *_: config


def problem_builds(problem: Problem, config: LaunchConfig, platform: Platform, target: Target) -> list[Build]:
    """Which kernels a configuration launches on a target that need not be here."""
    with pretending(target), choosing(_always(config)), recording(str(problem), target.vendor) as builds:
        make_call(problem, platform, torch.device("meta"))()
    return builds


def candidates(problem: Problem, default: LaunchConfig | None, target: Target) -> list[LaunchConfig]:
    """Configurations to try: the default if there is one, then those nearest to it that can fit, at most 64 in all."""
    sizes = dict(problem.sizes)
    choices = _BLOCKS[problem.kernel]
    if default is None:  # of a product which something else serves: of many rows of bytes, else of few
        usual = (
            {"BM": 64, "BN": 128, "BK": 128}
            if problem.kernel == "byte_matmul"
            else {"BM": max(16, sizes["rows"]), "BN": 32, "BK": 128, "SPLITS": 4}
        )
        blocks = {name: usual[name] for name in choices}
        start = LaunchConfig(blocks=blocks, num_warps=4, num_stages=4)
    else:
        start = default
    warps = (2, 4, 8) if problem.kernel != "prefill_attention" else (4, 8)
    stages = (1, 2, 3, 4, 5) if target.vendor == "cuda" else (1, 2)
    found = [
        LaunchConfig(blocks=dict(zip(choices, cut, strict=True)), num_warps=num_warps, num_stages=num_stages)
        for cut, num_warps, num_stages in product(product(*choices.values()), warps, stages)
    ]
    fit = [config for config in found if config != start and _is_sensible(problem, config, target)]
    fit.sort(key=lambda config: _apart(start, config))
    return [start, *fit[: MOST_CANDIDATES - 1]]


def _apart(one: LaunchConfig, other: LaunchConfig) -> float:
    """Doublings between two configurations."""
    blocks = sum(abs(log2(one.blocks[name] / other.blocks[name])) for name in one.blocks)
    return blocks + abs(log2(one.num_warps / other.num_warps)) + 0.75 * abs(one.num_stages - other.num_stages)


def _is_sensible(problem: Problem, config: LaunchConfig, target: Target) -> bool:
    """Whether it fits into shared memory by what must be held there, and makes pieces no larger than the problem."""
    facts, blocks = {**dict(problem.sizes), **dict(problem.traits)}, config.blocks
    itemsize = 1 if problem.kernel == "byte_matmul" else getattr(torch, str(facts["dtype"])).itemsize
    held = 0  # bytes of a stage; of several stages one is on its way to the registers
    if problem.kernel.endswith("attention"):
        held = 2 * blocks["BLOCK_N"] * int(facts["head_dim"]) * itemsize
    elif "BK" in blocks:
        if facts.get("form") == "int4" and blocks["BK"] != 128:  # the form says how many
            return False
        if str(facts.get("form")).startswith("fp8") and problem.kernel == "byte_matmul" and blocks["BK"] != 128:
            return False
        if blocks["BM"] == 1 and (facts.get("form") != "int4" or facts["rows"] != 1):
            return False
        rows, outputs, inputs, splits = (
            int(facts["rows"]),
            int(facts["outputs"]),
            int(facts["inputs"]),
            blocks.get("SPLITS", 1),
        )
        if (
            blocks["BM"] > max(16, rows)
            or blocks["BN"] > max(16, outputs)
            or splits * 2 * blocks["BK"] > max(inputs, 2 * blocks["BK"])
        ):
            return False
        if splits > 1 and rows > 64:  # there are programs enough
            return False
        weights = 2 if problem.kernel == "gated_matmul" else 1
        held = (blocks["BM"] + weights * blocks["BN"]) * blocks["BK"] * itemsize
    else:
        held = (blocks["BM"] + blocks["BN"]) * 32 * itemsize
    return bool(held * max(1, config.num_stages - 1) <= target.shared_memory_bytes)


class Fit(NamedTuple):
    """Whether a GPU can run a configuration."""

    config: LaunchConfig
    refusal: str | None
    """Why not, or None."""


def fitting(
    problem: Problem, configs: Sequence[LaunchConfig], platform: Platform, target: Target, pool: Executor | None = None
) -> list[Fit]:
    """Compile each configuration and hold it against the limits of the target, which need not be here.

    Args:
        pool: Of processes that compile, from `compiling_pool`; None compiles here.
    """
    jobs = [[named(build) for build in problem_builds(problem, config, platform, target)] for config in configs]
    run = map if pool is None else pool.map
    return [Fit(*pair) for pair in zip(configs, run(_refusal, jobs, [target] * len(jobs)), strict=True)]


def compiling_pool(num_processes: int) -> ProcessPoolExecutor:
    """Processes for `fitting`. Each imports torch and Triton, which takes seconds: one pool for all problems."""
    return ProcessPoolExecutor(num_processes, mp_context=get_context("spawn"))


def _refusal(builds: list[Build], target: Target) -> str | None:
    from quire_kernels_cuda.ahead_of_time import measure

    for build in builds:
        try:
            taken = measure(replace(build, kernel=kernel_of(build)), target)
        except Exception as error:
            return f"does not compile: {type(error).__name__}: {error}"
        if taken.shared_bytes > target.shared_memory_bytes:
            return f"needs {taken.shared_bytes} bytes of shared memory, there are {target.shared_memory_bytes}"
        if taken.registers > target.registers:
            return f"needs {taken.registers} registers, there are {target.registers}"
        if taken.spilled:
            return f"spills {taken.spilled}"
    return None


def device_time_us(device: torch.device) -> Callable[[Callable[[], Any]], float]:
    """What measures a call on a GPU: the median of its time on the device, with cold caches."""
    flushed = torch.empty(FLUSHED_BYTES, dtype=torch.uint8, device=device)

    def time_us(call: Callable[[], Any]) -> float:
        call()
        pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(REPEATS)]
        for begin, end in pairs:
            flushed.zero_()  # long enough for the host to be ahead when the call begins
            begin.record()
            call()
            end.record()
        torch.cuda.synchronize(device)
        return float(1e3 * median(begin.elapsed_time(end) for begin, end in pairs))

    return time_us


class Timing(NamedTuple):
    """How long a problem takes with a configuration."""

    config: LaunchConfig | None
    """None: without this kernel, by what is launched where no table has it."""
    taken_us: float


def timings(
    problem: Problem,
    configs: Iterable[LaunchConfig],
    platform: Platform,
    device: torch.device,
    *,
    time_us: Callable[[Callable[[], Any]], float],
    context: int = CONTEXT,
) -> Iterator[Timing]:
    """Time what is launched where no table has the problem, and then each other configuration that gives its result.

    Whatever else a call launches is launched as the platform's tables say: gate and up in one kernel are beside the
    product that was measured to be best for them, with its gate.

    Args:
        configs: What can run on the device, the default or not.
        time_us: Measures a call (`device_time_us`).
        context: Tokens of each sequence of a decode.
    """
    call = make_call(problem, platform, device, context=context)
    default = default_config(call)
    with platform.deciding(problem.kernel, default, device):
        wanted = call()
        yield Timing(default, time_us(call))
    for config in configs:
        if config == default:
            continue
        with platform.deciding(problem.kernel, config, device):
            try:
                got = call()
            except Exception as error:  # Triton's, where a launch asks for too much
                _logger.warning("%s: %s is left out: %s", problem, config, error)
                continue
            if not is_same(got, wanted):
                _logger.error("%s: %s computes something else and is left out", problem, config)
                continue
            yield Timing(config, time_us(call))


def tune(
    problem: Problem,
    configs: Iterable[LaunchConfig],
    platform: Platform,
    device: torch.device,
    *,
    time_us: Callable[[Callable[[], Any]], float],
    version: str,
    context: int = CONTEXT,
) -> Entry | None:
    """The fastest of the configurations, or None where none is clearly faster than doing without the kernel.

    Args:
        version: Of Triton. See `timings` for the others.
    """
    found = timings(problem, configs, platform, device, time_us=time_us, context=context)
    return fastest(problem, found, version)


def fastest(problem: Problem, found: Iterable[Timing], version: str) -> Entry | None:
    """What a table gets: the fastest of some timings, the default's first; None where the default is no configuration
    and none is clearly faster."""
    default, *others = found
    best = min(others, key=lambda timing: timing.taken_us, default=default)
    if best.taken_us >= WORTH * default.taken_us:
        best = default
    return None if best.config is None else Entry(problem, best.config, best.taken_us, default.taken_us, version)


def is_same(got: Tensor, wanted: Tensor) -> bool:
    """Whether two results differ by no more than the order of additions explains."""
    error = (got.double() - wanted.double()).abs().max()
    return bool(error <= _TOLERANCE[wanted.dtype] * wanted.double().abs().max().clamp(min=1e-30))
