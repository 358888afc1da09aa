"""Linear methods keep their contract; int8 is as exact as its scale allows; unknown names are refused."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from quire_interfaces import ConfigError, LinearMethod
from quire_ops import OpRequest
from quire_ops.grouped import dequantize, unblock_groups
from quire_quantization import head_method, linear_method, linear_method_names
from quire_quantization.numbers import in_every_case
from quire_testkit.conformance.linear_method import LinearMethodSuite


@pytest.mark.parametrize("broken", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("name", linear_method_names())
def test_a_weight_that_is_not_finite_stays_so(name: str, broken: float) -> None:
    """Its output is not finite either, for the request to fail by it; the others are what they were."""
    weight, x = torch.randn(32, 256), torch.randn(3, 256)
    method = linear_method(name, OpRequest())
    expected = method.apply(method.make_weights(weight.clone(), None), x)
    weight[5, 77] = broken
    out = method.apply(method.make_weights(weight, None), x)
    assert not out[:, 5].isfinite().any()
    assert torch.equal(out[:, :5], expected[:, :5])
    assert torch.equal(out[:, 6:], expected[:, 6:])


@pytest.mark.parametrize("name", linear_method_names())
def test_weights_are_made_on_the_device_of_the_weight(name: str) -> None:
    """On tensors without memory, so that no such device is needed: operations on two devices fail there as well."""

    def make() -> None:
        with FakeTensorMode():
            weight, bias = (torch.empty(shape, dtype=torch.bfloat16, device="cuda") for shape in ((48, 300), (48,)))
            method = linear_method(name, OpRequest(device="cuda", dtype=torch.bfloat16))
            weights = method.make_weights(weight, bias)
        assert {tensor.device.type for tensor in weights.values()} == {"cuda"}

    in_every_case(make)


class TestPlain(LinearMethodSuite):
    def make_method(self, dtype: torch.dtype) -> LinearMethod:
        return linear_method("plain", OpRequest(dtype=dtype))

    def test_weight_is_not_copied(self) -> None:
        weight = torch.randn(4, 8)
        assert self.make_method(torch.float32).make_weights(weight, None)["weight"] is weight


class TestInt8(LinearMethodSuite):
    # Half a step is max/254 of a row; rounding errors are independent, so products keep far below the worst case.
    max_error = 1 / 254

    def make_method(self, dtype: torch.dtype) -> LinearMethod:
        return linear_method("int8", OpRequest(dtype=dtype))

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_each_weight_is_within_half_a_step(self, dtype: torch.dtype) -> None:
        weight = (torch.randn(50, 64) * torch.logspace(-3, 2, 50)[:, None]).to(dtype)
        weights = self.make_method(dtype).make_weights(weight, None)
        assert weights["weight"].dtype == torch.int8
        scale = weights["scale"].double()[:, None]
        restored = weights["weight"].double() * scale
        # Clamping costs what the rounding of the scale to the dtype costs.
        slack = 0.5 + 127 * torch.finfo(dtype).eps
        assert ((restored - weight.double()).abs() <= slack * scale).all()
        assert weights["weight"].abs().amax(dim=1).min() >= 126

    def test_rows_of_tiny_half_precision_weights(self) -> None:
        weight = torch.full((16, 32), 6e-8, dtype=torch.float16)
        method = self.make_method(torch.float16)
        assert torch.isfinite(method.apply(method.make_weights(weight, None), torch.ones(1, 32).half())).all()


class TestW8A8(LinearMethodSuite):
    # Half a step of the weight, and half a step of the token.
    max_error = 2 / 254

    def make_method(self, dtype: torch.dtype) -> LinearMethod:
        return linear_method("w8a8", OpRequest(dtype=dtype))

    def test_what_int8_can_hold_is_multiplied_exactly(self) -> None:
        x, weight = torch.randint(-127, 128, (7, 300)).float(), torch.randint(-127, 128, (20, 300)).float()
        x[:, 5], weight[:, 9] = 127, -127
        method = self.make_method(torch.float32)
        weights = method.make_weights(weight, None)
        assert torch.equal(method.apply(weights, x), x @ weight.T)
        head = head_method("w8a8", OpRequest())  # which takes hidden states as they are
        logits = head.logits(head.make_weights(weight, None), x + 0.25)
        assert torch.allclose(logits, (x + 0.25) @ weight.T, rtol=1e-6)


class TestInt8Grouped(LinearMethodSuite):
    max_error = 1 / 254

    def make_method(self, dtype: torch.dtype) -> LinearMethod:
        return linear_method("w8a8-g64", OpRequest(dtype=dtype))

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_each_weight_is_within_half_a_step_of_its_group(self, dtype: torch.dtype) -> None:
        weight = (torch.randn(50, 100) * torch.logspace(-3, 2, 100)).to(dtype)
        weight[7] = 0
        weights = self.make_method(dtype).make_weights(weight, None)
        assert weights["weight"].dtype == torch.int8
        scale = unblock_groups(weights["scale"], 50).double()
        assert scale.shape == (50, 2)
        restored = dequantize(weights["weight"], weights["scale"], None, 100, torch.float64)
        slack = (0.5 + 127 * torch.finfo(dtype).eps) * scale.repeat_interleave(64, dim=1)[:, :100]
        assert ((restored - weight.double()).abs() <= slack).all()


class _Int4(LinearMethodSuite):
    # By Cauchy and Schwarz: rounding to steps of a third of a standard deviation costs a tenth of a row's norm.
    max_error = 1 / 8
    group_size = 128

    def make_method(self, dtype: torch.dtype) -> LinearMethod:
        name = "int4" if self.group_size == 128 else f"int4-g{self.group_size}"
        return linear_method(name, OpRequest(dtype=dtype))

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_scales_are_as_good_as_the_plain_ones(self, dtype: torch.dtype) -> None:
        inputs, size = 300, self.group_size
        weight = (torch.randn(50, inputs) * torch.logspace(-2, 1, 50)[:, None]).to(dtype)
        weights = self.make_method(dtype).make_weights(weight, None)
        restored = dequantize(weights["weight"], weights["scale"], None, inputs, torch.float64)
        for begin in range(0, inputs, size):
            group = weight[:, begin : begin + size].double()
            extreme = group.gather(1, group.abs().argmax(dim=1, keepdim=True))
            scale = (extreme / -8).to(dtype).double()
            plain = torch.round(group / scale).clamp(-8, 7) * scale
            error = (restored[:, begin : begin + size] - group).square().sum(dim=1)
            assert (error <= (plain - group).square().sum(dim=1) * (1 + 1e-3)).all()
            # What rounding to 16 even levels over four standard deviations would leave, and some.
            assert error.sum() <= 0.02 * group.square().sum()

    def test_what_int4_can_hold_is_kept_exactly(self) -> None:
        elements = torch.randint(-8, 8, (20, 256))
        elements[:, :: self.group_size] = -8
        weight = elements * 2.0 ** torch.arange(-10, 10)[:, None]
        weights = self.make_method(torch.float32).make_weights(weight, None)
        assert torch.equal(dequantize(weights["weight"], weights["scale"], None, 256, torch.float32), weight)


class TestInt4(_Int4):
    pass


class TestInt4Groups64(_Int4):
    group_size = 64


class TestInt4Groups32(_Int4):
    group_size = 32


class _Float8(LinearMethodSuite):
    # Half a step of 3 bits after the point.
    max_error = 1 / 16
    name = "fp8"

    def make_method(self, dtype: torch.dtype) -> LinearMethod:
        return linear_method(self.name, OpRequest(dtype=dtype))

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_each_weight_is_within_half_a_step(self, dtype: torch.dtype) -> None:
        weight = (torch.randn(50, 320) * torch.logspace(-2, 1, 50)[:, None]).to(dtype)
        weight[7] = 0
        weights = self.make_method(dtype).make_weights(weight, None)
        restored = dequantize(weights["weight"], weights["scale"], None, 320, torch.float64)
        wide, scale = weight.double(), weights["scale"].double().max()
        # Below 2^-6 of a scale steps are all alike; above 448 of them the power of two cuts off.
        slack = wide.abs() * (1 / 16 + (1 / 8 if self.name == "mxfp8" else 0.005)) + scale * 2.0**-9
        assert ((restored - wide).abs() <= slack).all()
        assert (restored[7] == 0).all()


class TestFloat8(_Float8):
    pass


class TestFloat8Microscaled(_Float8):
    name = "mxfp8"
    max_error = 1 / 8

    def test_scales_are_powers_of_two(self) -> None:
        weight = torch.randn(16, 64)
        scale = self.make_method(torch.float32).make_weights(weight, None)["scale"]
        assert torch.equal(scale.log2(), scale.log2().round())
        largest = weight.view(16, 2, 32).abs().amax(2)
        assert torch.equal(unblock_groups(scale, 16).log2(), largest.log2().floor() - 8)


def test_unknown_method_lists_the_choices() -> None:
    names = ("plain", "int8", "w8a8", "w8a8-g64", "int4", "int4-g64", "int4-g32", "fp8", "ptpc_fp8", "mxfp8")
    assert linear_method_names() == names
    with pytest.raises(ConfigError, match="no linear method 'int3'; choose one of plain, int8, w8a8, w8a8") as error:
        linear_method("int3", OpRequest())
    assert error.value.field == "quantization"
