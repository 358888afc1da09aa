"""Everything that a GPU has to show, in one command: tests on the device, kernels and whole steps beside their limits.

    python apps/bench/benchmarks/gpu_check.py tests kernels engine sampled steps draws gated joined --out results.json

For a machine that has a GPU for a short time: runs in a bare checkout, with torch, Triton and Transformers and little
else, each part in a few minutes; what each took is among the results. `steps` times decode steps of every
kind (penalties, grammars, adapters, narrow caches and weights, a prompt beside decodes), `draws` the drawing of tokens
alone. `gated joined` say together whether gate, up and activation are faster in one kernel, and layers that share an
input in one product. Weights are random. Limits are measured in the same run: bytes that must be read by the rate of
reading memory, operations by the rate of matrix products.
Results are JSON, a line for each figure as it comes; `passes` says whether a figure reaches its bar, where it has one.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import math
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import tomllib
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
SOURCES = [str(path) for pattern in ("packages/*/src", "apps/*/src", "kernels-*/src") for path in ROOT.glob(pattern)]
sys.path[:0] = [path for path in (str(Path(__file__).parent), *SOURCES) if path not in sys.path]
KERNEL_BARS: list[tuple[dict[str, Any], float]] = [
    ({"op": "paged_attention", "shapes": {"batch": "64xq1k4k"}}, 0.85),
    ({"op": "paged_attention", "shapes": {"batch": "q1k8k"}}, 0.0),
    ({"op": "paged_attention", "shapes": {"batch": ["q2k*4", "q8k"]}}, 0.4),
    ({"op": "rms_norm", "shapes": {"rows": 8192}}, 0.85),
    ({"op": "add_rms_norm", "shapes": {"rows": 8192}}, 0.85),
    ({"op": "silu_and_mul", "shapes": {"rows": 8192}}, 0.85),
    ({"op": "rotary_embedding", "shapes": {"rows": 8192}}, 0.85),
    ({"op": "write_kv_cache", "shapes": {"batch": "q8k"}}, 0.85),
    ({"op": "linear", "shapes": {"rows": [1, 8, 32], "outputs": [4096, 6144, 28672], "inputs": 4096}}, 0.0),
    ({"op": "linear", "shapes": {"rows": [1, 32], "outputs": 4096, "inputs": 14336}}, 0.0),
    ({"op": "gated_linear", "shapes": {"rows": [1, 4, 16, 32], "outputs": 14336, "inputs": 4096}}, 0.0),
    ({"op": "gated_linear", "shapes": {"rows": [1, 4, 16, 32], "outputs": 3072, "inputs": 1024}}, 0.0),
    ({"op": "lm_head_argmax", "shapes": {"rows": [1, 32], "outputs": 128256}}, 0.0),
    ({"op": "grouped_linear", "shapes": {"rows": [1, 16], "outputs": 14336}}, 0.0),
]
"""Runs of `quire bench kernels`, and the share of the limit that they have to reach; 0 is only measured."""
DECODES = (("8b", 1, 1024, 0.78), ("8b", 64, 1024, 0.75), ("0.6b", 1, 1024, 0.6))
"""Shape, requests, context, and the share of the limit that decode steps have to reach."""
PREFILLS = (("8b", 8192, 0.6),)
GATED = (("8b", 14336, 4096), ("0.6b", 3072, 1024))
"""Shape, outputs of gate and of up, inputs: what part "gated" times, for each number of GATED_ROWS."""
GATED_ROWS = (1, 4, 16, 32)
SAMPLED_STEPS = (("0.6b", 64, 1024),)
"""Shape, requests, context: decode steps that part "sampled" times."""
SAMPLED: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "temperature": {"temperature": 0.7},
    "top_k": {"temperature": 0.7, "top_k": 20},
    "top_p": {"temperature": 0.7, "top_p": 0.95},
    "top_k and top_p": {"temperature": 0.7, "top_k": 20, "top_p": 0.95},
    "top_k, top_p and a penalty": {"temperature": 0.7, "top_k": 20, "top_p": 0.95, "presence_penalty": 0.5},
    "log probabilities": {"temperature": 0.7, "logprobs": 5},
}
"""What requests of part "sampled" ask for."""
WITHOUT_DEVICE = ("_build_digest", "_builds", "_folder", "_gpu_check", "_interpreter", "_readme")
"""Ends of the names of test files that need no device."""
PARTS = ("tests", "kernels", "engine", "sampled", "steps", "draws", "gated", "joined")
STEPS = (
    ("0.6b", 64, 1024, ()),
    ("8b", 1, 1024, ("greedy", "weights in int4", "weights in int8", "weights in fp8", "weights in w8a8")),
)
"""Shape, requests, context and kinds of the steps of part "steps"; no kinds for all (`gpu_steps.STEPS`)."""
DRAWS = ((64, 151936), (1, 151936))
"""Rows and tokens of part "draws"."""
JOINED = (("8b", 1, 1024), ("8b", 16, 1024), ("0.6b", 1, 1024), ("0.6b", 16, 1024))
"""Shape, requests, context: decode steps that part "joined" times with products joined and apart."""


class Results:
    """Figures, printed as they come and kept in a file, so that a run that is cut short is not lost."""

    def __init__(self, out: Path | None) -> None:
        self.figures: list[dict[str, Any]] = []
        self._out = out

    def add(self, part: str, what: str, **figure: Any) -> None:
        self.figures.append({"part": part, "what": what, **figure})
        print(json.dumps(self.figures[-1]), flush=True)
        if self._out is not None:
            self._out.write_text(json.dumps(self.figures, indent=1))

    def measured(self, part: str, what: str, seconds: float, limit_s: float, bar: float, **more: Any) -> None:
        share = limit_s / seconds
        passes = {"passes": share >= bar} if bar else {}
        self.add(part, what, median_ms=seconds * 1e3, limit_ms=limit_s * 1e3, of_limit=share, bar=bar, **passes, **more)


def register_kernels() -> None:
    """Entry points are found in installed packages only; a checkout has none."""
    from quire_kernels_cuda.ops import backends
    from quire_kernels_rocm.ops import backends as rocm_backends
    from quire_ops import op_table

    table = op_table()
    for backend in (*backends(), *rocm_backends()):
        if all(other.name != backend.name for other in table.backends(backend.op)):
            table.add(backend)


def run_tests(results: Results, limit_s: float, only: Callable[[str], bool]) -> None:
    """Tests of the kernels, on the device, in as many processes as there are cores; files that need a package which is
    not here are left out. Each file is reported as soon as its tests have run; after `limit_s` seconds what has run,
    and that the rest did not."""
    import torch

    folder = "kernels-cuda" if torch.version.hip is None else "kernels-rocm"
    files, left_out = [], []
    for path in sorted((ROOT / folder / "tests").glob("test_*.py")):
        if not only(path.stem):
            continue
        text = path.read_text()
        needs_engine = re.search(r"^from quire[. ]", text, re.MULTILINE) and not _is_here("msgspec")
        (left_out if needs_engine or path.stem.endswith(WITHOUT_DEVICE) else files).append(path)
    with tempfile.TemporaryDirectory() as temporary:
        write_entry_points(Path(temporary))
        summaries = Path(temporary) / "summaries.jsonl"
        folders = [temporary, str(Path(__file__).parent), *SOURCES, *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(folders)}
        command = [sys.executable, "-m", "pytest", "-q", "-c", os.devnull, "--rootdir", str(ROOT), "--tb=short"]
        command += ["-p", "no:cacheprovider", "-p", "file_summaries", f"--file-summaries={summaries}"]
        command += map(str, files)
        if _is_here("xdist"):
            command += ["-n", str(max(1, (os.cpu_count() or 2) - 2)), "--dist", "worksteal"]
        output = (Path(temporary) / "output").open("w+")
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
        num_told, deadline_s = 0, time.monotonic() + limit_s
        for end_s, sends in ((deadline_s, signal.SIGINT), (deadline_s + 30, signal.SIGKILL), (math.inf, None)):
            while process.poll() is None and time.monotonic() < end_s:
                time.sleep(0.2)
                num_told = _tell_files(results, summaries, num_told)
            if process.poll() is None and sends is not None:  # after SIGINT pytest reports what has run
                process.send_signal(sends)
        _tell_files(results, summaries, num_told)
        output.seek(0)
        text = output.read()
        output.close()
        names = [path.name for path in left_out]
        summary = text.strip().splitlines()[-60:]
        results.add("tests", folder, passes=process.returncode == 0, left_out=names, summary=summary)


def write_entry_points(folder: Path) -> None:
    """Metadata of the checkout's packages, as an installation leaves it: entry points are found through it."""
    for project in ROOT.glob("*/pyproject.toml"), ROOT.glob("*/*/pyproject.toml"):
        for path in project:
            table = tomllib.loads(path.read_text()).get("project", {})
            if groups := table.get("entry-points"):
                metadata = folder / f"{table['name'].replace('-', '_')}-{table['version']}.dist-info"
                metadata.mkdir()
                (metadata / "METADATA").write_text(
                    f"Metadata-Version: 2.1\nName: {table['name']}\nVersion: {table['version']}\n"
                )
                lines = [
                    f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in names.items())
                    for group, names in groups.items()
                ]
                (metadata / "entry_points.txt").write_text("".join(lines))


