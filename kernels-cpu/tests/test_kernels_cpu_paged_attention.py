"""The decode kernel against the reference in float64, at awkward shapes; and what happens where it cannot serve."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quire_attention import AttentionBackend, OpsAttentionBackend
from quire_kernels_cpu.kernels import MAX_HEAD_DIM, backends, paged_attention, unavailable
from quire_ops import OpRequest, op_table
from quire_ops.reference import paged_attention as reference
from quire_testkit.conformance.attention_backend import AttentionBackendSuite

README = Path(__file__).resolve().parents[1] / "README.md"
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2}


@dataclass
class Layout:
    """A `PagedLayout` of random sequences; slots that belong to nobody hold NaN."""

    block_size: int
    query_lens: list[int]
    kv_lens: list[int]
    block_table: Tensor = field(init=False)
    query_start_loc: Tensor = field(init=False)
    slot_mapping: Tensor = field(init=False)
    derived: dict[Any, Any] = field(default_factory=dict)
    num_blocks: int = 0

    def __post_init__(self) -> None:
        counts = [-(-length // self.block_size) for length in self.kv_lens]
        self.num_blocks = sum(counts) + 1
        free = torch.randperm(self.num_blocks - 1).add(1).to(torch.int32)
        self.block_table = torch.zeros(len(counts), max(counts) + 2, dtype=torch.int32)
        for row, (blocks, count) in enumerate(zip(free.split(counts), counts, strict=True)):
            self.block_table[row, :count] = blocks
        self.query_start_loc = torch.tensor([0, *self.query_lens]).cumsum(0).to(torch.int32)
        self.slot_mapping = torch.zeros(sum(self.query_lens), dtype=torch.int64)

    def cache(self, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> Tensor:
        cache = torch.full((self.num_blocks, self.block_size, 2, num_kv_heads, head_dim), float("nan"))
        slots = cache.view(-1, 2, num_kv_heads, head_dim)
        for row, length in enumerate(self.kv_lens):
            positions = torch.arange(length)
            blocks = self.block_table[row].long()[positions // self.block_size]
            slots[blocks * self.block_size + positions % self.block_size] = torch.randn(
                length, 2, num_kv_heads, head_dim
            )
        return cache.to(dtype)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("block_size", [1, 3, 16, 256])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"), [(4, 4, 16), (8, 4, 20), (8, 2, 64), (6, 2, 96), (16, 1, 256)]
)
def test_mixed_steps_equal_the_reference(
    dtype: torch.dtype, block_size: int, heads: int, kv_heads: int, head_dim: int
) -> None:
    chooser = random.Random(f"{block_size}{heads}{head_dim}")
    torch.manual_seed(chooser.randrange(1000))
    query_lens = [chooser.choice([1, 1, 1, 2, 9]) for _ in range(9)]
    kv_lens = [count + chooser.choice([0, 1, 15, 63, 64, 65, 300]) for count in query_lens]
    for window in (None, 1, 7, 64):
        layout = Layout(block_size, query_lens, kv_lens)
        cache = layout.cache(kv_heads, head_dim, dtype)
        query = torch.randn(sum(query_lens), heads, head_dim).to(dtype)
        got = paged_attention(query, cache, layout, scale=head_dim**-0.5, sliding_window=window)
        expected = reference(
            query.double(), cache.double(), layout, scale=head_dim**-0.5, sliding_window=window, soft_cap=None
        )
        assert got.dtype == dtype
        error = (got.double() - expected).abs().max()
        assert error <= TOLERANCE[dtype], f"window {window}: off by {error:.1e}"


def test_large_scores_do_not_overflow() -> None:
    layout = Layout(16, [1, 1], [200, 5])
    cache = layout.cache(2, 32, torch.float32) * 100
    query = torch.randn(2, 4, 32) * 100
    expected = reference(query.double(), cache.double(), layout, scale=1.0, sliding_window=None, soft_cap=None)
    got = paged_attention(query, cache, layout, scale=1.0)
    assert (got - expected).abs().max() <= 1e-3  # values are about 300


def test_a_sequence_does_not_depend_on_its_neighbours() -> None:
    torch.manual_seed(3)
    layout = Layout(16, [1] * 8, [70, 5, 300, 64, 65, 1, 128, 9])
    cache, query = layout.cache(2, 64, torch.bfloat16), torch.randn(8, 4, 64).bfloat16()
    together = paged_attention(query, cache, layout, scale=0.125)
    for row, length in enumerate(layout.kv_lens):
        alone = Layout(16, [1], [length])
        alone.block_table = layout.block_table[row : row + 1].contiguous()
        assert torch.equal(paged_attention(query[row : row + 1], cache, alone, scale=0.125)[0], together[row])


def test_what_the_kernel_does_not_serve_goes_to_torch() -> None:
    layout = Layout(8, [1, 4], [20, 30])
    for dtype, soft_cap in ((torch.float16, None), (torch.float32, 5.0)):
        cache, query = layout.cache(2, 32, dtype), torch.randn(5, 4, 32).to(dtype)
        got = paged_attention(query, cache, layout, scale=0.2, soft_cap=soft_cap)
        expected = reference(query.double(), cache.double(), layout, scale=0.2, sliding_window=None, soft_cap=soft_cap)
        assert (got.double() - expected).abs().max() <= 4e-3
        layout.derived.clear()


def test_too_wide_heads_are_refused_by_the_table() -> None:
    (backend,) = backends()
    assert backend.refusal(OpRequest(sizes={"head_dim": MAX_HEAD_DIM})) == unavailable()
    assert "at most" in (backend.refusal(OpRequest(sizes={"head_dim": MAX_HEAD_DIM + 2})) or "") or unavailable()


class TestConformance(AttentionBackendSuite):
    def make_backend(self) -> AttentionBackend:
        return OpsAttentionBackend("cpu", op_table())


OLDER = {"avx2": ("test_mixed_steps_equal_the_reference", "TestConformance"), "default": ("TestConformance",)}


@pytest.mark.parametrize("capability", OLDER)
def test_lower_instruction_sets_serve_too(capability: str) -> None:
    """On a processor made to look older; "default" has no kernels, so torch's operators serve."""
    command = [sys.executable, "-m", "pytest", "-q", *(f"{__file__}::{test}" for test in OLDER[capability])]
    run = subprocess.run(
        command, env={**os.environ, "ATEN_CPU_CAPABILITY": capability}, capture_output=True, text=True, timeout=250
    )
    assert run.returncode == 0, run.stdout[-2000:]
    assert " passed" in run.stdout


def test_the_report_says_why_not() -> None:
    code = "from quire_kernels_cpu.kernels import unavailable; print(unavailable())"
    env = {**os.environ, "ATEN_CPU_CAPABILITY": "default"}
    run = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert "needs AVX2 or AVX-512" in run.stdout


def test_readme_example_runs(tmp_path: Path) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    subprocess.run([sys.executable, "-c", block], check=True, cwd=tmp_path)
