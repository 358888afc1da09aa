"""What is read of a kernel's machine code: the loop that loads most, its instructions, and how wide its loads are."""

from __future__ import annotations

from dataclasses import replace

import pytest

from quire_kernels_cuda.ahead_of_time import Resources, complaints
from quire_kernels_cuda.inner_loop import InnerLoop, inner_loop_of_amdgcn, inner_loop_of_sass
from quire_kernels_cuda.targets import NVIDIA_TARGETS

SASS = """
.text.kernel:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/                   LDG.E.128 R4, desc[UR4][R2.64] ;
.L_x_outer:
        /*0020*/                   IADD3 R0, R0, 0x1, RZ ;
.L_x_1:
        /*0030*/                   LDG.E.128 R4, desc[UR4][R2.64] ;
        /*0040*/              @!P0 LDGSTS.E.BYPASS.LTC128B.128 [R8], desc[UR4][R2.64] ;
        /*0050*/                   LDG.E R9, desc[UR4][R2.64] ;
        /*0060*/                   HMMA.16816.F32.BF16 R12, R4, R8, R12 ;
        /*0070*/               @P1 BRA `(.L_x_1) ;
        /*0080*/                   LDG.E.U8 R9, desc[UR4][R2.64] ;
        /*0090*/               @P2 BRA `(.L_x_outer) ;
        /*00a0*/                   EXIT ;
.L_x_9:
        /*00b0*/                   BRA `(.L_x_9);
        /*00c0*/                   NOP;
"""
AMDGCN = """
kernel:
\ts_load_dwordx4 s[0:3], s[4:5], 0x0
.LBB0_1:                                ; %loop
\tglobal_load_dwordx4 v[0:3], v[4:5], off
\tbuffer_load_ubyte v6, v7, s[0:3], 0 offen
\tv_mfma_f32_16x16x16_bf16 a[0:3], v[0:1], v[2:3], a[0:3]
\ts_cbranch_scc1 .LBB0_1
\ts_endpgm
"""


def test_the_innermost_loop_with_loads_is_counted() -> None:
    assert inner_loop_of_sass(SASS) == InnerLoop(instructions=5, load_bytes=36, bytes_per_load=12.0)
    assert inner_loop_of_amdgcn(AMDGCN) == InnerLoop(instructions=4, load_bytes=17, bytes_per_load=8.5)


def test_what_other_programs_wrote_is_not_counted() -> None:
    """Joining what was attended to in pieces reads more in a turn than the loop over the keys."""
    strong = SASS.replace("LDG.E R9", "LDG.E.128.STRONG.GPU R9")
    assert inner_loop_of_sass(strong) == InnerLoop(instructions=5, load_bytes=32, bytes_per_load=16.0)


def test_code_without_such_a_loop_has_none() -> None:
    assert inner_loop_of_sass(SASS.partition(".L_x_outer")[0]) is None
    assert inner_loop_of_amdgcn("") is None


@pytest.mark.parametrize("exact", [False, True])
def test_narrower_loads_fail_whatever_the_compiler(exact: bool) -> None:
    line = Resources(
        kernel="k", target="sm_90", registers=64, spilled=0, shared_bytes=1024, num_warps=4, loop_instructions=100,
        loop_bytes=64, bytes_per_load=16.0,
    )  # fmt: skip
    found = complaints([replace(line, bytes_per_load=4.0)], [line], NVIDIA_TARGETS, exact=exact)
    assert found == ["k on sm_90 loads 4 bytes at a time, and 16 before"]
    assert complaints([line], [line], NVIDIA_TARGETS, exact=exact) == []


def test_lines_older_than_the_columns_are_no_difference() -> None:
    old = Resources(kernel="k", target="sm_90", registers=64, spilled=0, shared_bytes=1024, num_warps=4)
    line = replace(old, loop_instructions=100, loop_bytes=64, bytes_per_load=16.0)
    assert complaints([line], [old], NVIDIA_TARGETS, exact=True) == []
    assert "loop_instructions 100 -> 120" in complaints(
        [replace(line, loop_instructions=120)], [line], NVIDIA_TARGETS, exact=True
    )[0]  # fmt: skip
