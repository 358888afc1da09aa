"""`quire bench kernels`: every backend of an op on the same shapes, each figure beside what the machine allows.

The limit of a call is the larger of its bytes divided by the rate of reading memory and its operations divided by the
rate of matrix products, both measured in the same run. Calls go round over copies of their memory, so that none finds
its operands in a cache; on a GPU they are replays of a graph, timed by its events.
"""

from __future__ import annotations

import csv
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import median
from typing import Any

import torch

from quire_bench.device_timing import event_samples
from quire_bench.kernel_cases import CASES, KernelWork, make_work
from quire_bench.limits import MachineLimits
from quire_interfaces import ConfigError
from quire_interfaces.platforms import platform_of, platform_of_type
from quire_ops import OpRequest, op_table
from quire_ops.ops import op_named

__all__ = [
    "KernelFigure",
    "KernelPlan",
    "KernelRun",
    "RateSampler",
    "call_samples",
    "load_plan",
    "make_plan",
    "measure_limits",
    "measure_plan",
    "write_csv",
]

MAX_PLAN_BYTES = 1 << 20
MAX_RUNS = 1000
"""Pairs of op and shape of a plan."""
MAX_BYTES = 1 << 35
"""Memory of a call's tensors."""
COPIES_BYTES = {"cpu": 1 << 28, "cuda": 1 << 29}
"""Beyond the caches of such a device."""
SAMPLE_S = 0.005
LIMIT_SIDE = {"cpu": 2048, "cuda": 8192}
"""Of the matrices whose product is the limit of operations."""
SAMPLE_SIDE = 1024
"""Of those of `RateSampler`: milliseconds."""


