"""Pooling methods against float64 formulas, and the same bits in any batch, order and chunking."""

from __future__ import annotations

import math
from typing import get_args

import pytest
import torch
from torch import Tensor

from quire_pooling import PoolingMethod
from quire_pooling.methods import BLOCK, TextPooling, pool_texts

METHODS: tuple[PoolingMethod, ...] = get_args(PoolingMethod)
LENS = [1, 2, 5, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 200, 1]


def formula(text: Tensor, method: str, skip: int = 0) -> Tensor:
    """The definition, in float64; text [n, H] -> [H]."""
    text = text.double()
    weights = torch.arange(1, len(text) + 1, dtype=torch.float64)[skip:].unsqueeze(1)
    text = text[skip:]
    return {
        "CLS": lambda: text[0],
        "LAST": lambda: text[-1],
        "MEAN": lambda: text.mean(0),
        "MAX": lambda: text.amax(0),
        "SUM": lambda: text.sum(0),
        "WEIGHTEDMEAN": lambda: (text * weights).sum(0) / weights.sum(),
        "MEAN_SQRT_LEN": lambda: text.sum(0) / math.sqrt(len(text)),
    }[method]()


def assert_near(vector: Tensor, text: Tensor, method: str, skip: int = 0) -> None:
    """Within the rounding of a float32 sum, which goes with the magnitudes that are summed."""
    error = (vector.double() - formula(text, method, skip)).abs()
    assert bool((error <= 1e-6 * formula(text.abs(), method, skip)).all()), error.max()


@pytest.fixture
def hidden() -> Tensor:
    return torch.randn(sum(LENS), 48, generator=torch.Generator().manual_seed(1)) * 3


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_method_is_its_formula(hidden: Tensor, method: PoolingMethod, dtype: torch.dtype) -> None:
    hidden = hidden.to(dtype)
    pooled = pool_texts(hidden, LENS, method)
    assert pooled.dtype == torch.float32
    for text, vector in zip(hidden.split(LENS), pooled, strict=True):
        assert_near(vector, text, method)


@pytest.mark.parametrize("method", METHODS)
def test_a_text_has_the_same_bits_alone_and_in_any_order(hidden: Tensor, method: PoolingMethod) -> None:
    pooled = pool_texts(hidden, LENS, method)
    order = torch.randperm(len(LENS), generator=torch.Generator().manual_seed(2)).tolist()
    texts = hidden.split(LENS)
    shuffled = pool_texts(torch.cat([texts[number] for number in order]), [LENS[number] for number in order], method)
    assert torch.equal(shuffled, pooled[order])
    for text, vector in zip(texts, pooled, strict=True):
        assert torch.equal(pool_texts(text, [len(text)], method)[0], vector)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("skip", [0, 1, 70])
def test_chunks_give_the_bits_of_the_whole(hidden: Tensor, method: PoolingMethod, skip: int) -> None:
    text = hidden[:200]
    whole = pool_texts(text, [200], method, [skip])[0]
    if method != "LAST":
        assert_near(whole, text, method, skip)
    for chunks in ([200], [1] * 200, [63, 1, 136], [64, 64, 72], [7, 120, 73], [199, 1]):
        state = TextPooling(method, skip)
        for chunk in text.split(chunks):
            state.add(chunk)
            chunk.add(1)  # the caller's memory is the caller's
        assert torch.equal(state.result(48, text.device), whole), chunks


@pytest.mark.parametrize("method", METHODS)
def test_what_is_added_is_copied(hidden: Tensor, method: PoolingMethod) -> None:
    step = hidden[:100].clone()
    state = TextPooling(method)
    state.add(step)
    step.fill_(torch.nan)
    assert torch.equal(state.result(48, step.device), pool_texts(hidden[:100], [100], method)[0])


@pytest.mark.parametrize("method", [method for method in METHODS if method != "LAST"])
def test_nothing_left_is_zeros(hidden: Tensor, method: PoolingMethod) -> None:
    pooled = pool_texts(hidden[:8], [3, 5], method, [3, 1])
    assert torch.equal(pooled[0], torch.zeros(48))
    assert torch.equal(pooled[1], pool_texts(hidden[3:8], [5], method, [1])[0])


def test_the_number_of_threads_changes_no_bit(hidden: Tensor) -> None:
    threads = torch.get_num_threads()
    try:
        results = []
        for num_threads in (1, 2):
            torch.set_num_threads(num_threads)
            results.append([pool_texts(hidden, LENS, method) for method in METHODS])
    finally:
        torch.set_num_threads(threads)
    assert all(map(torch.equal, *results))
