"""What every `LinearMethod` must do, as tests to inherit. Needs torch.

class TestMyMethod(LinearMethodSuite):
    max_error = 0.01
    def make_method(self, dtype): return MyMethod(...)
"""

from __future__ import annotations

import torch

from quire_interfaces import LinearMethod

__all__ = ["LinearMethodSuite"]

SHAPES = ((64, 32), (33, 70), (1, 16))
ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


class LinearMethodSuite:
    """Tests of the `LinearMethod` contract. Implement `make_method`, say `max_error`; override nothing else."""

    max_error = 0.0
    """Error of the method itself, of the largest result, beside the rounding of the dtype."""

    def setup_method(self) -> None:
        """Every test draws the same numbers each time."""
        torch.manual_seed(0)

    def make_method(self, dtype: torch.dtype) -> LinearMethod:
        """The method under test, for a compute dtype."""
        raise NotImplementedError

    def test_products(self) -> None:
        for dtype, rounding in ROUNDING.items():
            method = self.make_method(dtype)
            for out_features, in_features in SHAPES:
                weight = torch.randn(out_features, in_features).to(dtype)
                for bias in (None, torch.randn(out_features).to(dtype)):
                    weights = method.make_weights(weight, bias)
                    for rows in (1, 3, 40):
                        x = torch.randn(rows, in_features).to(dtype)
                        got = method.apply(weights, x)
                        wanted = x.double() @ weight.double().T + (0 if bias is None else bias.double())
                        assert got.dtype == dtype
                        assert got.shape == (rows, out_features)
                        error = (got.double() - wanted).abs().max()
                        scale = x.double().norm(dim=1).max() * weight.double().norm(dim=1).max()
                        assert error <= rounding * wanted.abs().max() + self.max_error * scale

    def test_logits_are_kept_wide(self) -> None:
        for dtype, rounding in ROUNDING.items():
            method = self.make_method(dtype)
            weight, x = torch.randn(70, 64).to(dtype), torch.randn(5, 64).to(dtype)
            weights = method.make_weights(weight, None)
            got = method.logits(weights, x)
            assert got.dtype == torch.float32
            assert (got - method.apply(weights, x)).abs().max() <= rounding * got.abs().max()

    def test_rows_of_zeros_stay_zeros(self) -> None:
        for dtype in ROUNDING:
            method = self.make_method(dtype)
            weight = torch.randn(8, 16).to(dtype)
            weight[3] = 0
            out = method.apply(method.make_weights(weight, None), torch.randn(5, 16).to(dtype))
            assert torch.isfinite(out).all()
            assert (out[:, 3] == 0).all()

    def test_input_and_weights_are_left_alone(self) -> None:
        method = self.make_method(torch.float32)
        weight, x = torch.randn(16, 32), torch.randn(4, 32)
        before, x_before = weight.clone(), x.clone()
        weights = method.make_weights(weight, None)
        first = method.apply(weights, x)
        assert torch.equal(method.apply(weights, x), first)
        assert torch.equal(weight, before)
        assert torch.equal(x, x_before)