@dataclass(frozen=True, slots=True)
class KernelRun:
    """An op on one shape."""

    op: str
    shape: dict[str, Any]
    backends: tuple[str, ...] | None = None
    """None for every one that can serve, the reference aside."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelPlan:
    """What is measured."""

    dtype: torch.dtype
    device: torch.device
    runs: tuple[KernelRun, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelFigure:
    """One backend on one shape."""

    op: str
    shape: str
    backend: str
    median_s: float
    best_s: float
    limit_s: float
    of_limit: float
    """limit_s / median_s."""
    bound_by: str
    """"memory" or "operations"."""
    bytes_per_s: float
    flop_per_s: float


def load_plan(path: str | Path, device: str) -> KernelPlan:
    """Read a plan: a YAML mapping of `dtype` and `runs`, each with `op`, and perhaps `shapes` (dimension -> list of
    values, of which every combination is measured) and `backends`.

    Raises:
        ConfigError: The file cannot be read, is no such mapping, or asks for more than `MAX_RUNS`.
    """
    import yaml

    try:
        text = Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", field="plan") from None
    if len(text) > MAX_PLAN_BYTES:
        raise ConfigError(f"{path} has {len(text)} bytes, a plan at most {MAX_PLAN_BYTES}", field="plan")
    try:
        content = yaml.safe_load(text)
    except (yaml.YAMLError, UnicodeDecodeError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not YAML: {' '.join(str(error).split())[:300]}", field="plan") from None
    _check_keys(content, {"dtype", "runs"}, str(path))
    return make_plan(content.get("runs"), str(content.get("dtype", "bfloat16")), device)


def make_plan(entries: Any, dtype: str, device: str) -> KernelPlan:
    """A plan from the entries of its `runs`, as `load_plan` describes them.

    Raises:
        ConfigError: A dtype, a device, an op or an entry that cannot be, or more than `MAX_RUNS` shapes.
    """
    names = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
    if dtype not in names:
        raise ConfigError(f"dtype must be one of {', '.join(names)}, got {dtype!r}", field="dtype")
    if not isinstance(entries, list) or not entries:
        raise ConfigError("a plan's runs must be a list of mappings with an op each", field="runs")
    runs = tuple(itertools.islice((run for entry in entries for run in _runs(entry)), MAX_RUNS + 1))
    if len(runs) > MAX_RUNS:
        raise ConfigError(f"the plan asks for more than {MAX_RUNS} shapes; list fewer values", field="shapes")
    return KernelPlan(dtype=names[dtype], device=_device(device), runs=runs)


def _device(name: str) -> torch.device:
    if name not in COPIES_BYTES:
        raise ConfigError(f"device must be cpu or cuda, got {name!r}", field="device")
    if (reason := platform_of(name).refusal()) is not None:
        raise ConfigError(f"{reason}; use --device cpu", field="device")
    return torch.device(name)


def _check_keys(value: Any, known: set[str], what: str) -> None:
    if not isinstance(value, dict):
        raise ConfigError(f"{what} must be a mapping with {', '.join(sorted(known))}", field="plan")
    if unknown := sorted(str(key) for key in value.keys() - known):
        raise ConfigError(f"{what} has no field {unknown[0]!r}; it has {', '.join(sorted(known))}", field=unknown[0])


def _runs(entry: Any) -> Iterator[KernelRun]:
    _check_keys(entry, {"op", "shapes", "backends"}, "a run")
    op, shapes, backends = entry.get("op"), entry.get("shapes") or {}, entry.get("backends")
    if not isinstance(op, str) or op not in CASES:
        raise ConfigError(f"there is no benchmark of op {op!r}; choose one of {', '.join(sorted(CASES))}", field="op")
    if not isinstance(shapes, dict):
        raise ConfigError(f"shapes of op {op!r} must be a mapping of dimensions to values", field="shapes")
    if backends is not None and not (isinstance(backends, list) and all(isinstance(name, str) for name in backends)):
        raise ConfigError(f"backends of op {op!r} must be a list of names", field="backends")
    axes = [values if isinstance(values, list) else [values] for values in shapes.values()]
    for values in itertools.product(*axes):
        yield KernelRun(op, dict(zip(shapes, values, strict=True)), None if backends is None else tuple(backends))


def measure_limits(device: torch.device, dtype: torch.dtype) -> MachineLimits:
    """Rates of reading memory and of matrix products on this device: the best of a few runs of each, by torch."""
    size, side = 2 * COPIES_BYTES[device.type], LIMIT_SIDE[device.type]
    ways = _ways_to_read(torch.ones(size // 4, device=device))
    quickest = _quickest(dtype) if device.type == "cpu" else dtype
    return MachineLimits(
        read_bytes_per_s=size / min(min(call_samples([way], device, 5)) for way in ways),
        matmul_flop_per_s=2 * side**3 / min(call_samples([_product(side, quickest, device)], device, 5)),
    )


class RateSampler:
    """Rates of this processor as they are now, a few milliseconds for each.

    Args:
        dtype: Of the products.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        device = torch.device("cpu")
        self._data = torch.ones(COPIES_BYTES["cpu"] // 4)
        ways = _ways_to_read(self._data)
        self._read = min(ways, key=lambda way: min(call_samples([way], device, 2)))
        self._multiply = _product(SAMPLE_SIDE, _quickest(dtype), device)

    def sample(self, rate: str) -> float:
        """Bytes per second ("read") or operations per second ("multiply")."""
        call, work = {
            "read": (self._read, float(self._data.nbytes)),
            "multiply": (self._multiply, 2.0 * SAMPLE_SIDE**3),
        }[rate]
        start = time.perf_counter()
        call()
        return work / (time.perf_counter() - start)


def _ways_to_read(data: torch.Tensor) -> list[Callable[[], Any]]:
    """Of float32; which is the fastest depends on the build of torch."""
    halves, one = data.view(torch.bfloat16).view(-1, 2048), torch.ones(2048, dtype=torch.bfloat16, device=data.device)
    return [data.sum, lambda: torch.dot(data, data), lambda: halves @ one]


def _product(side: int, dtype: torch.dtype, device: torch.device) -> Callable[[], Any]:
    left, right = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    return lambda: left @ right


def _quickest(dtype: torch.dtype) -> torch.dtype:
    """`dtype`, or float32: without instructions for it, bfloat16 is multiplied fifty times slower."""
    device = torch.device("cpu")
    return min((dtype, torch.float32), key=lambda each: min(call_samples([_product(256, each, device)], device, 2)))


def call_samples(calls: list[Callable[[], Any]], device: torch.device, repeats: int) -> list[float]:
    """Seconds of a call, `repeats` times the mean of as many calls as take about `SAMPLE_S`; on a GPU by its own
    events, in a captured graph where that can be (`event_samples`)."""
    if device.type == "cuda":
        return event_samples(calls, device, repeats, SAMPLE_S)[0]

    def timed(count: int) -> float:
        _wait(device)
        start = time.perf_counter()
        for index in range(count):
            calls[index % len(calls)]()
        _wait(device)
        return (time.perf_counter() - start) / count

    timed(1)  # whatever is compiled or allocated by the first call
    count = max(1, min(10_000, round(SAMPLE_S / max(timed(1), 1e-7))))
    return [timed(count) for _ in range(repeats)]


def _wait(device: torch.device) -> None:
    platform = platform_of_type(device.type)
    if platform.module:
        platform.runtime().synchronize(device)


def measure_plan(
    plan: KernelPlan, *, repeats: int = 5, on_run: Callable[[str], None] = lambda _: None
) -> tuple[MachineLimits, list[KernelFigure], dict[tuple[str, str], list[str]]]:
    """Measure every run.

    Returns:
        The better of the machine's rates before and after, the figures, and (backend, why it cannot serve) -> ops.

    Raises:
        ConfigError: A shape cannot be or takes more than `MAX_BYTES`, or a backend that was asked for cannot serve.
    """
    for run in plan.runs:  # before anything is measured
        _check(run, plan.dtype)
    before = measure_limits(plan.device, plan.dtype)
    measured: list[tuple[KernelRun, str, KernelWork, list[float]]] = []
    left_out: dict[tuple[str, str], list[str]] = {}
    for run in plan.runs:
        on_run(run.op)
        copies = _copies(run, plan)
        work = copies[0]
        request = OpRequest(device=plan.device.type, dtype=plan.dtype, sizes=work.sizes)
        for backend in op_table().backends(op_named(run.op)):
            asked = run.backends is not None and backend.name in run.backends
            if not asked and (run.backends is not None or backend.name == "reference"):
                continue
            if (reason := backend.refusal(request)) is not None:
                if asked:
                    message = f"backend {backend.name!r} cannot serve op {run.op!r}: {reason}"
                    raise ConfigError(message, field="backends")
                ops = left_out.setdefault((backend.name, reason), [])
                ops += [run.op] if run.op not in ops else []
                continue
            samples = call_samples([copy.prepare(backend.function) for copy in copies], plan.device, repeats)
            measured.append((run, backend.name, work, samples))
    after = measure_limits(plan.device, plan.dtype)
    rates = MachineLimits(
        read_bytes_per_s=max(before.read_bytes_per_s, after.read_bytes_per_s),
        matmul_flop_per_s=max(before.matmul_flop_per_s, after.matmul_flop_per_s),
    )
    return rates, [_figure(*one, rates) for one in measured], left_out


def _check(run: KernelRun, dtype: torch.dtype) -> None:
    work = make_work(run.op, run.shape, dtype, torch.device("meta"))
    if (needed := max(work.num_bytes, work.memory_bytes)) > MAX_BYTES:
        raise ConfigError(f"op {run.op!r} on {run.shape} takes {needed} bytes, at most {MAX_BYTES}", field="shapes")
    names = [backend.name for backend in op_table().backends(op_named(run.op))]
    if unknown := sorted(set(run.backends or ()) - set(names)):
        choices = ", ".join(names)
        raise ConfigError(f"op {run.op!r} has no backend {unknown[0]!r}; choose of {choices}", field="backends")


def _copies(run: KernelRun, plan: KernelPlan) -> list[KernelWork]:
    """As many as are more than caches hold, at least two: what is left of one call is no help to the next."""
    works = [make_work(run.op, run.shape, plan.dtype, plan.device)]
    while len(works) < 2 or (len(works) * works[0].num_bytes < COPIES_BYTES[plan.device.type] and len(works) < 64):
        if (len(works) + 1) * max(works[0].num_bytes, works[0].memory_bytes) > MAX_BYTES:
            break
        works.append(make_work(run.op, run.shape, plan.dtype, plan.device))
    return works


def _figure(run: KernelRun, backend: str, work: KernelWork, samples: list[float], rates: MachineLimits) -> KernelFigure:
    memory_s, flop_s = work.num_bytes / rates.read_bytes_per_s, work.flop / rates.matmul_flop_per_s
    typical = median(samples)
    shape = CASES[run.op].defaults | run.shape
    return KernelFigure(
        op=run.op,
        shape=" ".join(f"{name}={value}" for name, value in shape.items()),
        backend=backend,
        median_s=typical,
        best_s=min(samples),
        limit_s=max(memory_s, flop_s),
        of_limit=max(memory_s, flop_s) / typical,
        bound_by="memory" if memory_s >= flop_s else "operations",
        bytes_per_s=work.num_bytes / typical,
        flop_per_s=work.flop / typical,
    )


def write_csv(figures: list[KernelFigure], path: str | Path) -> None:
    """A line for each figure.

    Raises:
        ConfigError: The file cannot be written.
    """
    try:
        with Path(path).open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, [field.name for field in fields(KernelFigure)], lineterminator="\n")
            writer.writeheader()
            writer.writerows(asdict(figure) for figure in figures)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}", field="csv") from None