def _tell_files(results: Results, summaries: Path, num_told: int) -> int:
    """Report the files of which the plug-in `file_summaries` has written whole lines since `num_told` of them. Returns
    their number."""
    lines = summaries.read_text().split("\n")[:-1] if summaries.is_file() else []
    for line in lines[num_told:]:
        counts = json.loads(line)
        results.add("tests", counts.pop("file"), **counts)
    return len(lines)


def _is_here(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def run_kernels(results: Results, device: str, runs: list[tuple[dict[str, Any], float]]) -> None:
    """Each backend of each op."""
    from quire_bench.kernels import make_plan, measure_plan

    for entry, bar in runs:
        plan = make_plan([entry], "bfloat16", device)
        try:
            _, figures, left_out = measure_plan(plan)
        except Exception as error:
            results.add("kernels", str(entry["op"]), passes=False, error=f"{type(error).__name__}: {error}"[:500])
            continue
        for one in figures:
            ours = bar if one.backend in ("triton", "triton-rocm") else 0.0
            what = f"{one.op} {one.shape}"
            results.measured("kernels", what, one.median_s, one.limit_s, ours, backend=one.backend, by=one.bound_by)
        for (backend, reason), ops in left_out.items():
            results.add("kernels", f"{', '.join(ops)} without {backend}", reason=reason)


def run_gated(results: Results, device: str, shapes: Any, rows: Any, tables: Path, dtype: str) -> None:
    """Gate, up and activation of few rows, three ways, each at its best: torch's product and the gate, our product and
    the gate, one kernel. What `quire tune` would choose goes into a table, which part "joined" reads."""
    import torch
    import triton

    from quire_bench.kernels import measure_limits
    from quire_kernels_cuda.platform import NVIDIA, gpu_of, pretending
    from quire_kernels_cuda.tuned import Entry, Problem, Tables, save
    from quire_kernels_cuda.tuning import Timing, candidates, compiling_pool, device_time_us, fastest, fitting, timings
    from quire_kernels_rocm.platform import AMD

    tiny, there = device == "cpu", torch.device(device)
    vendor = NVIDIA if torch.version.hip is None else AMD
    target, gpu = vendor.target_of(there), gpu_of(there) or "cpu"
    time_us = _host_time_us if tiny else device_time_us(there)
    rates = measure_limits(there, getattr(torch, dtype))

    fits: dict[str, list[Any]] = {}
    pool = compiling_pool(os.cpu_count() or 1)

    def fit(problem: Problem) -> list[Any]:
        configs = candidates(problem, None, target)
        if tiny:
            return configs[:2]
        # Kernels do not depend on the number of rows, only on their tiles: those for 1 row and for 16 are the same.
        key = f"{problem.kernel} {dict(problem.sizes) | {'rows': 0}} {configs}"
        if key not in fits:
            found = fitting(problem, configs, vendor, target, pool)
            fits[key] = [each.config for each in found if each.refusal is None]
        return fits[key]

    def timed(problem: Problem, configs: list[Any], *known: Entry) -> list[Timing]:
        """Without the problem's own kernel, then by it; what is known serves beside it."""
        with tempfile.TemporaryDirectory() as folder:
            save(Path(folder), gpu, known)
            platform = replace(vendor, tables=Tables(Path(folder)))
            with pretending(target, gpu) if tiny else nullcontext():  # for the sake of the table
                return list(timings(problem, configs, platform, there, time_us=time_us))

    for (shape, outputs, inputs), num_rows in itertools.product(shapes, rows):
        sizes = {"rows": num_rows, "outputs": outputs, "inputs": inputs}
        product = Problem.of("skinny_matmul", sizes | {"outputs": 2 * outputs}, {"dtype": dtype})
        gated = Problem.of("gated_matmul", sizes, {"dtype": dtype, "activation": "silu"})
        products = timed(product, fit(product))
        ours = min(products[1:], key=lambda timing: timing.taken_us)
        known = Entry(product, ours.config, ours.taken_us, products[0].taken_us, triton.__version__)
        (our_way,) = timed(gated, [], known)
        torchs_way, *one_kernel = timed(gated, fit(gated))
        one = min(one_kernel, key=lambda timing: timing.taken_us)
        num_bytes = getattr(torch, dtype).itemsize * (2 * outputs * inputs + num_rows * (inputs + outputs))
        for way, timing, config in (
            ("torch's product and the gate", torchs_way, None),
            ("our product and the gate", our_way, ours.config),
            ("one kernel", one, one.config),
        ):
            what, limit_s = f"{shape} batch {num_rows}: {way}", num_bytes / rates.read_bytes_per_s
            results.measured("gated", what, timing.taken_us / 1e6, limit_s, 0.0, config=str(config))
        best_product = fastest(product, products, triton.__version__)
        otherwise = torchs_way if best_product is None else our_way
        best = fastest(gated, [otherwise, *one_kernel], triton.__version__)
        save(tables, gpu, [entry for entry in (best_product, best) if entry is not None], dropped=[product, gated])
        chosen = "one kernel" if best else "our product" if best_product else "torch's product"
        results.add("gated", f"{shape} batch {num_rows}: chosen", chosen=chosen)
    pool.shutdown()


def _host_time_us(call: Callable[[], Any]) -> float:
    """Of the CPU, where only the command itself is tried."""
    start = time.perf_counter()
    call()
    return 1e6 * (time.perf_counter() - start)


@contextmanager
def reported(results: Results, part: str, what: str) -> Iterator[None]:
    """A figure that cannot be measured is reported, and the next ones are measured all the same."""
    try:
        yield
    except Exception:
        results.add(part, what, passes=False, error=traceback.format_exc()[-3000:])


def run_engine(results: Results, device: str, decodes: Any, prefills: Any, dtype: str) -> None:
    """Whole steps of networks with random weights."""
    import torch
    from gpu_engine import Engine

    from quire_bench.kernels import measure_limits

    rates = measure_limits(torch.device(device), getattr(torch, dtype))
    results.add("engine", "rates", read_bytes_per_s=rates.read_bytes_per_s, flop_per_s=rates.matmul_flop_per_s)
    for shape, num_seqs, length, bar in decodes:
        what = f"decode {shape} batch {num_seqs} context {length}"
        with reported(results, "engine", what):
            engine = Engine(shape, num_seqs, length, device, dtype)
            engine.add_decode(results, "engine", what, rates.read_bytes_per_s, bar)
            engine.close()
            del engine
    for shape, length, bar in prefills:
        engine = Engine(shape, 1, length, device, dtype)
        seconds = statistics.median([engine.prefill_s() for _ in range(6)][1:])
        config = engine.config
        weights = engine.weight_bytes() // engine.network.dtype.itemsize - config.vocab_size * config.hidden_size
        attended = 2 * config.num_layers * length * length * config.num_heads * config.head_dim
        limit_s = (2 * weights * length + attended) / rates.matmul_flop_per_s
        results.measured("engine", f"prefill {shape} {length}", seconds, limit_s, bar, tokens_per_s=length / seconds)
        engine.close()
        del engine


def run_sampled(results: Results, device: str, decodes: Any, dtype: str) -> None:
    """Decode steps of requests that sample, each beside the steps of greedy ones."""
    from gpu_engine import Engine

    for shape, num_seqs, length in decodes:
        greedy_s = None
        for what, sampling in SAMPLED.items():
            name = f"decode {shape} batch {num_seqs} context {length}, {what}"
            with reported(results, "sampled", name):
                engine = Engine(shape, num_seqs, length, device, dtype, sampling=sampling)
                seconds, host_s = engine.decode_s(32)
                greedy_s = greedy_s or seconds
                figure = {"median_ms": seconds * 1e3, "of_greedy": seconds / greedy_s, "host_ms": host_s * 1e3}
                results.add("sampled", name, **figure, graphs=engine.graphs())
                engine.close()
                del engine


def run_joined(results: Results, device: str, decodes: Any, tables: Path, dtype: str) -> None:
    """Decode steps with layers that share an input apart, and in one product; and that with what part "gated" chose."""
    import torch
    from gpu_engine import Engine

    from quire_bench.kernels import measure_limits
    from quire_kernels_cuda.platform import NVIDIA
    from quire_kernels_rocm.platform import AMD

    rates = measure_limits(torch.device(device), getattr(torch, dtype))
    for way in ("apart", "joined", "joined, tuned"):
        if way == "joined, tuned":
            if not tables.is_dir():
                results.add("joined", way, reason=f"there is no {tables}: part gated makes it")
                return
            (NVIDIA if torch.version.hip is None else AMD).tables.use(tables)
        for shape, num_seqs, length in decodes:
            engine = Engine(shape, num_seqs, length, device, dtype, join_products=way != "apart")
            what = f"decode {shape} batch {num_seqs} context {length}, {way}"
            engine.add_decode(results, "joined", what, rates.read_bytes_per_s, 0.0)
            engine.close()
            del engine


def main(arguments: list[str] | None = None) -> int:
    """The command line; 1 when something failed or stayed under its bar."""
    parser = argparse.ArgumentParser(description="What a GPU has to show, each figure beside its limit.")
    parser.add_argument("parts", nargs="+", choices=PARTS)
    parser.add_argument("--only", help="of parts tests and steps, what holds one of these texts, separated by commas")
    parser.add_argument("--device", default="cuda", help="cpu tries the command itself, on tiny shapes")
    parser.add_argument("--out", type=Path, help="file for all figures, written after each")
    parser.add_argument("--tables", type=Path, default=Path("gpu-tables"), help="folder that part gated writes to")
    parser.add_argument("--tests-limit-s", type=float, default=480.0, help="seconds after which tests are cut short")
    args = parser.parse_args(arguments)
    results, tiny = Results(args.out), args.device == "cpu"
    import torch
    import triton

    name = "cpu" if tiny else torch.cuda.get_device_name()
    results.add("machine", name, torch=torch.__version__, triton=triton.__version__, python=sys.version.split()[0])
    register_kernels()
    if tiny:
        from quire_bench import kernels

        kernels.COPIES_BYTES["cpu"], kernels.LIMIT_SIDE["cpu"] = 1 << 20, 64
    device, dtype, steps = args.device, "float32" if tiny else "bfloat16", (("tiny", 2, 32),)
    runs = [({"op": "rms_norm", "shapes": {"rows": 4, "size": 64}}, 0.0)] if tiny else KERNEL_BARS
    decodes, prefills = ((("tiny", 2, 32, 0.0),), (("tiny", 64, 0.0),)) if tiny else (DECODES, PREFILLS)
    products = ((("tiny", 32, 64),), (2,)) if tiny else (GATED, GATED_ROWS)
    texts = args.only.split(",") if args.only else [""]

    def only(name: str) -> bool:
        return any(text in name for text in texts)

    from gpu_steps import run_draws, run_steps

    from quire_bench.kernels import call_samples

    kinds, draws = ((("tiny", 2, 32, ()),), ((2, 300),)) if tiny else (STEPS, DRAWS)
    parts = {
        "tests": lambda: run_tests(results, args.tests_limit_s, only),
        "steps": lambda: run_steps(results, device, kinds, dtype, reported, only),
        "draws": lambda: run_draws(results, device, draws, reported, call_samples),
        "kernels": lambda: run_kernels(results, device, runs),
        "engine": lambda: run_engine(results, device, decodes, prefills, dtype),
        "sampled": lambda: run_sampled(results, device, steps if tiny else SAMPLED_STEPS, dtype),
        "gated": lambda: run_gated(results, device, *products, args.tables, dtype),
        "joined": lambda: run_joined(results, device, steps if tiny else JOINED, args.tables, dtype),
    }
    for part in args.parts:
        start = time.perf_counter()
        try:
            parts[part]()
        except Exception:
            results.add(part, "failed", passes=False, error=traceback.format_exc()[-3000:])
        results.add(part, "took", seconds=time.perf_counter() - start)
    return 0 if all(figure.get("passes", True) for figure in results.figures) else 1


if __name__ == "__main__":
    sys.exit(main())
