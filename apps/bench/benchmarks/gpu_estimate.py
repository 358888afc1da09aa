"""What a captured decode step takes on a GPU that is not here, by counting: launches, bytes, operations.

    python apps/bench/benchmarks/gpu_estimate.py 8b --device h200 --batch 64 --context 1024
    python apps/bench/benchmarks/gpu_estimate.py --table        all rows of ROWS, and those that an H100 has measured
    python apps/bench/benchmarks/gpu_estimate.py 8b --batch 2 --graph-memory    what graphs take, and what is planned

The launches are those of the real step: it runs on tensors without memory, with the kernels and the configurations of
the named GPU, and everything that would be launched is noted with its arguments. Each launch takes the time that its
bytes take at the GPU's rate of reading, or its operations at the rate of its matrix units, whichever is more, by a
share that kernels of its kind reach; and some microseconds for starting and ending. Shares and microseconds are
fitted to an H100's measured steps (`docs/gpu.md`), so an estimate says how a change moves a step, not what a kernel
that nobody has timed will do. Layers are counted by a network of one and one of two.
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
from dataclasses import dataclass
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


DEVICES = {
    "h100": Device("sm_90", 3.05e12, 790e12),
    "h200": Device("sm_90", 4.3e12, 790e12),
}
"""h100: measured by `gpu_check.py`. h200: its memory by the same share of its rated speed."""
MEASURED_MS = {
    ("8b", 1, 1024): 6.20, ("8b", 16, 1024): 7.09, ("8b", 64, 1024): 9.91,
    ("0.6b", 1, 1024): 1.29, ("0.6b", 16, 1024): 2.10, ("0.6b", 64, 1024): 4.50,
}  # fmt: skip
"""Steps of an H100 (docs/gpu.md): shape, requests, tokens of each -> milliseconds."""
ROWS = [(shape, "h100", batch, context) for shape, batch, context in MEASURED_MS] + [
    ("8b", "h200", 1, 1024), ("8b", "h200", 64, 1024), ("0.6b", "h200", 1, 1024)
]  # fmt: skip
"""Estimates of `--table`: shape, device, requests, tokens of each."""
SHARES = {"attention": 0.75, "product": 0.96, "other": 0.8}
"""Of the GPU's rate of reading, what kernels of a kind reach once they run."""
LAUNCH_US = {"attention": 2.0, "product": 3.5, "other": 2.5}
"""What a launch within a graph takes besides: to start, to fill the GPU, to drain it. These and the shares were chosen
so that the six steps that an H100 has measured are met within 1.1 %."""
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

    def seconds(self, device: Device) -> float:
        """What it takes."""
        memory_s = self.num_bytes / device.read_bytes_per_s / SHARES[self.kind]
        compute_s = self.num_operations / device.flop_per_s / SHARES[self.kind]
        return LAUNCH_US[self.kind] * 1e-6 + max(memory_s, compute_s)


class Estimate(NamedTuple):
    """A step."""

    num_launches: int
    num_bytes: float
    seconds: float
    by_name: dict[str, tuple[int, float, float]]
    """Kernel -> its launches, bytes and seconds."""


