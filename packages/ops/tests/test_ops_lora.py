"""Op `lora_linear`: every backend against the reference, and what tokens without adapters may expect."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from quire_ops import LoraTokens, LoraWeights, op_table, ops

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
BACKENDS = [backend for backend in op_table().backends(ops.lora_linear) if backend.unavailable is None]
SLOTS, MAX_RANK = 5, 11


def make_weights(inputs: int, outputs: int, dtype: torch.dtype, chooser: random.Random) -> LoraWeights:
    """Slots of mixed rank, some adjusted, one that leaves the layer as it is."""
    ranks = [chooser.choice([1, 3, 8, MAX_RANK]) for _ in range(SLOTS - 1)] + [0]
    a, b = torch.randn(SLOTS, MAX_RANK, inputs) * inputs**-0.5, torch.randn(SLOTS, MAX_RANK, outputs)
    for slot, rank in enumerate(ranks):
        a[slot, rank:] = b[slot, rank:] = 0
    return LoraWeights(
        a=a.to(dtype),
        b=b.to(dtype),
        ranks=torch.tensor(ranks, dtype=torch.int32),
        adjusted=torch.tensor([chooser.randint(0, 1) for _ in range(SLOTS - 1)] + [0], dtype=torch.int32),
        scale=torch.rand(SLOTS, outputs) + 0.5,
        shift=torch.randn(SLOTS, outputs),
    )


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
def test_a_backend_equals_the_reference(backend, dtype: torch.dtype, wide: bool, seed: int) -> None:
    torch.manual_seed(seed)
    chooser = random.Random(seed)
    inputs, outputs, count = (*chooser.choice([(64, 96), (37, 301), (160, 24)]), chooser.choice([1, 7, 40]))
    weights = make_weights(inputs, outputs, dtype, chooser)
    slots = np.array([chooser.randint(-1, SLOTS - 1) for _ in range(count - 1)] + [0], dtype=np.int32)
    tokens = LoraTokens.of(slots)
    assert tokens is not None
    x = torch.randn(count, inputs).to(dtype)
    beside = 16 if seed == 1 else 0  # rows are apart where there are other results beside
    whole = torch.randn(count, outputs + beside).to(torch.float32 if wide else dtype)
    others, out = whole[:, outputs:].clone(), whole[:, :outputs]
    expected = out.double()
    ops.lora_linear(expected, x.double(), weights, tokens)
    before = out.clone()
    backend.function(out, x, weights, tokens)
    assert (out.double() - expected).abs().max() <= TOLERANCE[dtype] * expected.abs().max()
    untouched = torch.from_numpy((slots < 0) | (slots == SLOTS - 1))
    assert torch.equal(out[untouched], before[untouched])
    assert torch.equal(whole[:, outputs:], others)


@pytest.mark.parametrize("narrow", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
def test_narrow_matrices_give_the_bits_of_widened_ones(backend, dtype: torch.dtype, narrow: torch.dtype) -> None:
    torch.manual_seed(3)
    chooser = random.Random(3)
    inputs, outputs, count = 37, 301, 14
    wide = make_weights(inputs, outputs, dtype, chooser)
    a, b = ((100 * each.float()).clamp(-127, 127).to(narrow) for each in (wide.a, wide.b))
    a_scale, b_scale = torch.rand(SLOTS, MAX_RANK) / 100, torch.rand(SLOTS, outputs) / 100
    stored = replace(wide, a=a, b=b, a_scale=a_scale, b_scale=b_scale)
    widened = replace(
        wide,
        a=(a.float() * a_scale[:, :, None]).to(dtype),
        b=(b.float() * b_scale[:, None, :]).to(dtype),
    )
    tokens = LoraTokens.of(np.array([chooser.randint(-1, SLOTS - 1) for _ in range(count)], dtype=np.int32))
    assert tokens is not None
    x, out = torch.randn(count, inputs).to(dtype), torch.randn(count, outputs).to(dtype)
    got, expected = out.clone(), out.clone()
    backend.function(got, x, stored, tokens)
    backend.function(expected, x, widened, tokens)
    assert torch.equal(got, expected)
    assert not torch.equal(got, out)
    reference = out.double()
    ops.lora_linear(reference, x.double(), stored, tokens)
    assert (got.double() - reference).abs().max() <= TOLERANCE[dtype] * reference.abs().max()


def test_tokens_are_gathered_by_slot() -> None:
    tokens = LoraTokens.of(np.array([2, -1, 0, 2, 0, -1], dtype=np.int32))
    assert tokens is not None
    assert tokens.order.tolist() == [2, 4, 0, 3]
    assert tokens.groups.tolist() == [[0, 0, 2], [2, 2, 4]]
    assert LoraTokens.of(np.array([-1, -1], dtype=np.int32)) is None
    assert LoraTokens.of(np.array([], dtype=np.int32)) is None
