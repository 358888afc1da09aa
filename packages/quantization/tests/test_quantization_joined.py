"""Weights of several layers as those of one: what methods make of rows together is what they make of them apart."""

from __future__ import annotations

import pytest
import torch

from quire_ops import OpRequest
from quire_quantization import linear_method, linear_method_names
from quire_quantization.joined import join_weights, split_weights

SIZES = (48, 16, 32)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", linear_method_names())
def test_together_is_apart(name: str, dtype: torch.dtype, bias: bool) -> None:
    torch.manual_seed(0)
    method = linear_method(name, OpRequest(dtype=dtype))
    matrices = [torch.randn(size, 160).to(dtype) for size in SIZES]  # int4 and mxfp8 have a short last group
    biases = [torch.randn(size).to(dtype) if bias else None for size in SIZES]
    apart = [method.make_weights(matrix, one) for matrix, one in zip(matrices, biases, strict=True)]
    whole_bias = torch.cat([one for one in biases if one is not None]) if bias else None
    whole = method.make_weights(torch.cat(matrices), whole_bias)

    joined = join_weights(apart)
    assert joined is not None
    assert joined.keys() == whole.keys()
    for part, other in ((joined, whole), *zip(split_weights(whole, SIZES), apart, strict=True)):
        assert part.keys() == other.keys()
        for key, tensor in other.items():
            assert part[key].dtype == tensor.dtype
            assert torch.equal(part[key], tensor), key
    for part in split_weights(whole, SIZES):
        for key, tensor in part.items():
            assert tensor.untyped_storage().data_ptr() == whole[key].untyped_storage().data_ptr()
            assert tensor.is_contiguous()
    x = torch.randn(3, 160).to(dtype)
    wanted = torch.cat([method.apply(part, x) for part in apart], dim=1)
    got = method.apply(whole, x)
    torch.testing.assert_close(got, wanted, rtol=2e-2 if dtype == torch.bfloat16 else 1e-4, atol=1e-2)


def test_other_forms_are_not_joined() -> None:
    int8 = {"weight": torch.zeros(16, 4, dtype=torch.int8), "scale": torch.zeros(16)}
    assert join_weights([int8, int8]) is not None
    for other in (
        {**int8, "scale": torch.zeros(16, dtype=torch.bfloat16)},
        {**int8, "scale": torch.zeros(1, 1, 16)},
        {**int8, "zero": torch.zeros(16)},
        {"weight": torch.zeros(16, 4)},
        {**int8, "order": torch.arange(4)},
    ):
        assert join_weights([int8, other]) is None
        assert join_weights([other, int8]) is None
    ordered = {**int8, "order": torch.arange(4)}
    assert join_weights([ordered, ordered]) is None
