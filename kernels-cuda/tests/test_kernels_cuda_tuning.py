"""Tables of configurations, and how they come about: lookups, writers at once, candidates, limits, the search."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from kernels_cuda_support import DEVICE, check, here, random_tensor

from quire_interfaces import ConfigError
from quire_kernels_cuda.platform import NVIDIA, choosing, pretending
from quire_kernels_cuda.targets import NVIDIA_TARGETS
from quire_kernels_cuda.triton import attention, linear, matmul
from quire_kernels_cuda.tuned import (
    BLOCK_NAMES,
    Entry,
    LaunchConfig,
    Problem,
    Tables,
    canonical_gpu_name,
    read_table,
    save,
)
from quire_kernels_cuda.tuning import candidates, default_config, is_same, tune
from quire_kernels_cuda.tuning_cases import make_call
from quire_ops import ops as ref

SM_90 = NVIDIA_TARGETS["sm_90"]
MATMUL = {"form": "plain", "group": 0, "dtype": torch.float32, "scale_dtype": torch.float32,
          "out_dtype": torch.float32, "zero": False}  # fmt: skip


def tile(outputs: int, **more: int) -> LaunchConfig:
    return LaunchConfig(blocks={"BM": 16, "BN": outputs, "BK": 64, "SPLITS": 2} | more, num_warps=4, num_stages=3)


def entry(kernel: str, config: LaunchConfig, traits: dict[str, object] | None = None, **sizes: int) -> Entry:
    return Entry(Problem.of(kernel, sizes, traits or {}), config, 10.0, 12.5, "3.9.0")


@pytest.mark.parametrize(
    ("name", "canonical"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100-80gb-hbm3"),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "h100-80gb-hbm3-mig-1g.10gb"),
        ("NVIDIA GeForce RTX 4090", "geforce-rtx-4090"),
        ("AMD Instinct MI300X OAM", "instinct-mi300x-oam"),
        ("AMD Radeon(TM) RX 7900 XTX", "radeon-rx-7900-xtx"),
    ],
)
def test_names_of_gpus(name, canonical):
    assert canonical_gpu_name(name) == canonical
    assert canonical_gpu_name(name, arch="gfx942") == canonical


@pytest.mark.parametrize("name", ["", "AMD Radeon Graphics", "AMD Radeon(TM) Graphics"])
def test_a_gpu_without_a_name_is_called_by_its_architecture(name):
    assert canonical_gpu_name(name, arch="gfx1100") == "gfx1100"


def test_the_nearest_problem_of_the_same_traits_is_found(tmp_path):
    sizes = {"outputs": 4096, "inputs": 4096}
    save(tmp_path, "h200", [entry("matmul", tile(32), MATMUL, rows=1, **sizes)])
    save(tmp_path, "h200", [entry("matmul", tile(64), MATMUL, rows=16, **sizes)])
    save(tmp_path, "h200", [entry("matmul", tile(128), MATMUL | {"form": "int8"}, rows=16, **sizes)])
    tables = Tables(tmp_path)

    def found(rows: int, outputs: int = 4096, exact: bool = False, **other: object) -> int | None:
        wanted = sizes | {"rows": rows, "outputs": outputs}
        config = tables.find("h200", "matmul", wanted, MATMUL | other, exact=exact)
        return None if config is None else config.blocks["BN"]

    assert [found(rows) for rows in (1, 2, 8, 16, 64)] == [32, 32, 64, 64, 64]
    assert found(16, outputs=6144) == 64
    assert found(128) is found(16, outputs=32768) is found(16, form="int4") is None
    assert found(16, form="int8") == 128
    assert found(16, exact=True) == 64
    assert found(8, exact=True) is None
    assert tables.find("h100", "matmul", sizes | {"rows": 1}, MATMUL) is None
    assert "3 measured on h200 with Triton 3.9.0" in tables.describe("h200")
    assert "no table" in tables.describe("h100")

    # What a user measured comes before what is shipped, and a problem that is measured anew replaces itself.
    own = tmp_path / "own"
    save(own, "h200", [entry("matmul", tile(256), MATMUL, rows=16, **sizes)])
    save(own, "h200", [entry("matmul", tile(16), MATMUL, rows=16, **sizes)])
    tables.use(own)
    assert (found(16), found(1)) == (16, 32)
    assert len(read_table(own / "h200.json")) == 1


def test_several_writers_lose_nothing(tmp_path):
    def write(number: int) -> None:
        for rows in range(1, 5):
            save(tmp_path, "h200", [entry("matmul", tile(32), MATMUL, rows=rows, outputs=number, inputs=64)])
            assert read_table(tmp_path / "h200.json")  # never half a table

    writers = [threading.Thread(target=write, args=(number,)) for number in range(1, 5)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert len({str(each.problem) for each in read_table(tmp_path / "h200.json")}) == 16
    assert {path.name for path in tmp_path.iterdir()} == {"h200.json", ".h200.lock"}


def test_a_damaged_table_is_refused_with_the_reason(tmp_path):
    path = save(tmp_path, "h200", [entry("decode_attention", LaunchConfig(
        blocks={"BLOCK_N": 64}, num_warps=4, num_stages=2), {"head_dim": 128}, sequences=8)])  # fmt: skip
    good = json.loads(path.read_text())

    def complaint(**changes: object) -> str:
        path.write_text(json.dumps(good | {"entries": [good["entries"][0] | changes]}))
        with pytest.raises(ConfigError) as caught:
            Tables(tmp_path / "none").use(tmp_path)
        assert str(path) in str(caught.value)
        return str(caught.value)

    assert "entry 0: num_warps must be a power of two from 1 to 32, is 3" in complaint(num_warps=3)
    assert "num_stages must be a whole number" in complaint(num_stages="2")
    assert "no kernel 'attend' is tuned; the kernels are decode_attention" in complaint(kernel="attend")
    assert "has the blocks BLOCK_N, not BM" in complaint(blocks={"BM": 16})
    assert "size sequences must be" in complaint(sizes={"sequences": 0})
    assert "trait head_dim must be" in complaint(traits={"head_dim": [1]})
    del good["entries"][0]["median_us"]
    assert "median_us is missing" in complaint()
    path.write_text("{")
    with pytest.raises(ConfigError, match="is no JSON"):
        Tables(tmp_path).find("h200", "matmul", {}, {})
    path.write_text("{}")
    with pytest.raises(ConfigError, match="is no table of format 2"):
        read_table(path)
    with pytest.raises(ConfigError, match="is no folder of tables"):
        Tables().use(tmp_path / "none")


@pytest.fixture
def tuned(tmp_path):
    """A platform with a table for one GPU, which this machine is taken for."""
    problem = {"rows": 4, "outputs": 48, "inputs": 256}
    save(tmp_path, "test-gpu", [
        entry("matmul", tile(16, BK=32, SPLITS=4), MATMUL, **problem),
        entry("skinny_matmul", tile(32), {"dtype": torch.float32}, **problem),
    ])  # fmt: skip
    with pretending(SM_90, "test-gpu"):
        yield replace(NVIDIA, tables=Tables(tmp_path))


def test_kernels_take_what_a_table_says(tuned):
    torch.manual_seed(0)
    x, weight, bias = random_tensor(3, 256), random_tensor(48, 256), random_tensor(48)
    cut = matmul._tuned_tile(x, 48, "plain", 0, torch.float32, torch.float32, False, tuned)
    assert cut == matmul.MatmulTile(16, 16, 32, 4, 4, 3)
    check(linear.lm_head(here(x), here(weight), platform=tuned), ref.lm_head(x, weight))
    got = linear.linear(here(x), here(weight), here(bias), platform=tuned)  # ours: it is in the table
    check(got, ref.linear(x, weight, bias))
    near = {"rows": 8, "outputs": 48, "inputs": 256}
    assert tuned.config("skinny_matmul", x.device, None, dtype=x.dtype, sizes=near) is None


@pytest.mark.parametrize(
    ("problem", "configs"),
    [
        (Problem.of("matmul", {"rows": 2, "outputs": 32, "inputs": 128}, MATMUL),
         [tile(16, BK=32), tile(32, SPLITS=1)]),
        (Problem.of("matmul", {"rows": 2, "outputs": 32, "inputs": 128}, MATMUL | {"form": "int8"}), [tile(16, BK=32)]),
        (Problem.of("matmul", {"rows": 2, "outputs": 32, "inputs": 128}, MATMUL | {"form": "fp8", "group": 128}),
         [tile(32)]),
        (Problem.of("matmul", {"rows": 2, "outputs": 32, "inputs": 128},
                    MATMUL | {"form": "int4", "group": 64, "zero": True, "dtype": torch.bfloat16}),
         [tile(16, BK=128, SPLITS=1)]),
        (Problem.of("skinny_matmul", {"rows": 1, "outputs": 32, "inputs": 64}, {"dtype": torch.float32}), [tile(32)]),
        (Problem.of("gated_matmul", {"rows": 1, "outputs": 32, "inputs": 64},
                    {"dtype": torch.float32, "activation": "gelu"}),
         [LaunchConfig(blocks={"BM": 16, "BN": 32, "BK": 64}, num_warps=4, num_stages=3)]),
        (Problem.of("byte_matmul", {"rows": 256, "outputs": 32, "inputs": 128},
                    {"form": "int8", "dtype": torch.bfloat16}),
         [LaunchConfig(blocks={"BM": 64, "BN": 64, "BK": 64}, num_warps=4, num_stages=3)]),
        (Problem.of("byte_matmul", {"rows": 256, "outputs": 32, "inputs": 128},
                    {"form": "fp8", "dtype": torch.bfloat16}),
         [LaunchConfig(blocks={"BM": 64, "BN": 64, "BK": 128}, num_warps=4, num_stages=3)]),
        (Problem.of("decode_attention", {"sequences": 2}, {
            "tokens": 1, "head_dim": 16, "queries_per_kv_head": 2, "kv_heads": 1, "block_size": 8,
            "dtype": torch.float32, "cache_dtype": torch.int8, "sliding_window": 12, "soft_cap": 1, "sinks": 1,
            "alibi": 0}), [LaunchConfig(blocks={"BLOCK_N": 32}, num_warps=4, num_stages=2)]),
        (Problem.of("prefill_attention", {"tokens": 16}, {
            "head_dim": 16, "queries_per_kv_head": 2, "kv_heads": 1, "block_size": 8, "dtype": torch.float32,
            "cache_dtype": torch.float32, "sliding_window": 0, "soft_cap": 0, "sinks": 0, "alibi": 1}),
         [LaunchConfig(blocks={"BLOCK_M": 64, "BLOCK_N": 16}, num_warps=4, num_stages=2)]),
        (Problem.of("fused_moe", {"pairs": 4, "experts": 2, "inputs": 32, "inner": 16}, {
            "dtype": torch.float32, "form": "plain", "group": 0, "scale_dtype": torch.float32, "zero": 0, "bias": 0,
            "activation": "silu"}), [LaunchConfig(blocks={"BM": 32, "BN": 32}, num_warps=4, num_stages=2)]),
        (Problem.of("fused_moe", {"pairs": 4, "experts": 2, "inputs": 64, "inner": 32}, {
            "dtype": torch.bfloat16, "form": "int8", "group": 32, "scale_dtype": torch.float32, "zero": 1, "bias": 1,
            "activation": "swigluoai"}), [LaunchConfig(blocks={"BM": 16, "BN": 32}, num_warps=4, num_stages=2)]),
    ],
    ids=lambda value: str(value)[:60] if isinstance(value, Problem) else "",
)  # fmt: skip
def test_the_search_ends_with_a_right_configuration_in_the_table(tmp_path, problem, configs):
    """Every kind of problem is solved with each configuration; here, what takes least time is the interpreter's."""
    torch.manual_seed(0)

    def time_us(call) -> float:
        begin = time.perf_counter()
        call()
        return 1e6 * (time.perf_counter() - begin)

    found = tune(problem, configs, NVIDIA, torch.device(DEVICE), time_us=time_us, version="3.9.0", context=24)
    if found is None:
        assert problem.kernel in ("skinny_matmul", "gated_matmul", "byte_matmul")  # torch's product is faster
        return
    assert found.median_us <= found.default_us
    assert set(found.config.blocks) == set(BLOCK_NAMES[problem.kernel])
    save(tmp_path, "h200", [found])
    saved = Tables(tmp_path).find("h200", problem.kernel, dict(problem.sizes), dict(problem.traits), exact=True)
    assert saved == found.config


