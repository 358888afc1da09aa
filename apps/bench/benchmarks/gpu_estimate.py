"""What a captured decode step takes on a GPU that is not here, by counting: launches, bytes, operations.

    python apps/bench/benchmarks/gpu_estimate.py 8b --device h200 --batch 64 --context 1024
    python apps/bench/benchmarks/gpu_estimate.py --table        all STEPS, and what an H100 has measured of them
    python apps/bench/benchmarks/gpu_estimate.py --bars         what steps are to reach, and what they reach
    python apps/bench/benchmarks/gpu_estimate.py 8b --batch 2 --graph-memory    what graphs take, and what is planned

The launches are those of the real step: it runs on tensors without memory, with the kernels and the configurations of
the named GPU, and everything that would be launched is noted with its arguments. Each launch takes the time that its
bytes take at the GPU's rate of reading, or its operations at the rate of its matrix units, whichever is more, by a
share that kernels of its kind reach; and some microseconds for starting and ending. Kernels that widen weights or keys,
and those of our own in the place of the library's, also take the time of their instructions: they are compiled, and
turns of their inner loops counted. Shares and
microseconds are fitted to an H100's measured steps (`docs/gpu.md`), so an estimate says how a change moves a step, not
what a kernel that nobody has timed will do. Layers are counted by a network of one and one of two.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import sys
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[3]
if importlib.util.find_spec("quire_runner") is None:
    sys.path[:0] = [str(path) for pattern in ("packages/*/src", "apps/*/src", "kernels-*/src")
                    for path in ROOT.glob(pattern)]  # fmt: skip


class Device(NamedTuple):
    """A GPU as launches see it."""

    target: str
    read_bytes_per_s: float
    """What reading memory reaches, not what is printed on the box."""
    flop_per_s: float
    """Of products of bfloat16, likewise."""
    warp_instructions_per_s: float
    """That its schedulers issue."""


DEVICES = {
    "h100": Device("sm_90", 3.05e12, 790e12, 132 * 4 * 1.755e9),
    "h200": Device("sm_90", 4.3e12, 790e12, 132 * 4 * 1.755e9),
}
"""h100: measured by `gpu_check.py`; instructions of 132 multiprocessors by its clock. h200: its memory by the same
share of its rated speed."""


def _gguf(kind: str, num_layers: int) -> dict[str, Any]:
    layer = [*(f"self_attn.{name}_proj" for name in "qkvo"), *(f"mlp.{name}_proj" for name in ("gate", "up", "down"))]
    names = [f"model.layers.{number}.{name}" for number in range(num_layers) for name in layer]
    return {"quant_method": "gguf", "types": dict.fromkeys([*names, "model.embed_tokens", "lm_head"], kind)}


class Step(NamedTuple):
    """A decode step."""

    shape: str
    device: str
    batch: int
    """Requests."""
    context: int = 1024
    """Tokens of each."""
    weights: str = "plain"
    """How weights are kept (`build_model(linear_method=)`); or a checkpoint's, of `STORED`."""
    kv_cache_dtype: str | None = None
    """Of keys and values; None for the network's own."""
    drawn: bool = False
    """Whether requests draw their tokens."""

    def __str__(self) -> str:
        kinds = [] if self.weights == "plain" else [f"{self.weights} weights"]
        kinds += [f"{self.kv_cache_dtype} cache"] if self.kv_cache_dtype else []
        kinds += ["drawn"] if self.drawn else []
        return ", ".join([f"{self.shape} on {self.device}", f"{self.batch} requests at {self.context}", *kinds])

    @property
    def counts_instructions(self) -> bool:
        """Whether kernels widen what they read: others are bound by bytes (`resources.csv`)."""
        return self.weights != "plain" or self.kv_cache_dtype is not None


