"""Embedding and the most likely token: equal logits, NaN, vocabularies that fill no tile."""

from __future__ import annotations

import pytest
import torch
from kernels_cuda_support import DTYPES, check, here, poison, random_tensor

from quire_kernels_cuda.triton import vocabulary
from quire_ops import ops as ref


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "vocab_size", "inputs"), [(1, 300, 96), (20, 130, 200), (33, 3, 16), (0, 5, 16)])
def test_lm_head_argmax(monkeypatch, dtype, rows, vocab_size, inputs):
    torch.manual_seed(0)
    poison(monkeypatch)
    x, weight = random_tensor(rows, inputs, dtype=dtype), random_tensor(vocab_size, inputs, dtype=dtype)
    weight[1] = weight[1].round()  # whole numbers, whose sums are the same in any order
    weight[vocab_size // 2] = weight[1]
    if rows:
        x[0] = weight[1]  # two equal max_logits
    if rows > 2:
        x[1, 3] = float("nan")
        x[2] = 0.0  # all equal
    ids, max_logits = (part.cpu() for part in vocabulary.lm_head_argmax(here(x), here(weight)))
    wanted_ids, wanted_peaks = ref.lm_head_argmax(x, weight)
    assert torch.equal(max_logits.isnan(), wanted_peaks.isnan())
    known = ~max_logits.isnan()
    assert torch.equal(ids[known], wanted_ids[known])
    check(max_logits[known], wanted_peaks[known], torch.float32)
    assert ids.dtype == torch.int64
    assert ((ids >= 0) & (ids < vocab_size)).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1, 96, 1500])
def test_embedding(dtype, size):
    weight, ids = random_tensor(50, size, dtype=dtype), torch.tensor([49, 0, 7, 7])
    assert torch.equal(vocabulary.embedding(here(ids), here(weight)).cpu(), weight[ids])
    assert vocabulary.embedding(here(ids[:0]), here(weight)).shape == (0, size)
