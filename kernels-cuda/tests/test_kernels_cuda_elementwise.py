"""Norms, gates and rotation against the reference: short and long rows, views of wider tensors, no rows at all."""

from __future__ import annotations

import pytest
import torch
from kernels_cuda_support import DTYPES, check, here, poison, random_tensor

from quire_kernels_cuda.triton import gates, norms, rotary
from quire_ops import ops as ref

each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    torch.manual_seed(0)
    poison(monkeypatch)


@each_dtype
@pytest.mark.parametrize("shape", [(1, 96), (5, 1), (37, 64), (3, 5, 128), (2, 3000), (0, 64)], ids=str)
def test_rms_norm_and_layer_norm(dtype, shape):
    x, weight, bias = (random_tensor(*size, dtype=dtype) for size in (shape, shape[-1:], shape[-1:]))
    x[..., 0] += 30.0  # an outlier, and a mean that is not zero
    before = x.clone()
    check(norms.rms_norm(here(x), here(weight), 1e-5), ref.rms_norm(x, weight, 1e-5), dtype)
    for gain, offset in ((weight, bias), (weight, None), (None, None)):
        check(norms.layer_norm(here(x), here(gain), here(offset), 1e-5), ref.layer_norm(x, gain, offset, 1e-5), dtype)
    assert torch.equal(x, before)


@each_dtype
def test_rms_norm_of_heads_in_a_fused_projection(dtype):
    fused, weight = random_tensor(4, 3 * 6 * 32, dtype=dtype), random_tensor(32)
    for part in here(fused).view(4, 3, 6, 32).unbind(1):
        assert not part.is_contiguous()
        check(norms.rms_norm(part, here(weight), 1e-6), ref.rms_norm(part.cpu(), weight, 1e-6), dtype)


@each_dtype
@pytest.mark.parametrize(("rows", "size"), [(1, 96), (33, 40), (3, 2500), (0, 8)])
def test_add_rms_norm(dtype, rows, size):
    x, residual, weight = (random_tensor(*shape, dtype=dtype) for shape in ((rows, size), (rows, size), (size,)))
    normed, total = ref.add_rms_norm(x, residual, weight, 1e-6)
    got_normed, got_total = norms.add_rms_norm(here(x), here(residual).clone(), here(weight), 1e-6)
    assert torch.equal(got_total.cpu(), total), "the sum is rounded once, as everywhere"
    check(got_normed, normed, dtype)


@each_dtype
@pytest.mark.parametrize("size", [1, 70, 1300])
@pytest.mark.parametrize("name", ["silu_and_mul", "gelu_and_mul", "sigmoid_and_mul"])
def test_gates_of_a_fused_projection(dtype, size, name):
    fused = random_tensor(5, 2 * size, dtype=dtype) * 4
    before = fused.clone()
    gate, up = here(fused).split(size, dim=1)
    reference = getattr(ref, name)
    check(getattr(gates, name)(gate, up), reference(*fused.split(size, dim=1)), dtype)
    assert torch.equal(fused, before)
    one = random_tensor(5, 1, dtype=dtype)
    check(getattr(gates, name)(here(one), up), reference(one, fused[:, size:]), dtype)
    wide = random_tensor(2, 3, 4, dtype=dtype)
    check(getattr(gates, name)(here(wide), here(wide)), reference(wide, wide), dtype)


def angles(tokens: int, head_dim: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    angle = torch.rand(tokens, 1, head_dim // 2) * 6
    cos, sin = angle.cos(), angle.sin()
    return torch.cat((cos, cos), -1).to(dtype), torch.cat((-sin, sin), -1).to(dtype)


@each_dtype
@pytest.mark.parametrize(("heads", "head_dim"), [(1, 2), (6, 64), (3, 96), (40, 128)])
def test_rotary_embedding(dtype, heads, head_dim):
    """Of the first dimensions of heads, which leaves the others beside them."""
    x = random_tensor(3, heads, head_dim + 8, dtype=dtype)
    cos, sin = angles(3, head_dim, dtype)
    got = rotary.rotary_embedding(here(x)[..., :head_dim], here(cos), here(sin))
    check(got, ref.rotary_embedding(x[..., :head_dim], cos, sin), dtype)