STORED: dict[str, Callable[[int], dict[str, Any]]] = {
    "nvfp4": lambda _: {"quant_method": "modelopt", "quant_algo": "NVFP4", "exclude_modules": ["lm_head"]},
    "mxfp4": lambda _: {
        "quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized", "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": {
            "num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "symmetric": True}}},
    },
    "nf4": lambda _: {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    **{kind: partial(_gguf, kind) for kind in ("Q4_K", "Q6_K", "IQ4_XS")},
}  # fmt: skip
"""Checkpoints whose weights stay in blocks -> their quantization_config, for so many layers; of GGUF files the
embedding and the LM head, too."""
MEASURED_MS = {
    ("8b", 1, 1024): 6.20, ("8b", 16, 1024): 7.09, ("8b", 64, 1024): 9.91,
    ("0.6b", 1, 1024): 1.29, ("0.6b", 16, 1024): 2.10, ("0.6b", 64, 1024): 4.50,
}  # fmt: skip
"""Steps of an H100 (docs/gpu.md): shape, requests, tokens of each -> milliseconds. Measured before a request alone had
products of its own (`row_linear.py`): these two were estimated 6.14 and 1.29 ms then."""
STEPS = [Step(shape, "h100", batch, context) for shape, batch, context in MEASURED_MS] + [
    Step("8b", "h200", 1), Step("8b", "h200", 64), Step("0.6b", "h200", 1),
    Step("8b", "h200", 1, weights="int4"), Step("8b", "h200", 64, kv_cache_dtype="int8"),
    Step("0.6b", "h200", 64, drawn=True),
    *(Step("8b", "h200", batch, weights=weights) for batch, weights in (
        (64, "int4"), (1, "fp8"), (64, "mxfp8"), (1, "w8a8"), (64, "ptpc_fp8"),
    )),
]  # fmt: skip
"""Estimates of `--table`."""
SHARES = {"attention": 0.75, "product": 0.96, "other": 0.8}
"""Of the GPU's rate of reading, what kernels of a kind reach once they run."""
LAUNCH_US = {"attention": 2.0, "product": 3.5, "other": 2.5}
"""What a launch within a graph takes besides: to start, to fill the GPU, to drain it. These and the shares were chosen
so that the six steps that an H100 has measured are met within 1.1 %."""
JOIN_US = 1.5
"""Of a launch whose last program puts together what others wrote, assumed: until writes are in the L2 cache, an atomic
addition, and reading there."""
LATENCY_US = 0.8
"""From a load of memory to its numbers while the memory is busy, assumed: what a kernel must have under way."""
COUNTED = ("row_linear_kernel",)
"""Kernels of our own in the place of the library's, which nothing was fitted to: their instructions are always counted,
and what they have under way."""
BLOCK = 16


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel of a step."""

    name: str
    kind: str
    num_bytes: float
    """Read and written."""
    num_operations: float
    """Of matrix products."""
    build: Any = None
    """What Triton compiles; None of torch's kernels."""
    num_programs: int = 0
    num_turns: int = 0
    """Of the inner loops of all its programs."""
    num_instructions: float = 0.0
    """Of all warps in these, where they are counted."""
    joins: bool = False
    """Its last program puts together what others wrote."""
    bytes_under_way: float = math.inf
    """That all programs which run at once have asked for in a turn, where it is counted."""

    def seconds(self, device: Device) -> float:
        """What it takes."""
        memory_s = self.num_bytes / device.read_bytes_per_s / SHARES[self.kind]
        memory_s = max(memory_s, self.num_bytes * LATENCY_US * 1e-6 / self.bytes_under_way)
        compute_s = self.num_operations / device.flop_per_s / SHARES[self.kind]
        issue_s = self.num_instructions / device.warp_instructions_per_s / SHARES[self.kind]
        fixed_us = LAUNCH_US[self.kind] + JOIN_US * self.joins
        return fixed_us * 1e-6 + max(memory_s, compute_s, issue_s)


class Estimate(NamedTuple):
    """A step."""

    num_launches: int
    num_bytes: float
    seconds: float
    by_name: dict[str, tuple[int, float, float]]
    """Kernel -> its launches, bytes and seconds."""

    def of_limit(self, step: Step) -> float:
        """The time of its bytes alone, as a share of its time."""
        return self.num_bytes / DEVICES[step.device].read_bytes_per_s / self.seconds


@contextmanager
def _fake_runner(
    step: Step, num_blocks: int, num_layers: int, capture: Callable[[Callable[[], Any]], Any], **settings: Any
) -> Iterator[Any]:
    """Within it, a runner of a network of so many layers on a GPU that is not there: tensors have no memory, launches
    do nothing.

    Args:
        settings: Of `RunnerConfig`.
    """
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    from quire_kv_cache import plan_kv_cache
    from quire_models import ModelConfig, build_model
    from quire_ops import kernel_builders
    from quire_quantization import methods
    from quire_quantization.numbers import BLOCK_CONSTANTS, EXACT_SCALES, assumed_answers
    from quire_runner import ModelRunner, RunnerConfig
    from quire_testkit.checkpoints import checkpoint_config

    methods._SEARCH_ELEMENTS = 1 << 40  # nothing has memory: weights are quantized in one piece
    like = "qwen3" if step.shape == "0.6b" else "llama"
    table = checkpoint_config(like, step.shape, num_hidden_layers=num_layers)
    stored = STORED.get(step.weights)
    more = {} if stored is None else {"quantization_config": stored(num_layers)}
    config = ModelConfig.from_dict({key: value for key, value in table.items() if key != "layer_types"} | more)
    target = DEVICES[step.device].target
    builder = next(each for each in kernel_builders() if target in each.targets)
    with builder.recording(target, step.device), torch.inference_mode(), FakeTensorMode(allow_non_fake_inputs=True):
        network = build_model(
            config, dtype="bfloat16", device="cuda", attention_backend="triton", block_size=BLOCK,
            linear_method="plain" if stored else step.weights, kv_cache_dtype=step.kv_cache_dtype,
        )  # fmt: skip
        for parameter in network.parameters:
            dtype = parameter.dtype or network.dtype
            memory = parameter.memory(dtype, network.device)
            parameter.tensor = torch.empty(parameter.shape, dtype=dtype, device="cuda") if memory is None else memory
        # Methods round scales to the weight's dtype; whoever quantizes q, k and v together gives them one constant.
        with assumed_answers({EXACT_SCALES: True, BLOCK_CONSTANTS: True}):
            network.finish_loading()
        plan = plan_kv_cache(config.kv_cache_specs(BLOCK, step.kv_cache_dtype or "bfloat16"), num_blocks=num_blocks)
        runner_config = RunnerConfig(device="cuda", dtype="bfloat16", **settings)
        runner = ModelRunner.for_model(network, plan, runner_config, capture=capture)
        if runner.graphs is None:
            raise RuntimeError(f"the step cannot be captured: {runner.graph_refusal}")
        yield runner


def _capture_all(graphs: Any) -> None:
    graphs._has_memory = lambda: True  # there is no device to ask
    graphs.capture(math.inf)
    if graphs.failure is not None:
        raise RuntimeError(f"the step cannot be captured: {graphs.failure}")


def step_launches(step: Step, num_layers: int) -> list[Launch]:
    """Launches of a captured step of a network of so many layers."""
    from quire_sampling import SampleMode

    found: list[Launch] = []
    num_captures = 0

    def capture(compute: Callable[[], Any]) -> Any:
        nonlocal num_captures
        num_captures += 1
        if num_captures != 1 + step.drawn:  # greedy requests first, then those that draw
            return (lambda: None), ()
        with _noted(found, step, caches):
            return (lambda: None), compute()

    settings = {
        "max_num_seqs": step.batch, "max_model_len": step.context, "max_num_batched_tokens": max(step.batch, 16)
    }  # fmt: skip
    num_blocks = 1 + step.batch * -(-step.context // BLOCK)
    with _fake_runner(step, num_blocks, num_layers, capture, cuda_graph_sizes=(step.batch,), **settings) as runner:
        caches = {id_of(cache) for cache in runner._layers.kv_caches}
        _capture_all(runner.graphs)
        wanted = (step.batch, SampleMode.SAMPLED if step.drawn else SampleMode.ARGMAX)
        if runner.graphs.captured.index(wanted) != int(step.drawn):
            raise RuntimeError(f"graphs are captured in another order: {runner.graphs.captured}")
    return [_counted(each, step) if step.counts_instructions or each.name in COUNTED else each for each in found]


def _counted(launch: Launch, step: Step) -> Launch:
    """With what only the compiled kernel tells."""
    if launch.build is None:
        return launch
    found = _resources(launch.build, step)
    instructions = launch.num_turns * (found.loop_instructions or 0) * found.num_warps
    if launch.name not in COUNTED:
        return replace(launch, num_instructions=instructions)
    from quire_kernels_cuda.targets import NVIDIA_TARGETS

    constants, threads = launch.build.constants, 32 * found.num_warps
    tiles = 1 + (constants["ACTIVATION"] != "none")
    ahead = min(constants["NUM_STAGES"] - 1, launch.num_turns / launch.num_programs)  # turns that are loaded ahead
    of_program = constants["BN"] * constants["BK"] * 2 * tiles * ahead  # bfloat16
    processors = NVIDIA_TARGETS[DEVICES[step.device].target].multiprocessors
    at_once = min(REGISTERS // (-(-found.registers // 8) * 8 * threads), THREADS // threads)
    at_once = min(at_once, SHARED_BYTES // (found.shared_bytes + 1024), launch.num_programs / processors)
    return replace(launch, num_instructions=instructions, bytes_under_way=processors * at_once * of_program)


REGISTERS, THREADS, SHARED_BYTES = 65536, 2048, 228 << 10
"""Of a multiprocessor of sm_90."""
_MEASURED: list[tuple[Any, Any]] = []


def _resources(build: Any, step: Step) -> Any:
    """What a kernel takes and does; compiled once for each."""
    from quire_kernels_cuda.ahead_of_time import measure
    from quire_kernels_cuda.targets import NVIDIA_TARGETS

    known = next((found for other, found in _MEASURED if other == build), None)
    if known is None:
        known = measure(build, NVIDIA_TARGETS[DEVICES[step.device].target])
        _MEASURED.append((build, known))
    return known


def _num_turns(values: dict[str, Any], grid: tuple[int, ...], context: int) -> int:
    """Turns of the inner loops of a launch's programs: over keys, or over inputs of a product."""
    if "BLOCK_N" in values:
        return math.prod(grid) * math.ceil(context / values["num_splits"] / values["BLOCK_N"])
    if "split_turns" in values:
        return math.prod(grid) * values["split_turns"]
    if "inputs" in values:
        inputs, of_turn = values.get("split_inputs", values["inputs"]), values.get("BK", 128)
        return math.prod(grid) * math.ceil(inputs / of_turn)
    return 0


def graph_memory(shape: str, gpu: str, batch: int, context: int) -> dict[str, int]:
    """Most bytes that a captured step has alive at once besides weights and cache, of decodes and of prompts beside
    them, for `batch` rows; and what is planned for them ("planned")."""
    from quire_runner.memory import step_graph_bytes

    peaks: dict[str, int] = {}
    kind = "decodes"

    def capture(step: Callable[[], Any]) -> Any:
        with _alive_bytes() as alive:
            tokens = step()
        peaks[kind] = max(peaks.get(kind, 0), alive.peak)
        return (lambda: None), tokens

    settings = {"max_num_seqs": batch, "max_model_len": max(context, 1024), "max_num_batched_tokens": 1024}
    with _fake_runner(Step(shape, gpu, batch, context), 16, 1, capture, **settings) as runner:
        _capture_all(runner.graphs)
        kind = "mixed"
        _capture_all(runner._captured.mixed.graphs)
        peaks["planned"] = step_graph_bytes(
            runner._captured.mixed._padded._network.config, runner._config, dtype_bytes=2
        )
    return peaks


class _AliveBytes:
    """Bytes of the memory that has been made and is not gone."""

    def __init__(self) -> None:
        self._num_tensors: dict[int, int] = defaultdict(int)
        self._bytes = 0
        self.peak = 0

    def add(self, tensor: Any) -> None:
        """Count the memory of a tensor until the last tensor of it is gone."""
        memory, num_bytes = id_of(tensor), int(tensor.untyped_storage().nbytes())
        if not self._num_tensors[memory]:
            self._bytes += num_bytes
            self.peak = max(self.peak, self._bytes)
        self._num_tensors[memory] += 1
        weakref.finalize(tensor, self._drop, memory, num_bytes)

    def knows(self, tensor: Any) -> bool:
        """Whether the tensor's memory is counted."""
        return self._num_tensors[id_of(tensor)] > 0

    def _drop(self, memory: int, num_bytes: int) -> None:
        self._num_tensors[memory] -= 1
        if not self._num_tensors[memory]:
            self._bytes -= num_bytes


@contextmanager
def _alive_bytes() -> Iterator[_AliveBytes]:
    """Within it, memory that is made is counted while it is alive."""
    from torch import Tensor
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    alive = _AliveBytes()

    class Counting(TorchDispatchMode):
        @classmethod
        def _should_skip_dynamo(cls) -> bool:
            return False

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            given = {id_of(each) for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)}
            out = func(*args, **(kwargs or {}))
            for each in tree_leaves(out):
                if isinstance(each, Tensor) and (id_of(each) not in given or alive.knows(each)):
                    alive.add(each)
            return out

    with Counting():
        yield alive


def id_of(tensor: Any) -> int:
    """Tells memory apart."""
    return int(tensor.untyped_storage()._cdata)


PICKED = 1 << 20
"""Bytes from which on a table is taken to be read in places, by kernels that are no products."""


PRODUCTS = ("linear", "mm", "matmul", "fp8_kernel", "w8a8_kernel", "block_row_kernel", "best_token_kernel")
"""What is in the name of a product's launch."""


def _launch(name: str, given: list[Any], made: list[Any], step: Step, caches: set[int]) -> Launch:
    """What one launch reads and writes.

    Args:
        given: Tensors that it is given, results among them for Triton's kernels.
        made: Tensors that it makes.
    """
    is_product = any(text in name for text in PRODUCTS)
    is_attention = "attend" in name
    sizes, seen = [], set[tuple[int, int]]()
    matrices = []
    for tensor in (*given, *made):
        # A cache's scales are a view of it.
        key = (id_of(tensor), 0 if id_of(tensor) in caches else int(tensor.storage_offset()))
        if key in seen:
            continue
        seen.add(key)
        if id_of(tensor) in caches:
            if is_attention:  # keys and values of all tokens of each request
                row = math.prod(tensor.shape[1:]) // tensor.shape[-2] * tensor.itemsize
                sizes.append(step.batch * step.context * row)
            continue
        num_bytes = tensor.numel() * tensor.itemsize
        if num_bytes > PICKED and not is_product and not is_attention and tensor.ndim and tensor.shape[0] > step.batch:
            continue  # embeddings, rotations, rows: as much is read as is written
        sizes.append(num_bytes)
        if is_product and tensor.ndim == 2:
            matrices.append(tensor)
    operations = 2.0 * step.batch * max((each.numel() for each in matrices), default=0) if is_product else 0.0
    kind = "product" if is_product else "attention" if is_attention else "other"
    return Launch(name, kind, float(sum(sizes)), operations)


@contextmanager
def _noted(found: list[Launch], step: Step, caches: set[int]) -> Iterator[None]:
    """Within it, everything that would be launched is put into the list."""
    from torch import Tensor
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves
    from triton.runtime.jit import JITFunction

    def tensors(values: Any) -> list[Any]:
        return [each for each in tree_leaves(values) if isinstance(each, Tensor)]

    class Noting(TorchDispatchMode):
        @classmethod
        def _should_skip_dynamo(cls) -> bool:
            return False

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            given = tensors((args, kwargs))
            out = func(*args, **(kwargs or {}))
            known = {id_of(each) for each in given}
            made = [each for each in tensors(out) if id_of(each) not in known]
            if func._schema.is_mutable or (made and "empty" not in func.__name__):
                found.append(_launch(str(func), given, made, step, caches))
            return out

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        build = record(self, *args, grid=grid, warmup=warmup, **kwargs)
        noted = _launch(self.__name__, tensors((args, kwargs)), [], step, caches)
        values = dict(zip(self.arg_names, args, strict=False)) | kwargs
        if noted.kind != "other":
            noted = replace(noted, build=build, num_programs=math.prod(grid),
                            num_turns=_num_turns(values, grid, step.context))  # fmt: skip
        if values.get("JOINS"):
            parts = sum(values[name].numel() * values[name].itemsize for name in ("part_out", "part_weight"))
            noted = replace(noted, joins=True, num_bytes=noted.num_bytes + parts)  # written and read
        found.append(noted)

    record, JITFunction.run = JITFunction.run, run
    try:
        with Noting():
            yield
    finally:
        JITFunction.run = record


def estimate(step: Step) -> Estimate:
    """A captured decode step."""
    from quire_testkit.checkpoints import checkpoint_config

    num_layers = checkpoint_config("qwen3" if step.shape == "0.6b" else "llama", step.shape)["num_hidden_layers"]
    one, two = (step_launches(step, count) for count in (1, 2))
    names: dict[str, list[float]] = defaultdict(lambda: [0, 0.0, 0.0])
    for launches, times in ((one, 2 - num_layers), (two, num_layers - 1)):
        for launch in launches:
            for i, value in enumerate((1, launch.num_bytes, launch.seconds(DEVICES[step.device]))):
                names[launch.name][i] += times * value
    by_name = {name: (int(values[0]), values[1], values[2]) for name, values in names.items()}
    total = [sum(values[i] for values in by_name.values()) for i in range(3)]
    return Estimate(int(total[0]), total[1], total[2], by_name)


def print_estimate(step: Step) -> None:
    """A line for each kernel, the longest first."""
    found = estimate(step)
    for name, (num, num_bytes, seconds) in sorted(found.by_name.items(), key=lambda item: -item[1][2]):
        print(
            f"  {name:44s} x{num:<5d}{num_bytes / 1e6:10.1f} MB{seconds * 1e6:10.1f} us {seconds / found.seconds:6.1%}"
        )
    is_plain = step == Step(*step[:4])
    measured = MEASURED_MS.get((step.shape, step.batch, step.context)) if step.device == "h100" and is_plain else None
    print(
        f"{step}: {found.seconds * 1e3:.2f} ms, {found.num_launches} launches, "
        f"{step.batch / found.seconds:.0f} tokens/s, {found.of_limit(step):.0%} of the limit of its bytes"
        + ("" if measured is None else f"; measured {measured:.2f} ms ({found.seconds * 1e3 / measured - 1:+.0%})")
    )


def print_bars() -> None:
    """What steps on an H200 are to reach, beside what they do."""
    one, many, small = Step("8b", "h200", 1), Step("8b", "h200", 64), Step("0.6b", "h200", 1)
    greedy = Step("0.6b", "h200", 64)
    int4, int8, drawn = one._replace(weights="int4"), many._replace(kv_cache_dtype="int8"), greedy._replace(drawn=True)
    found = {step: estimate(step) for step in (one, many, small, greedy, int4, int8, drawn)}
    seconds = {step: each.seconds for step, each in found.items()}
    for what, wanted, number in (
        (f"{one}: tokens/s", 240, 1 / seconds[one]),
        (f"{many}: of the limit", 0.80, found[many].of_limit(many)),
        (f"{small}: of the limit", 0.45, found[small].of_limit(small)),
        (f"{drawn}: rate beside greedy", 1 / 1.05, seconds[greedy] / seconds[drawn]),
        (f"{int4}: rate beside plain", 2.2, seconds[one] / seconds[int4]),
        (f"{int8}: rate beside plain", 1.0, seconds[many] / seconds[int8]),
    ):
        print(f"{what}: {number:.3g}, {'reaches' if number >= wanted else 'misses'} {wanted:.3g}")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="What a captured decode step takes on a GPU, by counting.")
    parser.add_argument("shape", nargs="?", default="8b", choices=("8b", "0.6b"))
    parser.add_argument("--device", default="h200", type=str.lower, choices=tuple(DEVICES))
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--weights", default="plain", help="how weights are kept, e.g. int4")
    parser.add_argument("--kv-cache-dtype", help="of keys and values, e.g. int8")
    parser.add_argument("--drawn", action="store_true", help="requests that draw their tokens")
    parser.add_argument("--table", action="store_true", help="all of STEPS")
    parser.add_argument("--bars", action="store_true", help="what steps are to reach")
    parser.add_argument("--graph-memory", action="store_true", help="memory of captured steps with so many rows")
    args = parser.parse_args()
    if args.table:
        for step in STEPS:
            print_estimate(step)
    elif args.bars:
        print_bars()
    elif args.graph_memory:
        for name, num_bytes in graph_memory(args.shape, args.device, args.batch, args.context).items():
            print(f"{name}: {num_bytes / (1 << 20):.1f} MiB")
    else:
        print_estimate(
            Step(args.shape, args.device, args.batch, args.context, args.weights, args.kv_cache_dtype, args.drawn)
        )


if __name__ == "__main__":
    main()
