"""Heads and activations against torch's modules in float64, and the same bits in any company."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from quire_interfaces import CheckpointError
from quire_pooling import Activation, ActivationSpec, DenseSpec, LayerNormSpec, NormalizeSpec, PoolingHeadSpec
from quire_pooling.activations import activate_with, normalize
from quire_pooling.heads import PoolingHead

CPU = torch.device("cpu")
EXACT = {
    "identity": lambda x: x,
    "relu": torch.relu,
    "silu": F.silu,
    "gelu": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_erf": F.gelu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "softmax": lambda x: x.softmax(-1),
    "log1p_relu": lambda x: x.relu().log1p(),
    "log1p_log1p_relu": lambda x: x.relu().log1p().log1p(),
}


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 2


@pytest.mark.parametrize("name", get_args(Activation))
@pytest.mark.parametrize("width", [1, 2, 7, 48, 1000])
def test_an_activation_is_its_formula_and_knows_no_neighbours(name: Activation, width: int) -> None:
    x = numbers(9, width)
    kept = x.clone()
    out = activate_with(CPU)(x, name)
    assert torch.equal(x, kept), "the argument was overwritten"
    torch.testing.assert_close(out.double(), EXACT[name](x.double()), rtol=1e-6, atol=1e-6)
    for number in range(9):
        assert torch.equal(activate_with(CPU)(x[number : number + 1], name)[0], out[number])
    assert torch.equal(activate_with(CPU)(x.flip(0), name).flip(0), out)


@pytest.mark.parametrize("width", [1, 2, 3, 5, 64, 384, 1000, 70_001])
def test_normalized_vectors_have_length_one_in_any_company(width: int) -> None:
    x = numbers(4, width)
    kept = x.clone()
    out = normalize(x)
    assert torch.equal(x, kept)
    torch.testing.assert_close(out.double(), F.normalize(x.double(), dim=-1), rtol=1e-6, atol=1e-7)
    for number in range(4):
        assert torch.equal(normalize(x[number : number + 1])[0], out[number])
        assert torch.equal(normalize(x[number]), out[number])


def test_a_vector_of_zeros_stays_zeros() -> None:
    assert torch.equal(normalize(torch.zeros(2, 5)), torch.zeros(2, 5))


SPEC = PoolingHeadSpec(
    steps=(
        DenseSpec(weight="a.weight", bias="a.bias", in_features=48, out_features=32, activation="gelu_erf"),
        LayerNormSpec(weight="n.weight", bias="n.bias", size=32, eps=1e-5),
        ActivationSpec(activation="tanh"),
        DenseSpec(weight="b.weight", in_features=32, out_features=5),
    )
)


def weights_of(spec: PoolingHeadSpec) -> dict[str, Tensor]:
    return {name: numbers(*shape, seed=number) for number, (name, shape) in enumerate(spec.shapes().items())}


def test_a_chain_is_its_modules_in_order() -> None:
    weights = weights_of(SPEC)
    head = PoolingHead(SPEC, weights | {"other": torch.zeros(3)}, CPU)
    x = numbers(7, 48, seed=9)
    wide = {name: tensor.double() for name, tensor in weights.items()}
    expected = F.gelu(F.linear(x.double(), wide["a.weight"], wide["a.bias"]))
    expected = torch.tanh(F.layer_norm(expected, (32,), wide["n.weight"], wide["n.bias"], 1e-5))
    expected = F.linear(expected, wide["b.weight"])
    torch.testing.assert_close(head(x).double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(head(x, (4, 1)).double(), expected[:, [4, 1]], rtol=1e-5, atol=1e-5)


def test_a_head_gives_a_vector_the_same_bits_in_any_company() -> None:
    head = PoolingHead(SPEC, weights_of(SPEC), CPU)
    x = numbers(70, 48, seed=9)
    outputs = head(x) if head.is_invariant else torch.cat([head(vector) for vector in x.split(1)])
    for number in (0, 3, 69):
        assert torch.equal(head(x[number : number + 1])[0], outputs[number])


@pytest.mark.parametrize("out_features", [48, 6])
def test_a_residual_is_added_through_its_matrix_where_widths_differ(out_features: int) -> None:
    residual = None if out_features == 48 else "r"
    dense = DenseSpec(
        weight="w", in_features=48, out_features=out_features, activation="tanh", use_residual=True, residual=residual
    )
    spec = PoolingHeadSpec(steps=(dense,))
    weights = weights_of(spec)
    assert set(weights) == ({"w"} if residual is None else {"w", "r"})
    x = numbers(3, 48, seed=9)
    expected = torch.tanh(x @ weights["w"].T) + (x if residual is None else x @ weights["r"].T)
    head = PoolingHead(spec, weights, CPU)
    torch.testing.assert_close(head(x), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(head(x, (5, 0)), expected[:, [5, 0]], rtol=1e-5, atol=1e-5)


def test_weights_of_any_dtype_are_read_as_float32() -> None:
    spec = PoolingHeadSpec(steps=(DenseSpec(weight="w", in_features=8, out_features=3),))
    weight = numbers(3, 8).bfloat16()
    assert torch.equal(
        PoolingHead(spec, {"w": weight}, CPU)(numbers(1, 8)),
        PoolingHead(spec, {"w": weight.float()}, CPU)(numbers(1, 8)),
    )


def test_a_missing_or_wrong_tensor_is_named() -> None:
    weights = weights_of(SPEC)
    with pytest.raises(CheckpointError, match=r"needs tensor b\.weight"):
        PoolingHead(SPEC, {name: tensor for name, tensor in weights.items() if name != "b.weight"}, CPU)
    with pytest.raises(CheckpointError, match=r"a\.bias must be \[32\], is \[31\]"):
        PoolingHead(SPEC, weights | {"a.bias": torch.zeros(31)}, CPU)


def test_columns_of_a_chain_that_ends_with_a_function_of_all_of_them() -> None:
    """softmax, and a length of one, are of all columns; those that are asked for are taken from what comes out."""
    dense = DenseSpec(weight="w", in_features=48, out_features=6)
    x, weight = numbers(3, 48, seed=9), numbers(6, 48, seed=1)
    logits = x @ weight.T
    ends = {ActivationSpec(activation="softmax"): logits.softmax(-1), NormalizeSpec(): F.normalize(logits, dim=-1)}
    for end, expected in ends.items():
        head = PoolingHead(PoolingHeadSpec(steps=(dense, end)), {"w": weight}, CPU)
        torch.testing.assert_close(head(x), expected, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(head(x, (4, 0)), expected[:, [4, 0]], rtol=1e-5, atol=1e-6)
    none = PoolingHead(PoolingHeadSpec(), {}, CPU)
    assert torch.equal(none(x, (7,)), x[:, [7]])
