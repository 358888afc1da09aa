"""What tests of kernels share: where they run, uninitialized memory full of NaN, and how near is near."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
"""With a GPU the tests run on it; without one the interpreter takes tensors of the CPU."""

TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 1.6e-2, torch.float16: 3e-3}
"""Of the largest result."""

DTYPES = (torch.float32, torch.bfloat16)


def poison(monkeypatch: Any) -> None:
    """Fill what `torch.empty` and `torch.empty_like` give with NaN, or with large numbers."""

    def filled(function: Any) -> Any:
        def make(*args: Any, **options: Any) -> Tensor:
            out: Tensor = function(*args, **options)
            return out.fill_(float("nan") if out.is_floating_point() else 0x55)

        return make

    monkeypatch.setattr(torch, "empty", filled(torch.empty))
    monkeypatch.setattr(torch, "empty_like", filled(torch.empty_like))


def poisoned_cache(num_blocks: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: Any) -> Tensor:
    """A KV cache [num_blocks, 2, num_kv_heads, 4, row] of nonsense, with memory between its blocks, as where layers
    with states have larger ones."""
    row = {torch.int8: head_dim + 4, torch.uint8: head_dim // 2 + 4}.get(dtype, head_dim)
    size = 2 * num_kv_heads * 4 * row * dtype.itemsize
    memory = torch.full((num_blocks, size + 48), 0x5A, dtype=torch.uint8, device=device)
    return memory.view(dtype)[:, : size // dtype.itemsize].view(num_blocks, 2, num_kv_heads, 4, row)


def here(value: Any) -> Any:
    """Tensors, in tuples too, where the kernels run."""
    if isinstance(value, Tensor):
        return value.to(DEVICE)
    if isinstance(value, tuple):
        parts = [here(part) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return value


def random_tensor(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape).to(dtype)


def check(got: Tensor, wanted: Tensor, dtype: torch.dtype | None = None) -> None:
    """Equal shapes and dtypes, and no element further away than the dtype's tolerance of the largest one."""
    assert got.dtype == wanted.dtype
    assert got.shape == wanted.shape
    if got.numel():
        got, wanted = got.cpu().double(), wanted.double()
        assert got.isfinite().all()
        error = (got - wanted).abs().max() / wanted.abs().max().clamp(min=1e-30)
        assert error <= TOLERANCE[dtype or torch.float32], float(error)
