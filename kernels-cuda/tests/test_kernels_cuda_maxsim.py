"""Late interaction: one query for all documents or one each, sizes that fill no tile, and other pairs beside."""

from __future__ import annotations

import pytest
import torch
from kernels_cuda_support import DTYPES, check, here, poison, random_tensor

from quire_kernels_cuda.triton.maxsim import maxsim
from quire_ops import ops as ref


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [20, 128])
@pytest.mark.parametrize(("query_lens", "lens"), [([5], [1, 70, 3]), ([33, 2], [64, 65]), ([4], [])], ids=str)
def test_maxsim(monkeypatch, dtype, size, query_lens, lens):
    torch.manual_seed(0)
    poison(monkeypatch)
    queries, documents = (random_tensor(sum(each), size, dtype=dtype) for each in (query_lens, lens))
    scores = maxsim(here(queries), here(documents), query_lens, lens)
    check(scores, ref.maxsim(queries, documents, query_lens, lens))


def test_other_pairs_change_no_bit():
    torch.manual_seed(0)
    queries, documents = here(random_tensor(40, 32)), here(random_tensor(100, 32))
    together = maxsim(queries, documents, [7, 33], [30, 70])
    alone = maxsim(queries[7:], documents[30:], [33], [70])
    assert torch.equal(together[1:], alone)


def test_products_may_all_be_negative():
    query, documents = here(random_tensor(3, 16).abs()), here(-random_tensor(9, 16).abs())
    assert (maxsim(query, documents, [3], [4, 5]) < 0).all()
