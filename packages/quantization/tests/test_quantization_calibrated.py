"""Rounding by inputs, against the algorithms as the papers write them, in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quire_quantization.calibrated import awq_factors, gptq_round, inverse_factor, second_moments


def inputs(tokens: int, size: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    mixed = torch.randn(tokens, size, generator=generator) @ torch.randn(size, size, generator=generator)
    return mixed * torch.linspace(0.1, 3.0, size)


def optimal_brain_quantization(weight: Tensor, moments: Tensor, scale: Tensor, order: list[int]) -> Tensor:
    """Input by input with the whole inverse, which loses a row and a column each time (Frantar et al., eq. 2-3)."""
    weight, moments = weight.double().clone(), moments.double()
    moments += 0.01 * moments.diagonal().mean() * torch.eye(len(moments), dtype=torch.float64)
    inverse, size = torch.linalg.inv(moments), weight.shape[1] // scale.shape[1]
    elements = torch.zeros(weight.shape, dtype=torch.int8)
    left = set(order)
    for i in order:
        step = scale[:, i // size].double()
        elements[:, i] = torch.round(weight[:, i] / step).clamp(-8, 7).to(torch.int8)
        left.remove(i)
        error = (weight[:, i] - elements[:, i] * step) / inverse[i, i]
        rest = sorted(left)
        weight[:, rest] -= error[:, None] * inverse[i, rest]
        inverse = inverse - inverse[:, i : i + 1] @ inverse[i : i + 1] / inverse[i, i]
    return elements


def test_gptq_is_the_papers_algorithm() -> None:
    x, weight = inputs(700, 160), torch.randn(24, 160, generator=torch.Generator().manual_seed(1))
    scale = weight.view(24, 5, 32).abs().amax(dim=2) / 8
    factor = inverse_factor(second_moments(x))
    found = gptq_round(weight, scale, factor, low=-8, high=7)
    moments = (x.double().T @ x.double()) / len(x)
    assert factor.order.tolist() == torch.argsort(moments.diagonal(), descending=True, stable=True).tolist()
    wanted = optimal_brain_quantization(weight, moments, scale, factor.order.tolist())
    # Sums in another order: here and there a number in the middle between two steps falls to the other side.
    assert float((found != wanted).float().mean()) < 0.002
    nearest = torch.round(weight / scale.repeat_interleave(32, 1)).clamp(-8, 7)

    def error(elements: Tensor) -> float:
        difference = elements.double() * scale.repeat_interleave(32, 1) - weight
        return float((x.double() @ difference.T).square().sum())

    assert error(found) < 0.5 * error(nearest)


def test_inputs_that_are_always_zero_do_no_harm() -> None:
    x = inputs(300, 64)
    x[:, [3, 40]] = 0.0
    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(1))
    scale = weight.view(8, 2, 32).abs().amax(dim=2) / 8
    found = gptq_round(weight, scale, inverse_factor(second_moments(x)), low=-8, high=7)
    assert not found[:, [3, 40]].any()
    assert found.bool().sum() > 300


def test_fewer_tokens_than_inputs_are_enough() -> None:
    factor = inverse_factor(second_moments(inputs(4, 64)))
    assert bool(torch.isfinite(factor.upper).all())


@pytest.mark.parametrize("shared", [False, True])
def test_awq_factors_make_the_outputs_error_smaller(shared: bool) -> None:
    x, weight = inputs(500, 64), torch.randn(16, 64, generator=torch.Generator().manual_seed(1))
    x[:, 5] *= 50

    def rounded(values: Tensor) -> Tensor:
        step = values.abs().amax(dim=1, keepdim=True) / 7
        return torch.round(values / step) * step

    def share(values: Tensor) -> Tensor:
        return values.view(32, 2).mean(dim=1, keepdim=True).expand(32, 2).flatten() if shared else values

    factors = awq_factors(x, [weight], rounded, share)
    assert factors.shape == (64,)
    assert bool((factors > 0).all())
    assert not shared or torch.equal(factors[::2], factors[1::2])
    plain = (x @ (rounded(weight) - weight).T).square().sum()
    scaled = (x @ (rounded(weight * factors) / factors - weight).T).square().sum()
    assert scaled < 0.5 * plain