@contextmanager
def _fake_runner(
    shape: str, gpu: str, num_blocks: int, num_layers: int, capture: Callable[[Callable[[], Any]], Any], **settings: Any
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
    from quire_runner import ModelRunner, RunnerConfig
    from quire_testkit.checkpoints import checkpoint_config

    like = "qwen3" if shape == "0.6b" else "llama"
    table = checkpoint_config(like, shape, num_hidden_layers=num_layers)
    config = ModelConfig.from_dict({key: value for key, value in table.items() if key != "layer_types"})
    target = DEVICES[gpu].target
    builder = next(each for each in kernel_builders() if target in each.targets)
    with builder.recording(target, gpu), torch.inference_mode(), FakeTensorMode(allow_non_fake_inputs=True):
        network = build_model(config, dtype="bfloat16", device="cuda", attention_backend="triton", block_size=BLOCK)
        for parameter in network.parameters:
            dtype = parameter.dtype or network.dtype
            memory = parameter.memory(dtype, network.device)
            parameter.tensor = torch.empty(parameter.shape, dtype=dtype, device="cuda") if memory is None else memory
        network.finish_loading()
        plan = plan_kv_cache(config.kv_cache_specs(BLOCK, "bfloat16"), num_blocks=num_blocks)
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


def step_launches(shape: str, gpu: str, batch: int, context: int, num_layers: int) -> list[Launch]:
    """Launches of a captured greedy step of `batch` requests of `context` tokens, of a network of so many layers."""
    found: list[Launch] = []

    def capture(step: Callable[[], Any]) -> Any:
        if found:
            return (lambda: None), ()
        with _noted(found, batch, context, caches):
            return (lambda: None), step()

    settings = {"max_num_seqs": batch, "max_model_len": context, "max_num_batched_tokens": max(batch, 16)}
    num_blocks = 1 + batch * -(-context // BLOCK)
    with _fake_runner(shape, gpu, num_blocks, num_layers, capture, cuda_graph_sizes=(batch,), **settings) as runner:
        caches = {id_of(cache) for cache in runner._layers.kv_caches}
        _capture_all(runner.graphs)
    return found


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
    with _fake_runner(shape, gpu, 16, 1, capture, **settings) as runner:
        _capture_all(runner.graphs)
        kind = "mixed"
        _capture_all(runner._captured.mixed.graphs)
        peaks["planned"] = step_graph_bytes(runner._captured.mixed._network.config, runner._config, dtype_bytes=2)
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


def _launch(name: str, given: list[Any], made: list[Any], batch: int, context: int, caches: set[int]) -> Launch:
    """What one launch reads and writes.

    Args:
        given: Tensors that it is given, results among them for Triton's kernels.
        made: Tensors that it makes.
    """
    is_product = any(text in name for text in ("linear", "mm", "matmul", "best_token_kernel"))
    is_attention = "attend" in name
    sizes, seen = [], set[tuple[int, int]]()
    matrices = []
    for tensor in (*given, *made):
        key = (id_of(tensor), int(tensor.storage_offset()))
        if key in seen:
            continue
        seen.add(key)
        if id_of(tensor) in caches:
            if is_attention:  # keys and values of all tokens of each request
                row = math.prod(tensor.shape[1:]) // tensor.shape[-2] * tensor.itemsize
                sizes.append(batch * context * row)
            continue
        num_bytes = tensor.numel() * tensor.itemsize
        if num_bytes > PICKED and not is_product and not is_attention and tensor.ndim and tensor.shape[0] > batch:
            continue  # embeddings, rotations, rows: as much is read as is written
        sizes.append(num_bytes)
        if is_product and tensor.ndim == 2:
            matrices.append(tensor)
    operations = 2.0 * batch * max((each.numel() for each in matrices), default=0) if is_product else 0.0
    kind = "product" if is_product else "attention" if is_attention else "other"
    return Launch(name, kind, float(sum(sizes)), operations)


@contextmanager
def _noted(found: list[Launch], batch: int, context: int, caches: set[int]) -> Iterator[None]:
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
                found.append(_launch(str(func), given, made, batch, context, caches))
            return out

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        found.append(_launch(self.__name__, tensors((args, kwargs)), [], batch, context, caches))

    launch, JITFunction.run = JITFunction.run, run
    try:
        with Noting():
            yield
    finally:
        JITFunction.run = launch


def estimate(shape: str, gpu: str, batch: int, context: int) -> Estimate:
    """A captured decode step of `batch` requests of `context` tokens each."""
    from quire_testkit.checkpoints import checkpoint_config

    num_layers = checkpoint_config("qwen3" if shape == "0.6b" else "llama", shape)["num_hidden_layers"]
    one, two = (step_launches(shape, gpu, batch, context, count) for count in (1, 2))
    names: dict[str, list[float]] = defaultdict(lambda: [0, 0.0, 0.0])
    for launches, times in ((one, 2 - num_layers), (two, num_layers - 1)):
        for launch in launches:
            for i, value in enumerate((1, launch.num_bytes, launch.seconds(DEVICES[gpu]))):
                names[launch.name][i] += times * value
    by_name = {name: (int(values[0]), values[1], values[2]) for name, values in names.items()}
    total = [sum(values[i] for values in by_name.values()) for i in range(3)]
    return Estimate(int(total[0]), total[1], total[2], by_name)


def print_estimate(shape: str, gpu: str, batch: int, context: int) -> None:
    """A line for each kernel, the longest first."""
    found = estimate(shape, gpu, batch, context)
    limit_s = found.num_bytes / DEVICES[gpu].read_bytes_per_s
    for name, (num, num_bytes, seconds) in sorted(found.by_name.items(), key=lambda item: -item[1][2]):
        print(
            f"  {name:44s} x{num:<5d}{num_bytes / 1e6:10.1f} MB{seconds * 1e6:10.1f} us {seconds / found.seconds:6.1%}"
        )
    measured = MEASURED_MS.get((shape, batch, context)) if gpu == "h100" else None
    print(
        f"{shape} on {gpu}, {batch} requests at {context}: {found.seconds * 1e3:.2f} ms, "
        f"{found.num_launches} launches, "
        f"{batch / found.seconds:.0f} tokens/s, {limit_s / found.seconds:.0%} of the limit of its bytes"
        + ("" if measured is None else f"; measured {measured:.2f} ms ({found.seconds * 1e3 / measured - 1:+.0%})")
    )


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="What a captured decode step takes on a GPU, by counting.")
    parser.add_argument("shape", nargs="?", default="8b", choices=("8b", "0.6b"))
    parser.add_argument("--device", default="h200", type=str.lower, choices=tuple(DEVICES))
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--table", action="store_true", help="all of ROWS")
    parser.add_argument("--graph-memory", action="store_true", help="memory of captured steps with so many rows")
    args = parser.parse_args()
    if args.table:
        for row in ROWS:
            print_estimate(*row)
    elif args.graph_memory:
        for name, num_bytes in graph_memory(args.shape, args.device, args.batch, args.context).items():
            print(f"{name}: {num_bytes / (1 << 20):.1f} MiB")
    else:
        print_estimate(args.shape, args.device, args.batch, args.context)


if __name__ == "__main__":
    main()