def test_what_a_kernel_asks_for_is_what_is_tuned():
    """A problem that is noted from a launch makes a launch that asks for the same problem."""
    asked = Problem.of("decode_attention", {"sequences": 4}, {
        "tokens": 1, "head_dim": 64, "queries_per_kv_head": 4, "kv_heads": 2, "block_size": 16, "dtype": "bfloat16",
        "cache_dtype": "float8_e4m3fn", "sliding_window": 0, "soft_cap": 0, "sinks": 0, "alibi": 0})  # fmt: skip
    seen = []
    with choosing(lambda problem, otherwise: seen.append(problem) or otherwise):
        make_call(asked, NVIDIA, torch.device(DEVICE), context=20)()
    assert seen == [asked]
    assert default_config(make_call(asked, NVIDIA, torch.device(DEVICE), context=20)) == attention.decode_config(
        SM_90, 64, torch.bfloat16, has_row_scales=False
    )


def test_candidates_fit_the_gpu_and_the_problem():
    sizes = {"rows": 16, "outputs": 4096, "inputs": 4096}
    problem = Problem.of("matmul", sizes, MATMUL | {"dtype": "bfloat16"})
    default = matmul.choose_tile(16, 4096, 4096, 132, SM_90).config
    for target in (SM_90, NVIDIA_TARGETS["sm_89"]):
        found = candidates(problem, default, target)
        assert found[0] == default
        assert 32 <= len(found) <= 64
        assert len({str(config) for config in found}) == len(found)
        for config in found[1:]:
            blocks = config.blocks
            held = (blocks["BM"] + blocks["BN"]) * blocks["BK"] * 2 * (config.num_stages - 1)
            assert held <= target.shared_memory_bytes
            assert blocks["BM"] == 16
    assert all(config.blocks["BK"] == 128 for config in candidates(
        Problem.of("matmul", sizes, MATMUL | {"form": "int4", "group": 128}), default, SM_90))  # fmt: skip
    wanted = torch.tensor([1.0, 2.0])
    assert is_same(wanted + 1e-5, wanted)
    assert not is_same(wanted + 1e-2, wanted)
    assert not is_same(wanted * float("nan"), wanted)


