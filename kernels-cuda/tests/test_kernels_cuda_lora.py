"""Op `lora_linear` in Triton against the reference: tiles of several slots, mixed ranks, adjusted slots."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch
from kernels_cuda_support import TOLERANCE, here, poison

from quire_kernels_cuda.triton.lora import lora_linear
from quire_ops import NO_SLOT, LoraTokens, LoraWeights
from quire_ops.lora import lora_linear as reference

RANKS = [3, 11, 0, 18, 0]
HOST = ("ranks", "adjusted", "a_scale", "b_scale", "device_adjusted")
"""Of wide weights, what is on the host or not there."""


def make_weights(inputs: int, outputs: int, dtype: torch.dtype, adjusted: list[int]) -> LoraWeights:
    """Slots of mixed rank; what slots that are not adjusted have of scale and shift is NaN."""
    a, b = torch.randn(len(RANKS), 18, inputs) * inputs**-0.5, torch.randn(len(RANKS), 18, outputs)
    for slot, rank in enumerate(RANKS):
        a[slot, rank:] = b[slot, rank:] = 0
    unused = torch.tensor(adjusted)[:, None] == 0
    return LoraWeights(
        a=a.to(dtype),
        b=b.to(dtype),
        ranks=torch.tensor(RANKS, dtype=torch.int32),
        adjusted=torch.tensor(adjusted, dtype=torch.int32),
        scale=(torch.rand(len(RANKS), outputs) + 0.5).masked_fill_(unused, float("nan")),
        shift=torch.randn(len(RANKS), outputs).masked_fill_(unused, float("nan")),
    )


def on_device(record: Any, *host: str) -> Any:
    names = [field.name for field in fields(record) if field.name not in host]
    return replace(record, **{name: here(getattr(record, name)) for name in names})


@pytest.mark.parametrize(
    ("dtype", "wide", "adjusted"),
    [
        (torch.float32, False, [0, 0, 0, 0, 0]),
        (torch.bfloat16, False, [0, 1, 1, 0, 0]),
        (torch.bfloat16, True, [0, 0, 1, 1, 0]),
    ],
)
def test_equals_reference(monkeypatch, dtype: torch.dtype, wide: bool, adjusted: list[int]) -> None:
    torch.manual_seed(0)
    weights = make_weights(600, 140, dtype, adjusted)
    slots = torch.randint(-1, 5, (24,), dtype=torch.int32).numpy()
    tokens = LoraTokens.of(np.append(slots, np.int32(3)))
    assert tokens is not None
    x = torch.randn(25, 650).to(dtype)[:, :600]
    out = torch.randn(25, 150).to(torch.float32 if wide else dtype)[:, :140]
    expected = out.double()
    reference(expected, x.double(), weights, tokens)
    before, got = out.clone(), here(out)
    poison(monkeypatch)
    lora_linear(got, here(x), on_device(weights, *HOST), on_device(tokens, "groups", "is_fixed"))
    assert (got.cpu().double() - expected).abs().max() <= TOLERANCE[dtype] * expected.abs().max()
    unused = [slot for slot in (2, 4) if not adjusted[slot]]
    untouched = torch.from_numpy(np.isin(tokens.slots.numpy(), [-1, *unused]))
    assert untouched.any()
    assert torch.equal(got.cpu()[untouched], before[untouched])


def test_tokens_of_a_graph(monkeypatch) -> None:
    """All of them in order, those without a slot last; nothing of the slots is asked on the host."""
    torch.manual_seed(1)
    weights = make_weights(200, 40, torch.float32, [0, 1, 0, 0, 1])
    slots = np.array([1, NO_SLOT, 3, 0, NO_SLOT, 3, 4, 1, *[NO_SLOT] * 13], dtype=np.int32)
    order = np.argsort(slots, kind="stable").astype(np.int32)
    tokens = LoraTokens(
        slots=torch.from_numpy(slots), order=torch.from_numpy(order), groups=torch.zeros(0, 3), is_fixed=True
    )
    x, out = torch.randn(21, 200), torch.randn(21, 40)
    expected, got = out.double(), here(out.clone())
    reference(expected, x.double(), weights, tokens)
    hidden = replace(on_device(weights, *HOST), ranks=torch.zeros(0), adjusted=torch.zeros(0))
    hidden = replace(hidden, device_adjusted=here(weights.adjusted))
    poison(monkeypatch)
    lora_linear(got, here(x), hidden, on_device(tokens, "groups", "is_fixed"))
    assert (got.cpu().double() - expected).abs().max() <= TOLERANCE[torch.float32] * expected.abs().max()
    assert torch.equal(got.cpu()[slots == NO_SLOT], out[slots == NO_SLOT])


@pytest.mark.parametrize(("narrow", "dtype"), [(torch.int8, torch.float32), (torch.float8_e4m3fn, torch.bfloat16)])
def test_narrow_matrices_give_the_bits_of_widened_ones(monkeypatch, narrow: torch.dtype, dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    wide = make_weights(70, 140, dtype, [0, 1, 0, 0, 0])
    a, b = ((50 * each.float()).clamp(-127, 127).to(narrow) for each in (wide.a, wide.b))
    a_scale, b_scale = torch.rand(5, 18) / 50, torch.rand(5, 140) / 50
    stored = replace(wide, a=a, b=b, a_scale=a_scale, b_scale=b_scale)
    widened = replace(
        wide, a=(a.float() * a_scale[:, :, None]).to(dtype), b=(b.float() * b_scale[:, None, :]).to(dtype)
    )
    tokens = LoraTokens.of(torch.randint(-1, 5, (20,), dtype=torch.int32).numpy())
    assert tokens is not None
    x, out = torch.randn(20, 70).to(dtype), torch.randn(20, 140).to(dtype)
    poison(monkeypatch)
    results = []
    for weights in (stored, widened):
        names = (*HOST[:2], HOST[4]) if weights is stored else HOST
        results.append(here(out.clone()))
        lora_linear(results[-1], here(x), on_device(weights, *names), on_device(tokens, "groups", "is_fixed"))
    assert torch.equal(*results)
    assert not torch.equal(results[0].cpu(), out)


def test_empty_slots_launch_nothing() -> None:
    weights = make_weights(16, 16, torch.float32, [0] * 5)
    weights.ranks.zero_()
    tokens = LoraTokens.of(np.array([1], dtype=np.int32))
    assert tokens is not None
    out = torch.ones(1, 16)
    lora_linear(out, out, weights, tokens)
    assert torch.equal(out, torch.ones(1, 16))
