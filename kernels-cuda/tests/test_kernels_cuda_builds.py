"""What is recorded of launches, and what the comparison with the table of resources finds."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from quire_kernels_cuda.ahead_of_time import Resources, complaints, read_table, write_table
from quire_kernels_cuda.targets import NVIDIA_TARGETS

LINE = Resources(kernel="k", target="sm_90", registers=64, spilled=0, shared_bytes=1024, num_warps=4)


def found(line: Resources, *, exact: bool = False) -> list[str]:
    return complaints([line], [LINE], NVIDIA_TARGETS, exact=exact)


def test_what_is_worse_is_found() -> None:
    assert found(LINE, exact=True) == []
    assert found(replace(LINE, spilled=8)) == ["k on sm_90 spills 8, and spilled 0 before"]
    assert "registers, there are 255" in found(replace(LINE, registers=256))[0]
    too_much = 227 * 1024 + 1
    assert f"needs {too_much} bytes of shared memory" in found(replace(LINE, shared_bytes=too_much))[0]
    assert found(replace(LINE, registers=65)) == []
    assert "registers 64 -> 65" in found(replace(LINE, registers=65), exact=True)[0]


def test_table_and_builds_are_the_same_list() -> None:
    assert complaints([LINE], [], NVIDIA_TARGETS, exact=True) == ["k on sm_90 is not in the table; write it anew"]
    assert "not built" in complaints([], [LINE], NVIDIA_TARGETS, exact=False)[0]


def test_table_comes_back(tmp_path: Path) -> None:
    write_table(tmp_path / "table.csv", "3.9.0", [LINE])
    assert read_table(tmp_path / "table.csv") == ("3.9.0", [LINE])


LISTING = """
import torch, triton, triton.language as tl
from quire_kernels_cuda.ahead_of_time import platform_builds
from quire_kernels_cuda.platform import NVIDIA
from quire_kernels_cuda.recording import recording

@triton.jit(do_not_specialize=["fixed"])
def kernel(x, y, absent, one, sixteen, seven, wide, fixed, number, flag, SIZE: tl.constexpr):
    pass

row = torch.empty(64, dtype=torch.bfloat16, device="meta")
with recording("label") as builds:
    for fused in (True, True, False):
        kernel[(1,)](
            row, row[1:], None, 1, 16, 7, 1 << 40, 16, 0.5, True, SIZE=8, num_warps=2, enable_fp_fusion=fused)
build, unfused = builds
assert (build.enable_fp_fusion, unfused.enable_fp_fusion) == (True, False)
assert build.name == "kernel label" and (build.num_warps, build.num_stages) == (2, 3)
assert list(build.signature.values()) == [
    "*bf16", "*bf16", "constexpr", "constexpr", "i32", "i32", "i64", "i32", "fp32", "i1", "constexpr"]
assert build.constants == {"absent": None, "one": 1, "SIZE": 8}
assert build.aligned == {"x", "sixteen", "wide"}, build.aligned

names = [(build.name, target.name) for target, build in platform_builds(NVIDIA)]
assert len(set(names)) == len(names) >= 80
assert {target for _, target in names} == set(NVIDIA.targets)
"""


def test_launches_are_recorded_as_triton_sees_them(tmp_path: Path) -> None:
    """In a process that does not interpret: there, launches are recorded and nothing else can run."""
    script = tmp_path / "listing.py"
    script.write_text(LISTING)
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    subprocess.run([sys.executable, script], check=True, env=environment, timeout=120)
