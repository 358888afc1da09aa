"""Linear methods keep their contract; int8 is as exact as its scale allows; unknown names are refused."""

from __future__ import annotations

import pytest
import torch

from quire_interfaces import ConfigError, LinearMethod
from quire_ops import OpRequest
from quire_quantization import linear_method, linear_method_names
from quire_testkit.conformance.linear_method import LinearMethodSuite


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


def test_unknown_method_lists_the_choices() -> None:
    assert linear_method_names() == ("plain", "int8")
    with pytest.raises(ConfigError, match="no linear method 'int3'; choose one of plain, int8") as error:
        linear_method("int3", OpRequest())
    assert error.value.field == "quantization"
