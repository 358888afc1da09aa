"""Products of one row with norm, gate and residual: against the references, and in a network beside the ops apart."""

from __future__ import annotations

import pytest
import torch
from kernels_cuda_runner import NETWORK, Driver, use_triton
from kernels_cuda_support import DTYPES, check, here, poison, random_tensor

from quire_kernels_cuda.triton import row_linear
from quire_ops import ops as ref

SIZES = [(1, 8, 512), (2, 5, 70), (0, 16, 32)]
"""Rows, outputs, inputs: whole tiles, and parts of some."""


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", [None, "gelu"])
@pytest.mark.parametrize(("rows", "outputs", "inputs"), SIZES)
def test_norm_linear(monkeypatch, dtype, activation, rows, outputs, inputs) -> None:
    """Rows of x apart, with a bias and without."""
    torch.manual_seed(rows)
    x = 3 * random_tensor(rows, inputs + 8, dtype=dtype)[:, :inputs]
    total = outputs * (2 if activation else 1)
    weight, bias = random_tensor(total, inputs) * inputs**-0.5, random_tensor(total, dtype=dtype)
    weight, gain = weight.to(dtype), 1 + random_tensor(inputs, dtype=dtype) / 4
    poison(monkeypatch)
    for added in (None, bias):
        wanted = ref.norm_linear(x, gain, 1e-5, weight, added, activation)
        got = row_linear.norm_linear(here(x), here(gain), 1e-5, here(weight), here(added), activation)
        check(got, wanted, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "outputs", "inputs"), SIZES)
def test_linear_add(monkeypatch, dtype, rows, outputs, inputs) -> None:
    """The residual stays as it is."""
    torch.manual_seed(rows)
    x, weight = random_tensor(rows, inputs + 8, dtype=dtype)[:, :inputs], random_tensor(outputs, inputs, dtype=dtype)
    weight *= inputs**-0.5
    residual, bias = random_tensor(rows, outputs + 1, dtype=dtype)[:, 1:], random_tensor(outputs, dtype=dtype)
    poison(monkeypatch)
    for added in (None, bias):
        wanted, stream = ref.linear_add(x, weight, added, residual), here(residual)
        check(row_linear.linear_add(here(x), here(weight), here(added), stream), wanted, dtype)
        assert torch.equal(stream.cpu(), residual)


def test_the_references_are_the_ops_in_turn() -> None:
    """In float64, in which nothing is rounded in between."""
    x, weight, gain = (random_tensor(*shape, dtype=torch.float64) for shape in ((3, 8), (10, 8), (8,)))
    normed = ref.rms_norm(x, gain, 1e-6)
    assert torch.equal(ref.norm_linear(x, gain, 1e-6, weight, None, None), ref.linear(normed, weight, None))
    gated = ref.gated_linear(normed, weight, None, "silu")
    assert torch.equal(ref.norm_linear(x, gain, 1e-6, weight, None, "silu"), gated)
    assert torch.equal(ref.linear_add(x, weight, None, normed @ weight.T), normed @ weight.T + x @ weight.T)


@pytest.mark.parametrize("family", ["Qwen2ForCausalLM", "Qwen3ForCausalLM"])
def test_steps_of_one_row_give_the_tokens_of_ops_apart(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With biases and without, between steps of several rows; a row with an adapter takes the ops apart."""
    use_triton(monkeypatch)
    launched: list[int] = []
    launch = row_linear._launch

    def noted(x: torch.Tensor, *args, **options) -> torch.Tensor:
        launched.append(len(x))
        return launch(x, *args, **options)

    monkeypatch.setattr(row_linear, "_launch", noted)
    network = {**NETWORK, "architectures": [family], "num_hidden_layers": 1, "use_sliding_window": False}
    settings = {"max_loras": 2, "enforce_eager": True}
    fused, apart = Driver(network, **settings), Driver(network, join_products=False, **settings)
    for rows in ([0, 1], [0], [1], [0, 1], [0]):
        launched.clear()
        fused.step(rows)
        assert set(launched) == ({1} if rows == [0] else set())  # the others have adapters
        launched.clear()
        apart.step(rows)
        assert not launched
    assert fused.tokens == apart.tokens
