"""The README's example runs, and the table of served ops says what each takes."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from quire_kernels_cuda.availability import unavailable
from quire_kernels_cuda.ops import backends
from quire_ops import OpRequest, builtin_table, ops

ROOT = Path(__file__).parents[2]


def test_readme_examples_run() -> None:
    for name in ("kernels-cuda", "kernels-rocm"):
        blocks = re.findall(r"```python\n(.*?)```", (ROOT / name / "README.md").read_text(), re.DOTALL)
        assert blocks
        for block in blocks:
            exec(compile(block, f"{name}/README.md", "exec"), {})


def test_requests_that_are_refused_say_why() -> None:
    (backend,) = (backend for backend in backends() if (backend.op, backend.name) == (ops.paged_attention, "triton"))
    device = next(iter(backend.devices or ()))
    assert unavailable() is None
    assert backend.refusal(OpRequest(device=device, dtype=torch.bfloat16, sizes={"head_dim": 256})) is None
    assert "head_dim must be at most 256" in str(backend.refusal(OpRequest(device=device, sizes={"head_dim": 576})))
    assert "not float64" in str(backend.refusal(OpRequest(device=device, dtype=torch.float64)))
    assert "runs on" in str(backend.refusal(OpRequest(device="mps")))


def test_interpreted_kernels_are_chosen_by_name_only() -> None:
    table = builtin_table()
    for backend in backends():
        table.add(backend)
    for op in {backend.op for backend in backends()}:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        request = OpRequest(device=device)
        assert (table.choose(op, request).name == "triton") == torch.cuda.is_available()
        assert table.choose(op, request, backend="triton").name == "triton"