LIMITS = """
import torch
from quire_kernels_cuda.platform import NVIDIA
from quire_kernels_cuda.tuned import LaunchConfig, Problem
from quire_kernels_cuda.tuning import default_on, fitting
from quire_interfaces import ConfigError
from quire_ops import kernel_builders

target = NVIDIA.targets["sm_90"]
problem = Problem.of("matmul", {"rows": 64, "outputs": 256, "inputs": 256}, {
    "form": "plain", "group": 0, "dtype": "bfloat16", "scale_dtype": "bfloat16", "out_dtype": "bfloat16", "zero": 0})
assert default_on(problem, NVIDIA, target).blocks["BM"] == 64
def tile(rows, outputs, inputs, num_warps, num_stages):
    blocks = {"BM": rows, "BN": outputs, "BK": inputs, "SPLITS": 1}
    return LaunchConfig(blocks=blocks, num_warps=num_warps, num_stages=num_stages)
configs = [tile(16, 16, 16, 1, 2), tile(32, 32, 128, 4, 16), tile(32, 128, 64, 1, 1)]
fits = fitting(problem, configs, NVIDIA, target)
assert fits[0].refusal is None
assert "bytes of shared memory, there are 232448" in fits[1].refusal, fits[1]
assert "spills" in fits[2].refusal, fits[2]
builder, = (each for each in kernel_builders() if "sm_90" in each.targets)
if not torch.cuda.is_available():
    assert builder.configurations() is None
    try:
        next(builder.tune([problem], None, num_processes=1, context=16))
    except ConfigError as error:
        assert "timed on a GPU" in str(error)
    else:
        raise AssertionError
"""


def test_configurations_beyond_a_gpus_limits_are_left_out(tmp_path: Path) -> None:
    """In a process that does not interpret: it compiles."""
    script = tmp_path / "limits.py"
    script.write_text(LIMITS)
    environment = {**os.environ, "TRITON_INTERPRET": "0", "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, script], check=True, env=environment, timeout=240)
